"""Samples of tar and TFRecord streams by other people's readers, for doors that give bytes and leave formats to programs."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import IO, Any

from doors.matrix.data_set import Record, record_of


def records_of_tar(file: Any, *, name: str = "") -> Iterator[Record]:
    """Yield the samples of one tar, or of several in a row, as Python's ``tarfile`` reads them in one pass.

    Neighbours whose paths are equal up to the first dot of the file name are one sample.

    Args:
        file: An open file.
        name: Name of the file, which a careful program adds to errors, as neither ``tarfile`` nor the kernel does.
    """
    try:
        yield from _records(file)
    except Exception as error:
        error.add_note(f"while {name} was read")
        raise


def _records(file: IO[bytes]) -> Iterator[Record]:
    key: str | None = None
    fields: dict[str, Any] = {}
    with tarfile.open(fileobj=file, mode="r|", ignore_zeros=True) as archive:
        for member in archive:
            if not member.isreg():
                continue
            folder, slash, base = member.name.rpartition("/")
            stem, _, field = base.partition(".")
            content = archive.extractfile(member)
            assert content is not None
            if folder + slash + stem != key:
                if key is not None:
                    yield record_of(key, fields)
                key, fields = folder + slash + stem, {}
            fields[field.lower()] = content.read()
    if key is not None:
        yield record_of(key, fields)


def record_of_example(data: bytes) -> Record:
    """Return the record of a serialised ``tf.train.Example``, as TensorFlow parses it."""
    import tensorflow as tf

    features = tf.train.Example.FromString(data).features.feature
    fields = {name: feature.bytes_list.value[0] for name, feature in features.items()}
    return record_of(fields["__key__"].decode(), fields)
