"""Measurements of ways to read a data set: see README.md in this folder."""
