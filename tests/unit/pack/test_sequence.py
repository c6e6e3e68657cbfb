"""Packing samples from Python: ``pack.writer``, iterables and data sets."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import ClosedError, ConfigError, DataError
from penstock.formats import feed_in_pieces, parser_of
from penstock.index import FOLDER
from penstock.pack import pack, verify, writer


def samples_of(folder: Path, format_name: str = "tar") -> list[tuple[str, dict[str, bytes]]]:
    found = []
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        parser = parser_of(format_name, shard=path.name)
        samples = [s for piece in feed_in_pieces(parser, path.read_bytes()) for s in piece] + parser.finish()
        found += [
            (s.key, {n: bytes(v) if v.format == "B" else v.tolist() for n, v in s.fields.items()}) for s in samples
        ]
    return found


def numbered(count: int) -> Iterator[dict]:
    for number in range(count):
        yield {"__key__": f"k{number:04d}", "txt": "x" * 600, "n": number}


def test_a_writer_cuts_by_samples_and_bytes(tmp_path: Path) -> None:
    """Every sample is written once and in order, and no shard exceeds its limits."""
    with writer(tmp_path / "s/x-%06d.tar", samples_max=4) as out:
        for sample in numbered(10):
            out.write(sample)
    assert out.samples_count == 10
    names = sorted(path.name for path in (tmp_path / "s").glob("*.tar"))
    assert names == ["x-000000.tar", "x-000001.tar", "x-000002.tar"]
    assert samples_of(tmp_path / "s") == [(f"k{n:04d}", {"n": str(n).encode(), "txt": b"x" * 600}) for n in range(10)]
    with writer(tmp_path / "b/x-%06d.tar", bytes_max=8_000) as out:
        for sample in numbered(10):
            out.write(sample)
    sizes = [path.stat().st_size for path in (tmp_path / "b").glob("*.tar")]
    assert max(sizes) <= 8_000 < sum(sizes)
    verified = verify(f"{tmp_path}/b/")
    assert (verified.samples_count, verified.problems) == (10, ())


def test_an_exception_drops_the_open_shard(tmp_path: Path) -> None:
    """Complete shards stay, the open one is not visible, and a writer continues with ``append``."""
    out = writer(tmp_path / "x-%06d.tar", samples_max=4)

    def write() -> None:
        with out:
            for sample in numbered(7):
                out.write(sample)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        write()
    assert [path.name for path in tmp_path.glob("*.tar")] == ["x-000000.tar"]
    with pytest.raises(ClosedError):
        out.write(next(numbered(1)))
    with pytest.raises(ConfigError, match="not empty"):
        writer(tmp_path / "x-%06d.tar")
    with writer(tmp_path / "x-%06d.tar", overwrite=True) as out:
        out.write(next(numbered(1)))
    with writer(tmp_path / "x-%06d.tar", append=True) as out:
        out.write({"__key__": "more", "txt": "x"})
    assert [key for key, _ in samples_of(tmp_path)] == ["k0000", "more"]
    assert (tmp_path / FOLDER / "packed.manifest").exists()


def test_values_become_files(tmp_path: Path) -> None:
    """Numbers become digits, dicts JSON, arrays .npy, and images the format of their field's extension."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    with writer(tmp_path / "x-%06d.tar") as out:
        out.write(
            {
                "__key__": "a",
                "cls": 3,
                "score": 0.25,
                "flag": True,
                "json": {"b": [1, None], "a": "ü"},
                "x.npy": pixels,
                "png": pixels,
                "pil.png": image.fromarray(pixels),
                "np": np.int64(7),
                "raw": memoryview(b"abc"),
            }
        )
    ((_, fields),) = samples_of(tmp_path)
    assert (fields["cls"], fields["score"], fields["flag"], fields["np"]) == (b"3", b"0.25", b"1", b"7")
    assert fields["json"] == '{"a":"ü","b":[1,null]}'.encode()
    assert fields["raw"] == b"abc"
    assert np.load(io.BytesIO(fields["x.npy"])).tolist() == pixels.tolist()
    for name in ("png", "pil.png"):
        assert np.asarray(image.open(io.BytesIO(fields[name]))).tolist() == pixels.tolist()


def test_samples_that_cannot_be(tmp_path: Path) -> None:
    """Samples with an invalid key, an unsupported type or too large a size are refused, and writing continues."""
    with writer(tmp_path / "x-%06d.tar", bytes_max=10_000) as out:
        for bad in (
            {"txt": "x"},
            {"__key__": "a.b", "txt": "x"},
            {"__key__": "a", "txt": object()},
            {"__key__": "a", "x.npy": np.array([object()])},
            {"__key__": "a", "UPPER": b""},
            {"__key__": "a"},
            {"__key__": "a", "bin": bytes(20_000)},
        ):
            with pytest.raises(DataError):
                out.write(bad)
        out.write({"__key__": "good", "txt": "x"})
    assert samples_of(tmp_path) == [("good", {"txt": b"x"})]


def test_writers_need_a_pattern(tmp_path: Path) -> None:
    """A URL without a number, or with an unknown format, is refused."""
    with pytest.raises(ConfigError, match="not a pattern"):
        writer(tmp_path / "x.tar")
    with pytest.raises(ConfigError, match="not one of tar"):
        writer(tmp_path / "x-%06d.zip")
    with pytest.raises(ConfigError, match="exactly one number"):
        writer(tmp_path / "x-%06d-%06d.tar")


def test_numbers_stay_numbers_in_tfrecord(tmp_path: Path) -> None:
    """Ints, floats and arrays become lists of the Example; bytes and text become bytes."""
    with writer(tmp_path / "x-%06d.tfrecord") as out:
        out.write({"__key__": "a", "cls": 3, "box": np.array([1.5, 2.5]), "jpg": b"abc", "txt": "ü"})
    ((_, fields),) = samples_of(tmp_path, "tfrecord")
    assert fields == {"cls": [3], "box": [1.5, 2.5], "jpg": b"abc", "txt": "ü".encode()}


def test_an_iterable_is_packed(tmp_path: Path) -> None:
    """Generators of dicts and tuples are packed; ``fields`` names and types positions; keys are numbers."""
    packed = pack(numbered(10), tmp_path / "dicts", samples_max=4, verify=True)
    assert (packed.samples_count, len(packed.rows)) == (10, 3)
    pairs = [(b"\x89PNG", number) for number in range(5)]
    pack(iter(pairs), tmp_path / "tuples", fields="0=png:pixels,1=cls:int")
    assert samples_of(tmp_path / "tuples")[4] == ("000000004", {"cls": b"4", "png": b"\x89PNG"})
    with pytest.raises(DataError, match="neither a mapping nor a tuple"):
        pack(iter([3]), tmp_path / "bad")
    with pytest.raises(DataError, match="two consecutive samples"):
        pack(iter([{"__key__": "a", "x": b""}] * 2), tmp_path / "twice")
    with pytest.raises(ConfigError, match="shuffle="):
        pack(iter(pairs), tmp_path / "shuffled", shuffle=True)


class Data:
    """A data set with ``len`` and ``[]``, which counts its calls."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count = count
        self.fails_at = fails_at
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict:
        if index == self.fails_at:
            raise RuntimeError("no")
        self.asked.append(index)
        return {"txt": f"text {index}"}


def test_a_data_set_goes_on_where_it_was(tmp_path: Path) -> None:
    """A resumed run reads only the first sample of each finished shard, and gives the shards of one run.

    The first sample of all is read once more, to distinguish this data set from another one of the same type and length.
    """
    pack(Data(20), tmp_path / "whole", samples_max=3)
    with pytest.raises(RuntimeError):
        pack(Data(20, fails_at=10), tmp_path / "out", samples_max=3)
    rest = Data(20)
    packed = pack(rest, tmp_path / "out", samples_max=3)
    assert rest.asked == [
        0,
        0,
        3,
        6,
        *range(9, 20),
    ]  # the first of each finished shard is held against what was written
    assert packed.samples_count == 20
    assert samples_of(tmp_path / "out") == samples_of(tmp_path / "whole")


@pytest.mark.parametrize("name", ["mds", "mds.zst", "tfrecord.gz", "parquet", "jsonl.zst"])
def test_a_data_set_of_any_format_goes_on(tmp_path: Path, name: str) -> None:
    """With text, numbers and arrays, the first of them empty, a resumed run gives the bytes of one run."""

    class Arrays(Data):
        def __getitem__(self, index: int) -> dict:
            array = np.arange(index)
            return {**super().__getitem__(index), "cls": index, **({} if name.startswith("jsonl") else {"a": array})}

    def shards(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    pack(Arrays(10), tmp_path / "whole", samples_max=3, format=name)
    with pytest.raises(RuntimeError):
        pack(Arrays(10, fails_at=7), tmp_path / "out", samples_max=3, format=name)
    assert pack(Arrays(10), tmp_path / "out", samples_max=3, format=name).shards_written == 2
    assert shards(tmp_path / "out") == shards(tmp_path / "whole")


def test_an_iterable_is_replayed(tmp_path: Path) -> None:
    """A resumed run takes finished samples again and drops them; an iterable that yields other samples is refused."""

    def failing() -> Iterator[dict]:
        for sample in numbered(10):
            if sample["n"] == 7:
                raise RuntimeError("no")
            yield sample

    class Replayed:
        def __init__(self, first: int, make: type | object) -> None:
            self.first, self.make = first, make

        def __iter__(self) -> Iterator[dict]:
            samples = failing() if self.make == "failing" else numbered(10 + self.first)
            for _ in range(self.first):
                next(samples)
            return samples

    with pytest.raises(RuntimeError):
        pack(Replayed(0, "failing"), tmp_path / "out", samples_max=3)
    assert len(samples_of(tmp_path / "out")) == 6
    with pytest.raises(DataError, match=r"sample 0 of the source is 'k0001', but was 'k0000'"):
        pack(Replayed(1, "good"), tmp_path / "out", samples_max=3)
    packed = pack(Replayed(0, "good"), tmp_path / "out", samples_max=3)
    assert (packed.samples_count, packed.shards_written) == (10, 2)
    assert [key for key, _ in samples_of(tmp_path / "out")] == [f"k{n:04d}" for n in range(10)]


def test_other_samples_are_another_packing(tmp_path: Path) -> None:
    """A list of the same length with another sample is refused, or packed with ``overwrite``."""
    pack([{"x": b"a"}, {"x": b"b"}], tmp_path / "out", samples_max=2)
    with pytest.raises(ConfigError, match="what was packed here has another source"):
        pack([{"x": b"a"}, {"x": b"c"}], tmp_path / "out", samples_max=2)
    pack([{"x": b"a"}, {"x": b"c"}], tmp_path / "out", samples_max=2, overwrite=True)
    assert [fields["x"] for _, fields in samples_of(tmp_path / "out")] == [b"a", b"c"]


def test_an_iterable_that_is_shorter_now(tmp_path: Path) -> None:
    """Fewer samples than were already written are an error, not a loss."""

    class Samples:
        def __init__(self, count: int) -> None:
            self.count = count

        def __iter__(self) -> Iterator[dict]:
            return numbered(self.count)

    pack(Samples(6), tmp_path / "out", samples_max=3)
    with pytest.raises(DataError, match="had more when"):
        pack(Samples(4), tmp_path / "out", samples_max=3)


@pytest.mark.parametrize("name", ["tar", "tar.gz", "tfrecord", "jsonl.gz", "parquet"])
@pytest.mark.parametrize("transform", [None, lambda sample: {"txt": sample["txt"]}], ids=["plain", "transformed"])
def test_an_iterable_of_other_samples_never_counts_as_packed(tmp_path: Path, name: str, transform: object) -> None:
    """In every format, a changed sample is refused or written, never passed over."""

    def samples(text: str) -> Iterator[dict]:
        return ({"txt": text if number == 4 else "x"} for number in range(6))

    pack(samples("x"), tmp_path / "out", samples_max=3, format=name, transform=transform)
    if name in ("tar", "tfrecord"):  # whose index has checksums
        with pytest.raises(DataError, match="sample 4 of the source is '000000004', but had other bytes"):
            pack(samples("y"), tmp_path / "out", samples_max=3, format=name, transform=transform)
        return
    pack(samples("y"), tmp_path / "out", samples_max=3, format=name, transform=transform)
    pack(samples("y"), tmp_path / "new", samples_max=3, format=name, transform=transform)
    shards = [{path.name: path.read_bytes() for path in (tmp_path / to).glob("shard*")} for to in ("out", "new")]
    assert shards[0] == shards[1]


def test_keys_are_wanted_where_they_are_stored(tmp_path: Path) -> None:
    """A format that stores no keys needs none; one that stores them, itself or in a field, does."""
    with writer(tmp_path / "x-%06d.tfrecord") as out:
        out.write({"txt": "a"})
        out.write({"__key__": "k", "txt": "b"})
    assert [fields["txt"] for _, fields in samples_of(tmp_path, "tfrecord")] == [b"a", b"b"]
    for name, options in (("x-%06d.tar", {}), ("x-%06d.tfrecord", {"key_field": "id"})):
        with writer(tmp_path / "other" / name, **options) as out, pytest.raises(DataError, match="no valid key"):
            out.write({"txt": "a"})
