"""Registers this package with WebDataset as what opens ``s3://``."""

from __future__ import annotations

from typing import Any

import webdataset

from penstock.system.tracebacks import boundary
from penstock.webdataset.opening import ShardOpener, gopen, open_url, url_opener
from penstock.webdataset.stores import ShardStores, set_default_stores
from penstock.webdataset.writing import abort_on_exceptions

SCHEMES = ("s3", "penstock+s3")


@boundary
def register(**options: Any) -> None:
    """Have WebDataset open ``s3://`` and ``penstock+s3://`` with penstock, for reading and writing.

    Importing ``penstock.webdataset`` calls this without options. Calling it again replaces the options for data sets that
    are made afterwards.

    Args:
        **options: Options of ``penstock.connect``, such as ``cache=``, ``endpoint_url=`` and ``credentials=``.

    Raises:
        ConfigError: An option does not exist.
    """
    set_default_stores(ShardStores(**options))
    gopen.gopen_schemes.update(dict.fromkeys(SCHEMES, open_url))
    webdataset.cache.StreamingOpen = ShardOpener
    webdataset.tariterators.url_opener = url_opener
    abort_on_exceptions(webdataset.writer)
