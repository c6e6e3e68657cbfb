"""The memory and the files that bodies land in, and the ranges of an object that are read into them."""
