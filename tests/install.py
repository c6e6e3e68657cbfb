"""Installs the built wheel as a user would, in clean environments: without extras, then with each extra on top of that.

Run it as ``python tests/install.py dist/penstock_data-0.1.0-py3-none-any.whl``, or by ``make package``. In each environment a
small program uses what was installed. ``--only torch,crt`` chooses extras.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"  # the CPU build, before the extra could ask for a larger one

SHARDS = """
import pathlib
import penstock as ps
pathlib.Path("files").mkdir()
for number in range(8):
    pathlib.Path(f"files/{number}.cls").write_text(str(number))
ps.pack("files/", "shards/", samples_max=4)
pipeline = ps.shards("shards/").decode(ps.Integer("cls"))
"""
USES = {
    "": """
from pathlib import Path
import penstock as ps
with ps.connect("store/") as store:
    store.write("a", b"0123456789")
    assert bytes(store.read("a", ps.ByteRange(2, 4)).data) == b"23"
    assert [bytes(blob.data) for blob in store.read_many(["a", "a"])] == [b"0123456789"] * 2
""" + SHARDS + """
with ps.Loader(pipeline.shuffle().batch(4)) as loader:
    assert sorted(label for batch in loader for label in batch["cls"].tolist()) == list(range(8))
""",
    "torch": SHARDS + """
import torch
with ps.Loader(pipeline.batch(4)) as loader:
    assert [batch["cls"].tolist() for batch in ps.torch.Tensors(loader)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
assert isinstance(ps.torch.MapDataset(ps.shards("shards/")), torch.utils.data.Dataset)
""",
    "image": """
import io, pathlib
import PIL.Image
import penstock as ps
pathlib.Path("files").mkdir()
for number in range(4):
    PIL.Image.new("RGB", (40, 30), (255, 0, 0)).save(f"files/{number}.jpg")
ps.pack("files/", "shards/")
with ps.Loader(ps.shards("shards/").decode(ps.Image("jpg", height=16, width=16)).batch(4)) as loader:
    (batch,) = loader
assert batch["jpg"].shape == (4, 16, 16, 3) and batch["jpg"][..., 0].min() > 250
""",
    "processes": SHARDS + """
with ps.Loader(pipeline.map(lambda sample: {"cls": sample["cls"]}).batch(4), processes=1) as loader:
    assert [batch["cls"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
""",
    "audio": """
import io, pathlib
import numpy as np
import soundfile
import penstock as ps
pathlib.Path("files").mkdir()
soundfile.write("files/0.wav", np.zeros(800, np.float32), 8000)
(sample,) = ps.peek(ps.objects("files/").decode(ps.Audio("wav")), 1)
with ps.Loader(ps.objects("files/").decode(ps.Audio("wav")).batch(1)) as loader:
    (batch,) = loader
assert 800 in np.shape(batch["wav"])
""",
    "parquet": """
import pyarrow, pyarrow.parquet
import penstock as ps
pyarrow.parquet.write_table(pyarrow.table({"x": [1, 2, 3]}), "a.parquet")
with ps.Loader(ps.shards("a.parquet").decode(ps.Integer("x")).batch(3)) as loader:
    assert [batch["x"].tolist() for batch in loader] == [[1, 2, 3]]
""",
    "zstd": SHARDS + """
ps.pack("files/", "packed/", format="tar.zst")
with ps.Loader(ps.shards("packed/").decode(ps.Integer("cls")).batch(8)) as loader:
    assert [batch["cls"].tolist() for batch in loader] == [list(range(8))]
""",
    "fsspec": """
import penstock as ps
with ps.connect("local://store/") as store:
    store.write("a", b"hello")
    assert bytes(store.read("a").data) == b"hello"
""",
    "ray": SHARDS + """
import subprocess, sys
import ray
command = [sys.executable, "-m", "penstock", "pack", "files/", "packed/", "--executor", "ray", "--dry-run"]
subprocess.run(command, check=True)  # the plan alone: tests/doors/ray packs on a cluster
""",
    "gateway": """
import gzip, pathlib, re, subprocess, sys
import penstock as ps
pathlib.Path("store").mkdir()
pathlib.Path("store/a.gz").write_bytes(gzip.compress(b"hello"))
command = [sys.executable, "-m", "penstock", "gateway", "--upstream", "store", "--port", "0", "--cache", "cache:100MB"]
with subprocess.Popen([*command, "--transform", "gunzip"], stderr=subprocess.PIPE, text=True) as gateway:
    url = re.search("at (http://[0-9.:]+)", gateway.stderr.readline())[1]
    with ps.connect("s3://store", endpoint_url=url, anonymous=True) as store:
        assert bytes(store.read("a.gz").data) == b"hello"
    gateway.terminate()
    gateway.stderr.read()
assert gateway.returncode == 0
""",
    "bench": """
import pathlib, subprocess, sys
command = [sys.executable, "-m", "penstock", "cost", "--objects", "10", "--bytes", "1GB", "--html", "cost.html"]
subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
assert "<svg" in pathlib.Path("cost.html").read_text()
""",
    "crt": """
from awscrt import checksums
import penstock as ps
assert checksums.crc64nvme(b"123456789") == 0xAE8B14860A799888
with ps.connect("store/") as store:
    assert store.write("a", b"hello").size_bytes == 5
""",
}  # fmt: skip


def install(wheel: Path, extra: str, folder: Path, base: Path | None) -> Path:
    """Install the wheel with `extra` in a new environment in `folder`, and return its interpreter.

    What the environment `base` holds is there already: the wheel without extras, which is not installed again for each.
    """
    venv.create(folder, with_pip=base is None)
    python = folder / "bin" / "python"
    if base:
        (packages,) = base.glob("lib/python3*/site-packages")
        (folder / packages.relative_to(base) / "base.pth").write_text(f"{packages}\n")
    wanted = [[TORCH]] if extra == "torch" else []
    wanted.append([f"{wheel}[{extra}]" if extra else str(wheel)])
    for names in wanted:
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *names]
        subprocess.run(command, check=True, timeout=900)
    return python


def try_it(wheel: Path, extra: str, folder: Path, base: Path | None) -> None:
    """Install the wheel with `extra`, and run its program."""
    begun = time.monotonic()
    python = install(wheel, extra, folder, base)
    with tempfile.TemporaryDirectory(prefix="penstock-work-") as work:
        program = [python, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", USES[extra]]
        subprocess.run(program, cwd=work, check=True, timeout=300)
    print(f"penstock-data[{extra}]: installed and used, {time.monotonic() - begun:.0f} s", flush=True)


def main() -> None:
    """Try the wheel without extras, then with each; the first failure ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--only", default=",".join(filter(None, USES)), help="extras, separated by commas")
    arguments = parser.parse_args()
    wheel = arguments.wheel.resolve()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    missing = set(project["optional-dependencies"]) ^ (USES.keys() - {""})
    assert not missing, f"extras without a program, or programs without an extra: {sorted(missing)}"
    held = {"penstock/py.typed", f"penstock_data-{wheel.name.split('-')[1]}.dist-info/licenses/LICENSE"}
    assert held <= set(zipfile.ZipFile(wheel).namelist()), f"the wheel lacks one of {sorted(held)}"
    with tempfile.TemporaryDirectory(prefix="penstock-install-") as name:
        base = Path(name) / "base"
        try_it(wheel, "", base, None)
        command = [base / "bin" / "penstock", "--version"]
        told = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout
        assert wheel.name.split("-")[1] in told, told
        for extra in arguments.only.split(","):
            try_it(wheel, extra, Path(name) / extra, base)
            shutil.rmtree(Path(name) / extra)


if __name__ == "__main__":
    sys.exit(main())
