"""A manifest replaces listings, so that a mount sends no request for names."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.compose import connect, key_below, split
from penstock.errors import ConfigError, ObjectMissingError
from penstock.index.manifest import read_manifest
from penstock.mount.namespace.names import begin
from penstock.redaction import public_url
from penstock.store.base import OperationRelay, Resent, Store, Wrapper
from penstock.store.pages import sorted_page
from penstock.types import UNKNOWN_BYTES, Completion, Head, ListPage, ObjectInfo, Page

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.index.manifest import ManifestEntry
    from penstock.types import Operation, Sink, Transfer


def manifest_objects(
    manifest_url: str, store: Store, *, url: str, connection: Mapping[str, Any]
) -> dict[str, ObjectInfo]:
    """Return the objects of a manifest by their keys in `store`; those of unknown size have ``UNKNOWN_BYTES``.

    Args:
        manifest_url: URL of `store`.
        store: The store that is mounted.
        url: URL of the manifest.
        connection: Further arguments of ``connect``, also for the manifest.

    Raises:
        ConfigError: An object of the manifest is not below `url`.
        DataError: The manifest cannot be read.
        StoreError: The same, because of its store.

    Cost: the reading of the manifest; 400 bytes for each of its objects.
    """
    root, key = split(manifest_url)
    with connect(root, **{**connection, "cache": None}) as place:
        entries = read_manifest(place.read(key).data, url=manifest_url)
    roots = tuple(text if text.endswith("/") else text + "/" for text in (url, store.describe("")))
    return {info.key: info for info in (_object(entry, roots) for entry in entries)}


def _object(entry: ManifestEntry, roots: tuple[str, ...]) -> ObjectInfo:
    for root in roots:
        if entry.url.startswith(root):
            size_bytes = UNKNOWN_BYTES if entry.size_bytes is None else entry.size_bytes
            return ObjectInfo(key_below(root, entry.url), size_bytes, entry.etag)
    raise ConfigError(
        f"the manifest's object {public_url(entry.url)} is not below {public_url(roots[0])}",
        hint="mount the URL that all objects of the manifest begin with",
    )


class ManifestStore(Wrapper):
    """A store whose objects are those of a manifest. Only their bytes, and sizes that the manifest lacks, come from the store.

    Args:
        inner: The store.
        objects: The objects by key; their size may be ``UNKNOWN_BYTES``.
    """

    def __init__(self, inner: Store, objects: Mapping[str, ObjectInfo]) -> None:
        super().__init__(inner)
        self._objects = dict(objects)
        self._keys = sorted(self._objects)

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Start `operation`; see ``Store.submit``."""
        if isinstance(operation, ListPage):
            return _SizedPage(self, operation, sink).begin(
                sorted_page(self._keys, self._objects.__getitem__, operation)
            )
        if not isinstance(operation, Head):
            return self.inner.submit(operation, sink)
        info = self._objects.get(operation.key)
        if info is not None and info.size_bytes == UNKNOWN_BYTES:
            return self.inner.submit(operation, sink)
        completion = Completion(operation)
        completion.info = info
        if info is None:
            completion.error = ObjectMissingError("the manifest has no such object", operation="HEAD", status=404)
        sink.done(completion)
        return OperationRelay(self, operation, sink)

    def learn(self, info: ObjectInfo) -> None:
        """Remember the result of a HEAD for an object whose size was not known."""
        self._objects[info.key] = info._replace(headers={})


class _SizedPage(Resent):
    """A page of a manifest, of which some sizes must be asked for."""

    def __init__(self, store: ManifestStore, operation: ListPage, sink: Sink) -> None:
        self._store = store
        self._operation = operation
        self._sink = sink
        self._lock = threading.Lock()
        self.cancelled = False
        self.transfers: list[Transfer] = []
        self._completion = Completion(operation)
        self._missing_count = 0

    def begin(self, page: Page) -> Transfer:
        """Ask for the sizes that are not known, and end the operation with the last answer."""
        unknown = [index for index, info in enumerate(page.objects) if info.size_bytes == UNKNOWN_BYTES]
        self._completion.value = page
        self._missing_count = len(unknown)
        if not unknown or self._operation.keys_max == 1:  # of one key, only its existence is wanted
            self._sink.done(self._completion)
            return self
        for index in unknown:
            operation = Head(page.objects[index].key)
            transfer = begin(self._store.inner, operation, partial(self._sized, page.objects, index))
            if transfer is not None:
                self.transfers.append(transfer)
        return self

    def _sized(self, objects: list[ObjectInfo], index: int, completion: Completion) -> None:
        with self._lock:
            if completion.info is not None and completion.error is None:
                objects[index] = completion.info
                self._store.learn(completion.info)
            elif self._completion.error is None:
                self._completion.error = completion.error
            self._missing_count -= 1
            if self._missing_count:
                return
        self._sink.done(self._completion)
