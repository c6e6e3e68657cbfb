"""What a script prints when something fails: the user's file and line, a few lines in all, and no frame of penstock."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import penstock

SCRIPT = """
import sys
import penstock as ps

def broken(*_):
    raise KeyError("labl")                  # the line that is to be named

def batches(pipeline, **options):
    with ps.Loader(pipeline.batch(4) if options.pop("is_batched", True) else pipeline, **options) as loader:
        for batch in loader:
            pass

def every(iterable):
    for _ in iterable:
        pass

def torch_loader(dataset, **options):
    import torch.utils.data
    every(torch.utils.data.DataLoader(dataset, **options))

def items():
    yield {"cls": b"1"}
    broken()

def pack(source, **options):
    import penstock.pack
    penstock.pack(source, "packed/", **options)

shards = ps.shards("data/")
CASES = {
    "map": lambda: batches(shards.map(broken)),
    "map in processes": lambda: batches(shards.map(broken), processes=1),
    "filter": lambda: batches(shards.filter(broken)),
    "flat_map": lambda: batches(shards.flat_map(broken)),
    "Function": lambda: batches(shards.decode(ps.Function("cls", broken))),
    "read=, streamed": lambda: batches(ps.objects(["a", "b"], read=broken)),
    "read=, by number": lambda: ps.objects(["a", "b"], read=broken).open()[0],
    "collate": lambda: batches(shards.batch(4, collate=broken), is_batched=False),
    "batch_by_size": lambda: batches(shards.batch_by_size(100, size=broken), is_batched=False),
    "on_epoch": lambda: batches(shards, on_epoch=broken),
    "by number": lambda: shards.map(broken).open()[3],
    "samples in order": lambda: every(shards.map(broken).open()),
    "torch": lambda: every(ps.torch.IterableDataset(shards.map(broken).batch(4))),
    "torch, workers": lambda: torch_loader(
        ps.torch.IterableDataset(shards.map(broken).batch(4)), batch_size=None, num_workers=1
    ),
    "torch, by number, workers": lambda: torch_loader(
        ps.torch.MapDataset(shards.map(broken), index="auto"), batch_size=4, num_workers=1
    ),
    "transform": lambda: pack("files/", transform=broken),
    "items": lambda: pack(items()),
    "requests": lambda: every(ps.connect("data/").read_many(broken() for _ in range(2))),
}
# what fails is not the user's function
MISSING = {
    "loader": lambda: batches(ps.shards("nothing/")),
    "by number": lambda: ps.objects("nothing/").open(),
    "no such sample": lambda: ps.objects("data/").decode(ps.Image("jpg")).open()[0],
    "read": lambda: ps.connect("data/").read("nothing"),
    "read_many": lambda: every(ps.connect("data/").read_many(["nothing"])),
    "read_parts": lambda: every(ps.connect("data/").read_parts(["nothing"])),
    "list": lambda: every(ps.connect("nothing/").list()),
    "stat": lambda: ps.connect("data/").stat("nothing"),
    "open": lambda: ps.open("data/nothing"),
    "explain": lambda: ps.explain(ps.shards("nothing/").batch(2)),
    "peek": lambda: ps.peek(ps.shards("nothing/")),
    "build_index": lambda: ps.build_index(ps.shards("nothing/")),
    "pack": lambda: pack("nothing/"),
    "argument": lambda: ps.shards("data/").batch(0),
    "corrupt": lambda: batches(ps.shards("corrupt/")),
    "corrupt in processes": lambda: batches(ps.shards("corrupt/"), processes=1),
    "field": lambda: batches(shards.decode(ps.Image("cls"))),
}

if __name__ == "__main__":
    kind, name = sys.argv[1:]
    {"CASES": CASES, "MISSING": MISSING}[kind][name]()
"""
LINE = 1 + next(number for number, line in enumerate(SCRIPT.splitlines()) if "to be named" in line)
LINES_MAX = 15
FUNCTION_LINES_MAX = 22
"""Where a user's function failed: its frames, and those of the script, of which the table of cases adds five lines."""
TORCH_LINES_MAX = 45
"""Where a DataLoader's worker sends the error: PyTorch prints its own frames, of both processes."""


def names_of(kind: str) -> list[str]:
    table = SCRIPT.partition(f"{kind} = {{")[2].partition("\n}")[0]
    return [line.split('"')[1] for line in table.splitlines() if line.startswith('    "')]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tracebacks")
    (folder / "data").mkdir()
    with tarfile.open(folder / "data" / "a.tar", "w") as tar:
        for number in range(8):
            member = tarfile.TarInfo(f"{number:03d}.cls")
            member.size = 1
            tar.addfile(member, io.BytesIO(b"1"))
    (folder / "files").mkdir()
    (folder / "files" / "000.cls").write_bytes(b"1")
    (folder / "corrupt").mkdir()
    (folder / "corrupt" / "a.tar").write_bytes(b"\1" * 4096)
    (folder / "train.py").write_text(SCRIPT)
    return folder


def said(place: Path, kind: str, name: str, **environment: str) -> str:
    """What a script that fails in this way prints on standard error."""
    kept = {key: value for key, value in os.environ.items() if key != "PENSTOCK_TRACEBACK"}
    done = subprocess.run(
        [sys.executable, "train.py", kind, name],
        cwd=place,
        env=kept | {"XDG_CACHE_HOME": str(place / "cache")} | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr


PACKAGE = str(Path(penstock.__file__).parent)


@pytest.mark.parametrize("name", names_of("CASES"))
def test_a_users_function_that_fails_is_shown_and_named(place: Path, name: str) -> None:
    """The user's function, file and line and its error are said in a few lines, without a frame of penstock."""
    text = said(place, "CASES", name)
    assert PACKAGE not in text
    assert f'train.py", line {LINE}, in broken' in text
    assert "KeyError: 'labl'" in text
    if name not in ("on_epoch", "items", "requests"):  # where the user's own exception goes on as it is
        assert f"broken failed at train.py:{LINE}: KeyError: 'labl'" in text
    assert len(text.splitlines()) <= (TORCH_LINES_MAX if "workers" in name else FUNCTION_LINES_MAX), text


@pytest.mark.parametrize("name", names_of("MISSING"))
def test_an_error_of_penstock_is_shown_where_the_user_met_it(place: Path, name: str) -> None:
    """An error that no user's function raised shows the script's frames alone."""
    text = said(place, "MISSING", name)
    assert PACKAGE not in text
    assert 'train.py", line ' in text
    assert "penstock.errors." in text
    assert len(text.splitlines()) <= LINES_MAX, text


@pytest.mark.parametrize("name", ["map", "map in processes", "torch", "by number"])
def test_the_environment_asks_for_every_frame(place: Path, name: str) -> None:
    """With PENSTOCK_TRACEBACK=full the frames of the package and the whole chain of causes are printed."""
    text = said(place, "CASES", name, PENSTOCK_TRACEBACK="full")
    assert f"{PACKAGE}/samples/transform.py" in text
    assert "direct cause" in text
