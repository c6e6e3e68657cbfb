"""Objects as files: what they give, what they fetch for it, and what uses them."""

from __future__ import annotations

import gc
import io
import pickle
import random
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

import penstock as ps
from forking import exit_code_of, start_child
from penstock.config import FetchConfig
from penstock.errors import (
    ChecksumError,
    ClosedError,
    ConfigError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectMissingError,
)
from penstock.store.base import Store, Wrapper
from penstock.store.file import ObjectReader, _spans
from penstock.store.memory import MemoryStore
from penstock.types import Get, Operation, Sink, Transfer
from servers.faulty import FaultyServer
from servers.records import Request

KIB, MIB = 1024, 1024 * 1024
LARGE = random.Random(0).randbytes(24 * MIB + 123)


class Counting(Wrapper):
    """Remembers what was asked for."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.gets: list[Get] = []

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        if isinstance(operation, Get):
            self.gets.append(operation)
        return self.inner.submit(operation, sink)

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [(get.span.start, get.span.end) for get in self.gets if get.span]


@pytest.fixture(scope="module")
def memory() -> Iterator[MemoryStore]:
    with MemoryStore({"large": LARGE, "empty": b"", "lines": b"one\ntwo\n\nfour", "small": LARGE[:1000]}) as store:
        yield store


@pytest.fixture
def store(memory: MemoryStore) -> Counting:
    return Counting(memory)


@pytest.mark.parametrize("key", ["large", "empty", "lines", "small"])
def test_reads_as_bytesio_does(store: Counting, key: str) -> None:
    """A thousand random calls give what an in-memory file of the same bytes gives, also past the end."""
    expected = io.BytesIO(b"".join(bytes(chunk.data) for chunk in store.read_parts([key])))
    size = len(expected.getvalue())
    dice = random.Random(key)
    with store.open(key) as file:
        assert file.size_bytes == size
        for _ in range(1000):
            match dice.randrange(6):
                case 0:
                    at = dice.randrange(size + 10)
                    assert file.seek(at) == expected.seek(at)
                case 1:
                    assert file.seek(-min(size, 100), io.SEEK_END) == expected.seek(-min(size, 100), io.SEEK_END)
                case 2:
                    length = dice.choice([0, 1, 10, 70_000, 300_000, -7, sys.maxsize])
                    assert file.read(length) == expected.read(length)
                case 3:
                    target, other = bytearray(5000), bytearray(5000)
                    assert file.readinto(target) == expected.readinto(other)
                    assert target == other
                case 4:
                    assert file.readline() == expected.readline()
                case 5:
                    assert file.tell() == expected.tell()
        file.seek(0)
        assert file.read() == expected.getvalue()
        assert file.read() == b""


def test_lines_and_peek(store: Counting) -> None:
    """Lines iterate; ``peek`` moves nothing."""
    with store.open("lines") as file:
        assert file.peek(3)[:3] == b"one"
        assert list(file) == [b"one\n", b"two\n", b"\n", b"four"]
    with io.TextIOWrapper(store.open("lines"), encoding="utf-8") as text:
        assert text.read().splitlines() == ["one", "two", "", "four"]


def test_is_a_readable_seekable_buffered_file(store: Counting) -> None:
    """It says of itself what libraries ask."""
    with store.open("small") as file:
        assert isinstance(file, io.BufferedIOBase)
        assert file.readable()
        assert file.seekable()
        assert not file.writable()
        assert (file.name, file.mode) == (store.describe("small"), "rb")
        with pytest.raises(io.UnsupportedOperation):
            file.fileno()
        with pytest.raises(ValueError, match="before the start"):
            file.seek(-1)
    with pytest.raises(ValueError, match="closed"):
        file.read()


# ── what is fetched ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_opening_costs_one_request_and_a_small_file_no_more(store: Counting) -> None:
    """The GET that opens brings the first 64 KiB with size and version."""
    with store.open("small") as file:
        assert file.read() == LARGE[:1000]
    assert store.spans == [(0, 64 * KIB)]


def test_random_reads_fetch_64_kib_each(store: Counting) -> None:
    """A jump never fetches 8 MiB: 100 small reads in random places cost 64 KiB each."""
    dice = random.Random(1)
    with store.open("large") as file:
        store.gets.clear()
        for _ in range(100):
            at = dice.randrange(1 * MIB, len(LARGE) - 1000)
            file.seek(at)
            assert file.read(1000) == LARGE[at : at + 1000]
    assert max(end - start for start, end in store.spans) <= 64 * KIB
    assert len(store.spans) <= 100


def test_medium_random_read_is_one_request(store: Counting) -> None:
    """A read of 300 KB after a jump is one request for about that much."""
    with store.open("large") as file:
        store.gets.clear()
        file.seek(10 * MIB)
        assert file.read(300_000) == LARGE[10 * MIB : 10 * MIB + 300_000]
    assert store.spans == [(10 * MIB, 10 * MIB + 300_000)]


def test_large_random_read_fetches_what_it_asks_for(store: Counting) -> None:
    """A read of 9 MB after a jump comes in parts, and nothing past it is fetched."""
    with store.open("large") as file:
        store.gets.clear()
        file.seek(1000)
        file.seek(5 * MIB)
        assert file.read(9_000_000) == LARGE[5 * MIB : 5 * MIB + 9_000_000]
    assert max(end for _, end in store.spans) == 5 * MIB + 9_000_000
    assert len(store.spans) <= 2


def test_sequential_reading_grows_and_fetches_each_byte_once(store: Counting) -> None:
    """In sequence, requests grow to whole parts, and no byte is fetched twice."""
    with store.open("large") as file:
        position = 0
        while piece := file.read(50_000):
            assert piece == LARGE[position : position + len(piece)]
            position += len(piece)
    spans = sorted(store.spans)
    assert spans[0] == (0, 64 * KIB)
    assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]]
    assert spans[-1][1] == len(LARGE)
    assert max(end - start for start, end in spans) >= 4 * MIB


def test_small_gaps_are_read_through(store: Counting) -> None:
    """Skipping forward by less than the gap keeps the stream: no byte is fetched twice, none is asked for anew."""
    with store.open("large") as file:
        position = 0
        while position < len(LARGE):
            assert file.read(100_000) == LARGE[position : position + 100_000]
            position += 300_000
            file.seek(position)
    spans = sorted(store.spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert len(spans) < 20


@pytest.mark.parametrize("length", [1 * MIB, 5 * MIB, -1])
def test_padding_is_read_although_no_gap_is(memory: MemoryStore, length: int) -> None:
    """With ``gap_bytes_max=0``, a large read just after the first 64 KiB begins with the padding, and comes to an end."""
    store = Counting(memory)
    store.fetch_config = FetchConfig(gap_bytes_max=0)
    end = None if length < 0 else 80 * KIB + length
    with store.open("large") as file:
        file.seek(80 * KIB)
        assert file.read(length) == LARGE[80 * KIB : end]
    spans = sorted(store.spans)
    assert spans[1][0] == 64 * KIB, "the padding is read, so that the checksum of the whole object can be compared"
    assert all(left[1] <= right[0] for left, right in pairwise(spans)), spans


def test_spans_of_a_run_cover_it_and_grow() -> None:
    """They follow one another, two of each size, doubling to 8 MiB, then the rest."""
    spans = list(_spans(100, 40 * MIB, 1 * MIB))
    assert [span.length_bytes // MIB for span in spans] == [1, 1, 2, 2, 4, 4, 25]
    assert spans[0].start == 100
    assert [span.end for span in spans] == [span.start for span in spans[1:]] + [40 * MIB]
    assert [tuple(span) for span in _spans(0, 10, 1 * MIB)] == [(0, 10)]
    assert [tuple(span) for span in _spans(0, 9 * MIB, 9 * MIB)] == [(0, 9 * MIB)]


# ── versions and ends ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("length", [10, 2 * MIB])
def test_replaced_object_is_an_error_never_a_mix(length: int) -> None:
    """Once the object was replaced, reading what was not fetched yet raises, by small and by large reads."""
    with MemoryStore({"key": LARGE}) as store, store.open("key") as file:
        assert file.read(10) == LARGE[:10]
        store.write("key", bytes(len(LARGE)))
        file.seek(10 * MIB)
        with pytest.raises(ObjectChangedError):
            file.read(length)


def test_replaced_while_streaming_is_an_error() -> None:
    """Sequential reading ends in an error, before any byte of the other version."""
    with MemoryStore({"key": LARGE}) as store, store.open("key") as file:
        read = file.read(1 * MIB)
        store.write("key", bytes(len(LARGE)))
        try:
            while piece := file.read(1 * MIB):
                read += piece
        except ObjectChangedError:
            assert len(read) < len(LARGE)
        else:
            pytest.fail("it read on to the end")
        assert read == LARGE[: len(read)]


def test_missing_object_is_an_error_when_opened(store: Counting) -> None:
    """As with ``open``: no need to read first."""
    with pytest.raises(ObjectMissingError):
        store.open("nothing")
    with pytest.raises(FileNotFoundError):
        store.open("nothing")
    gc.collect()  # the half-made reader is finalised without a warning


def test_closing_in_the_middle_leaves_nothing(store: Counting, nothing_left: Callable) -> None:
    """Closing or dropping a file whose read-ahead is under way gives its budget back; closing twice is fine."""
    with store.open("large") as file:
        file.read(3 * MIB)

    def charged() -> int:
        gc.collect()
        statistics = store.budget.statistics()
        return statistics.used_bytes - statistics.free_bytes

    before = charged()
    with nothing_left():
        file = store.open("large")
        file.read(3 * MIB)
        file.close()
        file.close()
        file = store.open("large")
        file.read(3 * MIB)
        del file
        gc.collect()
    assert charged() <= before


def test_pickles_as_key_version_and_position() -> None:
    """It opens again where it was; of another version it refuses."""
    with MemoryStore({"key": LARGE}, name="test-file-pickle") as store:
        with store.open("key") as file:
            file.seek(5 * MIB)
            pickled = pickle.dumps(file)
        with pickle.loads(pickled) as again:
            assert again.tell() == 5 * MIB
            assert again.read(10) == LARGE[5 * MIB : 5 * MIB + 10]
        store.write("key", b"other")
        with pytest.raises(ObjectChangedError):
            pickle.loads(pickled)
        with pytest.raises(ClosedError):
            pickle.dumps(file)


def test_threads_share_a_file(store: Counting) -> None:
    """Each call is atomic: eight threads that read blocks from one file get every block once, unmixed."""
    found: list[bytes] = []
    with store.open("large") as file:

        def read() -> None:
            while piece := file.read(64 * KIB):
                found.append(piece)

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    blocks = {LARGE[at : at + 64 * KIB] for at in range(0, len(LARGE), 64 * KIB)}
    assert set(found) == blocks
    assert len(found) == len(blocks)


def test_forked_child_is_refused(store: Counting) -> None:
    """A child that inherited an open file gets ``ClosedError``; the parent reads on."""
    with store.open("large") as file:
        file.read(10)

        def is_refused() -> bool:
            file.seek(10 * MIB)
            with pytest.raises(ClosedError):
                file.read(10)
            return True

        assert exit_code_of(start_child(is_refused)) == 0
        assert file.read(10) == LARGE[10:20]


# ── modes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_writing_modes() -> None:
    """``wb`` replaces, ``xb`` creates or refuses; both commit when closed, and not when the block raises."""
    with MemoryStore() as store:
        with store.open("key", "wb") as file:
            file.write(b"one")
        assert bytes(store.read("key").data) == b"one"
        with pytest.raises(ObjectExistsError, match="Hint: "), store.open("key", "xb") as file:
            file.write(b"two")
        with pytest.raises(ZeroDivisionError), store.open("key", "wb") as file:
            file.write(b"three" + bytes(1 // 0))
        assert bytes(store.read("key").data) == b"one"


@pytest.mark.parametrize(
    ("mode", "hint"), [("r", "TextIOWrapper"), ("ab", "written whole"), ("r+b", "written whole"), ("?", "")]
)
def test_other_modes_are_refused(store: Counting, mode: str, hint: str) -> None:
    """With the modes there are, and what to do instead."""
    with pytest.raises(ConfigError, match=f"'rb', 'wb', 'xb'.*{hint}"):
        store.open("small", mode)  # type: ignore[call-overload]


# ── what uses files ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_zipfile_and_tarfile(memory: MemoryStore) -> None:
    """The standard library writes and reads archives through a store; a zip's member costs little more than itself."""
    store = Counting(memory)
    with store.open("a.zip", "wb") as file, zipfile.ZipFile(file, "w") as archive:
        for n in range(20):
            archive.writestr(f"{n}", LARGE[n * MIB : n * MIB + 500_000])
    with store.open("a.zip") as file, zipfile.ZipFile(file) as archive:
        store.gets.clear()
        assert archive.read("7") == LARGE[7 * MIB : 7 * MIB + 500_000]
        assert sum(end - start for start, end in store.spans) < 3 * MIB
        assert archive.testzip() is None
    with store.open("a.tar", "wb") as file, tarfile.open(fileobj=file, mode="w|") as archive:
        for n in range(5):
            member = tarfile.TarInfo(f"{n}")
            member.size = 1 * MIB
            archive.addfile(member, io.BytesIO(LARGE[n * MIB : (n + 1) * MIB]))
    with store.open("a.tar") as file, tarfile.open(fileobj=file) as archive:
        extracted = archive.extractfile("3")
        assert extracted is not None
        assert extracted.read() == LARGE[3 * MIB : 4 * MIB]


def test_pillow(memory: MemoryStore) -> None:
    """Pillow opens an image by its head and loads it."""
    image = pytest.importorskip("PIL.Image")
    with memory.open("a.png", "wb") as file:
        image.frombytes("RGB", (100, 50), LARGE[:15000]).save(file, "png")
    with memory.open("a.png") as file, image.open(file) as opened:
        assert opened.size == (100, 50)
        assert opened.tobytes() == LARGE[:15000]


@pytest.mark.torch
def test_torch_load(memory: MemoryStore) -> None:
    """A checkpoint is saved through a writer and loaded through a reader."""
    torch = pytest.importorskip("torch")
    weights = {"a": torch.arange(1_000_000), "b": torch.ones(3)}
    with memory.open("model.pt", "wb") as file:
        torch.save(weights, file)
    with memory.open("model.pt") as file:
        loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["a"], weights["a"])
    assert torch.equal(loaded["b"], weights["b"])


def test_parquet(memory: MemoryStore) -> None:
    """pyarrow reads one column of one row group without reading the file."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"a": list(range(1_000_000)), "b": [float(n) for n in range(1_000_000)]})
    with memory.open("t.parquet", "wb") as file:
        parquet.write_table(table, file, row_group_size=100_000, compression="none", use_dictionary=False)
    store = Counting(memory)
    with store.open("t.parquet") as file:
        found = parquet.ParquetFile(file).read_row_group(7, columns=["b"])
        assert found["b"].to_pylist() == table["b"].to_pylist()[700_000:800_000]
        assert sum(end - start for start, end in store.spans) < file.size_bytes / 4


# ── over HTTP ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.server
def test_over_http_every_byte_of_one_version(faulty: FaultyServer, connect_faulty: Callable[..., Store]) -> None:
    """Through cut, reset and refused answers a file reads bit-exact, and every range carries the version's ETag."""
    faulty.objects["key"] = LARGE
    faulty.random_faults(["close", "reset", "503", "chunked_cut"], ratio=0.3, seed=1)
    with connect_faulty().open("key") as file:
        assert isinstance(file, ObjectReader)
        assert file.read() == LARGE
        file.seek(12 * MIB)
        assert file.read(100) == LARGE[12 * MIB : 12 * MIB + 100]
        etag = file.etag
    assert any(request.fault for request in faulty.requests)
    assert {request.headers.get("if-match") for request in faulty.requests[-1:]} == {etag}


READERS: dict[str, Callable[[io.BufferedIOBase], object]] = {
    "at once": lambda file: file.read(),
    "in pieces": lambda file: [*iter(lambda: file.read(100_000), b"")],
    "line by line": list,
    "in pieces of 1 MiB": lambda file: [*iter(lambda: file.read(MIB), b"")],
    "in pieces of 3 MiB": lambda file: [*iter(lambda: file.read(3 * MIB), b"")],
    "growing": lambda file: [file.read(1 << bits) for bits in range(10, 26)],
    "into a buffer": lambda file: file.readinto(bytearray(len(LARGE))),
    "the end first": lambda file: [file.seek(-1000, io.SEEK_END), file.read(), file.seek(0), file.read()],
    "in pieces with gaps": lambda file: [(file.read(2 * MIB), file.seek(100, io.SEEK_CUR)) for _ in range(12)],
}
"""Ways to read a file whose bytes arrive in order, from the first to the last."""


def is_of_a_run(request: Request) -> bool:
    """Whether a range belongs to reading in sequence: the first 64 KiB, and jumps, are shorter."""
    return request.span is not None and request.span[1] - request.span[0] > 64 * KIB


@pytest.mark.server
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
def test_damaged_bytes_are_noticed_by_the_checksum_of_the_object(
    faulty: FaultyServer, connect_faulty: Callable[..., Store], reader: Callable[[io.BufferedIOBase], object]
) -> None:
    """A file that is read to its end is compared with the object's checksum; once it differs, every further read raises."""
    faulty.objects["key"] = LARGE
    with connect_faulty().open("key") as file:
        reader(file)
    faulty.fail("corrupt", times=1, match=is_of_a_run)
    with connect_faulty().open("key") as file:
        for call in (lambda: reader(file), lambda: (file.seek(9 * MIB), file.read(10))):
            with pytest.raises(ChecksumError, match=r"bucket/key: crc32c of"):
                call()


@pytest.mark.server
def test_a_file_of_up_to_1_mib_is_compared_with_its_checksum(
    faulty: FaultyServer, connect_faulty: Callable[..., Store]
) -> None:
    """If ``read()`` reads all of it, damaged bytes are fetched again."""
    for size_bytes in (1, 64 * KIB, 64 * KIB + 1, MIB - 1):
        faulty.objects["key"] = LARGE[:size_bytes]
        faulty.fail("corrupt")
        with connect_faulty().open("key") as file:
            assert file.read() == LARGE[:size_bytes]


@pytest.mark.server
@pytest.mark.torch
def test_torch_load_of_a_damaged_checkpoint_is_an_error(
    faulty: FaultyServer, connect_faulty: Callable[..., Store]
) -> None:
    """``torch.load`` reads the end first and passes over padding, and still learns that a tensor is damaged."""
    torch = pytest.importorskip("torch")
    body = io.BytesIO()
    torch.save({str(number): torch.arange(number * 99_999) for number in range(9)}, body)
    faulty.objects["model.pt"] = body.getvalue()
    with connect_faulty().open("model.pt") as file:
        assert len(torch.load(file)) == 9
    faulty.fail("corrupt", match=is_of_a_run)
    with connect_faulty().open("model.pt") as file, pytest.raises(ChecksumError):
        torch.load(file)


@pytest.mark.server
@pytest.mark.parametrize("etags", ["none", "weak"])
@pytest.mark.parametrize("length", [10, 100_000, 600_000, 5 * MIB])
def test_over_http_a_changed_object_without_an_etag(etags: str, length: int) -> None:
    """Where only the modification time tells versions apart, jumps and reading in sequence still see that it changed."""
    with FaultyServer({"key": LARGE}, etags=etags) as server:
        with ps.connect(server.url, endpoint_url=server.endpoint_url, anonymous=True) as store:
            for start in (0, 10 * MIB):
                server.objects["key"] = LARGE
                file = store.open("key")
                server.objects["key"] = bytes(len(LARGE))
                file.seek(start)
                read: list[bytes] = []
                with pytest.raises(ObjectChangedError):
                    read.extend(iter(lambda: file.read(length), b""))  # noqa: B023 - it ends in this turn
                assert LARGE[start:].startswith(b"".join(read))


@pytest.mark.server
def test_pickled_without_an_etag_it_refuses_another_version() -> None:
    """A file that is unpickled reads the version that was open, or none, also if only the modification time tells."""
    with FaultyServer({"key": LARGE}, etags="none") as server:
        with ps.connect(server.url, endpoint_url=server.endpoint_url, anonymous=True) as store:
            with store.open("key") as file:
                file.seek(5 * MIB)
                pickled = pickle.dumps(file)
            with pickle.loads(pickled) as again:
                assert again.read(10) == LARGE[5 * MIB : 5 * MIB + 10]
            server.objects["key"] = bytes(len(LARGE))
            with pytest.raises(ObjectChangedError):
                pickle.loads(pickled)


@pytest.mark.server
def test_over_http_changed_object(faulty: FaultyServer, connect_faulty: Callable[..., Store]) -> None:
    """The object changes between two ranges: an error, whichever way they are read."""
    for length in (10, 5 * MIB):
        faulty.objects["key"] = LARGE
        with connect_faulty().open("key") as file:
            faulty.objects["key"] = bytes(len(LARGE))
            file.seek(10 * MIB)
            with pytest.raises(ObjectChangedError):
                file.read(length)
