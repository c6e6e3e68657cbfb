"""The interface to fsspec: stores as a file system. ``store/fsspec.py`` is the other direction."""

try:
    from penstock.fsspec.filesystem import PenstockFileSystem, PenstockS3FileSystem, register
except ModuleNotFoundError as error:
    if error.name != "fsspec":
        raise
    text = "penstock.fsspec needs fsspec. Hint: pip install 'penstock[fsspec]'"
    raise ModuleNotFoundError(text, name="fsspec") from error

__all__ = ["PenstockFileSystem", "PenstockS3FileSystem", "register"]
