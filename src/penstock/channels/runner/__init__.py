"""Runs a program with its channels: see README.md in this folder."""
