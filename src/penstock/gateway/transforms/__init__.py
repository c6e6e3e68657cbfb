"""Transforms: the interface for their authors, and the worker processes in which they run."""
