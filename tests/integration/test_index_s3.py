"""``penstock index`` as a process: on S3, killed, interrupted; and a job that finds what it made."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from indexing import Shard
from penstock.formats import TarWriter
from penstock.index import lookup
from penstock.store import Store

pytestmark = pytest.mark.server


def tar(count: int, size_bytes: int = 3) -> bytes:
    out = io.BytesIO()
    writer = TarWriter(out.write)
    for number in range(count):
        writer.add({"__key__": f"{number:06d}", "bin": bytes([number % 256]) * size_bytes})
    writer.finish()
    return out.getvalue()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from penstock.cli import main; main()", *arguments]


@pytest.fixture
def environment(s3_endpoint: Any, tmp_path: Path) -> dict[str, str]:
    """Of a process that asks the session's S3, with a cache directory of its own."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return {
        **plain,
        **s3_endpoint.environment,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


@pytest.fixture
def penstock(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Runs ``penstock`` to its end."""

    def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(command(*arguments), env=environment, capture_output=True, timeout=60, check=False)

    return run


def summary(output: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def shards(store: Store) -> list[Shard]:
    infos = [info for info in store.list() if info.key.endswith(".tar")]
    return [Shard(store, info.key, store.describe(info.key), info.etag, info.size_bytes) for info in infos]


def test_a_bucket_is_indexed_beside_its_shards(
    penstock: Callable[..., subprocess.CompletedProcess[bytes]],
    bucket: str,
    connect_s3: Callable[..., Store],
    tmp_path: Path,
) -> None:
    """What one host wrote another finds, by the ETags of the listing; a replaced shard is noticed and done anew."""
    store = connect_s3(f"s3://{bucket}/train/")
    for number in range(4):
        store.write(f"{number}.tar", tar(10 + number))
    url = f"s3://{bucket}/train/"
    first = penstock("index", "--beside", "--json", url)
    assert first.returncode == 0, first.stderr
    assert (summary(first.stdout)["read"], summary(first.stdout)["samples"]) == (4, 46)
    found = lookup(shards(store), index_dir=tmp_path / "nothing")
    assert found.is_complete
    assert found.place.url == f"{url}.penstock/"
    store.write("2.tar", tar(99))
    assert [row is None for row in lookup(shards(store), index_dir=tmp_path / "nothing").rows] == [
        False, False, True, False,
    ]  # fmt: skip
    second = summary(penstock("index", "--beside", "--json", f"s3://{bucket}/train/{{0..3}}.tar").stdout)
    assert (second["known"], second["read"], second["samples"]) == (3, 1, 46 - 12 + 99)


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A directory of shards that takes a second to index; one file by many names."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "00.tar").write_bytes(tar(4000))
    for number in range(1, 30):
        (folder / f"{number:02d}.tar").hardlink_to(folder / "00.tar")
    return folder


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_build_that_was_ended_goes_on(
    penstock: Callable[..., subprocess.CompletedProcess[bytes]],
    environment: dict[str, str],
    many: Path,
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    """After some shards, by kill -9 too: what lies there is not done again, and the next run makes it whole."""
    child = subprocess.Popen(
        command("index", "--json", f"{many}/"),
        env=environment | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    seen = [json.loads(child.stdout.readline()) for _ in range(4)]
    assert {line["how"] for line in seen} == {"read"}
    child.send_signal(number)
    rest, errors = child.communicate(timeout=30)
    assert child.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[number], errors
    assert b"Traceback" not in errors
    assert b"summary" not in rest
    written = len(list((tmp_path / "cache").rglob("*.tar.index")))
    if number != signal.SIGKILL:
        assert written >= len(seen) + rest.count(b"\n")
        assert len(list((tmp_path / "cache").rglob("dataset.index"))) == 1
    again = summary(penstock("index", "--json", f"{many}/").stdout)
    assert (again["known"], again["read"]) == (written, 30 - written)
    assert (again["samples"], again["failed"]) == (120_000, 0)
