from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from loading import pipeline, write_counted
from pages import write_pictures
from penstock.errors import ConfigError
from penstock.loader.preview import Samples, picture_kind


def peek(pipeline: ps.Pipeline, n: int) -> Samples:
    samples = ps.peek(pipeline, n)
    assert isinstance(samples, Samples)
    return samples


def test_peek_gives_the_first_samples_as_stored(tmp_path: Path) -> None:
    """Shuffle and batch make no difference: what comes are the first samples, decoded, with where they are from."""
    write_counted(tmp_path, (5, 5))
    pipeline = ps.shards(f"{tmp_path}/").shuffle().decode(ps.Integer("cls"), ps.Text("txt")).batch(7, drop_last=True)
    samples = peek(pipeline, 6)
    assert [(sample["cls"], sample["__key__"]) for sample in samples] == [(i, f"s{i:05d}") for i in range(6)]
    assert samples[5]["__shard__"].endswith("s-001.tar")
    assert samples[0]["txt"] == "sample 0"


def test_peek_sees_what_passes_the_filters(tmp_path: Path) -> None:
    """Samples that a stage drops are passed over; where there are fewer than asked for, fewer come."""
    write_counted(tmp_path, (10,))
    pipeline = ps.shards(f"{tmp_path}/").decode(ps.Integer("cls")).filter(lambda sample: sample["cls"] % 4 == 3)
    assert [int(sample["cls"]) for sample in peek(pipeline, 5)] == [3, 7]


def test_peek_without_stages_gives_bytes(tmp_path: Path) -> None:
    """Before anything is decoded a sample is its members."""
    write_counted(tmp_path, (1,))
    assert peek(ps.shards(f"{tmp_path}/"), 1)[0]["cls"] == b"0"


def test_peek_shows_each_source_of_a_mix(tmp_path: Path) -> None:
    """Their first samples in turn, each through its own stages; where one has no more, the others go on."""
    write_counted(tmp_path / "a", (3,))
    write_counted(tmp_path / "b", (1,))
    a = ps.shards(f"{tmp_path}/a/").decode(ps.Integer("cls"))
    b = ps.shards(f"{tmp_path}/b/").decode(ps.Integer("cls")).map(lambda sample: {"cls": sample["cls"] + 100})
    mixed = ps.mix({a: 1, b: 5}).shuffle().batch(2)
    assert [int(sample["cls"]) for sample in peek(mixed, 5)] == [0, 100, 1, 2]
    assert [int(sample["cls"]) for sample in peek(mixed, 1)] == [0]


def test_peek_leaves_no_thread(tmp_path: Path) -> None:
    """Looking at a few samples of many ends what it began."""
    write_counted(tmp_path, (500,))
    peek(ps.shards(f"{tmp_path}/"), 1)
    left = [thread.name for thread in threading.enumerate()]
    assert [name for name in left if name.startswith(("penstock-read", "penstock-decode"))] == []


@pytest.mark.parametrize(("pipeline", "n"), [("s3://b/", 1), (ps.shards("/x/"), 0), (ps.shards("/x/"), 10_001)])
def test_peek_refuses(pipeline: object, n: int) -> None:
    """What is no pipeline, and counts out of bounds, are refused before anything is read."""
    with pytest.raises(ConfigError):
        peek(pipeline, n)  # type: ignore[arg-type]


def test_a_batch_is_a_line_for_each_field(tmp_path: Path) -> None:
    """Dtype and shape of arrays, length and kind of lists; what the loader adds comes last."""
    write_counted(tmp_path, (8,))
    with ps.Loader(pipeline(tmp_path, window=None)) as loader:
        said = ps.describe(next(iter(loader))).splitlines()
    assert said[0] == "cls           int64[8]"
    assert said[1] == "txt           list of 8 str, first 'sample 0' (8)"
    assert [line.split()[0] for line in said] == ["cls", "txt", "__key__", "__shard__", "__position__"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.zeros((2, 1024, 1024), np.uint8), "uint8[2, 1024, 1024], 2 MiB"),
        (np.float32(1.5), "float32 1.5"),
        (np.int64(7), "int64 7"),
        (b"x" * 50, "b'" + "x" * 40 + "'... (50)"),
        (memoryview(b"abc"), "b'abc' (3)"),
        ([], "list of 0"),
        ([1, "a"], "list of 2 int or str, first 1"),
        ({"a": None}, "a  None"),
        (ps.FetchConfig(), "FetchConfig FetchConfig("),
    ],
)
def test_values_of_every_kind(value: object, said: str) -> None:
    """Samples, single values, and what collate= makes."""
    assert ps.describe(value).startswith(said)


def test_a_tensor_is_described_as_an_array() -> None:
    """Dtype and shape, without its framework's name."""
    torch = pytest.importorskip("torch")
    assert ps.describe({"x": torch.zeros(2, 3)}) == "x  float32[2, 3]"
    assert ps.describe({"x": torch.zeros(2, device="meta")}) == "x  float32[2] on meta"


@pytest.mark.parametrize(
    ("head", "kind"),
    [(b"\xff\xd8\xff\xe0", "jpeg"), (b"\x89PNG\r\n\x1a\n", "png"), (b"GIF89a", "gif"), (b"RIFF\x08\0\0\0WEBPVP8 ", "webp"),
     (b"RIFF\x08\0\0\0WAVEfmt ", None), (b"", None)],
)  # fmt: skip
def test_the_kind_of_a_picture_is_in_its_first_bytes(head: bytes, kind: str | None) -> None:
    """Whatever its field is called."""
    assert picture_kind(head) == kind


def test_a_notebook_shows_pictures_and_escapes_text(tmp_path: Path) -> None:
    """Stored and decoded pictures become images; what comes from data or code is text, never HTML."""
    write_pictures(tmp_path / "train", samples=4, shards=1, kind="jpg")
    made = ps.shards(f"{tmp_path}/train/")
    assert peek(made, 2)._repr_html_().count('src="data:image/jpeg;base64,/9j/') == 2
    decoded = peek(made.decode(ps.Image("jpg")).map(lambda sample: {**sample, "txt": "<script>"}), 3)._repr_html_()
    assert decoded.count("data:image/png;base64,iVBOR") == 3
    assert "&lt;script&gt;" in decoded
    assert "<script>" not in decoded
    shown = made.decode(ps.Text("<b>")).batch(2)._repr_html_()
    assert "    .decode(Text(&#x27;&lt;b&gt;&#x27;))<br>    .batch(2)" in shown
    with ps.Loader(made.batch(2)) as loader:
        list(loader)
        table = loader.statistics()._repr_html_()
    assert "<tr><th>samples</th><td>4</td></tr>" in table
    assert "<th>bottleneck</th>" in table
