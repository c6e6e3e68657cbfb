"""Data sets with ``len`` and ``[]``, such as Hugging Face's and PyTorch's, packed, resumed and read again."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.formats import feed_in_pieces, parser_of
from penstock.pack import pack

image = pytest.importorskip("PIL.Image")


class Table:
    """Like ``datasets.Dataset``: rows are dicts of Python values and images, columns are lists."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count, self.fails_at = count, fails_at

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int | str) -> Any:
        if isinstance(at, str):
            raise AssertionError("no column was asked for")
        if at == self.fails_at:
            raise RuntimeError("no")
        if not 0 <= at < self.count:
            raise IndexError(at)
        return {"image": image.new("RGB", (8, 6), (at, 0, 0)), "label": at % 3, "text": f"ü{at}", "box": [0.5, at]}

    def __iter__(self) -> Any:
        return map(self.__getitem__, range(self.count))


FIELDS = "image=png:pixels,label=cls:int,text=txt,box=json:json"


def samples_of(folder: Path) -> list[dict[str, bytes]]:
    found = []
    for path in sorted(folder.glob("*.tar")):
        parser = parser_of("tar", shard=str(path))
        samples = [sample for piece in feed_in_pieces(parser, path.read_bytes()) for sample in piece]
        found += [
            {name: bytes(value) for name, value in sample.fields.items()} for sample in [*samples, *parser.finish()]
        ]
    return found


def test_a_hugging_face_data_set(tmp_path: Path) -> None:
    """Rows become samples with ``fields``; images are encoded, and a resumed run continues."""
    with pytest.raises(RuntimeError):
        pack(Table(10, fails_at=7), tmp_path / "out", fields=FIELDS, samples_max=3)
    packed = pack(Table(10), tmp_path / "out", fields=FIELDS, samples_max=3)
    assert (packed.samples_count, packed.shards_written) == (10, 2)
    for number, sample in enumerate(samples_of(tmp_path / "out")):
        assert (sample["cls"], sample["txt"].decode()) == (b"%d" % (number % 3), f"ü{number}")
        assert sample["json"] == b"[0.5,%d]" % number
        assert np.asarray(image.open(io.BytesIO(sample["png"])))[0, 0].tolist() == [number, 0, 0]


def test_a_torch_data_set(tmp_path: Path) -> None:
    """Items of a map-style data set are tuples of tensors, arrays and numbers, named by position."""
    torch = pytest.importorskip("torch")

    class Data(torch.utils.data.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> tuple[Any, Any, int]:
            return torch.full((2, 3), index, dtype=torch.int16).numpy(), torch.tensor(index), index * 2

    pack(Data(), tmp_path / "out", fields="0=x.npy,1=cls:int,2=n:int")
    found = samples_of(tmp_path / "out")
    assert [(sample["cls"], sample["n"]) for sample in found] == [(b"%d" % n, b"%d" % (2 * n)) for n in range(5)]
    assert np.load(io.BytesIO(found[3]["x.npy"])).tolist() == [[3] * 3] * 2
    pack(Data(), tmp_path / "mds", fields="0=x,1=cls:int", format="mds")
    pipeline = ps.shards(f"{tmp_path}/mds/").batch(5)
    with ps.Loader(pipeline) as loader:
        (batch,) = list(loader)
    assert [np.asarray(x).tolist() for x in batch["x"]] == [[[n] * 3] * 2 for n in range(5)]
