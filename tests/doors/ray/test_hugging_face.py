"""Hugging Face's own ``datasets`` as a source of packing."""

from __future__ import annotations

import io
from pathlib import Path

import datasets
import numpy as np
import PIL.Image

import penstock as ps
from penstock.pack import pack


def test_a_data_set_is_packed(tmp_path: Path) -> None:
    """Rows with images and labels become samples by the one spelling of fields; sliced and shuffled it is a source too."""
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"]), "text": datasets.Value("string")}
    )
    rows = {
        "image": [PIL.Image.new("RGB", (8, 6), (number, 0, 0)) for number in range(10)],
        "label": [number % 2 for number in range(10)],
        "text": [f"ü{number}" for number in range(10)],
    }
    data = datasets.Dataset.from_dict(rows, features=features)
    fields = "image=png:pixels,label=cls:int,text=txt"
    packed = pack(data, tmp_path / "out", fields=fields, samples_max=4, verify=True)
    assert (packed.samples_count, len(packed.rows)) == (10, 3)
    assert pack(data, tmp_path / "out", fields=fields, samples_max=4).shards_written == 0
    samples = ps.peek(ps.shards(f"{tmp_path}/out/"), 10)
    for number, sample in enumerate(samples):
        assert (sample["cls"], sample["txt"].decode()) == (b"%d" % (number % 2), f"ü{number}")
        assert np.asarray(PIL.Image.open(io.BytesIO(sample["png"])))[0, 0].tolist() == [number, 0, 0]
    shuffled = data.shuffle(seed=1).select(range(5))
    assert pack(shuffled, tmp_path / "some", fields=fields).samples_count == 5
