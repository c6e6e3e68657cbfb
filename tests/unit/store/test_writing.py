"""Writing beyond the contract: how parts grow, what is in flight, what a fork and the process's end do, failures."""

import gc
import os
import random
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from forking import exit_code_of, start_child
from penstock.errors import ClosedError, ConfigError, StoreError, UnavailableError
from penstock.store import upload
from penstock.store.faulty import Faulty
from penstock.store.inflight import perform
from penstock.store.local import LocalStore
from penstock.store.memory import MemoryStore
from penstock.store.upload import PART_BYTES, PARTS_MAX, PARTS_PER_STEP, Upload
from penstock.store.writing import Writer, copy, delete
from penstock.transport import engine
from penstock.types import AbortMultipart, CompleteMultipart, CreateMultipart, Delete, PutPart

MIB = 1 << 20


class Recording:
    """A core that records operations, and the most parts in flight."""

    def __init__(self, inner):
        self.inner = inner
        self.operations = []
        self.lock = threading.Lock()
        self.parts_count = self.parts_bytes = self.parts_count_max = self.parts_bytes_max = 0

    def submit(self, operation, sink):
        self.operations.append(operation)
        if isinstance(operation, PutPart):
            with self.lock:
                self.parts_count += 1
                self.parts_bytes += len(operation.body)
                self.parts_count_max = max(self.parts_count_max, self.parts_count)
                self.parts_bytes_max = max(self.parts_bytes_max, self.parts_bytes)
            sink = _Ending(self, sink)
        return self.inner.submit(operation, sink)

    def describe(self, key):
        return self.inner.describe(key)

    def kinds(self):
        return [type(operation) for operation in self.operations]


class _Ending:
    def __init__(self, owner, sink):
        self.owner, self.sink, self.landing = owner, sink, None

    def head(self, info, span):
        return self.sink.head(info, span)

    def done(self, completion):
        with self.owner.lock:
            self.owner.parts_count -= 1
            self.owner.parts_bytes -= len(completion.operation.body)
        self.sink.done(completion)


@pytest.fixture
def memory():
    with MemoryStore() as store:
        yield store


def test_ten_thousand_parts_hold_the_largest_object():
    """Parts grow so that S3's 10 000 hold its 5 TiB, none above its 5 GiB, and the first 600 MB go in 8 MiB."""
    sizes = [PART_BYTES * (1 + number // PARTS_PER_STEP) for number in range(PARTS_MAX)]
    assert sum(sizes) >= 5 << 40
    assert max(sizes) <= 5 << 30
    assert sum(size for size in sizes if size == PART_BYTES) > 600 * 10**6


def test_parts_in_flight_are_bounded(memory, monkeypatch):
    """At most 24 parts are in flight, and large parts fewer, whatever is written at once."""
    core = Recording(memory)
    with Writer(core, "k", part_bytes=1000) as writer:
        writer.write(bytes(100_000))
    assert core.parts_count_max <= upload.REQUESTS_MAX
    monkeypatch.setattr(upload, "PENDING_BYTES_MAX", 2500)
    core = Recording(memory)
    with Writer(core, "k", part_bytes=1000) as writer:
        writer.write(bytes(100_000))
    assert core.parts_bytes_max <= 2500


class _Distant(Recording):
    """A store whose answers to parts come 20 ms late, however many there are."""

    def submit(self, operation, sink):
        return super().submit(operation, _Delayed(sink) if isinstance(operation, PutPart) else sink)


class _Delayed:
    def __init__(self, sink):
        self.sink, self.landing = sink, None

    def head(self, info, span):
        return self.sink.head(info, span)

    def done(self, completion):
        engine.call_later(0.02, lambda: self.sink.done(completion))


def test_more_parts_are_sent_to_a_distant_store(memory):
    """If the writer waits for answers, and more parts in flight are faster, their number grows from that of the beginning."""
    core = _Distant(memory)
    with Writer(core, "k", part_bytes=1_000_000) as writer:
        for _ in range(upload.REQUESTS_MIN + 1):
            writer.write(bytes(1_000_000))
        assert core.parts_count_max == upload.REQUESTS_MIN
        for _ in range(100):
            writer.write(bytes(1_000_000))
    assert upload.REQUESTS_MIN < core.parts_count_max <= upload.REQUESTS_MAX


def test_small_objects_are_one_request(memory):
    """What is smaller than a part is put whole at close(), and dropped without a request."""
    core = Recording(memory)
    Writer(core, "dropped").write(b"x")
    gc.collect()
    with Writer(core, "k") as writer:
        writer.write(b"x" * 1000)
        assert core.operations == []
    assert len(core.operations) == 1


def test_an_upload_says_its_name(memory):
    """A writer that began an upload says which, so that another process can drop it; before, and of one request, None."""
    with Writer(memory, "x", part_bytes=10) as writer:
        assert writer.upload_id is None
        writer.write(bytes(25))
        perform(memory, AbortMultipart("x", writer.upload_id))
        writer.abort()


@pytest.mark.parametrize("failing", range(2, 8))  # 1 and 8 are the create and the commit: those happened, unheard
def test_a_failed_request_leaves_nothing(memory, failing):
    """Whichever request of a write fails, the error comes to the writer, nothing is visible, no upload is left."""
    store = Faulty(memory, fail_at_call=failing, error=UnavailableError("503"))
    writer = store.writer("k", part_bytes=1000)
    with pytest.raises(StoreError, match="503"), writer:
        writer.write(bytes(6000))
    assert writer.closed
    with pytest.raises(ClosedError):
        writer.write(b"more")
    assert list(memory.list()) == []
    assert memory._bucket.uploads == {}


def test_interrupting_a_write_aborts(memory):
    """Ctrl-C inside a write drops what was sent, as any exception does, also outside ``with``."""

    class Interrupting(Recording):
        def submit(self, operation, sink):
            if isinstance(operation, PutPart) and operation.part_number == 3:
                raise KeyboardInterrupt
            return super().submit(operation, sink)

    core = Interrupting(memory)
    writer = Writer(core, "k", part_bytes=1000)
    with pytest.raises(KeyboardInterrupt):
        writer.write(bytes(10_000))
    assert writer.closed
    assert core.kinds()[0] is CreateMultipart
    assert core.kinds()[-1] is AbortMultipart
    assert memory._bucket.uploads == {}


def test_giving_up_has_a_deadline(memory, monkeypatch):
    """abort() returns when the store never answers."""
    monkeypatch.setattr(upload, "ABORT_S_MAX", 0.05)

    class Silent(Recording):
        def submit(self, operation, sink):
            if isinstance(operation, AbortMultipart):
                self.operations.append(operation)
                return _Never()
            return super().submit(operation, sink)

    class _Never:
        def cancel(self):
            pass

    writer = Writer(Silent(memory), "k", part_bytes=1000)
    writer.write(bytes(5000))
    begun = time.monotonic()
    writer.abort()
    assert time.monotonic() - begun < 5
    assert writer.closed


def test_a_forked_child_neither_commits_nor_aborts(memory):
    """In a child an inherited writer is refused; its end drops nothing of the parent's, which then commits."""
    writers = [memory.writer("k", part_bytes=1000)]
    writers[0].write(bytes(5500))

    def ends() -> bool:
        with pytest.raises(ClosedError):
            writers[0].write(b"from the child")
        writers.pop().__exit__(ValueError, ValueError(), None)
        gc.collect()
        return True

    assert exit_code_of(start_child(ends)) == 0
    writer = writers.pop()
    writer.close()
    assert memory.read("k").data == bytes(5500)


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError", "del writer", "keep = [writer, store.list()]"])
def test_the_end_of_the_process_aborts(tmp_path, end):
    """A process that ends with an open writer, in any way that runs Python, commits nothing and leaves no upload."""
    program = f"""
        import sys
        from penstock.store.local import LocalStore
        store = LocalStore({str(tmp_path)!r})
        writer = store.writer("k", part_bytes=1000)
        writer.write(bytes(5500))
        {end}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], stderr=subprocess.DEVNULL, timeout=60, check=False)
    assert os.listdir(tmp_path) == []


def test_nothing_is_left(nothing_left, tmp_path):
    """Writers that were closed, aborted and dropped leave no thread and no descriptor."""
    with nothing_left(), LocalStore(tmp_path) as store:
        for end in (Writer.close, Writer.abort, lambda writer: None):
            writer = store.writer("k", part_bytes=1000)
            writer.write(bytes(5500))
            end(writer)
            del writer
            gc.collect()


def test_a_part_size_must_be_a_size(memory):
    """Sizes below one byte are refused, and the failed writer commits nothing."""
    with pytest.raises(ConfigError, match="part_bytes"):
        memory.writer("k", part_bytes=0)


def test_too_many_parts_are_refused(memory, monkeypatch):
    """An object that would need more parts than S3 takes is refused with the bound."""
    monkeypatch.setattr(upload, "PARTS_MAX", 5)
    with pytest.raises(ConfigError, match="5 parts"):
        with memory.writer("k", part_bytes=10) as writer:
            writer.write(bytes(100))
    assert memory._bucket.uploads == {}


def test_a_lost_commit_is_not_aborted_twice(memory):
    """After a commit there is nothing to drop: abort() and collection send no request."""
    core = Recording(memory)
    sending = Upload(core, "k", if_absent=False)
    sending.send(b"x")
    sending.commit()
    sending.abort()
    assert core.kinds() == [CreateMultipart, PutPart, CompleteMultipart]


def test_delete_goes_in_batches(memory):
    """1 000 keys a request, and the iterator is consumed as it goes."""
    core = Recording(memory)
    delete(core, (f"k{index}" for index in range(2500)))
    assert [len(operation.keys) for operation in core.operations] == [1000, 1000, 500]


def test_delete_names_what_was_not_deleted(memory):
    """Keys that the store would not delete are an error that counts them and names the first."""

    class Refusing(Recording):
        def submit(self, operation, sink):
            return self.inner.submit(operation, _Failing(sink) if isinstance(operation, Delete) else sink)

    class _Failing(_Ending):
        def __init__(self, sink):
            self.sink, self.landing = sink, None

        def done(self, completion):
            completion.value = {"a": "AccessDenied: no", "b": "AccessDenied: no"}
            self.sink.done(completion)

    with pytest.raises(StoreError, match=r"2 objects.*'a' \(AccessDenied: no\)"):
        delete(Refusing(memory), ["a", "b", "c"])


def test_a_failed_part_copy_leaves_nothing(memory):
    """A large copy that fails in the middle makes no target and drops its parts."""
    memory.write("s", bytes(10_000))
    store = Faulty(memory, fail_at_call=5, error=UnavailableError("503"))
    with pytest.raises(StoreError, match="503"):
        copy(store, "s", "t", copy_bytes_max=1000, part_bytes=1000)
    assert [info.key for info in memory.list()] == ["s"]
    assert memory._bucket.uploads == {}


def test_memory_of_parts_is_used_again():
    """An object of growing parts, written in odd pieces, takes the memory of those in flight and one more."""
    store = MemoryStore()
    core = Recording(store)
    data = random.Random(7).randbytes(PARTS_PER_STEP * 1000 + 30 * 2000 + 17)
    with Writer(core, "object", part_bytes=1000) as out:
        for start in range(0, len(data), 333):
            out.write(data[start : start + 333])
    assert bytes(store.read("object").data) == data
    bodies = {id(memoryview(operation.body).obj) for operation in core.operations if isinstance(operation, PutPart)}
    assert len(bodies) <= 2 * (upload.REQUESTS_MIN + 1)  # of either size
