"""Moving objects between stores and files: see README.md in this folder."""

from penstock.transfer.download import ETAG_ATTRIBUTE, Download, is_downloaded
from penstock.transfer.moving import (
    FileReceiver,
    Receiver,
    StoreReceiver,
    TransferItem,
    TransferListener,
    copy_inside,
    stream,
)

__all__ = [
    "ETAG_ATTRIBUTE",
    "Download",
    "FileReceiver",
    "Receiver",
    "StoreReceiver",
    "TransferItem",
    "TransferListener",
    "copy_inside",
    "is_downloaded",
    "stream",
]
