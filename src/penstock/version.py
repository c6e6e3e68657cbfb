"""The version of this package, the same as in ``pyproject.toml``; below all modules that record it in files."""

__version__ = "0.1.0"
