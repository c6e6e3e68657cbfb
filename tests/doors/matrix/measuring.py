"""What each column of the matrix measures. Each method reads through one door and returns the text of its cell, or fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from doors.matrix.data_set import SMALL_SHARDS, Record, files_of, records_of, samples_of, tar_of, tfrecord_of
from doors.matrix.door import Job
from doors.matrix.reading_process import DoorError, ReadingProcess
from doors.matrix.table import Reason, Row
from penstock.testing.s3_server import S3Server
from servers.faulty import FaultyServer
from servers.records import Request

SEED = 3
VICTIM = "s-002"
"""The shard that something happens to."""


FAULTS = ("replaced", "cut off", "deleted", "denied", "flipped")
"""What is tried, in the order of the page."""


class Cell(NamedTuple):
    """One cell of the page.

    Attributes:
        text: Its text.
        reason: What the page says about it below the table, if anything.
    """

    text: str
    reason: Reason | None = None


Cells = dict[str, Cell]
"""A row's cells by column."""


class Measurements:
    """Reads the data set on a real S3 server through doors.

    Args:
        server: The server.
        faulty: The server that misbehaves, for faults and to count requests.
        folder: Folder for caches and logs.
    """

    def __init__(self, server: S3Server, faulty: FaultyServer, folder: Path) -> None:
        self._faulty = faulty
        self._folder = folder
        self._environment = server.environment
        self._faulty_environment = {
            **server.environment, "AWS_ENDPOINT_URL": faulty.endpoint_url, "AWS_EC2_METADATA_DISABLED": "true"
        }  # fmt: skip
        self._bucket = server.create_bucket()
        self._shuffled: dict[str, list[Record]] = {}
        client = server.client()
        for form in ("tar", "tfrecord"):
            for name, data in files_of(form):
                client.put_object(Bucket=self._bucket, Key=f"{form}/{name}", Body=data)
        client.close()

    def build_index(self, process: ReadingProcess) -> None:
        """Have the tars indexed where all processes find it. With an index, a loader has a length and another shuffle."""
        job = Job(url=f"s3://{self._bucket}/tar/", files=())
        process.epoch("doors.matrix.plain_doors:RandomAccessDoor", job, self._environment)

    def cells(self, row: Row, process: ReadingProcess) -> Cells:
        """Measure a row, and return its cells."""
        read = Reader(row, process, self._environment, self._job(row))
        return {
            "order": self._order(read),
            "workers": self._workers(row, read),
            "shuffled": self._shuffle(row, read),
            "resumes": self._resumes(row, read),
            "cache": self._cache(row, process),
        }

    def _order(self, read: Reader) -> Cell:
        assert read() == records_of()
        return Cell("the shards'")

    def _workers(self, row: Row, read: Reader) -> Cell:
        if isinstance(row.workers, Reason):
            return Cell("no", row.workers)
        found = read(workers=row.workers)
        assert sorted(found) == sorted(records_of())
        assert (found == records_of()) == (row.order_with_workers == "the shards'")
        return Cell(f"{row.workers}, {row.order_with_workers}")

    def _shuffle(self, row: Row, read: Reader) -> Cell:
        if isinstance(row.shuffle, Reason):
            return Cell("no", row.shuffle)
        found = read(seed=SEED)
        assert sorted(found) == sorted(records_of())
        assert found != records_of()
        first = self._shuffled.setdefault(row.shuffle, found)
        if row.shuffle == "the Loader's":
            assert found == first
        assert read(seed=SEED) == found, "the same seed gave another order"
        return Cell(row.shuffle)

    def _resumes(self, row: Row, read: Reader) -> Cell:
        if isinstance(row.resumes, Reason):
            return Cell("no", row.resumes)
        assert read(do="resume") == records_of()
        if isinstance(row.workers, int):
            assert read(do="resume", workers=row.workers) == records_of()
        if row.shuffle == "the Loader's":
            assert read(do="resume", seed=SEED) == self._shuffled[row.shuffle]
        return Cell("yes")

    def _cache(self, row: Row, process: ReadingProcess) -> Cell:
        if isinstance(row.caches, Reason):
            return Cell("no", row.caches)
        place = f"{row.door.replace(':', '-')}-cached/"
        for name, data in files_of(row.form, SMALL_SHARDS):
            self._faulty.objects[place + name] = data
        cache = self._folder / place
        cache.mkdir()
        read = Reader(
            row, process, self._faulty_environment, self._job(row, at=f"s3://bucket/{place}", cache=str(cache))
        )
        assert read() == records_of(SMALL_SHARDS)
        cold = self._bodies_requested(place)
        assert cold
        assert read() == records_of(SMALL_SHARDS)
        warm = self._bodies_requested(place)[len(cold) :]
        assert not warm, f"the cold reader requested {cold}, and the warm one still {warm}"
        return Cell("yes")

    def _bodies_requested(self, place: str) -> list[tuple[str, object]]:
        return [
            (request.key, request.span)
            for request in self._faulty.requests
            if request.method == "GET" and is_shard(request.key, place)
        ]

    def _job(self, row: Row, *, at: str | None = None, cache: str | None = None) -> Job:
        names = None if at is None else SMALL_SHARDS
        files = tuple(name for name, _ in files_of(row.form, names))
        return Job(url=at or f"s3://{self._bucket}/{row.form}/", files=files, cache=cache)

    # ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def faults(self, row: Row, process: ReadingProcess) -> Cells:
        """Read through a door while something is wrong with one shard, and return what the door made of each case."""
        if row.faults_as is not None:
            return dict.fromkeys(FAULTS, Cell("as above", Reason(f"As {row.faults_as}, whose reader it uses.")))
        return {
            "replaced": self._replaced(row, process),
            "cut off": self._failing(row, process, "cut off", self._cut),
            "deleted": self._failing(row, process, "deleted", self._delete_when_read),
            "denied": self._failing(row, process, "denied", self._deny),
            "flipped": self._failing(row, process, "flipped", self._flip),
        }

    def _replaced(self, row: Row, process: ReadingProcess) -> Cell:
        place, job = self._place(row, "replaced")
        first = process.begin_epochs(f"doors.matrix.{row.door}", job, self._faulty_environment)
        assert first == records_of(SMALL_SHARDS)
        write = {"tar": tar_of, "tfrecord": tfrecord_of}[row.form]
        self._faulty.objects[f"{place}{VICTIM}.{row.form}"] = write(samples_of("s-004"))
        try:
            second = process.second_epoch()
        except DoorError as error:
            return Cell(named(error))
        assert second == records_of([*SMALL_SHARDS[:-1], "s-004"]), "neither an error nor all of the new samples"
        return Cell("the new samples")

    def _failing(self, row: Row, process: ReadingProcess, case: str, spoil: Callable[[str], None]) -> Cell:
        place, job = self._place(row, case)
        spoil(f"{place}{VICTIM}.{row.form}")
        try:
            found = process.epoch(f"doors.matrix.{row.door}", job, self._faulty_environment)
        except DoorError as error:
            if case == "cut off" and row.cut_off is not None:
                return Cell(f"`{error.kind}`", row.cut_off)
            return Cell(named(error, of=row.errors))
        raise AssertionError(f"no error, and {len(found)} of {len(records_of(SMALL_SHARDS))} samples")

    def _place(self, row: Row, case: str) -> tuple[str, Job]:
        place = f"{row.door.replace(':', '-')}-{case.replace(' ', '-')}/"
        for name, data in files_of(row.form, SMALL_SHARDS):
            self._faulty.objects[place + name] = data
        return place, self._job(row, at=f"s3://bucket/{place}")

    def _cut(self, key: str) -> None:
        whole = self._faulty.objects[key]
        self._faulty.objects[key] = whole[: len(whole) // 2 + 150]  # inside a record, and inside a member's header

    def _delete_when_read(self, key: str) -> None:
        def is_read(request: Request) -> bool:
            if request.key == key and request.method == "GET" and key in self._faulty.objects:
                del self._faulty.objects[key]
            return False

        self._faulty.fail("500", times=None, match=is_read)

    def _deny(self, key: str) -> None:
        self._faulty.fail("403", times=None, match=lambda request: request.key == key and request.method == "GET")

    def _flip(self, key: str) -> None:
        self._faulty.fail("corrupt", times=None, match=key)


class Reader:
    """Reads one door with changes of its job."""

    def __init__(self, row: Row, process: ReadingProcess, environment: Mapping[str, str], job: Job) -> None:
        self._door = f"doors.matrix.{row.door}"
        self._process = process
        self._environment = environment
        self._job = job

    def __call__(self, *, do: str = "epoch", **changes: Any) -> list[Record]:
        return self._process.epoch(self._door, replace(self._job, **changes), self._environment, do=do)


def named(error: DoorError, *, of: tuple[str, ...] = ()) -> str:
    """Return the name of an error that names the object, or those that it must be one `of`."""
    assert VICTIM in error.text, f"the error does not name the object:\n{error.text}"
    if of:
        assert error.kind in of
        return " or ".join(f"`{kind}`" for kind in of)
    return f"`{error.kind}`"


def is_shard(key: str, place: str) -> bool:
    """Return whether a key is that of a shard, and not of an index that a door looked for."""
    return key.removeprefix(place).partition(".")[0] in SMALL_SHARDS
