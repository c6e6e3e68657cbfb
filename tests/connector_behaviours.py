"""What a program can see of the connector, as functions of the library: they run on theirs and on ours.

Each function takes the library and the place where the objects are, and returns what the program saw, in plain values. What
it raised counts, too: ``outcome`` tells an ``S3Exception`` from Python's own classes.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import numpy.random  # noqa: F401 - or forked workers of PyTorch import it, and what a collection ends then may import, too: on Python 3.11 a KeyError
import torch
import torch.distributed.checkpoint

LINES = b"".join(b"line %d\n" % number for number in range(3000))
BIG = bytes(range(256)) * 80_000
NAMES = ["a", "b b", "c+c", "d=d&d", "e%20e", "f/ü", "g/日本", "h'h"]
OBJECTS = {f"data/{name}": f"<{name}>".encode() * 10 for name in NAMES}
BUILTINS = (TypeError, IndexError, ValueError, io.UnsupportedOperation, AttributeError, OSError, OverflowError)


@dataclass(frozen=True)
class Library:
    """One of the two libraries: its module, and options that make it work on any store."""

    name: str
    module: Any
    options: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def part(self, name: str) -> Any:
        """A subpackage, which needs packages of its own."""
        return importlib.import_module(f"{self.module.__name__}.{name}")

    def keywords(self, **changes: Any) -> dict[str, Any]:
        return {"region": "us-east-1", **self.options, **changes}


@dataclass(frozen=True)
class Place:
    """Where the objects are: below ``uri``."""

    uri: str
    client: Any
    endpoint: str

    @property
    def bucket(self) -> str:
        return self.uri.split("/")[2]

    def key(self, name: str) -> str:
        return f"{self.uri.split('/', 3)[3]}/{name}"

    def stored(self, name: str) -> bytes | None:
        """What the bucket has under a name; None if that is nothing."""
        keys = [
            row["Key"]
            for row in self.client.list_objects_v2(Bucket=self.bucket, Prefix=self.key(name)).get("Contents", ())
        ]
        if self.key(name) not in keys:
            return None
        return bytes(self.client.get_object(Bucket=self.bucket, Key=self.key(name))["Body"].read())


Behaviour = Callable[[Library, Place], Any]
ALL: dict[str, Behaviour] = {}


def behaviour(function: Behaviour) -> Behaviour:
    ALL[function.__name__] = function
    return function


def outcome(lib: Library, call: Callable[[], Any]) -> Any:
    """What a call returned, or what it raised."""
    try:
        return call()
    except lib.S3Exception:
        return "S3Exception"
    except BUILTINS as error:
        return next(kind.__name__ for kind in BUILTINS if isinstance(error, kind))


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def last_and_bytes(reader: Any) -> tuple[str, bytes]:
    return reader.key.rpartition("data/")[2], reader.read()


def map_of(lib: Library, at: Place, **changes: Any) -> Any:
    return lib.S3MapDataset.from_prefix(f"{at.uri}/data/", **lib.keywords(**{"transform": last_and_bytes, **changes}))


def stream_of(lib: Library, at: Place, **changes: Any) -> Any:
    return lib.S3IterableDataset.from_prefix(
        f"{at.uri}/data/", **lib.keywords(**{"transform": last_and_bytes, **changes})
    )


def reader_of(lib: Library, at: Place, name: str = "lines", **changes: Any) -> Any:
    return lib.S3MapDataset.from_objects(f"{at.uri}/{name}", **lib.keywords(**changes))[0]


# ── data sets ────────────────────────────────────────────────────────────────────────────────────────────────────────


@behaviour
def a_map_data_set(lib: Library, at: Place) -> Any:
    data = map_of(lib, at)
    return len(data), [data[i] for i in range(len(data))], data[-1], data.region, data.endpoint


@behaviour
def a_map_data_set_out_of_range(lib: Library, at: Place) -> Any:
    data = map_of(lib, at)
    return [outcome(lib, lambda i=i: data[i]) for i in (8, -9, "0", 1.0)]


@behaviour
def a_map_data_set_as_an_iterable(lib: Library, at: Place) -> Any:
    return list(map_of(lib, at))


@behaviour
def an_iterable_data_set_twice(lib: Library, at: Place) -> Any:
    data = stream_of(lib, at)
    return list(data), list(data), outcome(lib, lambda: len(data))


@behaviour
def an_iterable_data_set_sees_new_objects(lib: Library, at: Place) -> Any:
    data = lib.S3IterableDataset.from_prefix(f"{at.uri}/growing/", **lib.keywords(transform=last_and_bytes))
    before = len(list(data))
    at.client.put_object(Bucket=at.bucket, Key=at.key(f"growing/{lib.name}"), Body=b"x")
    after = len(list(data))
    at.client.delete_object(Bucket=at.bucket, Key=at.key(f"growing/{lib.name}"))
    return before, after


@behaviour
def a_prefix_that_ends_within_a_name(lib: Library, at: Place) -> Any:
    data = lib.S3MapDataset.from_prefix(f"{at.uri}/data/f", **lib.keywords(transform=last_and_bytes))
    return list(data)


@behaviour
def a_prefix_without_objects(lib: Library, at: Place) -> Any:
    nothing = f"{at.uri}/nothing/"
    data = lib.S3MapDataset.from_prefix(nothing, **lib.keywords())
    return len(data), list(lib.S3IterableDataset.from_prefix(nothing, **lib.keywords())), outcome(lib, lambda: data[0])


@behaviour
def one_uri_and_a_list_of_them(lib: Library, at: Place) -> Any:
    uris = [f"{at.uri}/data/{name}" for name in ("c+c", "a", "g/日本", "a")]
    kinds = (lib.S3MapDataset, lib.S3IterableDataset)
    options = lib.keywords(transform=last_and_bytes)
    return [[list(kind.from_objects(given, **options)) for given in (uris[1], uris, tuple(uris))] for kind in kinds]


@behaviour
def a_generator_of_uris_iterated_twice(lib: Library, at: Place) -> Any:
    data = lib.S3IterableDataset.from_objects(
        (f"{at.uri}/data/{name}" for name in ("a", "c+c")), **lib.keywords(transform=last_and_bytes)
    )
    return len(list(data)), len(list(data))


@behaviour
def a_reader_without_a_transform(lib: Library, at: Place) -> Any:
    reader = next(iter(stream_of(lib, at, transform=lambda reader: reader)))
    return (
        isinstance(reader, lib.S3Reader), isinstance(reader, io.BufferedIOBase), reader.bucket == at.bucket,
        reader.key == at.key("data/a"), reader.readable(), reader.writable(), reader.seekable(), reader.closed,
    )  # fmt: skip


@behaviour
def readers_that_are_read_later(lib: Library, at: Place) -> Any:
    readers = list(stream_of(lib, at, transform=lambda reader: reader))
    return [reader.read() for reader in reversed(readers)]


@behaviour
def a_transform_that_fails(lib: Library, at: Place) -> Any:
    def fail(reader: Any) -> Any:
        if reader.key.endswith("b b"):
            raise KeyError(reader.key)
        return last_and_bytes(reader)

    samples, found = iter(stream_of(lib, at, transform=fail)), []
    for _ in NAMES:
        try:
            found.append(next(samples))
        except KeyError:
            found.append("KeyError")
    return found


@behaviour
def an_object_that_is_called_like_a_directory(lib: Library, at: Place) -> Any:
    for name in ("marked/", "marked//x", "marked/y/"):
        at.client.put_object(Bucket=at.bucket, Key=at.key(name), Body=b"data")
    data = lib.S3MapDataset.from_prefix(f"{at.uri}/marked", **lib.keywords())
    return [(reader.key.rpartition("marked")[2], reader.read()) for reader in data]


def read_checked(reader: Any) -> bytes:
    return bytes(reader.read())


@behaviour
def an_error_in_a_worker(lib: Library, at: Place) -> Any:
    uris = [f"{at.uri}/data/a", f"{at.uri}/no/such"]
    kinds = (lib.S3MapDataset, lib.S3IterableDataset)
    found = []
    for kind in kinds:
        data = kind.from_objects(uris, **lib.keywords(transform=read_checked))
        batches = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork")
        found.append(outcome(lib, lambda batches=batches: list(batches)))
    return found


@behaviour
def readers_that_workers_hand_over(lib: Library, at: Place) -> Any:
    data = stream_of(lib, at, transform=lambda reader: reader, enable_sharding=True)
    readers = list(torch.utils.data.DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork"))
    return [(reader.key.rpartition("data/")[2], reader.read(3), reader.read()) for reader in readers]


@behaviour
def a_data_set_that_was_used_before_workers_were_forked(lib: Library, at: Place) -> Any:
    found = []
    for data in (map_of(lib, at), stream_of(lib, at, enable_sharding=True)):
        begun = iter(data)
        found.append(next(begun))
        options = {"batch_size": None, "num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}
        loader = torch.utils.data.DataLoader(data, **options)
        found += [list(loader), list(loader), next(begun)]
    return found


@behaviour
def workers_that_are_left_early(lib: Library, at: Place) -> Any:
    data = lib.S3IterableDataset.from_objects([f"{at.uri}/big"] * 20, **lib.keywords(transform=read_checked))
    batches = iter(torch.utils.data.DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork"))
    first = next(batches)
    del batches
    return len(first)


@behaviour
def odd_uris(lib: Library, at: Place) -> Any:
    def first(uri: Any) -> Any:
        return next(iter(lib.S3IterableDataset.from_prefix(uri, **lib.keywords(transform=last_and_bytes))))

    return [
        outcome(lib, lambda uri=uri: first(uri)) for uri in ("https://bucket/x", "s3://", "s3:///key", "", "bucket/x")
    ]


@behaviour
def when_an_odd_uri_is_refused(lib: Library, at: Place) -> Any:
    return outcome(lib, lambda: bool(lib.S3IterableDataset.from_prefix("bucket/x", **lib.keywords())))


@behaviour
def missing_objects_and_buckets(lib: Library, at: Place) -> Any:
    missing = lib.S3MapDataset.from_objects(f"{at.uri}/no/such", **lib.keywords())
    nowhere = lib.S3MapDataset.from_prefix("s3://penstock-no-such-bucket-anywhere/x", **lib.keywords())
    return [
        outcome(lib, call)
        for call in (
            lambda: bool(missing[0]), lambda: missing[0].read(), lambda: missing[0].seek(0, 2),
            lambda: missing[0].readinto(bytearray(3)), lambda: len(nowhere), lambda: nowhere[0],
        )
    ]  # fmt: skip


@behaviour
def wrong_keys_are_refused(lib: Library, at: Place) -> Any:
    with environment(AWS_SECRET_ACCESS_KEY="wrong"):
        return outcome(lib, lambda: len(map_of(lib, at))), outcome(lib, lambda: reader_of(lib, at).read())


@behaviour
def data_sets_cross_processes(lib: Library, at: Place) -> Any:
    found = []
    for data in (map_of(lib, at), stream_of(lib, at)):
        before = pickle.loads(pickle.dumps(data))
        list(data)
        found += [list(before), list(pickle.loads(pickle.dumps(data)))]
    return found


# ── readers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

CALLS = [
    ("tell",), ("read", 10), ("tell",), ("read", 0), ("seek", 5), ("read", 7), ("seek", 3, 1), ("read", 4),
    ("seek", -6, 1), ("read", 3), ("seek", -20, 2), ("tell",), ("read",), ("read",), ("read", 5), ("tell",),
    ("seek", 0), ("read", None), ("tell",), ("seek", 100), ("read", -1), ("seek", 10**9), ("tell",), ("read", 3),
    ("seek", 100), ("read", -5), ("tell",), ("seek", 100), ("read", sys.maxsize), ("tell",),
    ("seek", 0, 2), ("seek", 5, 2), ("tell",), ("seek", 7, 1), ("seek", -5), ("tell",), ("seek", 0), ("seek", -1, 1),
    ("seek", -(10**6), 2), ("seek", 1, 3), ("seek", 2000), ("readline",), ("readline",), ("readline", 3), ("tell",),
    ("readlines", 30), ("seek", 1.5), ("seek", "1"), ("read", "1"), ("read", 2.0), ("fileno",), ("truncate",),
    ("write", b"x"), ("isatty",),
]  # fmt: skip


def called(lib: Library, reader: Any, call: tuple[Any, ...]) -> Any:
    return outcome(lib, lambda: getattr(reader, call[0])(*call[1:]))


def constructors(lib: Library) -> dict[str, Any]:
    make = lib.S3ReaderConstructor
    return {
        "none": None, "default": make.default(), "sequential": make.sequential(), "range_based": make.range_based(),
        "buffered": make.range_based(buffer_size=64), "unbuffered": make.range_based(0),
    }  # fmt: skip


@behaviour
def calls_on_each_kind_of_reader(lib: Library, at: Place) -> Any:
    found = {}
    for name, constructor in constructors(lib).items():
        reader = reader_of(lib, at, reader_constructor=constructor)
        found[name] = [called(lib, reader, call) for call in CALLS]
    return found


@behaviour
def reading_into_buffers(lib: Library, at: Place) -> Any:
    found = []
    for constructor in constructors(lib).values():
        reader, target = reader_of(lib, at, reader_constructor=constructor), bytearray(20)
        found.append(outcome(lib, lambda reader=reader: reader.readinto(b"unwritable")))
        reader.seek(0)
        found.append((reader.readinto(target), bytes(target), reader.readinto(memoryview(target)[5:9]), bytes(target)))
        reader.seek(-3, 2)
        found.append(
            (
                reader.readinto(target),
                bytes(target),
                reader.readinto(target),
                reader.readinto(bytearray()),
                reader.tell(),
            )
        )
    return found


@behaviour
def lines_and_with(lib: Library, at: Place) -> Any:
    with reader_of(lib, at) as reader:
        lines = list(reader)
    return lines, reader.closed


@behaviour
def a_large_object(lib: Library, at: Place) -> Any:
    found = []
    for constructor in constructors(lib).values():
        reader = reader_of(lib, at, "big", reader_constructor=constructor)
        found.append(
            (reader.read() == BIG, reader.seek(9_999_999), reader.read(100), reader.seek(-5, 2), reader.read())
        )
        pieces = reader_of(lib, at, "big", reader_constructor=constructor)
        found.append(b"".join(iter(lambda pieces=pieces: pieces.read(777_777), b"")) == BIG)
    return found


@behaviour
def prefetching(lib: Library, at: Place) -> Any:
    reader = reader_of(lib, at)
    return reader.prefetch(), reader.prefetch(), reader.read() == LINES, reader.prefetch(), reader.read()


@behaviour
def kinds_of_readers_by_name(lib: Library, at: Place) -> Any:
    make = lib.S3ReaderConstructor
    kinds = [*constructors(lib).values(), make.dcp_optimized(), make.dcp_optimized(max_gap_size=float("inf")), print]
    return [make.get_reader_type_string(kind) for kind in kinds], outcome(lib, lambda: bool(make.dcp_optimized(-1)))


@behaviour
def a_constructor_of_the_users(lib: Library, at: Place) -> Any:
    def make(bucket: str, key: str, get_object_info: Any, get_stream: Any) -> Any:
        info = get_object_info()
        return (
            bucket == at.bucket,
            key == at.key("lines"),
            info.size,
            b"".join(get_stream()),
            b"".join(get_stream(5, 9)),
        )

    return reader_of(lib, at, reader_constructor=make)


@behaviour
def a_reader_crosses_processes(lib: Library, at: Place) -> Any:
    reader = reader_of(lib, at)
    return outcome(lib, lambda: pickle.loads(pickle.dumps(reader)).read() == LINES)


@behaviour
def a_reader_that_was_read_crosses_processes(lib: Library, at: Place) -> Any:
    reader = reader_of(lib, at)
    reader.read(10)
    return outcome(lib, lambda: pickle.loads(pickle.dumps(reader)).read() == LINES[10:])


@behaviour
def text_from_a_reader(lib: Library, at: Place) -> Any:
    return outcome(lib, lambda: io.TextIOWrapper(reader_of(lib, at)).read() == LINES.decode())


@behaviour
def a_reader_that_was_closed(lib: Library, at: Place) -> Any:
    reader = reader_of(lib, at)
    reader.read(3)
    reader.close()
    reader.close()
    return reader.closed, outcome(lib, lambda: reader.read(2))


@behaviour
def an_empty_object(lib: Library, at: Place) -> Any:
    return [
        outcome(lib, lambda kind=kind: reader_of(lib, at, "empty", reader_constructor=kind).read())
        for kind in constructors(lib).values()
    ]


# ── writers and checkpoints ──────────────────────────────────────────────────────────────────────────────────────────


def checkpoint_of(lib: Library, **changes: Any) -> Any:
    return lib.S3Checkpoint(**lib.keywords(**changes))


@behaviour
def a_writer(lib: Library, at: Place) -> Any:
    name = f"written-{lib.name}"
    writer = checkpoint_of(lib).writer(f"{at.uri}/{name}")
    found = [isinstance(writer, lib.S3Writer), writer.writable(), writer.readable(), writer.seekable(), writer.closed]
    with writer as file:
        found += [
            file is writer,
            writer.write(b"one"),
            writer.write(memoryview(b"three")),
            writer.flush(),
            writer.tell(),
        ]
        found.append(at.stored(name))
    found += [
        writer.closed,
        at.stored(name),
        writer.close(),
        outcome(lib, lambda: writer.write(b"x")),
        writer.writable(),
    ]
    return found


@behaviour
def writing_nothing(lib: Library, at: Place) -> Any:
    with checkpoint_of(lib).writer(f"{at.uri}/nothing-{lib.name}"):
        pass
    return at.stored(f"nothing-{lib.name}")


@behaviour
def writing_other_types(lib: Library, at: Place) -> Any:
    with checkpoint_of(lib).writer(f"{at.uri}/types-{lib.name}") as writer:
        return [outcome(lib, lambda data=data: writer.write(data)) for data in ("text", 3, None)]


@behaviour
def writing_a_bytearray(lib: Library, at: Place) -> Any:
    with checkpoint_of(lib).writer(f"{at.uri}/array-{lib.name}") as writer:
        return outcome(lib, lambda: writer.write(bytearray(b"abc")))


@behaviour
def replacing_an_object(lib: Library, at: Place) -> Any:
    name, checkpoint, found = f"replaced-{lib.name}", checkpoint_of(lib), []
    for data in (b"first", b"2nd"):
        with checkpoint.writer(f"{at.uri}/{name}") as writer:
            writer.write(data)
            found.append(at.stored(name))
        found.append(at.stored(name))
    return found


@behaviour
def a_writer_after_an_exception(lib: Library, at: Place) -> Any:
    name = f"failed-{lib.name}"

    def fail() -> None:
        with checkpoint_of(lib).writer(f"{at.uri}/{name}") as writer:
            writer.write(b"half")
            raise KeyError(name)

    with suppress(KeyError):
        fail()
    gc.collect()
    return at.stored(name)


@behaviour
def a_writer_that_is_dropped(lib: Library, at: Place) -> Any:
    name = f"dropped-{lib.name}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        writer = checkpoint_of(lib).writer(f"{at.uri}/{name}")
        writer.write(b"half")
        del writer
        gc.collect()
    return at.stored(name)


@behaviour
def a_checkpoint(lib: Library, at: Place) -> Any:
    state = {"weights": torch.arange(3_000_000, dtype=torch.float32), "step": 7, "names": ["a", "b"]}
    uri, checkpoint = f"{at.uri}/state-{lib.name}.pt", checkpoint_of(lib)
    with checkpoint.writer(uri) as writer:
        torch.save(state, writer)
    found = torch.load(checkpoint.reader(uri), weights_only=True)
    return torch.equal(found["weights"], state["weights"]), found["step"], found["names"]


@behaviour
def odd_uris_of_checkpoints(lib: Library, at: Place) -> Any:
    checkpoint = checkpoint_of(lib)
    return [
        outcome(lib, lambda uri=uri: bool(checkpoint.reader(uri))) for uri in ("bucket/key", "", "s3://", "s3:///key")
    ]


@behaviour
def a_checkpoint_in_a_missing_bucket(lib: Library, at: Place) -> Any:
    def save() -> None:
        with checkpoint_of(lib).writer("s3://penstock-no-such-bucket-anywhere/x") as writer:
            writer.write(b"x")

    return outcome(lib, save), outcome(lib, lambda: checkpoint_of(lib).reader("s3://penstock-no-such-bucket/x").read())


# ── distributed checkpoints and Lightning's ──────────────────────────────────────────────────────────────────────────


@behaviour
def prefixes_of_ranks(lib: Library, at: Place) -> Any:
    dcp = lib.part("dcp")
    round_robin = lib.part("dcp.s3_prefix_strategy" if lib.name == "connector" else "dcp").RoundRobinPrefixStrategy
    strategies = [
        dcp.DefaultPrefixStrategy(), dcp.BinaryPrefixStrategy(), dcp.HexPrefixStrategy(),
        dcp.BinaryPrefixStrategy(epoch_num=3, min_prefix_length=2, prefix_count=9), dcp.BinaryPrefixStrategy(1, 4, 16),
        dcp.HexPrefixStrategy(epoch_num=0, min_prefix_length=1, prefix_count=257), dcp.HexPrefixStrategy(prefix_count=16),
        round_robin(["x", "y/z"]), round_robin(["x", "y", "w"], epoch_num=7),
    ]  # fmt: skip
    refused = [
        lambda: dcp.HexPrefixStrategy(min_prefix_length=0), lambda: dcp.BinaryPrefixStrategy(prefix_count=0),
        lambda: dcp.HexPrefixStrategy(epoch_num="1"), lambda: round_robin([]), lambda: dcp.HexPrefixStrategy(prefix_count=1.5),
    ]  # fmt: skip
    found = [[strategy(rank) for rank in (0, 1, 2, 15, 16, 255, 256, 300)] for strategy in strategies]
    found.append(strategies[-1].user_prefixes)
    return found, [outcome(lib, call) for call in refused], isinstance(strategies[0], dcp.S3PrefixStrategyBase)


def state_of(seed: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    return {"weights": torch.randn(300, 700, generator=made), "bias": torch.arange(seed, seed + 50), "step": seed}


def dcp_saved(lib: Library, uri: str, state: dict[str, Any], **options: Any) -> None:
    writer = lib.part("dcp").S3StorageWriter(path=uri, **lib.keywords(**options))
    torch.distributed.checkpoint.save(state, storage_writer=writer, no_dist=True)


def dcp_loaded(lib: Library, uri: str, **options: Any) -> dict[str, Any]:
    found = {"weights": torch.zeros(300, 700), "bias": torch.zeros(50, dtype=torch.int64), "step": 0}
    reader = lib.part("dcp").S3StorageReader(path=uri, **lib.keywords(**options))
    torch.distributed.checkpoint.load(found, storage_reader=reader, no_dist=True)
    return found


def is_same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return (
        all(torch.equal(found[name], wanted[name]) for name in ("weights", "bias")) and found["step"] == wanted["step"]
    )


@behaviour
def a_distributed_checkpoint(lib: Library, at: Place) -> Any:
    uri, dcp, found = f"{at.uri}/dcp-{lib.name}", lib.part("dcp"), []
    for number, options in enumerate(
        ({}, {"thread_count": 3}, {"prefix_strategy": dcp.HexPrefixStrategy(epoch_num=2)})
    ):
        dcp_saved(lib, uri, state_of(number), **options)
        found.append(is_same(dcp_loaded(lib, uri), state_of(number)))
    make = lib.S3ReaderConstructor
    for kind in (make.default(), make.dcp_optimized(0), make.dcp_optimized(float("inf")), make.range_based()):
        found.append(is_same(dcp_loaded(lib, uri, reader_constructor=kind), state_of(2)))
    at_prefix = at.client.list_objects_v2(Bucket=at.bucket, Prefix=at.key(f"dcp-{lib.name}/0000000000/epoch_2/__0_"))
    return found, at_prefix["KeyCount"] > 0


@behaviour
def a_distributed_checkpoint_that_must_not_be_replaced(lib: Library, at: Place) -> Any:
    uri, writer, found = f"{at.uri}/kept-{lib.name}", lib.part("dcp").S3StorageWriter, []
    for number, overwrite in enumerate((False, False, True)):
        try:
            dcp_saved(lib, uri, state_of(number), overwrite=overwrite)
        except BaseException as error:  # PyTorch's CheckpointException is no Exception
            found.append((type(error).__name__, "Checkpoint already exists" in str(error)))
        found.append([is_same(dcp_loaded(lib, uri), state_of(saved)) for saved in range(3)])
    return found, [writer(path=uri, **lib.keywords(thread_count=count)).thread_count for count in (1, 8)]


@behaviour
def a_distributed_checkpoint_that_is_missing(lib: Library, at: Place) -> Any:
    try:
        dcp_loaded(lib, f"{at.uri}/none")
    except BaseException as error:  # PyTorch's CheckpointException is no Exception
        return type(error).__name__


@behaviour
def uris_of_distributed_checkpoints(lib: Library, at: Place) -> Any:
    kinds = (lib.part("dcp").S3StorageWriter, lib.part("dcp").S3StorageReader)
    return [
        [kind.validate_checkpoint_id(uri) for uri in ("s3://b/k", "s3://b", "s3://", "/tmp/x", "")] for kind in kinds
    ]


@behaviour
def checkpoints_of_lightning(lib: Library, at: Place) -> Any:
    plugin = lib.part("lightning").S3LightningCheckpoint(**lib.keywords())
    uri, state = f"{at.uri}/lightning-{lib.name}.ckpt", state_of(5)
    plugin.save_checkpoint(state, uri)
    found = [is_same(plugin.load_checkpoint(uri), state), is_same(plugin.load_checkpoint(uri, "cpu", True), state)]
    for call in (plugin.load_checkpoint, plugin.remove_checkpoint, lambda path: plugin.save_checkpoint(state, path)):
        found += [
            outcome(lib, lambda call=call: call(PurePosixPath("x"))),
            outcome(lib, lambda call=call: call("bucket/x")),
        ]
    plugin.remove_checkpoint(uri)
    plugin.remove_checkpoint(uri)
    found += [
        at.stored(f"lightning-{lib.name}.ckpt"),
        outcome(lib, lambda: plugin.load_checkpoint(uri)),
        plugin.teardown(),
    ]
    return found


# ── configuration ────────────────────────────────────────────────────────────────────────────────────────────────────


@behaviour
def the_defaults_of_the_client(lib: Library, at: Place) -> Any:
    config = lib.S3ClientConfig()
    fields = ("throughput_target_gbps", "part_size", "unsigned", "force_path_style", "max_attempts", "profile")
    found = [getattr(config, name) for name in fields]
    return (
        found,
        lib.S3ClientConfig(1.5, 6 << 20).part_size,
        config == lib.S3ClientConfig(),
        hash(config) == hash(lib.S3ClientConfig()),
    )


@behaviour
def options_of_the_client(lib: Library, at: Place) -> Any:
    options = [{"part_size": 5 << 20}, {"throughput_target_gbps": 100.0}, {"max_attempts": 1}, {"part_size": 16 << 20}]
    configs = [lib.S3ClientConfig(force_path_style=True, **option) for option in options]
    return [reader_of(lib, at, "big", s3client_config=config).read() == BIG for config in configs]


@behaviour
def part_sizes_that_are_impossible(lib: Library, at: Place) -> Any:
    def read(part_size: Any) -> Any:
        config = lib.S3ClientConfig(force_path_style=True, part_size=part_size)
        return reader_of(lib, at, s3client_config=config).read() == LINES

    return [outcome(lib, lambda size=size: read(size)) is not True for size in (0, -1, 1.5)]


@behaviour
def a_wrong_region(lib: Library, at: Place) -> Any:
    with environment(AWS_REGION="ap-south-2", AWS_DEFAULT_REGION="ap-south-2"):
        return len(list(map_of(lib, at))), outcome(lib, lambda: len(list(stream_of(lib, at, region="eu-central-1"))))


@behaviour
def an_endpoint_argument(lib: Library, at: Place) -> Any:
    with environment(AWS_ENDPOINT_URL="http://127.0.0.1:9"):
        return len(list(map_of(lib, at, endpoint=at.endpoint)))


@behaviour
def an_endpoint_without_a_scheme(lib: Library, at: Place) -> Any:
    host = at.endpoint.removeprefix("http://")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        argument = outcome(lib, lambda: len(list(map_of(lib, at, endpoint=host))))
        with environment(AWS_ENDPOINT_URL=host):
            return argument, outcome(lib, lambda: len(list(map_of(lib, at))))
