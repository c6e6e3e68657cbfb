"""How a sample of one format becomes a sample of another, and what a conversion between two formats loses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError, DataError
from penstock.formats import FORMATS, without_content
from penstock.formats.mds_writer import Encoded
from penstock.pack.written_formats import FORMATS_WRITTEN, PLAIN_FORMATS
from penstock.text.json_text import parse_json

if TYPE_CHECKING:
    from penstock.formats import Sample
    from penstock.formats.mds import Column


class FormatFeatures(NamedTuple):
    """What a format stores of a sample besides the bytes of its fields.

    Attributes:
        keys: Whether it stores the key; otherwise the position of the sample serves as its key.
        names: Whether it stores field names, and so any number of fields.
        numbers: Whether it stores numbers as numbers.
        arrays: Whether it stores the shapes of arrays, and float64.
        binary: Whether it stores bytes that are not text.
    """

    keys: bool
    names: bool
    numbers: bool
    arrays: bool
    binary: bool


FORMAT_FEATURES: dict[str, FormatFeatures] = {
    "tar": FormatFeatures(keys=True, names=True, numbers=False, arrays=False, binary=True),
    "zip": FormatFeatures(keys=True, names=True, numbers=False, arrays=False, binary=True),
    "tfrecord": FormatFeatures(keys=False, names=True, numbers=True, arrays=False, binary=True),
    "recordio": FormatFeatures(keys=False, names=False, numbers=False, arrays=False, binary=True),
    "jsonl": FormatFeatures(keys=True, names=False, numbers=True, arrays=False, binary=False),
    "mds": FormatFeatures(keys=False, names=True, numbers=True, arrays=True, binary=True),
    "parquet": FormatFeatures(keys=True, names=True, numbers=True, arrays=True, binary=True),
}
"""Features by format; compression does not change them. A line of JSON counts as one value; it has its own numbers and
names."""


def base_format(format_name: str) -> str:
    """Return the format without its compression and without the content of its records: a key of ``FORMAT_FEATURES``."""
    return without_content(format_name.partition(".")[0])


def raw_format(format_name: str) -> str:
    """Return the format that gives records undecoded if there is one, otherwise `format_name`."""
    name = base_format(format_name)
    compression = format_name[len(format_name.removesuffix(".gz").removesuffix(".zst")) :]
    return f"{name}-raw{compression}" if f"{name}-raw" in FORMATS else format_name


def losses(source: str, target: str, *, key_field: str | None = None) -> tuple[str, ...]:
    """Say what a conversion from one format to another loses of a sample; () if it loses nothing.

    Args:
        source: Name of the format that is read.
        target: A key of ``FORMATS_WRITTEN``.
        key_field: Field of the target that takes the samples' keys; None if there is none.

    Raises:
        ConfigError: One of the formats is unknown.
    """
    source, wanted, target = base_format(source), target, base_format(target)
    if source not in FORMAT_FEATURES or wanted not in FORMATS_WRITTEN:
        raise ConfigError(
            f"{source!r} cannot be converted to {wanted!r}", hint=f"choose one of {', '.join(PLAIN_FORMATS)}"
        )
    if {source, target} == {"tfrecord", "recordio"} or source == target:
        return ()  # records are copied unchanged
    have, get = FORMAT_FEATURES[source], FORMAT_FEATURES[target]
    lost = []
    if have.keys and not get.keys and key_field is None:
        lost.append("the samples' keys (--key-field NAME stores them)")
    if have.names and not get.names and target != "jsonl":
        lost.append("the names of fields, and all fields but one")
    if have.numbers and not get.numbers and source != "jsonl":
        lost.append("the types of numbers: single ones become text, others .npy")
    if have.arrays and target == "parquet":
        lost.append("shapes of arrays, and the widths of numbers")
    elif have.arrays and not get.arrays and get.numbers:
        lost.append("shapes of arrays, and float64")
    return tuple(lost)


def loss_table() -> str:
    """Return a Markdown table of what is lost from each row's format to each column's."""
    targets = list(PLAIN_FORMATS)
    lines = ["| from | " + " | ".join(f"to {name}" for name in targets) + " |", "|---" * (len(targets) + 1) + "|"]
    for source in FORMAT_FEATURES:
        cells = []
        for target in targets:
            words = [
                text.partition(" (")[0].partition(":")[0].partition(", and all")[0] for text in losses(source, target)
            ]
            cells.append("; ".join(words) or "keeps all")
        lines.append(f"| {source} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def convert_sample(sample: Sample, source: str, target: str, *, key_field: str | None) -> dict[str, Any]:
    """Return a sample of the `source` format as the writer of the `target` format takes it.

    Raises:
        DataError: The target cannot hold it.
    """
    fields: dict[str, Any] = {"__key__": sample.key}
    if key_field is not None:
        if key_field in sample.fields:
            raise DataError(f"the sample already has a field {key_field!r}", sample_key=sample.key, field=key_field)
        fields[key_field] = sample.key
    for name, value in sample.fields.items():
        if value.format in ("B", "b", "c") and value.ndim == 1:
            fields[name] = value
        elif FORMAT_FEATURES[target].numbers:
            fields[name] = _numbers(value)
        elif value.nbytes == value.itemsize:
            fields[name] = repr(value.tolist() if not value.ndim else value.tolist()[0])
        else:
            fields[f"{name}.npy"] = _numbers(value)
    if target == "recordio":
        return _one_record(fields)
    if target == "jsonl" and set(fields) == {"__key__", "json"} and FORMAT_FEATURES[source].keys and source != "jsonl":
        return _json_with_key(fields)
    return fields


def convert_mds_sample(sample: Sample, columns: tuple[Column, ...], *, key_field: str | None) -> dict[str, Any]:
    """Return an MDS sample as the MDS writer takes it, with its shard's own encodings, so that MosaicML reads equal values."""
    fields = convert_sample(sample, "mds", "mds", key_field=key_field)
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
            hint="--fields selects one of them",
            sample_key=fields["__key__"],
        )
    return {"__key__": fields["__key__"], "record": fields[names[0]]}


def _json_with_key(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a sample that is one JSON object, with its key as a name of that object."""
    try:
        value = parse_json(bytes(fields["json"]))
    except ValueError as error:
        raise DataError(f"it is not JSON ({error})", sample_key=fields["__key__"], field="json") from error
    return {**value, "__key__": fields["__key__"]} if isinstance(value, dict) else fields
