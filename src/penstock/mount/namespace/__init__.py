"""Maps the keys of a store to directories and files."""
