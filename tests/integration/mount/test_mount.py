"""A mounted bucket and a mounted directory, as programs see them: the real kernel, a real S3 server."""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from connecting import connection_to
from mounting import needs_fuse
from penstock.errors import ConfigError
from penstock.mount.config import MountConfig
from penstock.mount.fuse.watching import find_mount
from penstock.mount.namespace.directories import StoreDirectories
from penstock.mount.namespace.inodes import key_number
from penstock.mount.serving import MountServer
from penstock.store import Store
from servers.faulty import FaultyServer
from servers.leaks import has_ended

pytestmark = [
    pytest.mark.server,
    pytest.mark.heavy,
    needs_fuse,
]

TIME_S_MAX = 30
OBJECTS = {
    "top.txt": b"top",
    "empty": b"",
    "train/0001.bin": os.urandom(100_000),
    "train/0002.bin": os.urandom(5_000_000),
    "train/deep/er/x.txt": b"deep",
    "train/deep/y.txt": b"less deep",
    "name with spaces/\u00e9.txt": "\u00fc".encode(),
    "both": b"a file that a directory hides",
    "both/inside": b"seen",
}
FILES = {key: value for key, value in OBJECTS.items() if key != "both"}
HIDDEN = {"odd//empty": b"1", "odd/" + "n" * 256: b"2"}


def run(*command: str | Path, cwd: Path | None = None, code: int = 0) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=TIME_S_MAX,
        cwd=cwd,
        env=os.environ | {"LC_ALL": "C.UTF-8", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def penstock(*words: str | Path, code: int = 0) -> str:
    return run(sys.executable, "-m", "penstock", *words, code=code)


@pytest.fixture(params=["s3", "directory"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A mount of ``FILES``: of a bucket, with keys that no path can express, and of a local directory."""
    directory = tmp_path / "mounted"
    directory.mkdir()
    if request.param == "s3":
        bucket, endpoint = request.getfixturevalue("bucket"), request.getfixturevalue("s3_endpoint")
        store = request.getfixturevalue("connect_s3")(f"s3://{bucket}")
        for key, value in {**OBJECTS, **HIDDEN}.items():
            store.write(key, value)
        mount = ps.mount(f"s3://{bucket}/", directory, **connection_to(endpoint))
    else:
        for key, value in FILES.items():
            (tmp_path / "source" / key).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "source" / key).write_bytes(value)
        mount = ps.mount(tmp_path / "source", directory)
    with mount:
        yield directory
    assert find_mount(str(directory)) is None


def test_nothing_can_be_written(mounted: Path) -> None:
    """Writing fails with ``EROFS``, and what does not exist with ``ENOENT``, also if only part of a name exists."""
    assert "Read-only file system" in run("touch", mounted / "new", code=1)
    assert "Read-only file system" in run("rm", "-f", mounted / "top.txt", code=1)
    for missing in ("nothing", "train/nothing", "trai", "top.tx"):
        assert "No such file" in run("cat", mounted / missing, code=1)
    assert "Not a directory" in run("cat", mounted / "top.txt/below", code=1)
    assert "File name too long" in run("cat", mounted / ("n" * 256), code=1)


SCRIPT_OF_ATTRIBUTES = """
import os, sys
path = sys.argv[1]
status = os.stat(path)
print(status.st_size, oct(status.st_mode), status.st_uid == os.geteuid(), status.st_nlink, status.st_ino)
print(os.listxattr(path), os.getxattr(path, "user.etag").decode())
"""


def test_attributes_come_from_the_store(mounted: Path) -> None:
    """Size, mode, owner and ETag are known, and the inode number is the same in every mount of the same path."""
    first, second = run(sys.executable, "-c", SCRIPT_OF_ATTRIBUTES, mounted / "train/0001.bin").splitlines()
    assert first.split()[:4] == ["100000", "0o100444", "True", "1"]
    assert second.startswith("['user.etag'] ")
    assert len(second.split()[1]) >= 8


SCRIPT_OF_ONE_VERSION = """
import os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
first = os.pread(descriptor, 4096, 0)
print("ready", flush=True)
sys.stdin.readline()
try:
    rest = os.pread(descriptor, 1 << 20, 20 << 20)
    print("read", len(rest), set(rest) <= {ord("a")}, flush=True)
except OSError as error:
    print(error.errno, flush=True)
print(os.fstat(descriptor).st_size, flush=True)
for _ in range(2):
    try:
        again = open(sys.argv[1], "rb").read()
        break
    except OSError as error:
        assert error.errno == 116, error
print(len(again), set(again) == {ord("b")}, flush=True)
"""


def kernel_at_least(*version: int) -> bool:
    return tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2]) >= version


@pytest.mark.parametrize(
    "metadata_ttl_s",
    [
        0,
        pytest.param(
            "indefinite",
            marks=pytest.mark.skipif(
                not kernel_at_least(6, 16), reason="needs Linux 6.16, which forgets names on request"
            ),
        ),
    ],
)
def test_an_open_file_is_one_version(
    bucket: str, s3_endpoint: Any, connect_s3: Callable[..., Any], tmp_path: Path, metadata_ttl_s: Any
) -> None:
    """If an object is replaced, its open files give old bytes or ``ESTALE``, and opening it again gives the new ones."""
    store = connect_s3(f"s3://{bucket}")
    store.write("big", b"a" * (24 << 20))
    (tmp_path / "m").mkdir()
    with ps.mount(f"s3://{bucket}/", tmp_path / "m", metadata_ttl_s=metadata_ttl_s, **connection_to(s3_endpoint)):
        reader = subprocess.Popen(
            [sys.executable, "-c", SCRIPT_OF_ONE_VERSION, str(tmp_path / "m" / "big")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        store.write("big", b"b" * (25 << 20))
        out, _ = reader.communicate("\n", timeout=TIME_S_MAX)
    first, size, again = out.splitlines()
    assert first in (str(errno.ESTALE), f"read {1 << 20} True")
    assert size == str(24 << 20)
    assert again == f"{25 << 20} True"


TIMES = [
    f"20{year}{month:02d}01{hour:02d}000{hour % 10}" for year in (23, 24) for month in (1, 5, 9) for hour in range(4)
]
DIRECTORIES = ["20240901120005", "20240101120006", "run_8123_0040", "run_0123_0041", *TIMES]
SCRIPT_THAT_WALKS = """
import os, sys
numbers = {}
for root, directories, files in os.walk(sys.argv[1]):
    for name in directories + files:
        path = os.path.join(root, name)
        other = numbers.setdefault(os.stat(path).st_ino, path)
        assert other == path, f"{other} and {path} have the same st_ino"
    for name in files:
        path = os.path.join(root, name)
        assert open(path).read() == os.path.relpath(path, sys.argv[1]), path
print(len(numbers))
"""


@pytest.mark.parametrize("bits", [64, 8])
def test_every_path_has_its_own_files_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Directories show their own files, and each path has an inode number of its own, also if digests are equal.

    This process serves the mount, so that the digest can be cut; others use it.
    """
    kept = 1 << 62 | (1 << bits) - 1
    cut = partial(StoreDirectories, number=lambda key: key_number(key) & kept)
    monkeypatch.setattr("penstock.mount.serving.StoreDirectories", cut)
    keys = [f"{name}/{number}/{name[number]}" for name in DIRECTORIES for number in range(12)]
    keys += [f"{name}/{other}" for name in DIRECTORIES for other in DIRECTORIES]
    (tmp_path / "m").mkdir()
    with FaultyServer({key: key.encode() for key in keys}) as server:
        config = MountConfig(
            url=f"{server.url}/",
            directory=str(tmp_path / "m"),
            connection={"endpoint_url": server.endpoint_url, "anonymous": True},
        )
        with MountServer(config):
            walked = run(sys.executable, "-c", SCRIPT_THAT_WALKS, tmp_path / "m")
            assert int(walked) == len(keys) + len(DIRECTORIES) * 13
            listed = [request for request in server.requests if request.query.get("delimiter")]
            assert len(listed) <= 1 + len(DIRECTORIES) * 13
            run("cp", "-r", tmp_path / "m", tmp_path / "copy")
            run("diff", "-r", tmp_path / "m", tmp_path / "copy")
            one, other = DIRECTORIES[:2]
            differing = run("diff", "-rq", tmp_path / "m" / one, tmp_path / "m" / other, code=1).count(" differ\n")
            assert differing == len(DIRECTORIES) + sum(one[at] == other[at] for at in range(12))


SCRIPT_OF_TWO_VERSIONS = """
import os, sys
def replace():
    print("replace", flush=True)
    sys.stdin.readline()
with open(sys.argv[1], "rb") as file:
    file.read(100_000)
replace()
descriptor = os.open(sys.argv[1], os.O_RDONLY)
first = os.pread(descriptor, 100_000, 0)
replace()
try:
    first += os.pread(descriptor, 100_000, 20 << 20)
except OSError as error:
    print(error.errno, flush=True)
with open(sys.argv[1], "rb") as file:
    print(set(first), set(file.read()), flush=True)
"""


@pytest.mark.parametrize("etags", ["quoted", "none"])
def test_an_open_file_is_one_version_without_etags_in_the_manifest(tmp_path: Path, etags: str) -> None:
    """If a manifest names no version, an open file is that of its first read, whatever pages of others the kernel has."""
    (tmp_path / "m").mkdir()
    lines = [{"penstock_manifest": 1, "base_url": "s3://bucket/"}, {"key": "big", "size_bytes": 24 << 20}]
    with FaultyServer(etags=etags) as server:
        server.objects["manifest.jsonl"] = "\n".join(map(json.dumps, lines)).encode()
        server.objects["big"] = b"a" * (24 << 20)
        options = {"endpoint_url": server.endpoint_url, "anonymous": True}
        with ps.mount("s3://bucket/", tmp_path / "m", manifest="s3://bucket/manifest.jsonl", **options) as mount:
            reader = subprocess.Popen(
                [sys.executable, "-c", SCRIPT_OF_TWO_VERSIONS, str(mount.directory / "big")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert reader.stdin is not None
            assert reader.stdout is not None
            for letter in (b"b", b"c"):
                assert reader.stdout.readline() == "replace\n"
                server.objects["big"] = letter * (24 << 20)
                reader.stdin.write("\n")
                reader.stdin.flush()
            out, _ = reader.communicate(timeout=TIME_S_MAX)
    assert out.splitlines() == [str(errno.ESTALE), "{98} {99}"]


def test_a_single_object_is_not_mounted(tmp_path: Path, s3_endpoint: Any, s3_store: Store, bucket: str) -> None:
    """It would be an empty directory; the message says that it is an object, and names the folder."""
    (tmp_path / "m").mkdir()
    (tmp_path / "file.txt").write_text("contents")
    s3_store.write("train/a.tar", b"x")
    with pytest.raises(ConfigError, match=f"mount s3://{bucket}/train/"):
        ps.mount(f"s3://{bucket}/train/a.tar", tmp_path / "m", **connection_to(s3_endpoint))
    with pytest.raises(ConfigError, match="is an object, and only folders can be mounted"):
        ps.mount(tmp_path / "file.txt", tmp_path / "m")
    said = penstock("mount", tmp_path / "file.txt", tmp_path / "m", code=2)
    assert "is an object" in said
    assert find_mount(str(tmp_path / "m")) is None


def test_the_command_mounts_and_unmounts(tmp_path: Path) -> None:
    """``penstock mount`` returns when the directory can be used; ``penstock umount`` ends the process that serves it."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").write_text("contents")
    directory = tmp_path / "m"
    directory.mkdir()
    said = penstock("mount", tmp_path / "source", directory, "--log-file", tmp_path / "log")
    assert f"is mounted on {directory}; penstock umount {directory} unmounts it" in said
    process_id = int(said.split("process ")[1].split()[0])
    try:
        assert run("cat", directory / "file") == "contents"
        assert "is already a mount of" in penstock("mount", tmp_path / "source", directory, code=2)
    finally:
        penstock("umount", directory)
    assert has_ended(process_id, within_s=TIME_S_MAX)
    assert "was unmounted" in (tmp_path / "log").read_text()
    assert "nothing is mounted" in penstock("umount", directory, code=2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_mount_ends_with_its_process(number: signal.Signals, tmp_path: Path) -> None:
    """SIGTERM, Ctrl-C and SIGKILL leave nothing mounted, and the directory can be mounted on again."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").write_text("contents")
    directory = tmp_path / "m"
    directory.mkdir()
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "mount", tmp_path / "source", directory, "--foreground"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        assert "is mounted on" in process.stderr.readline()
        assert run("cat", directory / "file") == "contents"
        process.send_signal(number)
        process.communicate(timeout=TIME_S_MAX)
        assert process.returncode == (-9 if number == signal.SIGKILL else 0)
    deadline_s = time.monotonic() + TIME_S_MAX
    while find_mount(str(directory)) is not None:
        assert time.monotonic() < deadline_s, "it is still mounted"
        os.sched_yield()


def test_a_process_that_is_told_twice_to_end_still_unmounts(tmp_path: Path) -> None:
    """While open files keep a mount from ending, further signals neither kill its process nor spoil its end."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").write_text("contents")
    directory = tmp_path / "m"
    directory.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "mount", tmp_path / "source", directory, "--foreground"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "is mounted on" in process.stderr.readline()
    with (directory / "file").open() as file:
        process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + TIME_S_MAX
        while find_mount(str(directory)) is not None:
            assert time.monotonic() < deadline_s, "it is still mounted"
            os.sched_yield()
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert file.read() == "contents"
    process.communicate(timeout=TIME_S_MAX)
    assert process.returncode == 0


SCRIPT_THAT_DIES = """
import os, sys
import penstock as ps
mount = ps.mount(sys.argv[1], sys.argv[2])
os.kill(os.getpid(), 9)
"""


def test_a_mount_of_a_program_ends_with_the_program(tmp_path: Path) -> None:
    """``ps.mount`` leaves nothing behind if the program is killed."""
    (tmp_path / "source").mkdir()
    (tmp_path / "m").mkdir()
    run(sys.executable, "-c", SCRIPT_THAT_DIES, tmp_path / "source", tmp_path / "m", code=-9)
    deadline_s = time.monotonic() + TIME_S_MAX
    while find_mount(str(tmp_path / "m")) is not None:
        assert time.monotonic() < deadline_s, "it is still mounted"
        os.sched_yield()


SCRIPT_BESIDE_MODULES = """
import sys
sys.path = [path for path in sys.path if path]
import penstock as ps
with ps.mount("source", "m") as mount:
    print(mount.directory)
    print(open(mount.directory / "file").read())
"""


def test_the_current_directory_matters_for_paths_only(tmp_path: Path) -> None:
    """Relative paths begin at the program's directory, whose modules do not get in the way of the mount's process."""
    (tmp_path / "source").mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "source/file").write_text("contents")
    (tmp_path / "logging.py").write_text("raise SystemExit('the wrong module')")
    out = run(sys.executable, "-P", "-c", SCRIPT_BESIDE_MODULES, cwd=tmp_path)
    assert out == f"{tmp_path / 'm'}\ncontents\n"


def test_a_mount_in_use_is_not_taken_away(tmp_path: Path) -> None:
    """``umount`` fails while a program uses the mount; with ``--lazy`` the program goes on with the file it has open."""
    (tmp_path / "source").mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "source/file").write_text("contents")
    with ps.mount(tmp_path / "source", tmp_path / "m"):
        command = f"exec 3< {tmp_path}/m/file; echo open; read line; cat <&3"
        reader = subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert reader.stdout is not None
        assert reader.stdout.readline() == "open\n"
        assert "busy" in penstock("umount", tmp_path / "m", code=2)
        penstock("umount", "--lazy", tmp_path / "m")
        assert find_mount(str(tmp_path / "m")) is None
        assert reader.communicate("go on\n", timeout=TIME_S_MAX)[0] == "contents"


def test_a_process_that_does_not_answer(tmp_path: Path) -> None:
    """If the process of a mount hangs, another mount is refused, and `umount` works: no command waits for that process."""
    source, directory = tmp_path / "source", tmp_path / "mounted"
    source.mkdir()
    directory.mkdir()
    with ps.mount(source, directory) as mount:
        os.kill(mount.process_id, signal.SIGSTOP)
        try:
            assert "already a mount of" in penstock("mount", source, directory, code=2)
            penstock("umount", directory)
            assert find_mount(str(directory)) is None
        finally:
            os.kill(mount.process_id, signal.SIGCONT)


def test_errors_of_the_start_are_reported(tmp_path: Path, s3_endpoint: Any) -> None:
    """A missing directory, bucket or permission is the caller's error, and leaves nothing mounted."""
    (tmp_path / "m").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("")
    with pytest.raises(ps.DirectoryMissingError):
        ps.mount(tmp_path / "nothing", tmp_path / "m")
    with pytest.raises(ps.ConfigError, match="does not exist"):
        ps.mount(tmp_path, tmp_path / "gone")
    with pytest.raises(ps.ConfigError, match="not empty"):
        ps.mount(tmp_path, tmp_path / "full")
    with pytest.raises(ps.BucketMissingError):
        ps.mount("s3://no-such-bucket-here/", tmp_path / "m", **connection_to(s3_endpoint))
    with pytest.raises(ps.ConfigError, match="metadata_ttl_s"):
        ps.mount(tmp_path, tmp_path / "m", metadata_ttl_s=-1)
    assert find_mount(str(tmp_path / "m")) is None


def test_an_empty_prefix_is_said(
    tmp_path: Path, bucket: str, s3_endpoint: Any, connect_s3: Callable[..., ps.Store]
) -> None:
    """A mount without any object says so once, where the user sees it, and shows what is written later."""
    directory = tmp_path / "mounted"
    directory.mkdir()
    environment = os.environ | {
        "AWS_ENDPOINT_URL": s3_endpoint.endpoint_url,
        "AWS_REGION": s3_endpoint.region,
        "AWS_ACCESS_KEY_ID": s3_endpoint.access_key,
        "AWS_SECRET_ACCESS_KEY": s3_endpoint.secret_key,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    words = [sys.executable, "-m", "penstock", "mount", f"s3://{bucket}/trian/", directory, "--metadata-ttl", "0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIME_S_MAX, env=environment, check=True)
    try:
        said = f"There is no object below s3://{bucket}/trian/: the mount is empty until one is written."
        assert done.stderr.count(said) == 1
        connect_s3(f"s3://{bucket}").write("trian/a.txt", b"now")
        assert (directory / "a.txt").read_bytes() == b"now"
    finally:
        penstock("umount", directory)
    with pytest.raises(ps.BucketMissingError, match="no-such-bucket"):
        ps.mount("s3://no-such-bucket-here/", directory, **connection_to(s3_endpoint))


def test_umask_and_owner(tmp_path: Path) -> None:
    """The modes and the owner that the kernel shows are those that were asked for."""
    (tmp_path / "source/inner").mkdir(parents=True)
    (tmp_path / "source/inner/x").write_bytes(b"x")
    (tmp_path / "mounted").mkdir()
    with ps.mount(tmp_path / "source", tmp_path / "mounted", umask=0o027, uid=12345, gid=54321) as mount:
        for path, mode in (
            (mount.directory, 0o550),
            (mount.directory / "inner", 0o550),
            (mount.directory / "inner/x", 0o440),
        ):
            found = path.stat()
            assert (found.st_mode & 0o777, found.st_uid, found.st_gid) == (mode, 12345, 54321)


def test_own_open_files_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A program that closes a mount whose files it still uses is told which, and need not wait for itself."""
    (tmp_path / "source").mkdir()
    for name in ("read", "mapped"):
        (tmp_path / "source" / name).write_bytes(b"x" * 100_000)
    (tmp_path / "mounted").mkdir()
    mount = ps.mount(tmp_path / "source", tmp_path / "mounted")
    with (mount.directory / "read").open("rb"):
        with (mount.directory / "mapped").open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        started_s = time.monotonic()
        mount.close()
        assert time.monotonic() - started_s < 8  # others would be waited for for 10 s
        mount.close()
        (record,) = [each for each in caplog.records if each.name == "penstock"]
        assert f"{mount.directory}/mapped, {mount.directory}/read. Close" in record.getMessage()
    mapped.close()
    assert find_mount(str(mount.directory)) is None


def test_a_store_without_ranges_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a store that ignores ranges, short files can be read; long ones are EIO, and the log says how to read them."""
    (tmp_path / "mounted").mkdir()
    with FaultyServer({"short": b"s" * 100_000, "long": bytes(5_000_000)}) as server:
        server.fail("ignore_range", times=None, match=lambda request: request.span is not None)
        retry = ps.RetryConfig(attempts_max=2, backoff_s=0.005)
        options = {"endpoint_url": server.endpoint_url, "anonymous": True, "retry": retry}
        with ps.mount(server.url, tmp_path / "mounted", **options) as mount:
            assert (mount.directory / "short").read_bytes() == b"s" * 100_000
            with pytest.raises(OSError, match="Input/output") as caught:
                (mount.directory / "long").read_bytes()
            assert caught.value.errno == errno.EIO
            said = mount.log_file.read_text()
    assert "WARNING A request of a program failed: " in said
    assert "requested" in said
    assert "long" in said
    assert "Hint: this server ignores Range; penstock cp and store.read(key) can read whole objects of it" in said
