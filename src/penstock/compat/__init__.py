"""Other libraries' names and signatures on penstock's engine, a package for each library: a program only changes its import."""
