"""Moves objects between stores and files. See README.md in this folder."""

from penstock.transfer.download import ETAG_ATTRIBUTE, Decoder, Download, FileReceiver, is_downloaded
from penstock.transfer.moving import (
    FirstFailure,
    RaisingListener,
    Receiver,
    TransferItem,
    TransferListener,
    copy_between,
    copy_inside,
    stream,
)

__all__ = [
    "ETAG_ATTRIBUTE",
    "Decoder",
    "Download",
    "FileReceiver",
    "FirstFailure",
    "RaisingListener",
    "Receiver",
    "TransferItem",
    "TransferListener",
    "copy_between",
    "copy_inside",
    "is_downloaded",
    "stream",
]
