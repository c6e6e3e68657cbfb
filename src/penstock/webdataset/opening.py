"""Opens URLs for WebDataset: the handler of a scheme, the two stages that open a sequence of shards, and uploads.

A handler of ``gopen`` receives one URL at a time, and cannot know the next one. The stages receive the iterator of
URLs, so they can read ahead past the end of a shard; for URLs of other schemes they call WebDataset's own stages.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import webdataset

from penstock.errors import ConfigError
from penstock.redaction import public_url
from penstock.store.writing import Writer
from penstock.system.tracebacks import boundary
from penstock.webdataset.streams import Place, ShardStores, ShardStreams

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType


gopen = importlib.import_module("webdataset.gopen")  # the package's attribute of this name is a function
THEIR_URL_OPENER = webdataset.tariterators.url_opener
THEIR_STREAMING_OPEN: Any = webdataset.cache.StreamingOpen

_stores = ShardStores()  # of URLs that are opened without options, as ``register`` set them


@boundary
def open_url(url: str, mode: str = "rb", bufsize: int = 8192, **options: Any) -> io.IOBase:
    """Open one object, as a handler of WebDataset's ``gopen``.

    Args:
        url: ``s3://bucket/key``, or the same after ``penstock+``.
        mode: ``"rb"`` reads the object once from its beginning to its end; ``"wb"`` makes an object that is visible when the
            file is closed.
        bufsize: Ignored.
        **options: Options of ``penstock.connect``, beside those of ``register``.

    Raises:
        ConfigError: The URL, the mode or an option is not valid.
        StoreError: The object is missing, may not be read, ...
    """
    stores = _stores.with_options(options)
    if mode == "wb":
        return ShardUpload(*stores.locate(url))
    if mode != "rb":
        raise ConfigError(f"mode {mode!r} must be 'rb' or 'wb'")
    streams = ShardStreams((url,), locate=stores.locate)
    next(streams)
    stream = streams.open()
    assert stream is not None
    return stream


@boundary
def url_opener(
    data: Iterable[dict[str, Any]],
    handler: Callable[[Exception], bool] = webdataset.reraise_exception,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Open a sequence of shards, as WebDataset's stage of the same name, with the next ones requested while one is read.

    Args:
        data: Dicts with the key ``url``; the iterable is consumed a few dozen of them ahead.
        handler: Called with the exception of a shard that cannot be opened; if it returns true, the next one follows.
        **options: Options of ``penstock.connect``, beside those of ``register``.

    Returns:
        An iterator of the same dicts with the key ``stream`` added.

    Raises:
        ConfigError: An option does not exist.
    """
    return _url_opener(data, handler, _stores.with_options(options))


def _url_opener(
    data: Iterable[dict[str, Any]], handler: Callable[[Exception], bool], stores: ShardStores
) -> Iterator[dict[str, Any]]:
    verdict = _Verdict(handler)
    for sample, stream in _opened(data, stores, handler):
        if stream is not None:
            sample.update(stream=stream)
            yield sample
        else:
            yield from THEIR_URL_OPENER((sample,), handler=verdict)
            if verdict.ends:
                return


class ShardOpener(THEIR_STREAMING_OPEN):  # type: ignore[misc]
    """WebDataset's stage that opens the shards of ``WebDataset(urls)``, with the next ones requested while one is read.

    It pickles with the options of ``register``, so they also apply in worker processes, however these are started.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.stores = _stores

    def __call__(self, urls: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Open shards in order.

        Args:
            urls: URLs, or dicts with the key ``url``; the iterable is consumed a few dozen of them ahead.

        Returns:
            An iterator of dicts with the keys ``url`` and ``stream``.
        """
        verdict = _Verdict(self.handler)
        for item, stream in _opened(urls, self.stores, self.handler):
            if stream is not None:
                yield {"url": _url_of(item), "stream": stream}
            else:
                yield from self._theirs(item, verdict)
                if verdict.ends:
                    return

    def _theirs(self, item: Any, verdict: _Verdict) -> Iterator[dict[str, Any]]:
        opened: Iterator[dict[str, Any]] = THEIR_STREAMING_OPEN(verbose=self.verbose, handler=verdict)((item,))
        return opened


class _Verdict:
    """A handler that remembers whether it told its caller to end."""

    def __init__(self, handler: Callable[[Exception], bool]) -> None:
        self._handler = handler
        self.ends = False

    def __call__(self, error: Exception) -> bool:
        goes_on = self._handler(error)
        self.ends = not goes_on
        return goes_on


def _opened(
    items: Iterable[Any], stores: ShardStores, handler: Callable[[Exception], bool]
) -> Iterator[tuple[Any, io.BufferedReader | None]]:
    """Iterate over items and their streams; an item whose URL others open has no stream."""
    streams = ShardStreams(items, locate=lambda item: _place(_url_of(item), stores))
    try:
        for item in streams:
            try:
                stream = streams.open()
            except Exception as error:
                error.args = (*error.args, public_url(_url_of(item)))  # as WebDataset's own stage does
                if handler(error):
                    continue
                return
            yield item, stream
            del stream
    finally:
        streams.close()


def _url_of(item: Any) -> str:
    url: str = item["url"] if isinstance(item, dict) else item
    return url


def _place(url: str, stores: ShardStores) -> Place | None:
    """Return where the object of a URL lies; None if ``gopen`` would not call ``open_url`` for it."""
    rewritten = gopen.rewrite_url(url)
    if gopen.gopen_schemes.get(rewritten.partition("://")[0]) is not open_url:
        return None
    return stores.locate(rewritten)


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
    global _stores
    _stores = ShardStores(**options)
    gopen.gopen_schemes.update(dict.fromkeys(SCHEMES, open_url))
    webdataset.cache.StreamingOpen = ShardOpener
    webdataset.tariterators.url_opener = url_opener
    abort_on_exceptions(webdataset.writer)


class ShardUpload(Writer):
    """A file object that writes one shard.

    WebDataset's writers close their stream whenever their ``with`` block ends, also if an exception ends it; a file then keeps
    the samples written so far. An object would appear that looks like a whole shard. ``abort_on_exceptions`` therefore has
    the writers drop uploads first; what they write while they close is dropped, too.

    Args:
        store: The store.
        key: Key of the shard.
    """

    _is_dropped = False

    def write(self, data: Any, /) -> int:
        """Take all of `data`; drop it if the upload was dropped.

        Raises:
            StoreError: An earlier part failed; nothing becomes visible.
        """
        return memoryview(data).nbytes if self._is_dropped else super().write(data)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.drop()
        self.close()

    def drop(self) -> None:
        """Drop the bytes that were sent, and everything that is still written."""
        self._is_dropped = True
        self.abort()


def abort_on_exceptions(writers: ModuleType) -> None:
    """Have WebDataset's ``TarWriter`` and ``ShardWriter`` abort uploads if an exception ends their ``with`` block.

    Args:
        writers: The module ``webdataset.writer``.
    """
    for kind in (writers.TarWriter, writers.ShardWriter):
        if not hasattr(kind.__exit__, "__wrapped__"):
            kind.__exit__ = _aborting(kind.__exit__)


def _aborting(leave: Any) -> Any:
    @functools.wraps(leave)
    def leave_aborted(self: Any, *error: Any) -> Any:
        if error and error[0] is not None:
            tar = getattr(self, "tarstream", None) if hasattr(self, "pattern") else self  # a ``ShardWriter`` has one
            stream = getattr(tar, "stream", None)
            if isinstance(stream, ShardUpload):
                stream.drop()
                self.post = None  # a ``ShardWriter`` would call it for the shard that does not exist
        return leave(self, *error)

    return leave_aborted
