"""``parquet``, compared with pyarrow reading the whole file."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import ConfigError, CorruptShardError, DataError
from penstock.gateway.transforms.authoring import declaration_of
from penstock.gateway.transforms.builtin.filters import RowFilter
from penstock.gateway.transforms.builtin.parquet_files import parquet, projected

if TYPE_CHECKING:
    from penstock.types import ByteRange

_COUNT = 3000
_TABLE = pa.table(
    {
        "id": range(_COUNT),
        "split": ["train" if index % 3 else "val" for index in range(_COUNT)],
        "width": pa.array([None if index % 7 == 0 else index % 512 for index in range(_COUNT)], pa.int32()),
        "score": [index / 10 for index in range(_COUNT)],
        "small": pa.array([index / 10 for index in range(_COUNT)], pa.float32()),
        "ok": [index % 2 == 0 for index in range(_COUNT)],
        "user": [{"age": index % 90, "name": f"n{index}"} for index in range(_COUNT)],
        "a b": [[index, index] for index in range(_COUNT)],
        "jpg": [b"x" * (index % 300) for index in range(_COUNT)],
    }
)


def file_of(table: pa.Table = _TABLE, **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, **{"row_group_size": 500, **options})
    return out.getvalue()


_FILE = file_of()


class Ranged:
    """A file that is read by ranges, and notes which."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.spans: list[ByteRange] = []

    def __call__(self, span: ByteRange) -> bytes:
        self.spans.append(span)
        return self.data[span.start : span.end]


def run(data: bytes, columns: tuple[str, ...] = (), text: str = "", **options: Any) -> tuple[pa.Table, Ranged]:
    read = Ranged(data)
    row_filter = RowFilter(text) if text else None
    out = b"".join(projected(read, source="k", size_bytes=len(data), columns=columns, row_filter=row_filter, **options))
    return pq.read_table(io.BytesIO(out)), read


def test_everything_stays() -> None:
    """Without arguments, all columns and rows of every type remain."""
    assert run(_FILE)[0].equals(_TABLE)


@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("compression", ["snappy", "zstd", "gzip", "none"])
def test_columns_in_their_order(dictionary: bool, compression: str) -> None:
    """Only the named columns remain, in the named order, however the source is encoded."""
    found, _ = run(file_of(use_dictionary=dictionary), ("user", "split"), compression=compression)
    assert found.equals(_TABLE.select(["user", "split"]))


_ROWS = _TABLE.to_pylist()


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ('split == "train" and width >= 256', lambda r: r["split"] == "train" and (r["width"] or 0) >= 256),
        ("width != 5", lambda r: r["width"] is not None and r["width"] != 5),
        ("not width == 5", lambda r: r["width"] is not None and r["width"] != 5),
        ("width is None or 10 < id <= 20", lambda r: r["width"] is None or 10 < r["id"] <= 20),
        ("width is not None", lambda r: r["width"] is not None),
        ("width in (1, 2, 3)", lambda r: r["width"] in (1, 2, 3)),
        ("width not in (1, 2)", lambda r: r["width"] is not None and r["width"] not in (1, 2)),
        ("user.age < 3", lambda r: r["user"]["age"] < 3),
        ("ok == True and score > 299.5", lambda r: r["ok"] and r["score"] > 299.5),
        ("-1 < id and 7 > id", lambda r: r["id"] < 7),
        ("id == 2999", lambda r: r["id"] == 2999),
        ("id > 5000", lambda r: False),
        ("small == 0.1", lambda r: r["id"] == 1),
        ('column("id") <= 3', lambda r: r["id"] <= 3),
        ('split in ("val",) and not (id > 9 or id < 3)', lambda r: r["split"] == "val" and 3 <= r["id"] <= 9),
    ],
)
def test_filters(text: str, python: Any) -> None:
    """A filter keeps the rows that Python's own evaluation keeps; rows with a missing value are left out."""
    expected = [row["id"] for row in _ROWS if python(row)]
    if text.startswith("small"):  # whether a float equals a text of fewer digits is pyarrow's to say
        expected = _TABLE.filter(RowFilter(text).expression())["id"].to_pylist()
    found, _ = run(_FILE, ("id",), text)
    assert found["id"].to_pylist() == expected


def test_only_what_is_needed_is_read() -> None:
    """Columns that are not needed and row groups that the statistics exclude are not read."""
    big = file_of(_TABLE.append_column("big", pa.array([bytes([index % 251]) * 2000 for index in range(_COUNT)])),
                  compression="none", use_dictionary=False)  # fmt: skip
    found, read = run(big, ("id", "split"), "id >= 2600 and id < 2700")
    assert found.num_rows == 100
    assert sum(span.end - span.start for span in read.spans) < len(big) // 20


@pytest.mark.parametrize(
    "text",
    [
        "", "width", "width ==", "1 == 2", "width == height", "__import__('os')", "f(x) == 1", "x == [1]", "x in 5", "x is 5",
        "x in ()", "x == None", "lambda: 0", "x == f'{y}'", "(" * 40 + "x == 1" + ")" * 40 + " and", "not " * 40 + "x == 1",
        "x == 1 or " * 500 + "x == 1", "x[0] == 1", "column(1) == 2", "-'a' == x", "x := 1",
    ],
)  # fmt: skip
def test_what_is_not_a_filter(text: str) -> None:
    """Anything but comparisons of columns with constants is refused, at start, with the text."""
    with pytest.raises(ConfigError, match="filter"):
        RowFilter(text)


def test_arguments_are_checked_at_start() -> None:
    """Filters and columns are checked before anything is read."""
    check = declaration_of(parquet).check
    assert check is not None
    check({"columns": ("a",), "filter": "a == 1"})
    for wrong in ({"columns": ("a", "a"), "filter": ""}, {"columns": (), "filter": "a"}):
        with pytest.raises(ConfigError):
            check(wrong)


def test_a_column_that_is_not_there() -> None:
    """A missing column is an error that lists those that exist."""
    for columns, text in ((("idd",), ""), (("id", "x"), ""), (("id",), "x == 1")):
        with pytest.raises(DataError, match="column") as raised:
            run(_FILE, columns, text)
        assert raised.value.shard == "k"


def test_a_filter_of_another_type() -> None:
    """A constant that cannot be compared with its column is an error that says so."""
    with pytest.raises(DataError, match="does not fit"):
        run(_FILE, ("id",), "jpg == 5")


@pytest.mark.parametrize("damage", ["cut", "page", "empty", "text"])
def test_damage(damage: str) -> None:
    """A damaged file is an error with its key, never fewer rows."""
    good = bytearray(file_of(write_page_checksum=True, use_dictionary=False))
    good[3000] ^= 255
    data = {"cut": _FILE[:-9], "page": bytes(good), "empty": b"", "text": b"text" * 9}[damage]
    with pytest.raises(CorruptShardError) as raised:
        run(data)
    assert raised.value.shard == "k"


def test_equal_input_gives_equal_bytes() -> None:
    """The same file gives the same bytes."""
    outputs = {b"".join(projected(Ranged(_FILE), source=k, size_bytes=len(_FILE))) for k in ("a", "b")}
    assert len(outputs) == 1
