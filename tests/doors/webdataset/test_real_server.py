"""WebDataset, the command and the pages on a real S3 server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import webdataset as wds

import penstock as ps
import penstock.webdataset
from pages import ROOT, programs_of, write_pictures
from penstock.testing.ministack import Ministack

pytestmark = pytest.mark.server
PAGE = ROOT / "docs/coming-from/webdataset.md"


@pytest.fixture(scope="module")
def environment(ministack: Ministack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user whose ``my-bucket`` holds shards of pictures."""
    ministack.create_bucket("my-bucket")
    folder = tmp_path_factory.mktemp("train")
    write_pictures(folder, samples=40, shards=4, kind="jpg")
    keys = ps.Credentials(access_key=ministack.access_key, secret_key=ministack.secret_key)
    with ps.connect("s3://my-bucket/", endpoint_url=ministack.endpoint_url, credentials=keys) as store:
        for number, path in enumerate(sorted(folder.iterdir())):
            store.write(f"train/train-{number:06d}.tar", path.read_bytes())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **ministack.environment, "PATH": path}


def test_a_pipe(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``pipe:penstock cat`` gives the samples that ``s3://`` gives, and a shard that is missing is WebDataset's error."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    url = "s3://my-bucket/train/train-{000000..000003}.tar"
    direct, piped = (
        [(sample["__key__"], sample["jpg"]) for sample in wds.WebDataset(prefix + url, shardshuffle=False)]
        for prefix in ("", "pipe:penstock cat ")
    )
    assert direct == piped
    assert len(piped) == 40
    with pytest.raises(Exception, match=r"exit 1|empty file"):
        list(wds.WebDataset("pipe:penstock cat s3://my-bucket/train/none.tar", shardshuffle=False))


def test_the_page_runs(environment: dict[str, str], tmp_path: Path) -> None:
    """What the page shows as runnable runs as it is, with the library."""
    programs = programs_of(PAGE, "webdataset")
    assert "import penstock.webdataset" in programs[0]
    for program in programs:
        command = [
            sys.executable,
            "-W",
            "error",
            "-W",
            "ignore::DeprecationWarning",
            "-W",
            "ignore::ResourceWarning",
            "-c",
            program,
        ]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, f"{program}\n{done.stderr[-3000:]}"
