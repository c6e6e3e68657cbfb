"""What each format keeps of a sample, and so what a conversion between two would lose."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError, DataError
from penstock.formats import FORMATS, without_content
from penstock.formats.mds_writer import Encoded
from penstock.pack.shard_file import FORMATS_WRITTEN, PLAIN_FORMATS

if TYPE_CHECKING:
    from penstock.formats import Sample
    from penstock.formats.mds import Column


class Keeps(NamedTuple):
    """What a format stores of a sample besides its bytes.

    Attributes:
        keys: Its key; else a key is where the sample begins.
        names: Names of fields, and so several of them.
        numbers: Numbers as numbers.
        arrays: Shapes of arrays, and float64.
        binary: Bytes that are no text.
    """

    keys: bool
    names: bool
    numbers: bool
    arrays: bool
    binary: bool


KEEPS: dict[str, Keeps] = {
    "tar": Keeps(keys=True, names=True, numbers=False, arrays=False, binary=True),
    "zip": Keeps(keys=True, names=True, numbers=False, arrays=False, binary=True),
    "tfrecord": Keeps(keys=False, names=True, numbers=True, arrays=False, binary=True),
    "recordio": Keeps(keys=False, names=False, numbers=False, arrays=False, binary=True),
    "jsonl": Keeps(keys=True, names=False, numbers=True, arrays=False, binary=False),
    "mds": Keeps(keys=False, names=True, numbers=True, arrays=True, binary=True),
    "parquet": Keeps(keys=True, names=True, numbers=True, arrays=True, binary=True),
}
"""By format; compressed ones keep what is in them. A line of JSON is one value, whose numbers and names are its own."""


def plain(format_name: str) -> str:
    """A format without compression and without what was said of its records' content: a key of ``KEEPS``."""
    return without_content(format_name.partition(".")[0])


def raw(format_name: str) -> str:
    """The format that gives records as they are stored, where there is one; else the same."""
    name = plain(format_name)
    compression = format_name[len(format_name.removesuffix(".gz").removesuffix(".zst")) :]
    return f"{name}-raw{compression}" if f"{name}-raw" in FORMATS else format_name


def losses(source: str, target: str, *, key_field: str | None = None) -> tuple[str, ...]:
    """What of a sample is lost on the way from one format to another; () where nothing is.

    Args:
        source: A format that is read.
        target: A key of ``FORMATS_WRITTEN``.
        key_field: Of the target, that takes the samples' keys.

    Raises:
        ConfigError: nothing is known of one of them.
    """
    source, wanted, target = plain(source), target, plain(target)
    if source not in KEEPS or wanted not in FORMATS_WRITTEN:
        raise ConfigError(f"{source!r} cannot become {wanted!r}", hint=f"written are {', '.join(PLAIN_FORMATS)}")
    if {source, target} == {"tfrecord", "recordio"} or source == target:
        return ()  # records go as they are
    have, get = KEEPS[source], KEEPS[target]
    lost = []
    if have.keys and not get.keys and key_field is None:
        lost.append("the samples' keys (--key-field NAME stores them)")
    if have.names and not get.names and target != "jsonl":
        lost.append("the names of fields, of which there may be one")
    if have.numbers and not get.numbers and source != "jsonl":
        lost.append("the types of numbers: single ones become text, others .npy")
    if have.arrays and target == "parquet":
        lost.append("shapes of arrays, and the widths of numbers")
    elif have.arrays and not get.arrays and get.numbers:
        lost.append("shapes of arrays, and float64")
    return tuple(lost)


def table() -> str:
    """Every pair in Markdown: what is lost from the row's format to the column's."""
    targets = list(PLAIN_FORMATS)
    lines = ["| from | " + " | ".join(f"to {name}" for name in targets) + " |", "|---" * (len(targets) + 1) + "|"]
    for source in KEEPS:
        cells = []
        for target in targets:
            words = [text.partition(" (")[0].partition(":")[0].partition(", of")[0] for text in losses(source, target)]
            cells.append("; ".join(words) or "keeps all")
        lines.append(f"| {source} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def converted(sample: Sample, source: str, target: str, *, key_field: str | None) -> dict[str, Any]:
    """A sample of one format as the writer of another takes it.

    Raises:
        DataError: the target cannot hold it.
    """
    fields: dict[str, Any] = {"__key__": sample.key}
    if key_field is not None:
        if key_field in sample.fields:
            raise DataError(f"it has a field {key_field!r} already", sample_key=sample.key, field=key_field)
        fields[key_field] = sample.key
    for name, value in sample.fields.items():
        if value.format in ("B", "b", "c") and value.ndim == 1:
            fields[name] = value
        elif KEEPS[target].numbers:
            fields[name] = _numbers(value)
        elif value.nbytes == value.itemsize:
            fields[name] = repr(value.tolist() if not value.ndim else value.tolist()[0])
        else:
            fields[f"{name}.npy"] = _numbers(value)
    if target == "recordio":
        return _one_record(fields)
    if target == "jsonl" and set(fields) == {"__key__", "json"} and KEEPS[source].keys and source != "jsonl":
        return _with_key(fields)
    return fields


def encoded(sample: Sample, columns: tuple[Column, ...], *, key_field: str | None) -> dict[str, Any]:
    """A sample of MDS as MDS takes it: by the encodings of its own shard, so that MosaicML reads the same values."""
    fields = converted(sample, "mds", "mds", key_field=key_field)
    for column in columns:
        if not column.encoding.startswith("ndarray"):
            data = sample.fields[column.name].tobytes()
            fields[column.name] = Encoded(column.encoding, column.size_bytes, data)
    return fields


def _numbers(value: memoryview) -> Any:
    import numpy as np

    return np.asarray(value)


def _one_record(fields: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in fields if name != "__key__"]
    if len(names) != 1:
        raise DataError(
            f"a record holds one field, not {names}",
            hint="--fields takes one of them",
            sample_key=fields["__key__"],
        )
    return {"__key__": fields["__key__"], "record": fields[names[0]]}


def _with_key(fields: dict[str, Any]) -> dict[str, Any]:
    """A sample that is one JSON object, with its key in it."""
    try:
        value = json.loads(bytes(fields["json"]))
    except ValueError as error:
        raise DataError(f"it is no JSON ({error})", sample_key=fields["__key__"], field="json") from error
    return {**value, "__key__": fields["__key__"]} if isinstance(value, dict) else fields
