"""Moving objects between stores and files: see README.md in this folder."""

from penstock.transfer.download import Download, is_downloaded
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
