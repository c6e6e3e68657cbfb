"""Other libraries' names and signatures on penstock's engine, one package for each library: a program changes its import."""
