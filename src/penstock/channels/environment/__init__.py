"""The directory tree, the configuration files and the variables that a program finds: see README.md in this folder."""
