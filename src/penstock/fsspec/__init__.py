"""The interface to fsspec: stores as a file system. ``store/fsspec.py`` is the other direction."""

from penstock.system.lazy import needing
from penstock.version import install_hint

with needing("fsspec", f"penstock.fsspec needs fsspec. Hint: {install_hint('fsspec')}"):
    from penstock.fsspec.filesystem import PenstockFileSystem, PenstockS3FileSystem, register

__all__ = ["PenstockFileSystem", "PenstockS3FileSystem", "register"]
