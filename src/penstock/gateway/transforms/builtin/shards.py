"""``tar2tfrecord`` and ``tfrecord2tar``: WebDataset shards as TFRecords of Examples, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.config import KIB, MIB
from penstock.errors import ConfigError, DataError
from penstock.formats import Samples, TarWriter, TFRecordWriter
from penstock.formats.sample import RESERVED_FIELDS, check_key
from penstock.formats.tfrecord_columns import ExampleFramer
from penstock.gateway.transforms.authoring import transform
from penstock.gateway.transforms.builtin.streams import (
    PieceCollector,
    compressed,
    converted,
    located,
    parser_for,
    peek,
    plain_key,
    samples_in,
    singly,
)
from penstock.images import rgb_pixels, rgb_pixels_of_many
from penstock.pack.fields import as_bytes, cast_value, oriented, parse_fields, pixels_of, select_fields
from penstock.pack.written_formats import convert_sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.formats import Sample
    from penstock.gateway.transforms.authoring import SourceReader, TransformRequest
    from penstock.pack.fields import FieldSpec
    from penstock.types import Buffer

KEY = "__key__"

_BATCH_BYTES = 256 * KIB
"""Samples in columns that are written together: as much as stays in the processor's cache, so that no page is touched anew."""

_PICTURES_BATCH_BYTES = MIB
"""The same of samples whose pictures are decoded: their pixels are copied once less."""

_PIXELS_BYTES_MAX = 16 * MIB
"""Decoded pixels that are held of samples in columns; with more, they are written one by one."""


def _check(arguments: Mapping[str, Any]) -> None:
    specs = parse_fields(arguments.get("fields") or None) or ()
    if any(spec.field in RESERVED_FIELDS for spec in specs):
        raise ConfigError(f"fields={arguments['fields']!r} names one of {', '.join(sorted(RESERVED_FIELDS))}")


# ── tar to TFRecord ─────────────────────────────────────────────────────────────────────────────────────────────────


@transform(version="1", content_type="application/x-tfrecord", rest="fields", check=_check)
def tar2tfrecord(
    reader: SourceReader, request: TransformRequest, *, fields: str = "", key: str = "", gzip: bool = False
) -> Iterator[Buffer]:
    """Turn a WebDataset tar into TFRecords of ``tf.train.Example``, one for each sample.

    Args:
        reader: A tar, which may be compressed as a whole by gzip or zstd.
        request: The request.
        fields: Members that become features, and their types: ``png=image:pixels,cls=label:int``. Empty takes all members
            as bytes.
        key: Name of a feature that takes the samples' keys; empty stores none.
        gzip: Whether the TFRecords are compressed by gzip as a whole.
    """
    return tar_to_tfrecord(reader, source=reader.key, fields=fields, key=key, gzip=gzip)


def tar_to_tfrecord(
    chunks: Iterable[Buffer], *, source: str, fields: str = "", key: str = "", gzip: bool = False
) -> Iterator[Buffer]:
    """Iterate over the TFRecords of a tar; the arguments are those of ``tar2tfrecord``.

    Raises:
        DataError: The tar is damaged, a sample lacks a field, or a value does not have its type.

    Cost: holds one sample and, of samples below 32 KiB, those of one chunk.
    """
    output = PieceCollector()
    conversion = _ExampleConversion(output, source, parse_fields(fields or None), key)
    head, chunks = peek(chunks)
    groups = samples_in(parser_for("tar", head, source), chunks)
    return compressed(converted(groups, conversion.convert, output, conversion.finish), "gz" if gzip else "")


class _ExampleConversion:
    """Writes samples as Examples: those in columns many at once, others one by one, with the same bytes.

    Args:
        output: Collects the records.
        source: Key of the source, for errors.
        specs: Fields that are taken; None takes all as bytes.
        key: Name of the feature that takes the samples' keys; empty for none.
    """

    def __init__(self, output: PieceCollector, source: str, specs: tuple[FieldSpec, ...] | None, key: str) -> None:
        self._output = output
        self._source = source
        self._specs = specs
        self._is_oriented = False
        self._key = key
        self._writer = TFRecordWriter(output.write, keeps_key=key == KEY)
        self._has_large_pictures = False
        self._framers: dict[tuple[str, ...], ExampleFramer] = {}

    def convert(self, samples: Sequence[Sample]) -> Iterator[None]:
        """Write a group of samples; yields after each part of it."""
        if self._specs is not None and not self._is_oriented:
            with located(self._source, samples[0]):
                self._specs, self._is_oriented = oriented(self._specs, samples[0].fields), True
        if not isinstance(samples, Samples):
            yield from self._convert_some(samples)
            return
        decodes = any(spec.type == "pixels" for spec in self._specs or ())
        batch_bytes = _PICTURES_BATCH_BYTES if decodes else _BATCH_BYTES
        count = min(max(batch_bytes * len(samples) // (sum(samples.columns[2]) + 1), 16), 1024)
        for at in range(0, len(samples), count):
            yield from self._convert_some(samples[at : at + count])

    def _convert_some(self, samples: Sequence[Sample]) -> Iterator[None]:
        columns = self._columns(samples) if isinstance(samples, Samples) else None
        if columns is None:
            for sample in singly(samples):
                with located(self._source, sample):
                    self._writer.add({KEY: plain_key(sample.key), **self._fields(sample)})
                yield
            return
        names = tuple(columns)
        framer = self._framers.get(names)
        if framer is None:
            framer = self._framers[names] = ExampleFramer(names)
            if len(self._framers) > 64:
                self._framers.clear()
        self._output.write(framer.frame(columns))
        yield

    def finish(self) -> None:
        """End the shard."""
        self._writer.finish()

    def _fields(self, sample: Sample) -> dict[str, Any]:
        """Return the features of one sample."""
        taken: dict[str, Any] = {}
        if self._specs is None:
            taken.update(sample.fields)
        for spec in self._specs or ():
            if spec.source not in sample.fields:
                select_fields(sample.fields, (spec,), sample.key)  # raises the error
            value = sample.fields[spec.source]
            if spec.type == "pixels":
                taken.update(zip(spec.pixel_fields, pixels_of(value, spec, sample.key), strict=True))
            else:
                taken[spec.field] = cast_value(value, spec, sample.key)
        if self._key and self._key != KEY:
            if self._key in taken:
                raise DataError(f"the sample already has a field {self._key!r}", field=self._key)
            taken[self._key] = check_key(plain_key(sample.key))
        return taken

    def _columns(self, samples: Samples) -> dict[str, Any] | None:
        """Return the features of samples in columns; None if they must be written one by one."""
        stored = dict(zip(samples.names, samples.columns[3:], strict=True))
        if samples.names == ("record",) or self._key in stored or self._has_large_pictures:
            return None
        columns: dict[str, Any] = {}
        if self._specs is None:
            columns.update(stored)
        for spec in self._specs or ():
            if spec.source not in stored or spec.type not in {None, "bytes", "int", "float", "pixels"}:
                return None
            try:
                column = _column(spec, stored[spec.source], samples.keys)
            except DataError:
                return None  # one by one, the error names the sample
            if column is None:
                self._has_large_pictures = True
                return None
            columns.update(column)
        if self._key in columns:
            return None
        if self._key:
            try:
                columns[self._key] = [check_key(plain_key(key)).encode() for key in samples.keys]
            except ValueError:
                return None
        return columns


def _column(spec: FieldSpec, values: Sequence[bytes], keys: Sequence[str]) -> dict[str, Any] | None:
    """Return the features that a column of members becomes, by name; None if they would take too much memory."""
    if spec.type == "pixels":
        found = _pixel_columns(spec, values, keys)
        return None if found is None else dict(zip(spec.pixel_fields, found, strict=True))
    if spec.type in {"int", "float"}:
        table = {value: cast_value(value, spec, "") for value in set(values)}  # labels have few distinct values
        return {spec.field: [table[value] for value in values]}
    return {spec.field: values}


def _pixel_columns(spec: FieldSpec, values: Sequence[bytes], keys: Sequence[str]) -> list[Any] | None:
    """Return the pixels of pictures, their heights, widths and channels: as ``pixels_of``, in less time for each.

    Returns None if they take more than ``_PIXELS_BYTES_MAX``: a picture of one colour may grow a thousandfold.
    """
    alike = rgb_pixels_of_many(values)
    if alike is not None and alike.nbytes <= _PIXELS_BYTES_MAX:
        count, *shape = alike.shape
        return [alike.reshape(count, -1), *([length] * count for length in shape)]
    pixels, shapes, size_bytes = [], [], 0
    for value, key in zip(values, keys, strict=True):
        try:
            array = rgb_pixels(memoryview(value))
        except (ValueError, OSError):
            pixels_of(value, spec, key)  # raises the error
            raise
        size_bytes += array.nbytes
        if size_bytes > _PIXELS_BYTES_MAX:
            return None
        pixels.append(array.tobytes())
        shapes.append(array.shape)
    return [pixels, *map(list, zip(*shapes, strict=True))]


# ── TFRecord to tar ─────────────────────────────────────────────────────────────────────────────────────────────────


@transform(version="1", content_type="application/x-tar", rest="fields", check=_check)
def tfrecord2tar(
    reader: SourceReader, request: TransformRequest, *, fields: str = "", key: str = "", gzip: bool = False
) -> Iterator[Buffer]:
    """Turn TFRecords of ``tf.train.Example`` into a WebDataset tar, one sample for each record.

    Args:
        reader: TFRecords, which may be compressed as a whole by gzip or zstd.
        request: The request.
        fields: Features that become members, and their types: ``image=png:pixels,label=cls:int``. Empty takes all features:
            bytes as they are, single numbers as text, several as ``.npy``.
        key: Name of the feature that holds the samples' keys. Empty takes the feature ``__key__`` and, without one, the
            offset of the record in twelve digits.
        gzip: Whether the tar is compressed by gzip as a whole.
    """
    return tfrecord_to_tar(reader, source=reader.key, fields=fields, key=key, gzip=gzip)


def tfrecord_to_tar(
    chunks: Iterable[Buffer], *, source: str, fields: str = "", key: str = "", gzip: bool = False
) -> Iterator[Buffer]:
    """Iterate over the tar of TFRecords; the arguments are those of ``tfrecord2tar``.

    Raises:
        DataError: The TFRecords are damaged, a sample lacks a field, or a tar cannot hold it.

    Cost: holds one sample and, of samples below 32 KiB, those of one chunk.
    """
    output = PieceCollector()
    writer = TarWriter(output.write)
    convert = _members(writer, source, parse_fields(fields or None), key)
    head, chunks = peek(chunks)
    groups = samples_in(parser_for("tfrecord", head, source), chunks)
    return compressed(converted(groups, convert, output, writer.finish), "gz" if gzip else "")


def _members(
    writer: TarWriter, source: str, specs: tuple[FieldSpec, ...] | None, key_feature: str
) -> Callable[[Sequence[Sample]], Iterator[None]]:
    """Return a function that writes Examples as samples of a tar."""
    is_oriented = False

    def convert(samples: Sequence[Sample]) -> Iterator[None]:
        nonlocal specs, is_oriented
        for sample in singly(samples):
            with located(source, sample):
                if specs is not None and not is_oriented:
                    specs, is_oriented = oriented(specs, sample.fields), True
                key = _key_of(sample, key_feature)
                if specs is None:
                    fields = convert_sample(sample, "tfrecord", "tar", key_field=None)
                    if key_feature:
                        del fields[key_feature]
                else:
                    taken = select_fields(sample.fields, specs, key)
                    fields = {name: as_bytes(name, value, key) for name, value in taken.items()}
                writer.add({**fields, KEY: key})
            yield

    return convert


def _key_of(sample: Sample, feature: str) -> str:
    if not feature:
        return sample.key
    if feature not in sample.fields:
        raise DataError(f"the sample has no {feature!r}, only {sorted(sample.fields)}", field=feature)
    value = sample.fields[feature]
    return (
        str(value.tolist()[0]) if value.format == "q" and len(value) == 1 else bytes(value).decode("utf-8", "replace")
    )
