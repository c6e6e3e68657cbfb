"""A mount against a reference model, while the bucket changes: random operations of several threads.

The model knows when each key had which version, and each version also lies in a local file. An operation on the mount must
give what the same operation gives on the local file of a version that the key had at some time from the beginning of the
operation, less the lifetime of names, to its end. Otherwise, it must fail with ``ENOENT`` if the key may have been missing, or
with ``ESTALE`` if it may have changed. All bytes that one open file gives must be those of one version.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from connecting import connection_to
from mounting import needs_fuse
from penstock.config import KIB, MIB
from servers.faulty import FaultyServer

pytestmark = [
    pytest.mark.server,
    pytest.mark.heavy,
    # A thread that waits for a page ends only with its process. On two processors with a load of 22, 100 s are too few.
    pytest.mark.timeout(300, method="thread"),
    needs_fuse,
]

WALKERS = 5
OPERATIONS = 400
"""Operations of each walker."""
OPERATIONS_PER_CHANGE = 4
HANDLES_MAX = 6
LATE_S = 1.0
"""How much later than it should the kernel forgets a name if the machine is busy: its time begins when the program goes on."""
SMALL = (0, 1, 100, 5000, 70_000)
LARGE = (700 * KIB, 3 * MIB + 17)
KEYS = {
    **{f"d/{number:02d}": SMALL for number in range(10)},
    **{f"d/e/f/{number}": SMALL for number in range(3)},
    "top": SMALL,
    **{f"large/{number}": LARGE for number in range(3)},
    "swap": SMALL,
    "swap/inside": SMALL,
}
DIRECTORIES = ("", "d", "d/e", "d/e/f", "large", "swap")


@dataclass(frozen=True, kw_only=True)
class Version:
    """One version of an object, and the local file with the same bytes."""

    data: bytes = field(repr=False)
    copy: Path


@dataclass(kw_only=True)
class State:
    """What a key stood for, None for nothing, and when the change to it began and ended."""

    version: Version | None
    begun_s: float
    ended_s: float


class Bucket:
    """The model: changes a bucket, and knows what it contained when.

    Args:
        store: The bucket.
        folder: Where to keep a copy of each version.
        draw: Source of chance.
    """

    def __init__(self, store: Any, folder: Path, draw: random.Random) -> None:
        self._store = store
        self._folder = folder
        self._draw = draw
        self._states = {key: [State(version=None, begun_s=-math.inf, ended_s=-math.inf)] for key in KEYS}

    def change(self, key: str, *, deletes: bool = False) -> None:
        """Write a new version, an earlier one again, or delete the object."""
        draw, states = self._draw, self._states[key]
        known = [state.version for state in states if state.version is not None]
        version = None
        if not deletes:
            version = draw.choice(known) if known and draw.random() < 0.2 else self._new(key, known)
        state = State(version=version, begun_s=time.monotonic(), ended_s=math.inf)
        states.append(state)
        if version is None:
            self._store.delete([key])
        else:
            self._store.write(key, version.data)
        state.ended_s = time.monotonic()

    def _new(self, key: str, known: list[Version]) -> Version:
        """Make a version, of the same size as the last one in half of all cases."""
        draw = self._draw
        size = len(known[-1].data) if known and draw.random() < 0.5 else draw.choice(KEYS[key])
        copy = self._folder / f"{key.replace('/', '-')}.{len(self._states[key])}"
        copy.write_bytes(draw.randbytes(size))
        return Version(data=copy.read_bytes(), copy=copy)

    def possible(self, key: str, from_s: float, to_s: float) -> list[Version | None]:
        """Return what the key may have stood for at any time of a period; a key of which nothing is known never existed."""
        states = self._states.get(key, [State(version=None, begun_s=-math.inf, ended_s=-math.inf)])[:]
        ends = [state.ended_s for state in states[1:]] + [math.inf]
        return [
            state.version
            for state, end_s in zip(states, ends, strict=True)
            if state.begun_s <= to_s and end_s >= from_s
        ]

    def kinds(self, path: str, from_s: float, to_s: float) -> set[str]:
        """Return what the path may have been: a ``file``, a ``directory`` or ``nothing``."""
        below = [self.possible(key, from_s, to_s) for key in KEYS if key.startswith(f"{path}/")]
        found = set()
        if any(version is not None for versions in below for version in versions):
            found.add("directory")
        if all(None in versions for versions in below):
            at = self.possible(path, from_s, to_s)
            found |= {"file"} if any(version is not None for version in at) else set()
            found |= {"nothing"} if None in at else set()
        return found


class OpenFile:
    """A file of the mount that is open, and the versions that it can be, judged by what it gave so far."""

    def __init__(self, descriptor: int, path: str, begun_s: float, candidates: list[Version]) -> None:
        self.descriptor = descriptor
        self.path = path
        self.begun_s = begun_s
        size = os.fstat(descriptor).st_size
        self.candidates = [version for version in candidates if len(version.data) == size]
        assert self.candidates, f"{path} has {size} bytes, which no version has that it can be"

    def narrow(self, what: str, found: bytes, expected: Callable[[int], bytes], *, may_be_cut: bool = False) -> bool:
        """Leave only the candidates whose local copy gives the same; return whether less was read than there is.

        Args:
            what: What gave the bytes.
            found: What it gave.
            expected: Does the same with a descriptor of a local file.
            may_be_cut: Whether the object may have changed in the middle, so that the bytes before are given.
        """
        left, is_cut = [], True
        for version in self.candidates:
            descriptor = os.open(version.copy, os.O_RDONLY)
            try:
                right = expected(descriptor)
            finally:
                os.close(descriptor)
            if right == found or (may_be_cut and found and right.startswith(found)):
                left.append(version)
                is_cut = is_cut and right != found
        assert left, f"{what} of {self.path} gave {len(found)} bytes that are not of the one version that is open"
        self.candidates = left
        return is_cut


def read_by_pread(descriptor: int, offset: int, length: int) -> bytes:
    return os.pread(descriptor, length, offset)


def read_by_preadv(descriptor: int, offset: int, length: int) -> bytes:
    buffers = [bytearray(length // 3), bytearray(length - length // 3)]
    count = os.preadv(descriptor, buffers, offset)
    return b"".join(buffers)[:count]


def read_by_seek(descriptor: int, offset: int, length: int) -> bytes:
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, length)


def read_the_end(descriptor: int, offset: int, length: int) -> bytes:
    end = os.lseek(descriptor, 0, os.SEEK_END)
    return os.pread(descriptor, length, max(0, end - offset))


def read_by_sendfile(descriptor: int, offset: int, length: int) -> bytes:
    target = os.memfd_create("target")
    try:
        sent, left = 0, length
        while left and (count := os.sendfile(target, descriptor, offset + sent, left)):
            sent, left = sent + count, left - count
        return os.pread(target, sent + 1, 0)
    finally:
        os.close(target)


READS = (read_by_pread, read_by_preadv, read_by_seek, read_the_end, read_by_sendfile)

SCRIPT_THAT_MAPS = """
import mmap, os, sys
with open(sys.argv[1], "rb") as file:
    size = os.fstat(file.fileno()).st_size
    sys.stdout.buffer.write(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)[:] if size else b"")
"""


class Walker:
    """One thread that does random operations on the mount, and judges each."""

    def __init__(self, root: Path, bucket: Bucket, *, ttl_s: float, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._root = root
        self._bucket = bucket
        self._old_s = ttl_s + LATE_S if ttl_s else 0.0
        self._draw = random.Random(seed)
        self._open: list[OpenFile] = []

    def walk(self, after_each: Callable[[], object]) -> None:
        """Do all operations."""
        actions = {
            self.read_whole: 6,
            self.open_one: 4,
            self.read_open: 14,
            self.close_one: 2,
            self.stat: 6,
            self.list: 5,
            self.read_etag: 2,
            self.write: 1,
            self.map: 0.1,
        }
        try:
            for _ in range(OPERATIONS):
                (action,) = self._draw.choices(list(actions), weights=list(actions.values()))
                action()
                after_each()
        finally:
            for file in self._open:
                os.close(file.descriptor)

    def _key(self) -> str:
        return self._draw.choice([*KEYS, "d/missing", "missing/too"])

    def _failed(self, path: str, error: OSError, begun_s: float) -> None:
        """Judge an error of an operation on a path."""
        name = errno.errorcode[error.errno or 0]
        self.counts[name] += 1
        from_s, to_s = begun_s - self._old_s, time.monotonic()
        kinds = self._bucket.kinds(path, from_s, to_s)
        above = self._bucket.kinds(path.rpartition("/")[0], from_s, to_s) if "/" in path else set()
        allowed = {
            "ENOENT": "nothing" in kinds,
            "ESTALE": len(self._bucket.possible(path, from_s, to_s)) > 1 or len(kinds) > 1,
            "EISDIR": "directory" in kinds,
            "ENODATA": "directory" in kinds,
            "ENOTDIR": "file" in kinds | above,
        }
        assert allowed.get(name), f"{path}: {error}, but it can only be {kinds}"

    def _opened(self, path: str) -> OpenFile | None:
        begun_s = time.monotonic()
        try:
            descriptor = os.open(self._root / path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            self._failed(path, error, begun_s)
            return None
        if os.stat(descriptor).st_mode & 0o40000:
            os.close(descriptor)
            assert "directory" in self._bucket.kinds(path, begun_s - self._old_s, time.monotonic())
            return None
        versions = self._bucket.possible(path, begun_s - self._old_s, time.monotonic())
        try:
            return OpenFile(descriptor, path, begun_s, [version for version in versions if version is not None])
        except BaseException:
            os.close(descriptor)
            raise

    def _read(self, file: OpenFile, offset: int, length: int) -> bytes | None:
        read = self._draw.choice(READS)
        try:
            found = read(file.descriptor, offset, length)
        except OSError as error:
            self._failed_open(file, error)
            return None
        is_changed = len(self._bucket.possible(file.path, file.begun_s - self._old_s, time.monotonic())) > 1
        is_cut = file.narrow(
            read.__name__, found, lambda descriptor: read(descriptor, offset, length), may_be_cut=is_changed
        )
        self.counts["cut" if is_cut else "right"] += 1
        return None if is_cut else found

    def _failed_open(self, file: OpenFile, error: OSError) -> None:
        """Judge an error of a file that is open: it can only be that there is another version now, or none."""
        states = self._bucket.possible(file.path, file.begun_s - self._old_s, time.monotonic())
        name = errno.errorcode[error.errno or 0]
        assert name == "ESTALE", f"{file.path}: {error}"
        assert len(states) > 1, f"{file.path}: {error}, but it has not changed"
        self.counts[name] += 1

    def read_whole(self) -> None:
        """Open a file, read all of it and a little more, in pieces, and close it."""
        file = self._opened(self._key())
        if file is None:
            return
        try:
            size, offset = os.fstat(file.descriptor).st_size, 0
            while offset <= size:
                length = self._draw.choice((1, 4 * KIB, 100_000, MIB)) + size // 20
                if self._read(file, offset, length) is None:
                    break
                offset += length
        finally:
            os.close(file.descriptor)

    def open_one(self) -> None:
        """Open a file, and keep it open."""
        if len(self._open) >= HANDLES_MAX:
            self.close_one()
        file = self._opened(self._key())
        if file is not None:
            self._open.append(file)

    def read_open(self) -> None:
        """Read anywhere in a file that was opened earlier."""
        if self._open:
            file = self._draw.choice(self._open)
            size = os.fstat(file.descriptor).st_size
            assert size in {len(version.data) for version in file.candidates}
            self._read(file, self._draw.randrange(size + 5000), 1 << self._draw.randrange(22))

    def close_one(self) -> None:
        """Close a file."""
        if self._open:
            os.close(self._open.pop(self._draw.randrange(len(self._open))).descriptor)

    def stat(self) -> None:
        """Look at kind and size of a path."""
        path, begun_s = self._key(), time.monotonic()
        try:
            found = os.stat(self._root / path)
        except OSError as error:
            self._failed(path, error, begun_s)
            return
        from_s, to_s = begun_s - self._old_s, time.monotonic()
        if found.st_mode & 0o40000:
            assert "directory" in self._bucket.kinds(path, from_s, to_s)
        else:
            sizes = {len(version.data) for version in self._bucket.possible(path, from_s, to_s) if version is not None}
            assert found.st_size in sizes, f"{path} has {found.st_size} bytes instead of {sizes}"
        self.counts["right"] += 1

    def list(self) -> None:
        """List a directory: what was there all the time is in it, and what was not there at any time is not."""
        path, begun_s = self._draw.choice(DIRECTORIES), time.monotonic()
        try:
            with os.scandir(self._root / path) as entries:
                found = {entry.name: "directory" if entry.is_dir() else "file" for entry in entries}
        except OSError as error:
            self._failed(path, error, begun_s)
            return
        from_s, to_s = begun_s - self._old_s, time.monotonic()
        prefix = f"{path}/" if path else ""
        names = {key[len(prefix) :].split("/")[0] for key in KEYS if key.startswith(prefix)}
        assert found.keys() <= names
        for name in names:
            kinds = self._bucket.kinds(prefix + name, from_s, to_s)
            assert found.get(name, "nothing") in kinds, f"{prefix}{name} is {found.get(name, 'nothing')}, not {kinds}"
        self.counts["right"] += 1

    def read_etag(self) -> None:
        """Read the ETag of a path, which is that of one version."""
        path, begun_s = self._key(), time.monotonic()
        try:
            found = os.getxattr(self._root / path, "user.etag").decode()
        except OSError as error:
            self._failed(path, error, begun_s)
            return
        versions = self._bucket.possible(path, begun_s - self._old_s, time.monotonic())
        assert found in {etag_of(version) for version in versions if version is not None}
        self.counts["right"] += 1

    def write(self) -> None:
        """Try to change something: nothing can be changed."""
        path = self._root / self._key()
        attempts: list[Callable[[], object]] = [
            lambda: os.open(path, os.O_WRONLY | os.O_CREAT),
            lambda: os.truncate(path, 0),
            lambda: path.unlink(),
            lambda: path.rename(path.with_name("new")),
        ]
        with pytest.raises(OSError) as caught:
            self._draw.choice(attempts)()
        assert caught.value.errno in (errno.EROFS, errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ESTALE)

    def map(self) -> None:
        """Map a file in a process of its own, which is killed if a page cannot be read."""
        path, begun_s = self._key(), time.monotonic()
        done = subprocess.run(
            [sys.executable, "-S", "-c", SCRIPT_THAT_MAPS, str(self._root / path)],
            capture_output=True,
            timeout=60,
            check=False,
        )
        states = self._bucket.possible(path, begun_s - self._old_s, time.monotonic())
        if done.returncode == 0:
            assert done.stdout in {version.data for version in states if version is not None}
            self.counts["right"] += 1
        else:
            assert len(states) > 1 or None in states or path == "swap", done.stderr.decode()


def etag_of(version: Version) -> str:
    return hashlib.md5(version.data, usedforsecurity=False).hexdigest()


def change_all_the_time(
    bucket: Bucket, draw: random.Random, permits: threading.Semaphore, ended: threading.Event
) -> None:
    """Change an object for every permit."""
    while permits.acquire() and not ended.is_set():
        bucket.change(draw.choice(list(KEYS)), deletes=draw.random() < 0.25)


@pytest.fixture
def connection(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """A bucket and how to connect to it: of an S3 server, or of one that answers some requests later than others."""
    if request.param == "ministack":
        endpoint = request.getfixturevalue("ministack")
        yield f"s3://{endpoint.create_bucket()}/", connection_to(endpoint)
    else:
        with FaultyServer() as server:
            server.random_faults(["delay"], ratio=0.15, seconds=0.03)
            yield f"{server.url}/", {"endpoint_url": server.endpoint_url, "anonymous": True}


@pytest.mark.parametrize(
    ("connection", "ttl_s"),
    [("ministack", 0.3), ("slow", 0), ("slow", 0.3), ("slow", math.inf)],
    indirect=["connection"],
)
def test_a_mount_gives_what_the_bucket_contained(
    connection: tuple[str, dict[str, Any]], tmp_path: Path, ttl_s: float
) -> None:
    """Several threads read, list and look at paths while objects are written, deleted and replaced by directories."""
    url, settings = connection
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # pytest shows it if the test fails
    (tmp_path / "m").mkdir()
    (tmp_path / "versions").mkdir()
    permits, ended, operations = threading.Semaphore(0), threading.Event(), iter(range(1 << 30))

    def after_each() -> None:
        if next(operations) % OPERATIONS_PER_CHANGE == 0:
            permits.release()

    with ps.connect(url, **settings) as store, ThreadPoolExecutor(WALKERS + 1) as pool:
        bucket = Bucket(store, tmp_path / "versions", random.Random(seed))
        for key in KEYS:
            bucket.change(key)
        with ps.mount(url, tmp_path / "m", metadata_ttl_s=ttl_s, **settings) as mount:
            walkers = [Walker(mount.directory, bucket, ttl_s=ttl_s, seed=seed + number) for number in range(WALKERS)]
            changing = pool.submit(change_all_the_time, bucket, random.Random(-seed), permits, ended)
            walking = [pool.submit(walker.walk, after_each) for walker in walkers]
            try:
                for walk in walking:
                    walk.result()
            finally:
                ended.set()
                permits.release()
            changing.result()
            mount.check()
    counts = sum((walker.counts for walker in walkers), Counter[str]())
    print(counts)
    assert counts["right"] > WALKERS * OPERATIONS / 4
    assert counts["ENOENT"] > 0


def test_the_model_notices_a_mix(tmp_path: Path) -> None:
    """A file that gives bytes of two versions fails, as does one whose size no version had; so would a mount."""
    versions = []
    for number, text in enumerate((b"a" * 9000, b"b" * 9000)):
        (tmp_path / str(number)).write_bytes(text)
        versions.append(Version(data=text, copy=tmp_path / str(number)))
    (tmp_path / "mixed").write_bytes(b"a" * 4500 + b"b" * 4500)
    with (tmp_path / "mixed").open("rb") as mixed:
        file = OpenFile(mixed.fileno(), "mixed", 0.0, versions)
        for offset in (0, 4000):
            found = os.pread(mixed.fileno(), 500, offset)
            file.narrow("pread", found, lambda descriptor, offset=offset: os.pread(descriptor, 500, offset))  # type: ignore[misc]
        with pytest.raises(AssertionError, match="not of the one version"):
            file.narrow("pread", os.pread(mixed.fileno(), 9, 5000), lambda descriptor: os.pread(descriptor, 9, 5000))
        (tmp_path / "mixed").write_bytes(b"a")
        with pytest.raises(AssertionError, match="which no version has"):
            OpenFile(mixed.fileno(), "mixed", 0.0, versions)
