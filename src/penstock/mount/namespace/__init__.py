"""Directories and files of the keys of a store."""
