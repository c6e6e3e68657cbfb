"""Moving objects between stores and files: see README.md in this folder."""

from penstock.transfer.download import ETAG_ATTRIBUTE, Download, is_downloaded
from penstock.transfer.moving import (
    Receiver,
    TransferItem,
    TransferListener,
    copy_between,
    copy_inside,
    stream,
)
from penstock.transfer.receiving import Decoder, FileReceiver

__all__ = [
    "ETAG_ATTRIBUTE",
    "Decoder",
    "Download",
    "FileReceiver",
    "Receiver",
    "TransferItem",
    "TransferListener",
    "copy_between",
    "copy_inside",
    "is_downloaded",
    "stream",
]
