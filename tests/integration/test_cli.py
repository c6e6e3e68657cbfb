"""``penstock`` as a process: against real servers, in bad weather, interrupted, in pipes."""

from __future__ import annotations

import base64
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.store import LocalStore, Store
from servers.faulty import FaultyServer

IS_CEPH = os.environ.get("PENSTOCK_TEST_S3") == "ceph"

pytestmark = pytest.mark.server

MIB = 1 << 20
LARGE = random.Random(0).randbytes(20 * MIB + 7)
ENDS_S_MAX = 10
"""How long a command that was told to end may take on a busy machine; seconds, where deadlines would be 20 and more."""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from penstock.cli import main; main()", *arguments]


def environment(settings: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | {
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        **settings,
    }


@pytest.fixture
def penstock(s3_endpoint: Any) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Runs ``penstock`` against the session's S3."""

    def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[bytes]:
        variables = environment(s3_endpoint.environment | changes)
        return subprocess.run(command(*arguments), env=variables, capture_output=True, timeout=60, check=False)

    return run


@pytest.fixture
def at_faulty(faulty: FaultyServer) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Runs ``penstock`` against the misbehaving server."""

    def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        full = command(*arguments, "--endpoint-url", faulty.endpoint_url, "--anonymous")
        return subprocess.run(full, env=environment({}), capture_output=True, timeout=60, check=False)

    return run


def start_at(faulty: FaultyServer, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    full = command(*arguments, "--endpoint-url", faulty.endpoint_url, "--anonymous")
    return subprocess.Popen(full, env=environment({}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def wait_for(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_s
        time.sleep(0.01)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ── on a real S3 ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_up_list_cat_down(
    penstock: Callable[..., subprocess.CompletedProcess[bytes]], s3_store: Store, bucket: str, tmp_path: Path
) -> None:
    """A tree goes up, is listed, read and comes down bit-exact; runs that repeat it copy nothing."""
    files = {"a": b"a" * 1000, "sub/é + %25": b"odd name", "sub/deep/empty": b"", "large": LARGE}
    for name, data in files.items():
        path = tmp_path / "from" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    up = penstock("cp", str(tmp_path / "from"), f"s3://{bucket}/x/")
    assert (up.returncode, up.stdout) == (0, b""), up.stderr
    assert {info.key: info.size_bytes for info in s3_store.list()} == {f"x/{k}": len(v) for k, v in files.items()}
    listed = penstock("ls", "-r", "--json", f"s3://{bucket}/x/")
    assert [json.loads(line)["key"] for line in listed.stdout.splitlines()] == sorted(f"x/{name}" for name in files)
    assert penstock("cat", f"s3://{bucket}/x/large", f"s3://{bucket}/x/a").stdout == LARGE + files["a"]
    down = penstock("cp", f"s3://{bucket}/x/", str(tmp_path / "to"))
    assert down.returncode == 0, down.stderr
    assert tree(tmp_path / "to") == files
    for arguments in (
        ["cp", "--json", str(tmp_path / "from"), f"s3://{bucket}/x/"],
        ["cp", "--json", f"s3://{bucket}/x/", str(tmp_path / "to")],
    ):
        again = penstock(*arguments)
        assert json.loads(again.stdout.splitlines()[-1])["copied"] == 0


def test_headers_survive_a_directory(
    penstock: Callable[..., subprocess.CompletedProcess[bytes]], s3_client: Any, bucket: str, tmp_path: Path
) -> None:
    """Type, content headers and metadata of objects of any size come back from S3 by way of two directories."""
    described = {"ContentType": "text/x-a", "CacheControl": "no-cache", "Metadata": {"run": "7", "long": "m" * 1500}}
    bodies = {"small": b"a" * 1000, "empty": b"", "large": LARGE}
    for name, data in bodies.items():
        s3_client.put_object(Bucket=bucket, Key=f"x/{name}", Body=data, ChecksumAlgorithm="CRC32", **described)
    s3_client.put_object(Bucket=bucket, Key="x/plain", Body=b"plain")
    for source, target in (
        (f"s3://{bucket}/x/", str(tmp_path / "one")),
        (str(tmp_path / "one"), str(tmp_path / "two")),
        (str(tmp_path / "two"), f"s3://{bucket}/y/"),
    ):
        done = penstock("sync", source, target)
        assert done.returncode == 0, done.stderr
    for name, data in bodies.items():
        found = s3_client.get_object(Bucket=bucket, Key=f"y/{name}")
        assert found["Body"].read() == data
        assert {field: found.get(field) for field in described} == described
    assert s3_client.head_object(Bucket=bucket, Key="y/plain")["Metadata"] == {}
    told = s3_client.head_object(Bucket=bucket, Key="x/small", ChecksumMode="ENABLED").get("ChecksumCRC32")
    expected = base64.b64encode(zlib.crc32(bodies["small"]).to_bytes(4, "big")).decode()
    assert told == (None if IS_CEPH else expected)  # Ceph 16 keeps no checksums
    with LocalStore(tmp_path / "two") as store:
        assert store.stat("small").checksums.get("crc32") == told
    again = penstock("sync", "--json", f"s3://{bucket}/x/", str(tmp_path / "one"))
    assert json.loads(again.stdout.splitlines()[-1])["copied"] == 0


def test_a_key_that_cannot_be_asked_for_stops_no_copy(
    faulty: FaultyServer, at_faulty: Callable[..., subprocess.CompletedProcess[bytes]]
) -> None:
    """Within one store, a key with a ``..`` segment is named as failed; the others are copied, and the exit code says it."""
    for key in ("a/1", "a/../b", "a/x/../y", "a/z"):
        faulty.objects[key] = key.encode()
    copied = at_faulty("cp", "s3://bucket/a/", "s3://bucket/to/")
    assert copied.returncode == 1
    assert b"'a/../b' has a '.' or '..' segment" in copied.stderr
    assert {key: data for key, data in faulty.objects.items() if key.startswith("to/")} == {
        "to/1": b"a/1",
        "to/z": b"a/z",
    }


def test_copy_from_another_store(
    faulty: FaultyServer, at_faulty: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path
) -> None:
    """The source may be another endpoint's, also under the same bucket and key, or a signed URL, which names no file."""
    with FaultyServer({"d/a": b"there", "d/large": LARGE}) as other:
        faulty.objects["d/a"] = b"here, longer"
        copied = at_faulty("cp", "s3://bucket/d/", "s3://bucket/d/", "--source-endpoint-url", other.endpoint_url)
        assert copied.returncode == 0, copied.stderr
        assert (faulty.objects["d/a"], faulty.objects["d/large"]) == (b"there", LARGE)
        signed = f"{other.endpoint_url}/bucket/d/a?X-Amz-Signature=s3cr3t/x"
        down = at_faulty("cp", signed, f"{tmp_path}/")
        missing = at_faulty("cp", signed.replace("/a?", "/b?"), f"{tmp_path}/")
    assert tree(tmp_path) == {"a": b"there"}
    assert (down.returncode, missing.returncode) == (0, 2)
    assert b"s3cr3t" not in down.stderr + missing.stderr


@pytest.mark.parametrize("kind", ["corrupt", "change"])
@pytest.mark.parametrize("key", ["d/a", "d/large"])
def test_what_is_damaged_on_its_way_is_not_copied_to_another_store(
    faulty: FaultyServer, at_faulty: Callable[..., subprocess.CompletedProcess[bytes]], key: str, kind: str
) -> None:
    """Of one part or of many, an object that does not match its checksum, or is replaced meanwhile, is not written."""
    with FaultyServer({"d/a": b"there", "d/b": b"b", "d/large": LARGE}) as other:
        other.fail(kind, times=None, match=lambda request: request.key == key and request.is_read)
        copy = ["cp", "s3://bucket/d/", "s3://bucket/d/", "--source-endpoint-url", other.endpoint_url]
        is_whole = kind == "change" and key == "d/a"  # one answer has one version
        copied = at_faulty(*copy)
        assert copied.returncode == (0 if is_whole else 1)
        assert (key in faulty.objects) is is_whole
        assert faulty.objects["d/b"] == b"b"
        assert faulty.uploads == {}
        other.heal()
        assert at_faulty(*copy).returncode == 0
        assert faulty.objects["d/large"] == other.objects["d/large"]


def test_sync_deletes_nothing_when_the_listing_fails(
    faulty: FaultyServer, at_faulty: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path
) -> None:
    """A source whose listing breaks off, or is refused, leaves every object of the target."""
    faulty.objects["d/a"] = b"a"
    (tmp_path / "extra").write_bytes(b"x")
    faulty.fail("403", times=None, match=lambda request: "list-type" in request.query)
    ended = at_faulty("sync", "--delete", "--allow-empty", "s3://bucket/d/", str(tmp_path))
    assert ended.returncode == 1
    assert tree(tmp_path) == {"extra": b"x"}


@pytest.mark.parametrize("unordered", ["source", "target"])
def test_sync_deletes_nothing_when_a_listing_is_in_no_order(
    faulty: FaultyServer, at_faulty: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path, unordered: str
) -> None:
    """A server that lists in no order ends the command: what the source has too is not deleted from the target."""
    for number in range(40):
        faulty.objects[f"d/{number:02}"] = b"x"
        (tmp_path / f"{number:02}").write_bytes(b"x")
    faulty.fail("reversed_listing", times=None)
    ends = ["s3://bucket/d/", str(tmp_path)]
    ended = at_faulty("sync", "--delete", *(ends if unordered == "source" else reversed(ends)))
    assert (ended.returncode, len(tree(tmp_path)), len(faulty.objects)) == (1, 40, 40)
    assert b"not in the order of its keys" in ended.stderr


@pytest.mark.parametrize("target", ["folder", "bucket"])
def test_sync_deletes_nothing_after_a_listing_that_lacks_keys(
    faulty: FaultyServer, at_faulty: Callable[..., Any], tmp_path: Path, target: str
) -> None:
    """If the source has what its listing lacked, nothing is deleted, and the command fails."""
    faulty.objects["other/extra"] = b"x"
    (tmp_path / "extra").write_bytes(b"x")
    for number in range(40):
        faulty.objects[f"d/{number:02}"] = faulty.objects[f"other/{number:02}"] = b"x"
        (tmp_path / f"{number:02}").write_bytes(b"x")
    faulty.fail("incomplete_listing", match=lambda request: request.query.get("prefix") == "d/", times=None)
    end = str(tmp_path) if target == "folder" else "s3://bucket/other/"
    for options in (["--dry-run"], []):
        ended = at_faulty("sync", "--delete", *options, "s3://bucket/d/", end)
        assert (ended.returncode, len(tree(tmp_path)), len(faulty.objects)) == (1, 41, 81)
        # the first of several that are looked for
        assert re.search(rb"s3://bucket/d/\d\d: the object exists", ended.stderr)
    faulty.heal()
    assert at_faulty("sync", "--delete", "s3://bucket/d/", end).returncode == 0
    assert (len(tree(tmp_path)), len(faulty.objects)) == ((40, 81) if target == "folder" else (41, 80))


def test_sync_knows_its_source_under_other_keys(faulty: FaultyServer) -> None:
    """Nested folders of one bucket are refused, whoever asks for them; those of equal name at two endpoints are not."""
    for key in ("d/a", "d/x/b"):
        faulty.objects[key] = b"x"
    keys = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL": faulty.endpoint_url}
    nested = command("sync", "--delete", "--source-anonymous", "s3://bucket/d/x/", "s3://bucket/d/")
    ended = subprocess.run(nested, env=environment(keys), capture_output=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert b"lies inside the other" in ended.stderr
    assert set(faulty.objects) == {"d/a", "d/x/b"}
    with FaultyServer({"d/c": b"c"}) as other:
        mirror = ["--source-endpoint-url", other.endpoint_url, "--source-anonymous", "s3://bucket/d/", "s3://bucket/d/"]
        ended = subprocess.run(
            command("sync", "--delete", *mirror), env=environment(keys), capture_output=True, timeout=60, check=False
        )
    assert ended.returncode == 0, ended.stderr
    assert dict(faulty.objects) == {"d/c": b"c"}


def test_info_probes_without_secrets(
    penstock: Callable[..., subprocess.CompletedProcess[bytes]], s3_store: Store, s3_endpoint: Any, bucket: str
) -> None:
    """It names endpoint, region, and the credentials' source, times the store, and shows no secret."""
    s3_store.write("small", b"x")
    s3_store.write("big", LARGE[: 2 * MIB])
    shown = penstock("info", f"s3://{bucket}/", "--seconds", "0.3", "--json")
    assert shown.returncode == 0, shown.stderr
    facts = json.loads(shown.stdout)
    assert facts["store"]["credentials"].startswith("environment (permanent, access key ")
    assert facts["store"]["endpoint"].startswith(s3_endpoint.endpoint_url)
    assert facts["probe"]["object"] == f"s3://{bucket}/big"
    assert 0 < facts["probe"]["first_byte_p50_s"] <= facts["probe"]["first_byte_p99_s"]
    assert facts["probe"]["many_connections_bytes_per_s"] > 0
    people = penstock("info", f"s3://{bucket}/small", "--seconds", "0.1")
    for output in (shown.stdout, people.stdout, shown.stderr, people.stderr):
        assert s3_endpoint.secret_key.encode() not in output
        assert s3_endpoint.access_key.encode() not in output


def test_doctor_finds_what_is_wrong(
    penstock: Callable[..., subprocess.CompletedProcess[bytes]], s3_store: Store, s3_endpoint: Any, bucket: str
) -> None:
    """Each check is a line; one that fails has its reason and makes the exit code 1; nothing is stored, no secret shown."""
    s3_store.write("big", LARGE[: 2 * MIB])

    def doctor(*arguments: str, code: int, **changes: str) -> dict[str, dict[str, Any]]:
        done = penstock("doctor", "--json", *arguments, **changes)
        assert done.returncode == code, done.stdout + done.stderr
        assert s3_endpoint.secret_key.encode() not in done.stdout
        return {line["check"]: line for line in map(json.loads, done.stdout.splitlines())}

    sound = doctor("--write", f"s3://{bucket}/", code=0)
    assert [name for name, line in sound.items() if not line["ok"]] == ["tls"]  # skipped: loopback has none
    assert list(sound) == ["credentials", "dns", "tcp", "tls", "clock", "list", "region", "addressing", "read",
                           "throughput", "write"]  # fmt: skip
    assert sound["credentials"]["text"].startswith("environment (permanent, access key ")
    assert sound["addressing"]["text"].startswith("path: ")
    assert [info.key for info in s3_store.list("")] == ["big"]
    empty = doctor("--write", f"s3://{bucket}/new/", code=0)
    assert (empty["read"]["ok"], empty["write"]["ok"]) == (None, True)

    wrong = doctor(f"s3://{bucket}/", code=1, AWS_SECRET_ACCESS_KEY="wrong-secret")
    assert (wrong["tcp"]["ok"], wrong["list"]["ok"], wrong["read"]["ok"]) == (True, False, None)
    assert "SignatureDoesNotMatch" in wrong["list"]["text"]
    assert wrong["list"]["hint"]
    missing = doctor("--write", f"s3://{bucket}-missing/", code=1)
    assert (missing["list"]["ok"], missing["write"]["ok"]) == (False, False)
    assert doctor(f"s3://{bucket}/", code=1, AWS_ENDPOINT_URL="http://127.0.0.1:1")["tcp"]["ok"] is False
    assert doctor(f"s3://{bucket}/", code=1, AWS_ENDPOINT_URL="http://nowhere.invalid")["dns"]["ok"] is False
    assert doctor(f"s3://{bucket}/nothing", code=1)["read"]["ok"] is False
    none = doctor(f"s3://{bucket}/", code=1, AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")
    assert none["credentials"]["hint"]
    people = penstock("doctor", f"s3://{bucket}/", AWS_ENDPOINT_URL="http://127.0.0.1:1")
    assert b"\ntcp         failed: " in people.stdout


def test_doctor_compares_the_clocks(
    faulty: FaultyServer, at_faulty: Callable[..., subprocess.CompletedProcess[bytes]]
) -> None:
    """A machine whose clock is a quarter of an hour off is told so, and what to do."""
    faulty.clock_offset_s = 1000
    done = at_faulty("doctor", faulty.url)
    assert done.returncode == 1
    line = next(each for each in done.stdout.decode().splitlines() if each.startswith("clock"))
    assert re.search(r"failed: this machine is (999|100[0-9]) s behind the store; set this machine's clock", line)


def test_a_program_beside_a_server_of_its_own() -> None:
    """``sandbox`` hides the user's own store from the program, takes its exit code, and passes its options on."""
    script = (
        "import penstock as ps, os, sys\n"
        "with ps.connect('s3://mine') as store:\n"
        "    store.write('key', b'data')\n"
        "    assert [info.key for info in store.list()] == ['key']\n"
        "assert 'AWS_ENDPOINT_URL_S3' not in os.environ\n"
        "print(sys.argv[1:])\n"
        "sys.exit(7)\n"
    )
    full = command("sandbox", "--bucket", "mine", sys.executable, "-c", script, "--bucket", "-v", "--", "x")
    variables = environment({"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1", "HTTP_PROXY": "http://127.0.0.1:1"})
    ended = subprocess.run(full, env=variables, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout == "['--bucket', '-v', '--', 'x']\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 5), (signal.SIGTERM, 143)])
def test_an_interrupted_sandbox_leaves_nothing(number: signal.Signals, code: int) -> None:
    """Ctrl-C is the program's, as the terminal sends it to all; SIGTERM ends the program too; the server is gone."""
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(5))\n"
        "print(os.environ['AWS_ENDPOINT_URL'], flush=True)\n"
        "signal.pause()\n"
    )
    full = command("sandbox", sys.executable, "-c", script)
    with subprocess.Popen(
        full, env=environment({}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().decode().rpartition(":")[2])
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, errors = process.communicate(timeout=30)  # which also waits for the program: it holds the pipe's other end
    assert process.returncode == code, errors
    assert b"Traceback" not in errors
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


# ── in bad weather ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_cp_in_bad_weather(
    faulty: FaultyServer, at_faulty: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path
) -> None:
    """A tenth of all requests fails in some way; everything arrives bit-exact, in both directions."""
    objects = {f"d/{n:03d}": random.Random(n).randbytes(n * 97) for n in range(100)} | {"d/large": LARGE}
    for key, data in objects.items():
        faulty.objects[key] = data
    kinds = ["close", "reset", "reset_head", "close_head", "500", "503", "slow_down"]
    faulty.random_faults(kinds, ratio=0.1, seed=3)
    down = at_faulty("cp", "s3://bucket/d/", str(tmp_path / "to"))
    assert down.returncode == 0, down.stderr
    assert tree(tmp_path / "to") == {key.removeprefix("d/"): data for key, data in objects.items()}
    up = at_faulty("cp", str(tmp_path / "to"), "s3://bucket/up/")
    assert up.returncode == 0, up.stderr
    assert {key: faulty.objects["up/" + key[2:]] for key in objects} == objects
    assert sum(request.fault is not None for request in faulty.requests) > 10


def test_cp_goes_on_after_one_object_failed(
    faulty: FaultyServer, at_faulty: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path
) -> None:
    """An object that may not be read is reported by name; the others are there, and the exit code is 1."""
    for n in range(20):
        faulty.objects[f"{n:02d}"] = b"x" * n
    faulty.fail("403", times=None, match="07")
    ended = at_faulty("cp", "s3://bucket/", str(tmp_path))
    assert ended.returncode == 1
    assert sorted(tree(tmp_path)) == [f"{n:02d}" for n in range(20) if n != 7]
    assert b"s3://bucket/07" in ended.stderr
    assert b"1 failed" in ended.stderr


def test_cat_of_a_body_that_always_breaks(
    faulty: FaultyServer, at_faulty: Callable[..., subprocess.CompletedProcess[bytes]]
) -> None:
    """What is written is a right beginning, and the exit code says that it is not all."""
    faulty.objects["key"] = LARGE
    faulty.fail("403", times=None, match=lambda request: (request.span or (0, 0))[0] >= 16 * MIB)
    ended = at_faulty("cat", "s3://bucket/key")
    assert ended.returncode == 1
    assert LARGE.startswith(ended.stdout)
    assert len(ended.stdout) < len(LARGE)


def test_disk_full(faulty: FaultyServer, at_faulty: Callable[..., subprocess.CompletedProcess[bytes]]) -> None:
    """``cat`` to a full disk ends with the system's word for it."""
    faulty.objects["key"] = LARGE
    full = command("cat", "s3://bucket/key", "--endpoint-url", faulty.endpoint_url, "--anonymous")
    with Path("/dev/full").open("wb") as device:
        ended = subprocess.run(
            full, env=environment({}), stdout=device, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert ended.returncode == 1
    assert ended.stderr == b"penstock: No space left on device\n"


def test_download_larger_than_files_may_be(faulty: FaultyServer, tmp_path: Path) -> None:
    """A file that cannot be written to its end (here: a limit on its size) is an error that leaves nothing."""
    faulty.objects["key"] = LARGE
    full = command("cp", "s3://bucket/key", str(tmp_path), "--endpoint-url", faulty.endpoint_url, "--anonymous")
    limited = ["bash", "-c", 'ulimit -f 4096; exec "$@"', "bash", *full]  # KiB
    ended = subprocess.run(limited, env=environment({}), capture_output=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"{tmp_path}/key: File too large".encode() in ended.stderr
    assert tree(tmp_path) == {}


# ── ends ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_download_leaves_nothing_half_done(
    faulty: FaultyServer, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Ctrl-C during a body that stalls: prompt, exit code 130, complete files stay, no partial one does."""
    faulty.objects["a"] = b"first"
    faulty.objects["b"] = LARGE
    faulty.fail(
        "stall", times=None, match=lambda request: request.key == "b" and (request.span or (1, 1))[0] >= 16 * MIB
    )
    with start_at(faulty, "cp", "s3://bucket/", str(tmp_path / "to")) as process:
        wait_for(lambda: len(list((tmp_path / "to").glob("*"))) >= 2 or (tmp_path / "to/a").exists(), process)
        wait_for(lambda: any(request.fault for request in faulty.requests), process)
        start_s = time.monotonic()
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - start_s < ENDS_S_MAX
    assert process.returncode == code
    assert b"Traceback" not in errors
    assert tree(tmp_path / "to") == {"a": b"first"}


def test_interrupted_upload_leaves_no_parts(faulty: FaultyServer, tmp_path: Path) -> None:
    """Ctrl-C during a multipart upload aborts it: neither an object nor parts remain at the store."""
    (tmp_path / "large").write_bytes(LARGE * 3)
    faulty.fail("delay", times=None, seconds=5, match=lambda request: request.query.get("partNumber") == "2")
    with start_at(faulty, "cp", str(tmp_path / "large"), "s3://bucket/key") as process:
        wait_for(lambda: any(request.fault for request in faulty.requests), process)
        start_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - start_s < ENDS_S_MAX
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert "key" not in faulty.objects
    assert not faulty.uploads


def test_killed_download_is_redone(
    faulty: FaultyServer, at_faulty: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path
) -> None:
    """After kill -9 no target is half there, and the next run finishes and leaves no temporary file."""
    faulty.objects["key"] = LARGE
    fault = faulty.fail("stall", times=None, match=lambda request: (request.span or (0, 0))[0] >= 16 * MIB)
    with start_at(faulty, "cp", "s3://bucket/key", str(tmp_path)) as process:
        wait_for(lambda: any(tmp_path.iterdir()), process)
        process.kill()
    assert not (tmp_path / "key").exists()
    assert any(tmp_path.iterdir())
    fault.times = 0
    assert at_faulty("cp", "s3://bucket/key", str(tmp_path)).returncode == 0
    assert tree(tmp_path) == {"key": LARGE}


def test_closed_pipe_ends_it_silently(faulty: FaultyServer) -> None:
    """``penstock cat | head -c 1``: it ends by SIGPIPE, as cat does, and says nothing."""
    faulty.objects["key"] = LARGE
    with start_at(faulty, "cat", "s3://bucket/key") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) == LARGE[:1]
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == -signal.SIGPIPE


@pytest.mark.parametrize(
    "arguments", [["rm", "-r", "s3://bucket/d/"], ["sync", "--delete", "{folder}", "s3://bucket/d/"]]
)
def test_interrupted_deletion(faulty: FaultyServer, tmp_path: Path, arguments: list[str]) -> None:
    """Ctrl-C while the store does not answer to a deletion: prompt, 130, no traceback."""
    (tmp_path / "kept").write_bytes(b"x")
    for name in ("a", "b"):
        faulty.objects[f"d/{name}"] = b"x"
    faulty.fail("stall_head", times=None, match=lambda request: "delete" in request.query)
    with start_at(faulty, *(each.format(folder=tmp_path) for each in arguments)) as process:
        wait_for(lambda: any(request.fault for request in faulty.requests), process)
        start_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - start_s < ENDS_S_MAX
    assert process.returncode == 130
    assert b"Traceback" not in errors


def test_a_bucket_is_made_and_a_url_signed(
    penstock: Callable[..., subprocess.CompletedProcess[bytes]], s3_endpoint: Any, bucket: str
) -> None:
    """``mb`` makes a bucket once; ``presign`` prints a URL with which anybody reads the object, and nobody else's."""
    name = f"{bucket}-made"
    assert penstock("mb", f"s3://{name}").returncode == 0
    assert penstock("ls", f"s3://{name}/").returncode == 0
    elsewhere = penstock("mb", "--region", "eu-west-1", f"s3://{name}-2")
    assert elsewhere.returncode == 0 or (IS_CEPH and b"InvalidLocationConstraint" in elsewhere.stderr), elsewhere.stderr
    assert penstock("mb", f"s3://{bucket}/key").returncode == 2
    s3_endpoint.client().put_object(Bucket=name, Key="a b.txt", Body=b"signed")
    shown = penstock("presign", "--expires", "1min", f"s3://{name}/a b.txt")
    assert shown.returncode == 0, shown.stderr
    with urllib.request.urlopen(shown.stdout.decode().strip(), timeout=10) as answer:
        assert answer.read() == b"signed"
