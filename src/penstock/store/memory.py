"""``MemoryStore``: objects in a dict. It shows what every store must do, and is the fastest store for tests."""

from __future__ import annotations

import hashlib
import threading
import time
from bisect import bisect_left, insort
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ObjectChangedError, ObjectExistsError, ObjectMissingError, SpanError, StoreError
from penstock.store.pages import sorted_page
from penstock.store.records import answered_headers, canonical_headers
from penstock.store.threaded import ThreadedStore, check_ascending, span_within
from penstock.system import forks
from penstock.types import CopyPart, ObjectInfo, Page, Part, PutPart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.store.threaded import BlockingJob
    from penstock.types import Buffer, CompleteMultipart, Copy, CreateMultipart, Get, Head, Key, ListPage, Put


class _Object(NamedTuple):
    data: bytes
    info: ObjectInfo


class _Bucket:
    """Objects by key, their keys in order, and the multipart uploads in progress. Callers hold ``lock``."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, _Object] = {}
        self.keys: list[str] = []  # sorted; strings compare by code point, which is the order of their UTF-8 bytes
        self.uploads: dict[str, tuple[CreateMultipart, dict[int, _Object]]] = {}
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Replace the lock, which may have been held; the objects are the child's own copy from now on."""
        self.lock = threading.Lock()

    def put(
        self, key: str, data: bytes, etag: str, *, record: ObjectInfo | None = None,
        if_absent: bool = False, if_match: str | None = None,
    ) -> ObjectInfo:  # fmt: skip
        """Make data an object, with the headers and tags of `record`."""
        if if_match is not None:
            self.get(key, if_match)
        if key not in self.objects:
            insort(self.keys, key)
        elif if_absent:
            raise ObjectExistsError("an object with this key exists", status=412)
        info = ObjectInfo(key, len(data), etag, time.time())
        if record is not None:
            info = info._replace(headers=record.headers, tags=record.tags)
        self.objects[key] = _Object(data, info)
        return info

    def get(self, key: str, if_match: str | None = None) -> _Object:
        found = self.objects.get(key)
        if found is None:
            raise ObjectMissingError("no such object", status=404)
        if if_match is not None and if_match != found.info.etag:
            raise ObjectChangedError(f"the object is now version {found.info.etag}, not {if_match}", status=412)
        return found


_shared: dict[str, _Bucket] = {}
_shared_lock = threading.Lock()


class MemoryStore(ThreadedStore[dict[int, _Object]]):
    """Objects in this process's memory.

    Args:
        objects: Objects to begin with, by key; they are copied.
        name: Stores of one name share their objects within the process (``memory://name``), and pickle as their name. A
            store without a name shares nothing, and pickles as a copy of its objects.
        prefix: The store is the part of `name` below this prefix, to which its keys are relative (``memory://name/prefix/``).
            A slash is added at its end.

    Cost: One thread from the first operation to ``close()``; one copy of the bytes in, and one out.
    """

    keeps_records = True

    def __init__(
        self, objects: Mapping[Key, Buffer] | None = None, *, name: str | None = None, prefix: str = ""
    ) -> None:
        super().__init__(threads_max=1, name=f"memory-{name or ''}")
        self.name = name
        self.prefix = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
        if name is None:
            self._bucket = _Bucket()
        else:
            with _shared_lock:
                self._bucket = _shared.setdefault(name, _Bucket())
        self._uploads = self._bucket.uploads
        with self._bucket.lock:
            for key, data in (objects or {}).items():
                self.check_key(key)
                self._bucket.put(self.prefix + key, bytes(data), _etag(data))

    def describe(self, key: Key) -> str:
        """Return ``memory://name/prefix/key``."""
        return f"memory://{self.name or ''}/{self.prefix}{key}"

    def __reduce__(self) -> tuple[Any, ...]:
        if self.name is not None:
            return partial(MemoryStore, name=self.name, prefix=self.prefix), ()
        with self._bucket.lock:
            objects = {self._relative(key): found.data for key, found in self._bucket.objects.items()}
            return partial(MemoryStore, prefix=self.prefix), (objects,)

    def __repr__(self) -> str:
        place = f"{self.name}/{self.prefix}".rstrip("/") if self.name else "without a name"
        return f"<MemoryStore {place}, {len(self._bucket.objects)} objects>"

    def _relative(self, key: str) -> Key:
        return key[len(self.prefix) :]

    def _own(self, info: ObjectInfo) -> ObjectInfo:
        """Return a record of the shared objects as one of this store, whose keys are relative to its prefix."""
        return info._replace(key=self._relative(info.key)) if self.prefix else info

    def _get(self, operation: Get, job: BlockingJob) -> None:
        with self._bucket.lock:
            found = self._bucket.get(self.prefix + operation.key, operation.if_match)
        info = job.completion.info = self._own(found.info)
        span = span_within(operation, info.size_bytes)
        if span is None:
            return
        landing, view = job.land(info, span)
        job.check()
        view[:] = memoryview(found.data)[span.start : span.start + len(view)]
        landing.offset += len(view)

    def _head(self, operation: Head) -> ObjectInfo:
        with self._bucket.lock:
            return self._own(self._bucket.get(self.prefix + operation.key).info)

    def _put(self, operation: Put) -> ObjectInfo:
        data = bytes(operation.body)
        with self._bucket.lock:
            return self._place(operation, data, _etag(data), _record(operation))

    def _place(self, operation: Put | CompleteMultipart, data: bytes, etag: str, record: ObjectInfo) -> ObjectInfo:
        """Make data the object that an operation names, if its conditions hold; the caller holds the lock."""
        key, if_absent, if_match = self.prefix + operation.key, operation.if_absent, operation.if_match
        return self._own(self._bucket.put(key, data, etag, record=record, if_absent=if_absent, if_match=if_match))

    def _delete(self, operation: Any, job: BlockingJob) -> dict[Key, str]:
        bucket = self._bucket
        with bucket.lock:
            for key in (self.prefix + key for key in operation.keys):
                if bucket.objects.pop(key, None) is not None:
                    del bucket.keys[bisect_left(bucket.keys, key)]
        return {}

    def _copy(self, operation: Copy, job: BlockingJob) -> ObjectInfo:
        with self._bucket.lock:
            found = self._bucket.get(self.prefix + operation.source, operation.if_match)
            target, record = self.prefix + operation.target, found.info
            if operation.headers is not None:
                record = record._replace(headers=answered_headers(canonical_headers(operation.headers)))
            if operation.tags is not None:
                record = record._replace(tags=dict(operation.tags))
            return self._own(self._bucket.put(target, found.data, record.etag or "", record=record))

    def _new_upload(self, key: Key, upload_id: str) -> dict[int, _Object]:
        return {}

    def _put_part(self, operation: PutPart | CopyPart, job: BlockingJob) -> Part:
        with self._bucket.lock:
            if isinstance(operation, CopyPart):
                found = self._bucket.get(self.prefix + operation.source, operation.if_match)
                if operation.span.end > found.info.size_bytes:
                    raise SpanError(
                        f"the range ends at byte {operation.span.end} of {found.info.size_bytes}", status=416
                    )
                key, data = operation.target, found.data[operation.span.start : operation.span.end]
            else:
                key, data = operation.key, bytes(operation.body)
            info = ObjectInfo(key, len(data), _etag(data))
            self._upload(key, operation.upload_id)[operation.part_number] = _Object(data, info)
            return Part(operation.part_number, info.etag or "")

    def _complete(self, operation: CompleteMultipart, job: BlockingJob) -> ObjectInfo:
        with self._bucket.lock:
            parts = self._upload(operation.key, operation.upload_id)
            numbers = check_ascending(operation)
            wrong = [
                p.part_number
                for p in operation.parts
                if p.part_number not in parts or parts[p.part_number].info.etag != p.etag
            ]
            if wrong:
                raise StoreError(f"parts {wrong[:9]} are not those that were sent", status=400, code="InvalidPart")
            data = b"".join(parts[number].data for number in numbers)
            etag = f'{_etag(data)[:-1]}-{len(numbers)}"'
            info = self._place(operation, data, etag, _record(self._uploads[operation.upload_id][0]))
            self._end_upload(operation.key, operation.upload_id)
            return info

    def _list_page(self, operation: ListPage) -> Page:
        with self._bucket.lock:
            if not self.prefix:
                return sorted_page(self._bucket.keys, lambda key: self._bucket.objects[key].info, operation)
            whole = operation._replace(
                prefix=self.prefix + operation.prefix,
                start_after=self.prefix + operation.start_after,  # the prefix itself is no key of this store
            )
            page = sorted_page(self._bucket.keys, lambda key: self._own(self._bucket.objects[key].info), whole)
            return page._replace(prefixes=[self._relative(prefix) for prefix in page.prefixes])


def _record(operation: Put | CreateMultipart) -> ObjectInfo:
    """Return what is kept of a write besides its bytes."""
    headers = answered_headers(canonical_headers(operation.headers))
    return ObjectInfo(operation.key, 0, headers=headers, tags=dict(operation.tags))


def _etag(data: Buffer) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
