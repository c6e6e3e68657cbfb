"""Helpers for Python, the kernel and libcurl: locks, forks, private directories, lazy imports, tracebacks."""
