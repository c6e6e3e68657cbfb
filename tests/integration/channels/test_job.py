"""A whole training job on a real S3: its JSON, a pipe per rank, checkpoints while it runs, faults."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from mounting import needs_fuse
from penstock.store import Store
from servers.faulty import FaultyServer

pytestmark = pytest.mark.server


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))


def test_a_training_job(s3_endpoint: Any, s3_store: Store, bucket: str, tmp_path: Path) -> None:
    """The JSON of a CreateTrainingJob request runs by ``--job``: augmented manifest, model archive, checkpoints."""
    for number in range(5):
        s3_store.write(f"images/{number}.jpg", b"image %d" % number)
    lines = [json.dumps({"image-ref": f"s3://{bucket}/images/{n}.jpg", "label": n % 2}) for n in range(5)]
    s3_store.write("lines.manifest", "\n".join(lines).encode())
    (tmp_path / "job.json").write_text(json.dumps({
        "TrainingJobName": "job-1",
        "AlgorithmSpecification": {"TrainingInputMode": "Pipe"},
        "HyperParameters": {"epochs": "2"},
        "InputDataConfig": [{
            "ChannelName": "train",
            "DataSource": {"S3DataSource": {
                "S3DataType": "AugmentedManifestFile", "S3Uri": f"s3://{bucket}/lines.manifest",
                "AttributeNames": ["image-ref", "label"],
            }},
            "RecordWrapperType": "RecordIO",
            "ShuffleConfig": {"Seed": 1},
        }],
        "OutputDataConfig": {"S3OutputPath": f"s3://{bucket}/out"},
        "CheckpointConfig": {"S3Uri": f"s3://{bucket}/checkpoints/"},
    }))  # fmt: skip
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import os, pathlib, sys
        from penstock.channels import PipeReader

        reader = PipeReader("train")
        for epoch in range(int(os.environ["SM_HP_EPOCHS"])):
            values = list(reader)
            pairs = sorted(zip(values[::2], values[1::2]))
            assert pairs == [(b"image %d" % n, b"%d" % (n % 2)) for n in range(5)], pairs
            pathlib.Path(os.environ["SAGEMAKER_BASE_DIR"], "checkpoints", f"epoch-{epoch}").write_text("x")
        pathlib.Path(os.environ["SM_MODEL_DIR"], "weights").write_text(os.environ["TRAINING_JOB_NAME"])
    """)
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    main = "from penstock.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", main, "run", "--job", "job.json", "--strict", "--", sys.executable, "train.py"],
        env={**kept, "AWS_CONFIG_FILE": os.devnull, **s3_endpoint.environment}, cwd=tmp_path, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    keys = {info.key for info in s3_store.list()}
    assert {"out/job-1/output/model.tar.gz", "checkpoints/epoch-0", "checkpoints/epoch-1"} <= keys


def test_a_pipe_for_each_rank(s3_store: Store, bucket: str, connection: dict[str, Any], tmp_path: Path) -> None:
    """Ranks that read a split at the same time have each object once; copies give each all of them."""
    for number in range(20):
        s3_store.write(f"train/{number:02d}", b"%02d\n" % number)
    code = """
import os, subprocess, sys
from pathlib import Path
if "LOCAL_RANK" in os.environ:
    from penstock.channels import PipeReader
    found = {name: [line.decode() for line in PipeReader(name, format="lines")] for name in ("part", "copy")}
    Path(os.environ["SM_OUTPUT_DATA_DIR"], os.environ["LOCAL_RANK"]).write_text(repr(found))
else:
    ranks = [subprocess.Popen([sys.executable, __file__], env={**os.environ, "LOCAL_RANK": str(n)}) for n in range(2)]
    sys.exit(max(rank.wait() for rank in ranks))
"""
    (tmp_path / "train.py").write_text(code)
    result = ps.channels.run(
        str(tmp_path / "train.py"), input_mode="Pipe", output_url=f"{tmp_path}/out/",
        inputs={"part": f"s3://{bucket}/train/,split=2,seed=3", "copy": f"s3://{bucket}/train/,copies=2"}, **connection,
    )  # fmt: skip
    assert result.exit_code == 0
    ranks = [ast.literal_eval((tmp_path / "out" / str(number)).read_text()) for number in range(2)]
    names = [f"{number:02d}" for number in range(20)]
    assert sorted(ranks[0]["part"] + ranks[1]["part"]) == names
    assert sorted(ranks[0]["copy"]) == sorted(ranks[1]["copy"]) == names
    assert ranks[0]["copy"] != ranks[1]["copy"]


def test_a_loader_on_a_pipe_is_killed_and_resumed(faulty: FaultyServer, tmp_path: Path) -> None:
    """A job killed in the middle of an epoch of its pipe continues in a new run with the next sample: each comes once."""
    for number in range(7):
        faulty.objects[f"train/{number}"] = b"".join(b"%d-%d\n" % (number, line) for line in range(10))
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import json, os, signal, sys
        from pathlib import Path
        import penstock as ps

        state, found, batches_max = Path(sys.argv[1], "state"), Path(sys.argv[1], "found"), int(sys.argv[2])
        lines = ps.channels.PipeReader("train", format="lines").pipeline()
        pipeline = lines.shuffle(16, seed=1).decode(ps.Text("line")).batch(4)
        with ps.Loader(pipeline) as loader, found.open("a") as out:
            if state.exists():
                loader.load_state_dict(json.loads(state.read_text()))
            while loader.epoch < 2:
                for batch in loader:
                    out.write("".join(f"{loader.epoch} {line}\\n" for line in batch["line"]))
                    out.flush()
                    state.write_text(json.dumps(loader.state_dict()))
                    batches_max -= 1
                    if not batches_max:
                        os.kill(os.getpid(), signal.SIGKILL)
    """)
    )
    for name, limits in (("whole", [1000]), ("cut", [5, 9, 10, 1000])):
        (tmp_path / name).mkdir()
        for limit in limits:
            process = started(
                faulty, tmp_path, "--mode", "pipe", "-c", f"train={faulty.url}/train/,seed=3", "--",
                sys.executable, str(tmp_path / "train.py"), str(tmp_path / name), str(limit),
            )  # fmt: skip
            _, errors = process.communicate(timeout=60)
            assert (process.returncode == 0) == (limit == 1000), errors
    whole = (tmp_path / "whole" / "found").read_text().splitlines()
    lines = [f"{number}-{line}" for number in range(7) for line in range(10)]
    assert sorted(whole) == sorted(f"{epoch} {line}" for epoch in range(2) for line in lines)
    assert (tmp_path / "cut" / "found").read_text().splitlines() == whole


@pytest.mark.parametrize("mode", ["File", "Pipe", pytest.param("FastFile", marks=needs_fuse)])
def test_a_store_that_stumbles(faulty: FaultyServer, tmp_path: Path, mode: str) -> None:
    """Answers that break off and 503s do not reach the program: it gets every byte, in every mode."""
    data = os.urandom(3 << 20)
    for number in range(4):
        faulty.objects[f"train/{number}"] = data[number << 19 : (number + 2) << 19]
    expected = hashlib.sha256(b"".join(faulty.objects[f"train/{number}"] for number in range(4))).hexdigest()
    faulty.random_faults(["close", "reset", "reset_head", "500", "503"], ratio=0.3, seed=3)
    script = """
import os, pathlib, hashlib
path = os.environ["SM_CHANNEL_TRAINING"]
if os.path.isdir(path):
    found = b"".join(each.read_bytes() for each in sorted(pathlib.Path(path).iterdir()))
else:
    found = pathlib.Path(path + "_0").read_bytes()
pathlib.Path(os.environ["SM_MODEL_DIR"], "digest").write_text(hashlib.sha256(found).hexdigest())
"""
    (tmp_path / "train.py").write_text(script)
    result = ps.channels.run(
        str(tmp_path / "train.py"), inputs=f"{faulty.url}/train/", input_mode=mode, model_url=f"{tmp_path}/model/",
        endpoint_url=faulty.endpoint_url, anonymous=True,
    )  # fmt: skip
    assert result.exit_code == 0
    assert (tmp_path / "model" / "digest").read_text() == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("mode", ["file", "pipe"])
def test_the_end_before_the_start(faulty: FaultyServer, tmp_path: Path, mode: str, number: signal.Signals) -> None:
    """A signal before the program starts, or while its pipe waits for the store, ends the run at once and leaves nothing."""
    faulty.objects["train/a"] = b"x" * 1000
    faulty.fail("stall_head", match="train/a", times=None, seconds=60)
    process = started(
        faulty,
        tmp_path,
        "--mode",
        mode,
        "-c",
        f"{faulty.url}/train/",
        "--",
        "sh",
        "-c",
        'exec cat "$SM_CHANNEL_TRAINING"_0',
    )  # a shell that waits for another process would not end by SIGINT, which the program alone gets
    wait_for_request(faulty, "train/a")
    process.send_signal(number)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode in (128 + number, -number), errors
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_the_end_while_results_are_stored(faulty: FaultyServer, tmp_path: Path, number: signal.Signals) -> None:
    """A signal while the model is uploaded ends the run; the model stays, and the message says where."""
    faulty.fail("stall_head", match="models/m", times=None, seconds=60)
    process = started(
        faulty, tmp_path, "--model-url", f"{faulty.url}/models/", "--", "sh", "-c", 'echo weights > "$SM_MODEL_DIR/m"'
    )
    wait_for_request(faulty, "models/m")
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode in (128 + number, -number), errors
    (folder,) = (tmp_path / "tmp").iterdir()
    assert (folder / "model" / "m").read_text() == "weights\n"
    assert str(folder) in errors


def test_a_terminal_that_is_closed_may_be_ignored(faulty: FaultyServer, tmp_path: Path) -> None:
    """Under ``nohup``, SIGHUP reaches neither the runner nor the program."""
    script = 'kill -HUP "$PPID" $$ && kill -HUP "$(cut -d" " -f4 "/proc/$PPID/stat")" && echo alive'
    process = started(faulty, tmp_path, "--", "sh", "-c", script, before=("nohup",))
    out, errors = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "alive\n"), errors


def started(faulty: FaultyServer, tmp_path: Path, *words: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    (tmp_path / "tmp").mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    main = "from penstock.cli import main; main()"
    connection = ["--anonymous", "--endpoint-url", faulty.endpoint_url]
    return subprocess.Popen(
        [*before, sys.executable, "-c", main, "run", *connection, *words],
        env={**kept, "AWS_CONFIG_FILE": os.devnull, "TMPDIR": str(tmp_path / "tmp")},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_request(faulty: FaultyServer, path: str) -> None:
    deadline_s = time.monotonic() + 30
    while not any(path in request.path for request in faulty.requests):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
