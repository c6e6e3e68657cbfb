"""Packing from S3 to S3: killed, interrupted, refused and in bad weather, it ends with the same bytes."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock as ps
from connecting import connection_to
from penstock.errors import AccessDeniedError
from penstock.formats import feed_in_pieces, parser_of
from penstock.pack import convert, pack, verify

if TYPE_CHECKING:
    from servers.faulty import FaultyServer

pytestmark = pytest.mark.server

COMMAND = [sys.executable, "-c", "from penstock.cli import main; main()"]
SAMPLES = 60
SHARDS = 12


def fill(server: FaultyServer) -> None:
    """60 samples of two files each; 12 shards of 5 samples."""
    for number in range(SAMPLES):
        server.objects[f"src/{number:03d}.bin"] = bytes([number]) * (700 + 13 * number)
        server.objects[f"src/{number:03d}.cls"] = b"%d" % number


def command(server: FaultyServer, *options: str) -> list[str]:
    urls = [f"{server.url}/src/", f"{server.url}/dst/"]
    where = ["--endpoint-url", server.endpoint_url, "--anonymous"]
    return [*COMMAND, "pack", *urls, "--shard-samples", "5", "--jobs", "3", *where, *options]


def shards(server: FaultyServer) -> dict[str, bytes]:
    """What is visible, but for the index and plans."""
    return {
        key: bytes(data)
        for key, data in dict(server.objects).items()
        if key.startswith("dst/") and "/.penstock/" not in key
    }


def written(server: FaultyServer, since: int = 0) -> list[str]:
    """Keys of the shards that were stored since then."""
    found = []
    for request in server.requests[since:]:
        key = request.path.partition("/bucket/")[2].partition("?")[0]
        if request.method == "PUT" and key.startswith("dst/shard"):
            found.append(key)
    return found


@pytest.fixture
def whole(faulty: FaultyServer) -> dict[str, bytes]:
    """What an uninterrupted run gives; the destination is empty again."""
    fill(faulty)
    subprocess.run(command(faulty), check=True, capture_output=True, timeout=60)
    found = shards(faulty)
    assert len(found) == SHARDS
    for key in [key for key in faulty.objects if key.startswith("dst/")]:
        del faulty.objects[key]
    return found


def test_killed_at_any_request_it_ends_with_the_same_bytes(faulty: FaultyServer, whole: dict[str, bytes]) -> None:
    """kill -9 after so many requests, again and again: what is visible is whole, what is finished is not redone."""
    for further in (3, 45, 60):
        begin = len(faulty.requests)
        finished = {key.partition("shards/")[2] for key in faulty.objects if key.endswith(".tar.index")}
        child = subprocess.Popen(command(faulty), stderr=subprocess.PIPE)
        while child.poll() is None and len(faulty.requests) < begin + further:
            pass
        child.kill()
        child.communicate()
        assert shards(faulty).items() <= whole.items()
        assert not {f"{key.removeprefix('dst/')}.index" for key in written(faulty, begin)} & finished
    begin = len(faulty.requests)
    ended = subprocess.run(command(faulty, "--verify"), capture_output=True, timeout=60, text=True)
    assert ended.returncode == 0, ended.stderr
    assert f"{SAMPLES} samples in {SHARDS} shards" in ended.stderr
    assert shards(faulty) == whole
    before = len(faulty.requests)
    subprocess.run(command(faulty), check=True, capture_output=True, timeout=60)
    assert written(faulty, before) == []


def _packed(server: FaultyServer, **options: Any) -> None:
    pack(f"{server.url}/src/", f"{server.url}/dst/", samples_max=2, jobs=2, **options)


def _recut(server: FaultyServer, **options: Any) -> None:
    convert(f"{server.url}/tars/", f"{server.url}/dst/", to="tar", bytes_max=9_000, jobs=2, **options)


def _converted(server: FaultyServer, **options: Any) -> None:
    convert(f"{server.url}/tars/", f"{server.url}/dst/", to="mds.zst", allow_loss=True, jobs=2, **options)


@pytest.mark.parametrize("make", [_packed, partial(_packed, format="mds", allow_loss=True), _recut, _converted])
def test_cut_off_at_every_request_it_ends_with_the_same_bytes(faulty: FaultyServer, make: Callable[..., None]) -> None:
    """The store hears nothing after the first request, the second, ...: what a killed run leaves, the next one completes."""
    options = {"endpoint_url": faulty.endpoint_url, "anonymous": True}
    for number in range(6):
        faulty.objects[f"src/{number:03d}.bin"] = bytes([number]) * (900 + 13 * number)
    pack(f"{faulty.url}/src/", f"{faulty.url}/tars/", samples_max=3, **options)
    begin = len(faulty.requests)
    make(faulty, **options)
    requests_count = len(faulty.requests) - begin
    whole = shards(faulty)
    assert len(whole) >= 2
    for passed in range(requests_count):
        for key in [key for key in faulty.objects if key.startswith("dst/")]:
            del faulty.objects[key]
        counter = itertools.count()
        faulty.fail("403", times=None, match=lambda _, passed=passed, counter=counter: next(counter) >= passed)
        with contextlib.suppress(AccessDeniedError):  # the last requests only tidy up
            make(faulty, **options)
        faulty.heal()
        assert shards(faulty).items() <= whole.items()
        make(faulty, **options)
        assert shards(faulty) == whole


def test_parts_of_a_killed_run_are_dropped(faulty: FaultyServer) -> None:
    """Killed between the last part and the commit, its upload is dropped by the next run, and nobody else's is."""
    for number in range(3):
        faulty.objects[f"src/{number}.bin"] = bytes([number]) * 4_000_000
    where = ["--endpoint-url", faulty.endpoint_url, "--anonymous"]
    words = [*COMMAND, "pack", f"{faulty.url}/src/", f"{faulty.url}/dst/", *where]
    with ps.connect(faulty.url, endpoint_url=faulty.endpoint_url, anonymous=True) as store:
        foreign = store.writer("dst/shard-000000.tar", part_bytes=5 << 20)
        foreign.write(bytes(6 << 20))
        faulty.fail(
            "stall_head",
            times=None,
            seconds=60,
            match=lambda request: request.method == "POST" and "uploadId" in request.path,
        )
        begin = len(faulty.requests)
        child = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        while child.poll() is None and not any(
            request.method == "POST" and "uploadId" in request.path for request in faulty.requests[begin:]
        ):
            pass
        child.kill()
        child.wait()
        faulty.heal()
        assert len(faulty.uploads) == 2
        subprocess.run(words, check=True, capture_output=True, timeout=60)
        assert list(faulty.uploads) == [foreign.upload_id]
        assert len(faulty.objects["dst/shard-000000.tar"]) > 12_000_000
        assert not [key for key in faulty.objects if "/uploads/" in key]
        foreign.abort()


def test_ctrl_c_leaves_nothing_half_done(faulty: FaultyServer, whole: dict[str, bytes]) -> None:
    """SIGINT ends it with 130 and no traceback; no upload stays open, and the next run ends with the same bytes."""
    begin = len(faulty.requests)
    child = subprocess.Popen(command(faulty), stderr=subprocess.PIPE, text=True)
    while child.poll() is None and not written(faulty, begin):
        pass
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=20)
    assert child.returncode == 130, errors
    assert "Traceback" not in errors
    assert not faulty.uploads
    assert shards(faulty).items() <= whole.items()
    subprocess.run(command(faulty), check=True, capture_output=True, timeout=60)
    assert shards(faulty) == whole


def test_permission_lost_half_way(faulty: FaultyServer, whole: dict[str, bytes]) -> None:
    """A refused write ends it with one line that names the shard; granted again, it goes on from there."""
    faulty.fail("403", times=None, match=lambda request: request.method == "PUT" and "shard-000007" in request.path)
    ended = subprocess.run(command(faulty), capture_output=True, timeout=60, text=True)
    assert ended.returncode == 1
    assert "shard-000007.tar" in ended.stderr
    assert len(ended.stderr.splitlines()) <= 2
    assert shards(faulty).items() <= whole.items()
    finished = {key for key in faulty.objects if key.endswith(".tar.index")}
    faulty.heal()
    begin = len(faulty.requests)
    subprocess.run(command(faulty), check=True, capture_output=True, timeout=60)
    assert shards(faulty) == whole
    assert len(written(faulty, begin)) == SHARDS - len(finished)


def test_a_file_that_may_not_be_read(faulty: FaultyServer) -> None:
    """It is named, with the store's reason; the shards that are visible are whole."""
    fill(faulty)
    faulty.fail("403", times=None, match=lambda request: request.method == "GET" and "src/031.bin" in request.path)
    with pytest.raises(AccessDeniedError, match=r"src/031\.bin"):
        pack(
            f"{faulty.url}/src/", f"{faulty.url}/dst/", samples_max=5, endpoint_url=faulty.endpoint_url, anonymous=True
        )
    for key, data in shards(faulty).items():
        parser = parser_of("tar", shard=key)
        assert sum(len(piece) for piece in feed_in_pieces(parser, data)) + len(parser.finish()) == 5


def test_bad_weather_changes_nothing(faulty: FaultyServer, whole: dict[str, bytes]) -> None:
    """With one request in ten failing, by status or by a broken connection, the shards have the same bytes."""
    faulty.random_faults(["503", "500", "close", "reset"], ratio=0.1, seed=4)
    packed = pack(
        f"{faulty.url}/src/", f"{faulty.url}/dst/", samples_max=5, endpoint_url=faulty.endpoint_url, anonymous=True
    )
    assert packed.samples_count == SAMPLES
    assert shards(faulty) == whole


def test_a_source_says_how_it_is_reached(faulty: FaultyServer, tmp_path: Path) -> None:
    """From a store with settings of its own into a directory, interrupted and resumed."""
    fill(faulty)
    source = ps.objects(f"{faulty.url}/src/", endpoint_url=faulty.endpoint_url, anonymous=True)
    fault = faulty.fail("403", times=None, match=lambda request: "src/031.bin" in request.path)
    with pytest.raises(AccessDeniedError):
        pack(source, tmp_path / "out", samples_max=5, jobs=1)
    assert fault.times is None
    faulty.heal()
    packed = pack(source, tmp_path / "out", samples_max=5)
    assert (packed.samples_count, packed.shards_written) == (SAMPLES, SHARDS - 6)
    tars = ps.shards(f"{tmp_path}/out/")
    assert convert(tars, f"memory://{tmp_path.name}", to="tfrecord", allow_loss=True).samples_count == SAMPLES


def test_on_a_real_store(bucket: str, s3_endpoint: Any, connect_s3: Callable[..., Any]) -> None:
    """Packed, verified, converted and read by a loader with its index, on a real S3."""
    store = connect_s3(f"s3://{bucket}")
    for number in range(20):
        store.write(f"src/{number:03d}.txt", b"text %d" % number)
    options = connection_to(s3_endpoint)
    packed = pack(f"s3://{bucket}/src/", f"s3://{bucket}/dst/t-%06d.tar", samples_max=6, verify=True, **options)
    assert [row.key for row in packed.rows] == [f"t-{number:06d}.tar" for number in range(4)]
    again = pack(f"s3://{bucket}/src/", f"s3://{bucket}/dst/t-%06d.tar", samples_max=6, **options)
    assert again.shards_written == 0
    assert verify(f"s3://{bucket}/dst/", **options).samples_count == 20
    convert(f"s3://{bucket}/dst/", f"s3://{bucket}/records/", to="tfrecord", allow_loss=True, verify=True, **options)
    for folder in ("dst", "records"):
        pipeline = ps.shards(f"s3://{bucket}/{folder}/", **options).decode(ps.Text("txt")).select(["txt"]).batch(5)
        with ps.Loader(pipeline, index="require") as loader:
            assert [text for batch in loader for text in batch["txt"]] == [f"text {number}" for number in range(20)]


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Packing 240 MB in a process with a budget of 96 MiB takes 187 to 207 MiB, of which 70 are interpreter and libraries.

    Held in memory, the data alone would make it 300.
    """
    (tmp_path / "src").mkdir()
    for number in range(30):
        with (tmp_path / f"src/{number:02d}.bin").open("wb") as file:
            file.truncate(8_000_000)
    script = (
        "import re, sys; from penstock.cli.app import run; code = run(sys.argv[1:]);"  # ru_maxrss would count the parent's, too
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) * 1024); sys.exit(code)"
    )
    arguments = ["pack", f"{tmp_path}/src/", f"{tmp_path}/dst/", "--shard-size", "100MB", "--memory", "96MiB"]
    ended = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, timeout=100, text=True)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < (96 + 140) * 2**20
