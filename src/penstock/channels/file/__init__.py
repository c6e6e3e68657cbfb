"""File mode: see README.md in this folder."""
