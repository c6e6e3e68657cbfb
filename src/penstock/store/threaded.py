"""The base of stores whose operations block a thread: memory, local files, fsspec.

``ThreadedStore.submit`` puts an operation in a queue. One of a bounded number of daemon threads performs it, maps its
exceptions and calls the sink, exactly once. Threads start when there is work, and end with ``close()`` or when the store is
dropped.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from abc import abstractmethod
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from penstock.errors import (
    AccessDeniedError,
    CancelledOperationError,
    ClosedError,
    ConfigError,
    ObjectMissingError,
    StoreError,
    StoreFullError,
    UnavailableError,
)
from penstock.redaction import showable
from penstock.store.base import Store, check_key, check_plain_write
from penstock.system import forks
from penstock.types import (
    AbortMultipart,
    Attempt,
    ByteRange,
    CompleteMultipart,
    Completion,
    Copy,
    CopyPart,
    CreateMultipart,
    Delete,
    Get,
    Head,
    Landing,
    ListPage,
    Put,
    PutPart,
)

if TYPE_CHECKING:
    from typing import Any

    from penstock.types import Key, ObjectInfo, Operation, Part, Sink

log = logging.getLogger("penstock.store")

UploadT = TypeVar("UploadT")

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Runnable(Protocol):
    """Work for a ``Pool``."""

    def run(self) -> None:
        """Do the work, on a thread of the pool."""


class Pool:
    """A bounded number of daemon threads that perform jobs in the order in which they came.

    Args:
        threads_max: The most threads; at least 1.
        name: Name of the pool, for its threads and for messages.
    """

    def __init__(self, *, threads_max: int, name: str) -> None:
        self.threads_max = threads_max
        self.name = name
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        self._jobs: SimpleQueue[Runnable | None] = SimpleQueue()  # put() is reentrant, because a finaliser may submit
        self._lock = threading.RLock()  # reentrant for the same reason
        self._threads: list[threading.Thread] = []
        self._busy_count = 0
        self._closed = False

    def after_fork_in_child(self) -> None:
        """Forget the threads and jobs, which are the parent's; a pool that is open may start its own."""
        closed = self._closed
        self._reset()
        self._closed = closed

    def put(self, job: Runnable) -> None:
        """Queue `job`, and start a thread if all are busy and the bound allows.

        Raises:
            ClosedError: The pool was closed.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.name} was closed")
            self._busy_count += 1
            if self._busy_count > len(self._threads) and len(self._threads) < self.threads_max:
                thread = threading.Thread(target=self._work, name=f"penstock-{self.name}", daemon=True)
                self._threads.append(thread)
                try:
                    thread.start()
                except RuntimeError:  # the process ends, and starts no more threads: those that run do the job
                    self._threads.remove(thread)
                    if not self._threads:
                        self._busy_count -= 1
                        raise
            self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.run()
            except Exception:  # raised by its sink; if the thread ended, the other jobs would wait for ever
                log.exception("A callback failed on a thread of %s.", self.name)
            del job  # an idle thread keeps no buffer alive
            with self._lock:
                self._busy_count -= 1

    def end(self) -> list[threading.Thread]:
        """End the threads once the queue is empty, without waiting, because finalisers must not wait. Idempotent."""
        with self._lock:
            threads, self._threads = self._threads, []
            self._closed = True
            for _ in threads:
                self._jobs.put(None)
        return threads

    def close(self) -> None:
        """Finish the queued operations, then end the threads. Idempotent."""
        for thread in self.end():
            if thread is not threading.current_thread():
                thread.join()


class BlockingJob:
    """One submitted operation: the transfer that ``submit`` returns, and the work behind it."""

    __slots__ = ("_answered", "_perform", "cancelled", "completion", "operation", "sink", "started_s", "submitted_s")

    def __init__(self, operation: Operation, sink: Sink, perform: ThreadedStore[Any]) -> None:
        self.operation = operation
        self.sink = sink
        self.cancelled = False
        self.completion = Completion(operation)
        self.submitted_s = time.monotonic()
        self.started_s = 0.0
        self._answered = False
        self._perform = perform

    def cancel(self) -> None:
        """Cancel the operation: it does not begin, or stops at its next step."""
        self.cancelled = True

    def unanswered_s(self) -> float:
        """Return the seconds that it has run without an answer; 0 if it waits or has answered."""
        return time.monotonic() - self.started_s if self.started_s and not self._answered else 0.0

    def check(self) -> None:
        """Raise ``CancelledOperationError`` if it was cancelled; called between the steps of a long operation."""
        if self.cancelled:
            raise CancelledOperationError("cancelled")

    def land(self, info: ObjectInfo, span: ByteRange) -> tuple[Landing, memoryview]:
        """Ask the sink where the body of a ``Get`` goes.

        Returns:
            The landing, and a view of it, uint8[n], to be filled; the filling code moves ``landing.offset``. If the view is
            shorter than `span`, only its length is wanted.
        """
        self._answered = True
        landing = self.sink.head(info, span)
        if landing is None:
            landing = Landing(bytearray(span.length_bytes), 0, span.length_bytes)
        self.completion.landing = landing
        self.completion.span = span
        end = min(landing.end, landing.offset + span.length_bytes)
        return landing, memoryview(landing.buffer)[landing.offset : end]

    def run(self) -> None:
        """Perform the operation on this thread, and tell the sink how it ended."""
        self.started_s = time.monotonic()
        completion = self.completion
        try:
            self.check()
            self._perform.perform(self)
        except Exception as error:
            failure = self._perform.as_store_error(error, self.operation)
            completion.error = failure.with_traceback(None)  # whose frames refer to the completion: a cycle
            failure.attempts_count, failure.elapsed_s = 1, time.monotonic() - self.submitted_s
        self._answered = True
        completion.attempts = (self._attempt(completion),)
        self.sink.done(completion)

    def _attempt(self, completion: Completion) -> Attempt:
        error, landing = completion.error, completion.landing
        ended_s = time.monotonic()
        return Attempt(
            start_s=self.started_s,
            status=200 if error is None else (error.status or 0),
            offset_bytes=0,
            received_bytes=landing.offset - landing.start if landing else 0,
            queued_s=self.started_s - self.submitted_s,
            first_byte_s=ended_s - self.started_s,
            total_s=ended_s - self.started_s,
        )


class ThreadedStore(Store, Generic[UploadT]):
    """A store that implements one blocking method per operation.

    Args:
        threads_max: The most threads that perform operations at the same time; at least 1.
        name: Name of the store, for its threads and for messages.
    """

    _uploads: dict[str, tuple[CreateMultipart, UploadT]]  # beginning and state of each multipart upload, by its ID

    def __init__(self, *, threads_max: int, name: str) -> None:
        if threads_max < 1:
            raise ConfigError(f"threads_max={threads_max!r} must be at least 1")
        self._pool = Pool(threads_max=threads_max, name=name)
        weakref.finalize(self, self._pool.end).atexit = False  # at exit the threads are daemons
        self._uploads = {}

    def submit(self, operation: Operation, sink: Sink) -> BlockingJob:
        """Queue `operation`; see ``Store.submit``.

        Raises:
            ConfigError: The store cannot hold such a key, by the rule that the message names, or cannot do what a write wants.
            ClosedError: The store was closed.
        """
        for key in keys_of(operation):
            self.check_key(key)
        if not self.keeps_records:
            check_plain_write(self, operation)
        if isinstance(operation, Get | CopyPart) and operation.span is not None:
            operation.span.checked()
        job = BlockingJob(operation, sink, self)
        self._pool.put(job)
        return job

    def close(self) -> None:
        """Finish the submitted operations, and end the threads. Idempotent."""
        self._pool.close()

    def check_key(self, key: Key) -> None:
        """Refuse a key that this store cannot hold.

        Raises:
            ConfigError: The key breaks the rule that the message names.
        """
        check_key(key)

    def perform(self, job: BlockingJob) -> None:
        """Perform ``job.operation`` and write the answer to ``job.completion``; the caller maps its errors."""
        operation, completion = job.operation, job.completion
        match operation:
            case Get():
                self._get(operation, job)
            case Head():
                completion.info = self._head(operation)
            case ListPage():
                completion.value = self._list_page(operation)
            case Put():
                completion.info = self._put(operation)
            case Delete():
                completion.value = self._delete(operation, job)
            case Copy():
                completion.info = self._copy(operation, job)
            case CreateMultipart():
                upload_id = os.urandom(8).hex()
                self._uploads[upload_id] = operation, self._new_upload(operation.key, upload_id)
                completion.value = upload_id
            case PutPart() | CopyPart():
                completion.value = self._put_part(operation, job)
            case AbortMultipart():
                self._end_upload(operation.key, operation.upload_id)
            case CompleteMultipart():
                completion.info = self._complete(operation, job)

    @abstractmethod
    def _get(self, operation: Get, job: BlockingJob) -> None: ...
    @abstractmethod
    def _head(self, operation: Head) -> ObjectInfo: ...
    @abstractmethod
    def _list_page(self, operation: ListPage) -> object: ...
    @abstractmethod
    def _put(self, operation: Put) -> ObjectInfo: ...
    @abstractmethod
    def _delete(self, operation: Delete, job: BlockingJob) -> dict[Key, str]: ...
    @abstractmethod
    def _copy(self, operation: Copy, job: BlockingJob) -> ObjectInfo: ...
    @abstractmethod
    def _new_upload(self, key: Key, upload_id: str) -> UploadT: ...
    @abstractmethod
    def _put_part(self, operation: PutPart | CopyPart, job: BlockingJob) -> Part: ...
    @abstractmethod
    def _complete(self, operation: CompleteMultipart, job: BlockingJob) -> ObjectInfo: ...

    def _upload(self, key: Key, upload_id: str) -> UploadT:
        """Return the state of an upload. Raises a StoreError if this key has none with this ID."""
        found = self._uploads.get(upload_id)
        if found is None or found[0].key != key:
            raise StoreError(f"this key has no upload {upload_id!r}", status=404, code="NoSuchUpload")
        return found[1]

    def _end_upload(self, key: Key, upload_id: str) -> None:
        """Forget an upload that was completed or is dropped. Raises a StoreError if this key has none with this ID."""
        self._upload(key, upload_id)
        self._uploads.pop(upload_id, None)  # another thread may have been faster

    def as_store_error(self, error: Exception, operation: Operation) -> StoreError:
        """Return `error` as a ``StoreError`` with operation and URL; an ``OSError`` is mapped by its class and errno."""
        what = VERBS[type(operation)]
        url = self.describe(next(iter(keys_of(operation)), getattr(operation, "prefix", "")))
        if isinstance(error, StoreError):
            error.operation = error.operation or what
            error.url = error.url or url
            mapped = error
        elif isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
            mapped = ObjectMissingError("no such object", operation=what, url=url)
        elif isinstance(error, PermissionError) or getattr(error, "errno", None) == errno.EROFS:
            mapped = AccessDeniedError(getattr(error, "strerror", None) or str(error), operation=what, url=url)
        elif isinstance(error, ConnectionError | TimeoutError):
            mapped = UnavailableError(f"{type(error).__name__}: {error}", operation=what, url=url)
        else:
            reason = (
                error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
            )
            kind = StoreFullError if getattr(error, "errno", None) in _FULL else StoreError
            mapped = kind(reason, operation=what, url=url)
            if isinstance(error, OSError) and error.errno is not None:
                mapped.errno = error.errno
        if mapped is not error and showable(error):
            mapped.__cause__ = error
        return mapped


VERBS: dict[type, str] = {
    Get: "GET",
    Head: "HEAD",
    ListPage: "LIST",
    Put: "PUT",
    CreateMultipart: "CREATE MULTIPART",
    PutPart: "PUT PART",
    CompleteMultipart: "COMPLETE MULTIPART",
    AbortMultipart: "ABORT MULTIPART",
    Delete: "DELETE",
    Copy: "COPY",
    CopyPart: "COPY PART",
}


def keys_of(operation: Operation) -> tuple[Key, ...]:
    """Return the keys that an operation names."""
    match operation:
        case ListPage():
            return ()
        case Delete():
            return operation.keys
        case Copy() | CopyPart():
            return operation.source, operation.target
        case _:
            return (operation.key,)


def check_ascending(operation: CompleteMultipart) -> list[int]:
    """Return the numbers of the parts. Raises a StoreError if there are none, or they do not ascend."""
    numbers = [part.part_number for part in operation.parts]
    if not numbers or numbers != sorted(set(numbers)):
        raise StoreError(f"parts must be in ascending order, not {numbers[:9]}", status=400, code="InvalidPartOrder")
    return numbers


def span_within(operation: Get, size_bytes: int) -> ByteRange | None:
    """Return the bytes that a ``Get`` names in an object of `size_bytes`, cut at its end; None for an empty object.

    Raises:
        SpanError: The range starts at or past the end.
    """
    if operation.span is None:
        return ByteRange(0, size_bytes) if size_bytes else None
    return operation.span.within(size_bytes)
