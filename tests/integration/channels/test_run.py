"""``penstock run`` as a process: one training script in all modes on a real S3, signals, kills, results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mounting import HAS_FUSE, needs_fuse
from penstock.store import Store
from servers.faulty import FaultyServer

pytestmark = pytest.mark.server

WAIT_S_MAX = 30

TRAIN = textwrap.dedent("""
    import hashlib, json, os, pathlib

    config = json.loads(pathlib.Path(os.environ["SM_INPUT_CONFIG_DIR"], "inputdataconfig.json").read_text())

    def epoch(channel, number):
        path = pathlib.Path(os.environ["SM_CHANNEL_" + channel.upper()])
        if config[channel]["TrainingInputMode"] == "Pipe":
            return pathlib.Path(f"{path}_{number}").read_bytes()
        return b"".join(each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file())

    lines = [sorted(epoch("train", number).splitlines()) for number in range(3)]
    assert lines[0] == lines[1] == lines[2]
    weights = hashlib.sha256(b"".join(lines[0]) + epoch("val", 0)).hexdigest() + os.environ["SM_HP_LR"]
    pathlib.Path(os.environ["SM_MODEL_DIR"], "model.txt").write_text(weights)
    pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], "log.txt").write_text("fine")
""")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from penstock.cli import main; main()", "run", *arguments]


@pytest.fixture
def environment(s3_endpoint: Any, tmp_path: Path) -> dict[str, str]:
    """The variables of a run: the session's S3, and a directory of its own for temporary files."""
    (tmp_path / "tmp").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return {
        **kept,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "TMPDIR": str(tmp_path / "tmp"),
        **s3_endpoint.environment,
    }


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``penstock run`` to its end."""

    def run_it(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        variables = environment | changes
        return subprocess.run(
            command(*arguments), env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )

    return run_it


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts ``penstock run`` with a Python program, and waits until that has printed ``ready``."""

    def start_it(code: str, *arguments: str) -> subprocess.Popen[str]:
        (tmp_path / "program.py").write_text(textwrap.dedent(code))
        process = subprocess.Popen(
            command(*arguments, "--", sys.executable, str(tmp_path / "program.py")),
            env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()
        return process

    return start_it


def fill(store: Store) -> None:
    for number in range(50):
        store.write(f"train/{number:03d}.txt", b"".join(b"sample %d of %d\n" % (k, number) for k in range(50)))
    store.write("train/large.txt", b"a large object of few lines " * (20 << 15) + b"\n")
    store.write("val/only.txt", b"validation")


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.heavy
@needs_fuse
def test_one_base_directory_in_one_mode_after_the_other(
    run: Callable[..., subprocess.CompletedProcess[str]], s3_store: Store, bucket: str, tmp_path: Path
) -> None:
    """What File mode has downloaded is hidden while the channel is a mount or a pipe, and is still there afterwards."""
    s3_store.write("train/a", b"contents")
    downloaded = tmp_path / "base" / "input" / "data" / "train" / "a"
    inodes = set()
    for mode in ("file", "fastfile", "pipe", "file,start=lazy", "file"):
        name = "train_0" if mode == "pipe" else "train/a"
        done = run(
            "--channel", f"train=s3://{bucket}/train/,mode={mode}", "--base", str(tmp_path / "base"),
            "--", "sh", "-c", f'cat "$SM_INPUT_DIR/data/{name}"',
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "contents"), (mode, done.stderr)
        inodes.add(downloaded.stat().st_ino)
    assert len(inodes) == 1


def test_one_script_in_all_modes(
    run: Callable[..., subprocess.CompletedProcess[str]], s3_store: Store, bucket: str, tmp_path: Path
) -> None:
    """An unchanged training script gives the same model whatever the modes are; nothing is left but what it stored."""
    fill(s3_store)
    (tmp_path / "train.py").write_text(TRAIN)
    models = set()
    for number, (train, val) in enumerate(
        [("file", "file"), ("pipe", "pipe"), *([("fastfile", "pipe"), ("fastfile", "fastfile")] if HAS_FUSE else [])]
    ):
        done = run(
            "--channel", f"train=s3://{bucket}/train/,mode={train}", "--channel", f"val=s3://{bucket}/val/,mode={val}",
            "--hyperparameter", "lr=0.1", "--model-url", f"s3://{bucket}/models/{number}/",
            "--output-url", f"s3://{bucket}/out/{number}/output.tar.gz", "--", sys.executable, "train.py",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        models.add(bytes(s3_store.read(f"models/{number}/model.txt").data))
        assert s3_store.stat(f"out/{number}/output.tar.gz").size_bytes > 50
    assert len(models) == 1
    assert left_in(tmp_path / "tmp") == []


@needs_fuse
@pytest.mark.parametrize("mode", ["file", "pipe", "fastfile", "file,start=lazy"])
def test_objects_that_no_path_can_express(
    run: Callable[..., subprocess.CompletedProcess[str]], s3_store: Store, bucket: str, mode: str
) -> None:
    """In every mode, the program runs to its end with all other objects, while those without a path are left out."""
    for key in ("train/a/b", "train/a//b", f"train/{'x' * 300}", "train/full/"):
        s3_store.write(key, b"contents")
    read = (
        'cat "${SM_CHANNEL_TRAIN}_0"' if mode == "pipe" else 'cd "$SM_CHANNEL_TRAIN"; find . -type f; cat a/b; sleep 1'
    )
    done = run("--channel", f"train=s3://{bucket}/train/,mode={mode}", "--", "sh", "-c", read)
    assert (done.returncode, done.stdout) == (0, "contents" if mode == "pipe" else "./a/b\ncontents"), done.stderr
    assert ("and others like it are left out" in done.stderr) == (mode != "fastfile")


def test_a_directory_is_a_channel(run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """The same script trains on directories of this machine, which it neither copies nor removes."""
    for name, data in (("train/a", b"x\ny\n"), ("val/b", b"z")):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "train.py").write_text(TRAIN)
    for mode in ("file", "pipe", "fastfile"):
        done = run(
            "--mode", mode, "-c", "train=data/train", "-c", "val=data/val", "--hyperparameter", "lr=1",
            "--model-url", f"out/{mode}/", "--output-url", f"out/{mode}/", "--", sys.executable, "train.py",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert len({(tmp_path / "out" / mode / "model.txt").read_text() for mode in ("file", "pipe", "fastfile")}) == 1
    assert (tmp_path / "data/train/a").read_bytes() == b"x\ny\n"
    assert left_in(tmp_path / "tmp") == []


def test_results_without_a_url_are_kept(run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """A model that goes nowhere stays on this machine, and a message says where; its input does not stay."""
    code = "import os; open(os.environ['SM_MODEL_DIR'] + '/m', 'w').write('model')"
    (tmp_path / "data").mkdir()
    done = run("-c", "data", "--", sys.executable, "-c", code)
    assert done.returncode == 0
    folder = Path(done.stderr.strip().rpartition(" ")[2])
    assert (folder / "model" / "m").read_text() == "model"
    assert left_in(folder) == ["checkpoints", "code", "model", "output"]


def test_exit_codes_and_the_failure_file(run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """The exit code is the program's, a signal is 128 plus its number, and the failure file is reported, cut off."""
    code = "import os; open(os.environ['SM_OUTPUT_FAILURE'], 'w').write('no luck ' * 500); raise SystemExit(7)"
    done = run("--base", "base", "--", sys.executable, "-c", code)
    assert done.returncode == 7
    assert "no luck no luck" in done.stderr
    assert len(done.stderr) < 1200
    assert (tmp_path / "base" / "output" / "failure").stat().st_size == 4000
    assert run("--", "sh", "-c", "kill -9 $$").returncode == 128 + 9
    missing = run("--", "no-such-program")
    assert missing.returncode == 127
    assert "cannot run 'no-such-program': No such file or directory" in missing.stderr
    assert left_in(tmp_path / "tmp") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_the_program(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: signal.Signals
) -> None:
    """A signal to the runner reaches the program, which may end as it likes; nothing is left."""
    process = start(
        f"""
        import signal, sys
        signal.signal({int(number)}, lambda *_: sys.exit(42))
        print("ready", flush=True)
        while True:
            signal.pause()
        """
    )
    process.send_signal(number)
    _, errors = process.communicate(timeout=WAIT_S_MAX)
    assert process.returncode == 42, errors
    assert left_in(tmp_path / "tmp") == []


@pytest.mark.heavy
def test_a_program_that_does_not_end(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """A program that ignores SIGTERM is killed with its children when its time is over."""
    process = start(
        """
        import os, signal, subprocess, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open("pids", "w").write(f"{os.getpid()} {child.pid}")
        print("ready", flush=True)
        while True:
            signal.pause()
        """,
        "--stop-s", "0.5",
    )  # fmt: skip
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT_S_MAX)
    assert process.returncode == 128 + 9
    assert not any(is_running(int(pid)) for pid in (tmp_path / "pids").read_text().split())
    assert left_in(tmp_path / "tmp") == []


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit(0)", 0), ("None", 128 + 9), ("signal.signal(15, signal.SIG_DFL), os.kill(os.getpid(), 15)", 128 + 15)],
)
def test_the_maximal_runtime_of_a_request(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, ending: str, code: int
) -> None:
    """After MaxRuntimeInSeconds, the program gets SIGTERM, and later SIGKILL; a message says so, and results are stored."""
    (tmp_path / "job.json").write_text(json.dumps({"StoppingCondition": {"MaxRuntimeInSeconds": 1}}))
    (tmp_path / "train.py").write_text(
        "import os, signal, sys\n"
        "open(os.environ['SM_MODEL_DIR'] + '/m', 'w').write('model')\n"
        f"signal.signal(15, lambda *_: [{ending}])\n"
        "while True: signal.pause()\n"
    )
    done = run("--job", "job.json", "--stop-s", "0.5", "--model-url", "out/", "--", sys.executable, "train.py")
    assert done.returncode == code, done.stderr
    assert "penstock: MaxRuntimeExceeded: the program was stopped after 1 s" in done.stderr
    assert (tmp_path / "out" / "m").read_text() == "model"


@pytest.mark.parametrize("text", ["[" * 100_000, "\xff"])
def test_a_request_that_is_not_json(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, text: str
) -> None:
    """A request that Python cannot hold, or that is not there, is an error that names the file."""
    (tmp_path / "job.json").write_text(text, encoding="latin-1")
    done = run("--job", "job.json", "--", "true")
    assert (done.returncode, done.stderr.startswith("penstock: job.json is not JSON")) == (2, True), done.stderr
    done = run("--job", "gone.json", "--", "true")
    assert (done.returncode, done.stderr) == (2, "penstock: cannot read gone.json: No such file or directory\n")


def test_children_end_with_the_program(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """What the program leaves running, even in a session of its own, ends with it."""
    process = start(
        """
        import subprocess
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open("pids", "w").write(str(child.pid))
        print("ready", flush=True)
        """
    )
    process.communicate(timeout=WAIT_S_MAX)
    assert process.returncode == 0
    assert not is_running(int((tmp_path / "pids").read_text()))


def test_the_runner_is_killed(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """If the runner is killed, the program, its children and the private directory go, too."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("a")
    process = start(
        """
        import os, subprocess, time
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open("pids", "w").write(f"{os.getpid()} {child.pid}")
        print("ready", flush=True)
        time.sleep(1000)
        """,
        "-c", "train=data,mode=pipe",
    )  # fmt: skip
    assert len(left_in(tmp_path / "tmp")) == 1
    process.kill()
    process.communicate(timeout=WAIT_S_MAX)
    wait_until(lambda: left_in(tmp_path / "tmp") == [])
    wait_until(lambda: not any(is_running(int(pid)) for pid in (tmp_path / "pids").read_text().split()))


@pytest.mark.heavy
def test_runner_and_supervisor_are_killed(
    start: Callable[..., subprocess.Popen[str]], run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """If the supervisor is killed, too, the program ends, and the next run ends its children and removes the directory."""
    process = start(
        """
        import os, subprocess, time
        null = subprocess.DEVNULL
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=null, stderr=null)
        open("pids", "w").write(f"{os.getpid()} {child.pid} {os.getppid()}")
        print("ready", flush=True)
        time.sleep(1000)
        """
    )
    other = start(
        "import os, time; open('other', 'w').write(str(os.getpid())); print('ready', flush=True); time.sleep(1000)"
    )
    program, child, supervisor = map(int, (tmp_path / "pids").read_text().split())
    process.kill()
    os.kill(supervisor, signal.SIGKILL)
    process.communicate(timeout=WAIT_S_MAX)
    wait_until(lambda: not is_running(program))
    assert is_running(child)
    run("--", "true")
    wait_until(lambda: not is_running(child))  # it has got its signal, and init takes note of its end
    assert is_running(int((tmp_path / "other").read_text()))  # another run is left alone
    other.terminate()
    other.communicate(timeout=WAIT_S_MAX)
    assert left_in(tmp_path / "tmp") == []


def test_programs_inherit_no_descriptor_of_the_run(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """A program has its three standard streams only, so nothing that it leaves holds the lock of the run."""
    done = run("--", "sh", "-c", "ls /proc/self/fd")
    assert done.stdout.split() == ["0", "1", "2", "3"]  # 3 is ls reading the directory


@pytest.mark.heavy
def test_a_run_in_what_a_killed_run_has_left(
    start: Callable[..., subprocess.Popen[str]], run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """A run that a left-over process of a killed run starts does not end itself; the next run of somebody else cleans up."""
    process = start(
        """
        import os, subprocess, sys, time
        code = '''
        import subprocess, sys
        sys.stdin.read()
        done = subprocess.run([sys.executable, "-m", "penstock", "run", "--", "true"])
        open("code", "w").write(str(done.returncode))
        '''
        code = code.replace(" " * 8, "")
        read, write = os.pipe()
        null = subprocess.DEVNULL
        child = subprocess.Popen(
            [sys.executable, "-c", code], start_new_session=True, stdin=read, stdout=null, stderr=null
        )
        open("pids", "w").write(f"{os.getpid()} {child.pid} {os.getppid()}")
        print("ready", flush=True)
        time.sleep(1000)
        """
    )
    program, child, supervisor = map(int, (tmp_path / "pids").read_text().split())
    process.kill()
    os.kill(supervisor, signal.SIGKILL)  # then the pipe ends, and the child goes on
    process.communicate(timeout=WAIT_S_MAX)
    wait_until(lambda: not is_running(program) and not is_running(child))
    assert (tmp_path / "code").read_text() == "0"
    run("--", "true")
    assert left_in(tmp_path / "tmp") == []


def test_the_supervisor_is_killed(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """If only the supervisor is killed, the runner ends what the program has started, and leaves nothing."""
    process = start(
        """
        import os, subprocess, time
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open("pids", "w").write(f"{os.getpid()} {child.pid} {os.getppid()}")
        print("ready", flush=True)
        time.sleep(1000)
        """
    )
    program, child, supervisor = map(int, (tmp_path / "pids").read_text().split())
    os.kill(supervisor, signal.SIGKILL)
    _, errors = process.communicate(timeout=WAIT_S_MAX)
    assert process.returncode == 1
    assert "supervisor" in errors
    assert not is_running(program)
    assert not is_running(child)
    assert left_in(tmp_path / "tmp") == []


@pytest.mark.heavy
def test_a_base_directory_is_for_one_run(
    start: Callable[..., subprocess.Popen[str]], run: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """A second run with the same base directory is refused while the first one lasts, and works afterwards."""
    process = start("import signal; print('ready', flush=True); signal.pause()", "--base", "base")
    refused = run("--base", "base", "--", "true")
    assert refused.returncode == 2
    assert "another run uses the base directory" in refused.stderr
    process.terminate()
    process.communicate(timeout=WAIT_S_MAX)
    assert run("--base", "base", "--", "true").returncode == 0


def test_a_channel_that_fails_ends_the_program(
    start: Callable[..., subprocess.Popen[str]], s3_store: Store, bucket: str, tmp_path: Path
) -> None:
    """An object that is not there never looks like the end of the epoch: the run fails and names it."""
    s3_store.write("train/0", b"x" * 1000)
    s3_store.write("list.json", json.dumps([{"prefix": f"s3://{bucket}/train/"}, "0", "none"]).encode())
    os.mkfifo(tmp_path / "go")
    process = start(
        """
        import os
        print("ready", flush=True)
        open("go").read()
        open(os.environ["SM_CHANNEL_TRAIN"] + "_0", "rb").read()
        open("ended", "w").close()
        """,
        "-c", f"train=s3://{bucket}/list.json,mode=pipe,type=ManifestFile",
    )  # fmt: skip
    (tmp_path / "go").write_text("")
    _, errors = process.communicate(timeout=WAIT_S_MAX)
    assert process.returncode == 1
    assert f"s3://{bucket}/train/none" in errors
    assert not (tmp_path / "ended").exists()
    assert left_in(tmp_path / "tmp") == []


def mounts_below(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {folder}/" in line]


@needs_fuse
def test_a_mount_ends_with_the_run(
    start: Callable[..., subprocess.Popen[str]], s3_store: Store, bucket: str, tmp_path: Path
) -> None:
    """A mounted channel disappears when the program ends with a file open, and when the runner is killed."""
    s3_store.write("train/a", b"x" * 1000)
    code = """
        import os, signal
        file = open(os.environ["SM_CHANNEL_TRAIN"] + "/a", "rb")
        assert file.read() == b"x" * 1000
        print("ready", flush=True)
        signal.pause()
        """
    for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
        process = start(code, "-c", f"train=s3://{bucket}/train/,mode=fastfile")
        assert len(mounts_below(tmp_path / "tmp")) == 1
        end(process)
        process.communicate(timeout=WAIT_S_MAX)
        wait_until(lambda: mounts_below(tmp_path / "tmp") == [] and left_in(tmp_path / "tmp") == [])


@pytest.mark.heavy
@needs_fuse
def test_hosts_share_a_mount(
    run: Callable[..., subprocess.CompletedProcess[str]], s3_store: Store, bucket: str
) -> None:
    """Each host of a sharded channel sees its own share of the files, with their contents."""
    for number in range(7):
        s3_store.write(f"train/sub/{number}", b"%d" % number)
    found = []
    for host in ("a", "b"):
        done = run(
            "-c", f"train=s3://{bucket}/train/,mode=fastfile,distribution=ShardedByS3Key", "--hosts", "a,b",
            "--current-host", host, "--", "sh", "-c", 'cd "$SM_CHANNEL_TRAIN" && cat $(find . -type f)',
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found += done.stdout
        assert len(done.stdout) in (3, 4)
    assert sorted(found) == list("0123456")


@pytest.mark.heavy
@needs_fuse
def test_a_mount_needs_a_folder(
    run: Callable[..., subprocess.CompletedProcess[str]], s3_store: Store, bucket: str, tmp_path: Path
) -> None:
    """The beginning of a name is refused, as on SageMaker; a folder without its slash is fine."""
    s3_store.write("train-01/a", b"x")
    refused = run("-c", f"train=s3://{bucket}/train,mode=fastfile", "--", "true")
    assert refused.returncode == 2
    assert "FastFile mode mounts folders" in refused.stderr
    assert run("-c", f"train=s3://{bucket}/train-01,mode=fastfile", "--", "true").returncode == 0
    assert left_in(tmp_path / "tmp") == []


@pytest.mark.heavy
@needs_fuse
def test_why_a_read_of_a_mount_failed(run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """If the program fails, the run names each object that could not be read, and the cause, after the program's own words."""
    program = textwrap.dedent("""
        import os, pathlib, sys
        folder = pathlib.Path(os.environ["SM_CHANNEL_TRAIN"])
        assert (folder / "good").read_bytes() == b"good"
        for name in ("broken", "refused", "broken"):
            try:
                (folder / name).read_bytes()
            except OSError as error:
                print("the program sees:", error.strerror, file=sys.stderr, flush=True)
        sys.exit(3)
        """)
    objects = {f"train/{name}": name.encode() for name in ("good", "broken", "refused")}
    with FaultyServer(objects) as server:
        server.fail("500", times=None, match=lambda request: request.key == "train/broken")
        server.fail("403", times=None, match=lambda request: request.key == "train/refused")
        done = run(
            "--endpoint-url", server.endpoint_url, "--anonymous", "--retry-s", "0", "-c", "train=s3://bucket/train/,mode=fastfile",
            "--", sys.executable, "-c", program,
        )  # fmt: skip
    assert done.returncode == 3
    own, said = done.stderr.splitlines()[:3], done.stderr.splitlines()[3:]
    seen = ("Input/output error", "Permission denied", "Input/output error")
    assert own == [f"the program sees: {what}" for what in seen]
    assert all(line.startswith("penstock: channel train: ") for line in said)
    assert len([line for line in said if "s3://bucket/train/refused: " in line and "403" in line]) >= 1
    assert len([line for line in said if "s3://bucket/train/broken: " in line and "500" in line]) >= 1
    assert len(said) <= 4, "one for the HEAD and one for the GET of each object"
    assert left_in(tmp_path / "tmp") == []


def test_results_that_could_not_be_stored_end_a_run_before_it_begins(
    run: Callable[..., subprocess.CompletedProcess[str]], s3_endpoint: Any, bucket: str, tmp_path: Path
) -> None:
    """A missing bucket is an error before the program starts; where results may go, the look leaves nothing behind."""
    program = ("--", "touch", str(tmp_path / "ran"))
    for option in ("--model-url", "--output-url", "--checkpoint-url"):
        for url in (f"s3://{bucket}-missing/out/", f"s3://{bucket}-missing/out.tar.gz"):
            done = run(option, url, *program)
            assert done.returncode == 1
            assert f"results could not be stored at {url}" in done.stderr
            assert not (tmp_path / "ran").exists()
    (tmp_path / "file").touch()
    done = run("--model-url", "file/model/", *program)
    assert (done.returncode, (tmp_path / "ran").exists()) == (1, False)
    assert "file is no directory" in done.stderr
    done = run("--model-url", f"s3://{bucket}/out/", "--output-url", f"s3://{bucket}/out.tar.gz", *program)
    assert (done.returncode, (tmp_path / "ran").exists()) == (0, True)
    client = s3_endpoint.client()
    assert "Contents" not in client.list_objects_v2(Bucket=bucket)
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)
    client.close()


def test_a_program_that_cannot_be_run_has_a_shells_exit_code(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """127 if there is no such program, 126 if it is not executable, each with what to do."""
    (tmp_path / "train.sh").write_text("true")
    missing, plain = run("--", "no-such-program"), run("--", "./train.sh")
    assert (missing.returncode, plain.returncode) == (127, 126)
    assert "is it on the PATH?" in missing.stderr
    assert "is it executable?" in plain.stderr
