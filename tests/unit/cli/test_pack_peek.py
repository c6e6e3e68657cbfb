"""``penstock peek``: a table, JSON, contact sheets. ``pack --dry-run``, and the classes that a packing leaves."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.app import run
from penstock.formats import TarWriter, TFRecordWriter

image = pytest.importorskip("PIL.Image")


def picture(shade: int) -> bytes:
    out = io.BytesIO()
    image.new("RGB", (40, 30), (shade, 0, 0)).save(out, format="PNG")
    return out.getvalue()


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    out = io.BytesIO()
    writer = TarWriter(out.write)
    for number in range(9):
        writer.add({"__key__": f"a/{number}", "png": picture(20 * number), "cls": str(number), "txt": "[b]ü <i>"})
    writer.add({"__key__": "broken", "png": b"\x89PNG\r\nbroken", "cls": "9", "txt": "x"})
    writer.finish()
    path = tmp_path / "x.tar"
    path.write_bytes(out.getvalue())
    return path


def test_samples_as_a_table(shard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has keys, fields, sizes and text; markup in values is printed unchanged."""
    assert run(["peek", str(shard), "-n", "2"]) == 0
    out = capsys.readouterr().out
    assert "a/0" in out
    assert "a/1" in out
    assert "a/2" not in out
    assert "[b]ü <i>" in out


def test_samples_of_differing_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Samples with different fields are shown with their own fields."""
    out = io.BytesIO()
    writer = TarWriter(out.write)
    for sample in ({"txt": "a"}, {"cls": "3", "txt": "b"}, {"json": "{}"}):
        writer.add({"__key__": f"k{len(sample)}{next(iter(sample))}", **sample})
    writer.finish()
    (tmp_path / "x.tar").write_bytes(out.getvalue())
    assert run(["peek", f"{tmp_path}/x.tar", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [sorted(line["fields"]) for line in lines] == [["txt"], ["cls", "txt"], ["json"]]


def test_samples_for_machines(shard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has one object per line with sizes; numbers of an Example are numbers."""
    assert run(["peek", str(shard), "-n", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["key"] == "a/0"
    assert record["fields"]["cls"] == {"size_bytes": 1, "value": "0"}
    out = io.BytesIO()
    writer = TFRecordWriter(out.write)
    writer.add({"label": 7, "box": [1.5, 2.5]})
    (tmp_path / "x.tfrecord").write_bytes(out.getvalue())
    assert run(["peek", f"{tmp_path}/x.tfrecord", "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)["fields"]
    assert fields["label"]["value"] == "7"
    assert fields["box"]["value"] == "[1.5, 2.5]"


def test_contact_sheets(shard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Contact sheets are a PNG with every image, or an HTML page without links; a broken image is grey."""
    assert run(["peek", str(shard), "-n", "10", "-o", f"{tmp_path}/s.png"]) == 0
    assert "10 images of 10 samples" in capsys.readouterr().err
    sheet = image.open(tmp_path / "s.png")
    colours = {colour for _, colour in sheet.getcolors(1 << 20)}
    assert {(20 * number, 0, 0) for number in range(9)} <= colours
    assert (128, 128, 128) in colours
    assert run(["peek", str(shard), "-n", "10", "-o", f"{tmp_path}/s.html"]) == 0
    page = (tmp_path / "s.html").read_text()
    assert page.count("<figure ") == 10
    assert "http" not in page
    assert "&lt;i&gt;" in page
    assert "<i>" not in page


def test_captions_are_at_their_images(tmp_path: Path) -> None:
    """On a PNG sheet, the caption of a flat image is directly below it."""
    flat, out = io.BytesIO(), io.BytesIO()
    image.new("RGB", (320, 80), (255, 0, 0)).save(flat, format="PNG")
    writer = TarWriter(out.write)
    writer.add({"__key__": "one", "png": flat.getvalue()})
    writer.finish()
    (tmp_path / "x.tar").write_bytes(out.getvalue())
    assert run(["peek", f"{tmp_path}/x.tar", "-o", f"{tmp_path}/s.png"]) == 0
    sheet = np.asarray(image.open(tmp_path / "s.png"))
    red_rows = np.flatnonzero((sheet == (255, 0, 0)).all(axis=2).any(axis=1))
    text_rows = np.flatnonzero((sheet.max(axis=2) < 128).any(axis=1))
    assert 0 < text_rows[0] - red_rows[-1] < 10


def test_what_cannot_be(shard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown kinds of sheets, sheets without images, and too many samples are errors of one line."""
    assert run(["peek", str(shard), "-o", "s.gif"]) == 2
    assert "must end with .png or .html" in capsys.readouterr().err
    assert run(["peek", str(shard), "-n", "0"]) == 2
    assert "must be a whole number in" in capsys.readouterr().err
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    assert run(["peek", f"{tmp_path}/x.jsonl", "-o", f"{tmp_path}/s.png"]) == 2
    assert "has an image" in capsys.readouterr().err


def test_a_plan_shows_what_the_samples_consist_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fields with counts, classes, empty files, and how differently named pictures become one field; as text and JSON."""
    for number, name in enumerate(["cat/0.jpg", "cat/1.JPEG", "dog/2.jpg", "dog/3.jpeg"]):
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(9) if number else b"")
    plan = ["pack", f"{tmp_path}/files", f"{tmp_path}/out", "--labels", "folders", "--dry-run"]
    assert run(plan) == 0
    said = capsys.readouterr().err
    for words in (
        "fields: cls, jpg 2, jpeg 2",
        "2 classes: 0 cat, 1 dog",
        "empty files: 1, cat/0.jpg",
        'each sample has one of jpg, jpeg: --fields "jpg;jpeg" makes them one field',
    ):
        assert words in said
    assert run([*plan, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["fields"] == {"cls": 4, "jpg": 2, "jpeg": 2}
    assert (summary["empty"], summary["classes"]) == (["cat/0.jpg"], ["cat", "dog"])
    assert run([*plan[:-1], "--fields", "jpg;jpeg"]) == 0
    capsys.readouterr()
    assert run(["peek", f"{tmp_path}/out/"]) == 0
    assert "2 classes: 0 cat, 1 dog" in capsys.readouterr().out
    assert run(["info", f"{tmp_path}/out/", "--seconds", "0.01"]) == 0
    assert "cat, dog" in capsys.readouterr().out
    assert run(["info", f"{tmp_path}/out/", "--seconds", "0.01", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == {"classes": ["cat", "dog"]}


def test_single_objects_are_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where there are no shards, an object is shown, or those of a folder; a picture by its size and kind."""
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (64, 48)).save(tmp_path / "cat.jpg")
    (tmp_path / "note.txt").write_text("a cat")
    for url, count in ((f"{tmp_path}/cat.jpg", 1), (f"{tmp_path}/", 2)):
        assert run(["peek", "--json", url]) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert found[0]["fields"]["jpg"]["value"] == "64 x 48 RGB"
        assert len(found) == count
    assert found[1]["fields"]["txt"]["value"] == "a cat"
    assert run(["peek", f"{tmp_path}/none.jpg"]) == 1
