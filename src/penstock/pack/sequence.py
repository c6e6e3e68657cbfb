"""Packing samples that come from Python one after the other: ``penstock.pack.writer``, and iterables.

There is one writer and one order, so shards are cut by the bytes that were written. A plain iterable can only be replayed:
a resumed run takes the samples of the finished shards from it again, compares their keys and checksums with what was
written, and drops them. Shards whose index has no checksums (compressed ones and Parquet) are written again. A data set
with ``len`` and ``[]`` continues where the last finished shard ended; only the first sample of each finished shard is
compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock import compose
from penstock.errors import ClosedError, ConfigError, DataError
from penstock.formats import without_content
from penstock.loader import Loader
from penstock.pack.destination import Destination, split_destination
from penstock.pack.entries import checked_key
from penstock.pack.fields import select_fields
from penstock.pack.options import BYTES_MAX, PackOptions, number_in
from penstock.pack.plan import PackPlan, check_sample_size
from penstock.pack.recipes import apply_transform
from penstock.pack.shard_file import ShardFile
from penstock.pack.written_formats import (
    FORMATS_WRITTEN,
    checksum,
    prepare,
    stored_bytes,
    tail_bytes,
    with_key_field,
    written_format,
)
from penstock.pipeline import TokenBlocks
from penstock.store.writing import CommitOnExit
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Unpack

    from penstock.index import ShardIndex, ShardRow
    from penstock.pack.recipes import PackListener
    from penstock.pipeline import Pipeline
    from penstock.pipeline.factories import ConnectionOptions

_BATCH_TOKENS = 1 << 18
"""Tokens that the loader hands over at a time."""


class ShardSequence:
    """Writes shards one after the other. A shard ends before the sample that would exceed its limits.

    Attributes:
        rows: Rows of the shards that were written.

    Args:
        destination: Folder of the shards.
        plan: Plan of kind ``sequence``, which has the format and the pattern of the shards' names.
        options: Options of the packing, which have the limits of a shard.
        first_number: Number in the first shard's name.
    """

    def __init__(self, destination: Destination, plan: PackPlan, options: PackOptions, *, first_number: int) -> None:
        self._destination = destination
        self._plan = plan
        self._options = options
        self._number = first_number
        self._file: ShardFile | None = None
        self.rows: list[ShardRow] = []

    def add(self, sample: Mapping[str, Any]) -> ShardRow | None:
        """Write one sample with its ``__key__``; return the row of the shard that ended before it, or None.

        Raises:
            DataError: The format cannot hold the sample, or it is larger than a shard.
            StoreError: Writing failed; the shard is abandoned.
        """
        format_name, options = self._plan.format, self._options
        key = sample["__key__"]
        sample = prepare(with_key_field(sample, options.key_field), written_format(format_name, options.key_field))
        sizes = {name: _size(value) for name, value in sample.items() if name != "__key__"}
        more = stored_bytes(key, sizes, format_name)
        tail = tail_bytes(format_name)
        check_sample_size(key, more + tail, options.bytes_max)
        ended = None
        if self._file is not None and (
            self._file.offset_bytes + more + tail > options.bytes_max
            or (options.samples_max is not None and self._file.samples_count >= options.samples_max)
        ):
            ended = self.end()
        if self._file is None:
            name = self._plan.patterns[""] % self._number
            self._file = ShardFile(self._destination, name, format_name=format_name, key_field=options.key_field)
        self._file.add(sample)
        return ended

    def end(self) -> ShardRow | None:
        """Commit the open shard and return its row; return None if no shard is open."""
        if self._file is None:
            return None
        file, self._file = self._file, None
        try:
            row = file.close()
        except BaseException:
            file.abort()
            raise
        self.rows.append(row)
        self._number += 1
        return row

    def abort(self) -> None:
        """Drop the open shard; idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.abort()


def _size(value: Any) -> int:
    if isinstance(value, memoryview) or hasattr(value, "nbytes"):
        return int(value.nbytes)
    if isinstance(value, bytes | bytearray):
        return len(value)
    return len(str(value).encode())


@boundary
class SequenceWriter(CommitOnExit):
    """Writes shards sample by sample, like ``ShardWriter`` and ``TarWriter`` of other libraries; see ``writer``.

    A context manager. Complete shards are visible at once. Leaving it by an exception drops the open shard, and writes
    neither the data set's index nor the manifest; the finished shards can be read, or replaced with ``overwrite=True``.

    Attributes:
        samples_count: Number of samples written so far.
    """

    def __init__(
        self,
        url: str,
        options: PackOptions,
        *,
        append: bool,
        overwrite: bool,
        connection: ConnectionOptions,
    ) -> None:
        folder, _ = split_destination(url)
        self._store = compose.connect(folder, **connection)
        try:
            self._destination = Destination(self._store)
            job = options.job("writer")
            starts = self._destination.begin(
                job, options.patterns, is_mds=options.is_mds, append=append, overwrite=overwrite
            )
            self._plan = PackPlan.of_options(options, job, "sequence", starts)
            self._plan.identity += f"-{starts['']}"
            self._destination.save(self._plan)
        except BaseException:
            self._store.close()
            raise
        self._sequence = ShardSequence(self._destination, self._plan, options, first_number=starts[""])
        self._holds_keys = bool(options.key_field) or FORMATS_WRITTEN[options.format_name].features.keys
        self._closed = False
        self.samples_count = 0

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<SequenceWriter {self._destination.url!r}: {self.samples_count} samples, {state}>"

    def write(self, sample: Mapping[str, Any]) -> None:
        """Append one sample: ``{"__key__": "000017", "jpg": <bytes>, "cls": 3, "json": {...}}``.

        Bytes and text are stored unchanged. If the format holds no numbers, they become digits. Dicts and lists become
        JSON, arrays become ``.npy``, and images are encoded in the format of their field's extension.

        Raises:
            DataError: The sample has no key although the format stores keys, is larger than a shard, or the format cannot
                hold it; nothing of it was written.
            StoreError: Writing failed; the open shard is lost.
            ClosedError: The writer is closed.
        """
        if self._closed:
            raise ClosedError("the writer is closed")
        key = sample.get("__key__")
        if key is None and not self._holds_keys:
            key = f"{self.samples_count:09d}"
            sample = {**sample, "__key__": key}
        checked_key(key, "the sample has no valid key")
        self._sequence.add(sample)
        self.samples_count += 1

    def close(self) -> None:
        """Commit the last shard, then write the index and the manifest; idempotent.

        Raises:
            StoreError: One of these writes failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._sequence.end()
            self._destination.finish(self._plan, self._sequence.rows)
        finally:
            self._sequence.abort()
            self._store.close()

    def abort(self) -> None:
        """Drop the open shard; idempotent, and without effect after ``close()``."""
        if not self._closed:
            self._closed = True
            self._sequence.abort()
            self._store.close()


@boundary
def writer(
    url: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - the word that users look for
    bytes_max: int = BYTES_MAX,
    samples_max: int | None = None,
    key_field: str | None = None,
    append: bool = False,
    overwrite: bool = False,
    **connection: Unpack[ConnectionOptions],
) -> SequenceWriter:
    """Return a writer of shards, which takes samples by ``.write(sample)``.

    Args:
        url: Pattern of the shards' URLs: ``s3://bucket/train-%06d.tar``. Its suffix decides the format.
        format: Name of the format, as in ``pack``; None takes the suffix's.
        bytes_max: Size limit of a shard in bytes; a shard ends before the sample that would exceed it.
        samples_max: Largest number of samples in a shard; None sets no limit.
        key_field: Name of a field that takes the samples' keys, as in ``pack``; TFRecord, RecordIO and MDS do not store
            the keys without it.
        append: Whether to continue the numbers of the shards that exist.
        overwrite: Whether to replace the shards that penstock packed there.
        **connection: Connection options, as in ``penstock.connect``.

    Raises:
        ConfigError: `url` is not a pattern, or the destination is not empty and neither flag was given.
        StoreError: The destination cannot be listed or written.

    Cost: a listing; five parts of 8 MiB while a shard is open.
    """
    text = str(url)
    _, name = split_destination(text)
    if name is None:
        raise ConfigError(f"{text!r} is not a pattern of names", hint="s3://bucket/train-%06d.tar")
    options = PackOptions(format=format, name=name, bytes_max=bytes_max, samples_max=samples_max, key_field=key_field)
    return SequenceWriter(text, options, append=append, overwrite=overwrite, connection=connection)


# ── iterables ───────────────────────────────────────────────────────────────────────────────────────────────────────


def write_iterable(
    source: Iterable[Any], destination: Destination, plan: PackPlan, options: PackOptions, listener: PackListener
) -> tuple[list[ShardRow], list[ShardRow]]:
    """Write the samples of `source`; return the rows of shards that earlier runs wrote, and of those written now.

    Args:
        source: Samples, as mappings or tuples.
        destination: Folder of the shards.
        plan: Plan of kind ``sequence``.
        options: Options of the packing.
        listener: Receives progress.

    Raises:
        DataError: A sample is neither a mapping nor a tuple, or differs from the one that an earlier run wrote.
    """
    start, pattern = plan.starts[""], plan.patterns[""]
    known: list[ShardRow] = []
    indexes: list[ShardIndex] = []
    for number, row in enumerate(destination.rows(_names(destination, pattern, start)), start):
        if row.key != pattern % number:
            break  # a shard is missing, so it and all later ones are written again
        index = destination.place.load_shard(row)
        if index.crc32c is None and not is_map(source):
            break  # replayed samples could not be compared with what was written
        known.append(row)
        indexes.append(index)
        listener.finished(row, known=True)
    sequence = ShardSequence(destination, plan, options, first_number=start + len(known))
    listener.planned(0, 0, 0)
    try:
        for sample in _rest(source, indexes, options):
            ended = sequence.add(sample)
            listener.progressed(1, sum(_size(value) for name, value in sample.items() if name != "__key__"))
            if ended is not None:
                listener.finished(ended, known=False)
        if (ended := sequence.end()) is not None:
            listener.finished(ended, known=False)
    finally:
        sequence.abort()
    return known, sequence.rows


def _rest(source: Any, known: list[ShardIndex], options: PackOptions) -> Iterator[Mapping[str, Any]]:
    """Yield the samples that follow those of the shards in `known`."""
    last_key: str | None = None
    number = 0
    if is_map(source):
        for index in known:
            _check_same(source[number], number, index, 0, options)
            number += len(index)
        items: Iterator[Any] = (source[index] for index in range(number, len(source)))
    else:
        items = iter(source)
        for index in known:
            for at in range(len(index)):
                _check_same(next(items, None), number, index, at, options)
                number += 1
    for item in items:
        sample = as_sample(item, number, options)
        if sample["__key__"] == last_key:
            raise DataError("two consecutive samples have this key", sample_key=last_key)
        last_key = sample["__key__"]
        number += 1
        yield sample if options.transform is None else apply_transform(options.transform, dict(sample))


def _names(destination: Destination, pattern: str, start: int) -> list[str]:
    """Return the stored names of the pattern, ordered by number, from the number `start` on."""
    numbers = [number for name in destination.present if (number := number_in(pattern, name)) is not None]
    return [pattern % number for number in sorted(numbers) if number >= start]


def _check_same(item: Any, number: int, index: ShardIndex, at: int, options: PackOptions) -> None:
    """Compare a sample with the one that a finished shard has at position `at`.

    Raises:
        DataError: The sample differs from the one that was written.
    """
    row, name = index.row, without_content(index.row.format)
    sample: Mapping[str, Any] = as_sample(item, number, options)
    key = sample["__key__"]
    written = written_format(name, options.key_field)
    if written.features.keys and index.keys is not None and key != index.keys[at]:
        raise _changed(number, row, key, f"was {index.keys[at]!r}")
    if options.transform is not None:
        sample = apply_transform(options.transform, dict(sample))
    sample = with_key_field(sample, options.key_field)
    if index.crc32c is not None and checksum(sample, written) != int(index.crc32c[at]):
        raise _changed(number, row, key, "had other bytes")


def _changed(number: int, row: ShardRow, key: str, was: str) -> DataError:
    return DataError(
        f"sample {number} of the source is {key!r}, but {was} when {row.key} was written",
        hint="a source must give the same samples again to be resumed; --overwrite (overwrite=True) starts again",
        sample_key=key,
    )


def is_map(source: object) -> bool:
    """Return whether `source` is a data set with ``len`` and ``[]``, like those of Hugging Face and PyTorch; a dict is not."""
    return hasattr(source, "__getitem__") and hasattr(source, "__len__") and not hasattr(source, "keys")


def as_sample(item: Any, number: int, options: PackOptions) -> dict[str, Any]:
    """Return an item of an iterable as a sample. The positions of a tuple or list become field names.

    Raises:
        DataError: The item is neither a mapping nor a tuple, its key is invalid, or a field is missing.
    """
    if item is None:
        raise DataError(f"the iterable has only {number} samples now, and had more when this packing began")
    if hasattr(item, "items"):
        fields = {str(name): value for name, value in item.items()}
    elif isinstance(item, tuple | list):
        fields = {str(at): value for at, value in enumerate(item)}
    else:
        raise DataError(f"sample {number} is a {type(item).__name__}, neither a mapping nor a tuple")
    key = fields.pop("__key__", None)
    if key is None:
        key = f"{number:09d}"
    else:
        options.refuse_lost_key(str(key))
    checked_key(key, f"sample {number}")
    fields = {name: value for name, value in fields.items() if not name.startswith("__")}
    if options.specs is not None:
        fields = select_fields(fields, options.specs, key)
    return {"__key__": key, **fields}


class TokenRows:
    """Blocks as samples to pack: ``{"tokens": dtype[length]}``.

    Args:
        pipeline: A pipeline that ends with ``token_blocks``.
        processes: Number of worker processes that tokenise; 0 tokenises in threads.
    """

    def __init__(self, pipeline: Pipeline, *, processes: int) -> None:
        stage = pipeline.stage(TokenBlocks)
        assert stage is not None
        self._names = stage.names
        self._pipeline = pipeline.batch(max(1, _BATCH_TOKENS // stage.length))
        self._processes = processes

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # an index that appears between two runs would change the order, and with it what a run that goes on replays
        with Loader(
            self._pipeline, index="stream", processes=self._processes, rank=0, world_size=1, agree=None
        ) as loader:
            for batch in loader:
                for row in zip(*(batch[name] for name in self._names), strict=True):
                    yield dict(zip(self._names, row, strict=True))
