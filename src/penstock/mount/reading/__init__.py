"""Open files of a mount. See README.md in this folder."""

from penstock.mount.reading.files import StoreFiles

__all__ = ["StoreFiles"]
