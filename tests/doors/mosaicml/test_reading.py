"""MDS that penstock writes, read by MosaicML's own ``StreamingDataset``; and its writer's shards, converted and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming import MDSWriter, StreamingDataset

from penstock.pack import convert, pack

pytestmark = pytest.mark.filterwarnings(  # MosaicML leaves the compressed files open that it read
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)

ROWS = [
    {
        "n": number,
        "f": number / 2,
        "i16": np.int16(-number),
        "txt": f"ü{number}",
        "meta": {"number": number},
        "blob": bytes([number]) * (10 * number),
        "array": np.arange(6 * number, dtype=np.float32).reshape(2, 3, number),
    }
    for number in range(17)
]


def read(remote: Path, local: Path) -> list[dict[str, Any]]:
    """All samples, in the stored order, as MosaicML decodes them."""
    data = StreamingDataset(remote=str(remote), local=str(local), shuffle=False, batch_size=1)
    return list(data)


def same(found: dict[str, Any], row: dict[str, Any]) -> bool:
    return found.keys() == row.keys() and all(np.array_equal(found[name], row[name]) for name in row)


@pytest.mark.parametrize("name", ["mds", "mds.zst", "mds.gz"])
def test_mosaicml_reads_what_is_packed(tmp_path: Path, name: str) -> None:
    """Every value of every sample, in its type, by the ``index.json`` that lies beside the shards."""
    pack(ROWS, tmp_path / "out", format=name, samples_max=5, verify=True)
    found = read(tmp_path / "out", tmp_path / "local")
    assert len(found) == len(ROWS)
    assert all(map(same, found, ROWS))


def test_its_own_shards_stay_what_they_are(tmp_path: Path) -> None:
    """Compressed, and cut anew: what MosaicML reads of its own shards it reads of ours."""
    columns = {"n": "int", "u8": "uint8", "s": "str_int", "a": "ndarray:float32:2,2", "any": "ndarray"}
    with MDSWriter(out=str(tmp_path / "in"), columns=columns, size_limit=1000) as out:
        for number in range(40):
            array = np.full((2, 2), number, np.float32)
            out.write({"n": number, "u8": np.uint8(number), "s": number, "a": array, "any": array[:1]})
    convert(tmp_path / "in", tmp_path / "zst", to="mds.zst", verify=True)
    convert(tmp_path / "zst", tmp_path / "one", to="mds", bytes_max=10**6, verify=True)
    before = read(tmp_path / "in", tmp_path / "local-in")
    for folder in ("zst", "one"):
        assert all(map(same, read(tmp_path / folder, tmp_path / f"local-{folder}"), before))
