"""The interface to fsspec: stores as a file system. ``store/fsspec.py`` is the other direction."""

from penstock.version import install_hint

try:
    from penstock.fsspec.filesystem import PenstockFileSystem, PenstockS3FileSystem, register
except ModuleNotFoundError as error:
    if error.name != "fsspec":
        raise
    text = f"penstock.fsspec needs fsspec. Hint: {install_hint('fsspec')}"
    raise ModuleNotFoundError(text, name="fsspec") from error

__all__ = ["PenstockFileSystem", "PenstockS3FileSystem", "register"]
