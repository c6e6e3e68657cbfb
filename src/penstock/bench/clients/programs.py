"""Programs beside a client, which end with it: ``penstock gateway``, ``cat`` and ``cp``, and mounts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from penstock.bench.clients import loop
from penstock.text.patterns import is_pattern, split_glob

if TYPE_CHECKING:
    from collections.abc import Iterator

READY_S_MAX = 60.0
DOWNLOAD_S = 20.0
"""Least time for a download, which a short turn would not have."""
PENSTOCK = (sys.executable, "-m", "penstock")
GUARDED = 'directory=$1; shift; { "$@"; kill $$; } & read -r _; fusermount -u -z "$directory"'
"""A shell that unmounts when its input ends, as it does when this process has ended; it ends with the program."""


HANDLER = """
import sys
sys.path.insert(0, {source!r})
from penstock.bench.clients.handler import handler_of
lambda_handler = handler_of({image!r}, {label!r}, pixels={pixels!r})
"""


def _connection(url: str | None) -> list[str]:
    return [*(["--endpoint-url", url] if url else []), *(["--anonymous"] if loop.ANONYMOUS else [])]


@contextmanager
def gateway(url: str | None, bucket: str, job: dict[str, Any], through: str) -> Iterator[str]:
    """Serve a bucket with an empty cache, its tars as TFRecords, and yield the URL. `through` may be a Lambda ``handler``.

    Raises:
        RuntimeError: It did not start.
    """
    image, label, pixels = job["image"], job["label"], bool(job.get("pixels"))
    fields = ",".join(filter(None, [f"{image}={image}:pixels" if pixels else image, label]))
    command = [*PENSTOCK, "gateway", "--upstream", f"s3://{bucket}", "--metadata-ttl", "1h", "--port", "0"]
    command += _connection(url)
    with tempfile.TemporaryDirectory(dir=job["scratch"]) as folder, Path(folder, "log").open("w+") as log:
        if through == "handler":
            Path(folder, "code").mkdir()
            text = HANDLER.format(source=str(Path(__file__).parents[3]), image=image, label=label, pixels=pixels)
            Path(folder, "code", "app.py").write_text(text)
            command += ["--lambda", "app.lambda_handler", "--lambda-dir", f"{folder}/code", "--memory", "4GiB"]
        elif job["format"] == "tar":
            command += ["--transform", f"tar2tfrecord({fields})"]
        process = subprocess.Popen([*command, "--cache", f"{folder}/cache:32GB"], stderr=log)
        try:
            until_s = time.monotonic() + READY_S_MAX
            while not (found := re.search(r"at (http://[\d.]+:\d+)", Path(log.name).read_text())):
                if time.monotonic() > until_s or process.poll() is not None:
                    raise RuntimeError(f"the gateway did not start: {Path(log.name).read_text()[-500:]}")
                time.sleep(0.05)
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


@contextmanager
def mounted(way: str, url: str | None, bucket: str, directory: str) -> Iterator[None]:
    """Mount a bucket until the end of the context, or of this process.

    Raises:
        RuntimeError: The program did not mount it in time.
    """
    if way == "mount":
        import penstock as ps

        with ps.mount(f"s3://{bucket}/", directory, endpoint_url=url, anonymous=loop.ANONYMOUS):
            yield
        return
    region, environment = os.environ["AWS_REGION"], dict(os.environ)
    if way == "rclone":
        options = ["--config", os.devnull, "--read-only", "--s3-region", region]
        options += [] if loop.ANONYMOUS else ["--s3-env-auth"]
        options += ["--s3-provider", "Other", "--s3-endpoint", url] if url else ["--s3-provider", "AWS"]
        authorities = environment.pop("AWS_CA_BUNDLE", None)  # rclone does not start with this variable
        options += ["--ca-cert", authorities] if authorities else []
        command = ["rclone", "mount", f":s3:{bucket}", directory, *options]
    else:
        options = [
            "ro",
            "listobjectsv2",
            f"endpoint={region}",
            *(["use_path_request_style", f"url={url}"] if url else []),
            *(["public_bucket=1"] if loop.ANONYMOUS else []),
        ]
        command = ["s3fs", bucket, directory, "-f", *(word for option in options for word in ("-o", option))]
    shell = ["sh", "-c", GUARDED, "sh", directory, *command]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, start_new_session=True, env=environment) as process:
        try:
            until_s = time.monotonic() + READY_S_MAX
            while not os.path.ismount(directory):
                if process.poll() is not None or time.monotonic() > until_s:
                    raise RuntimeError(f"{command[0]} did not mount s3://{bucket}")
                time.sleep(0.05)
            yield
        finally:  # not by the end of its input alone, which workers of a DataLoader keep open
            subprocess.run(["fusermount", "-u", "-z", directory], check=False)
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)


def download(url: str | None, bucket: str, job: dict[str, Any], directory: str) -> None:
    """Download the data set; where its keys have others beside them, all with the suffixes of its keys.

    Raises:
        RuntimeError: It took longer than the job may.
    """
    source, included = job.get("source", loop.folder_of(job)), set[str]()
    if not isinstance(source, str):
        source, included = loop.folder_of(job), {f"--include=*{PurePosixPath(key).suffix}" for key in source}
    target = split_glob(f"/{source}")[0] if is_pattern(source) else f"/{source}"
    command = [*PENSTOCK, "cp", *included, f"s3://{bucket}/{source}", f"{directory}{target}", *_connection(url)]
    try:
        subprocess.run(
            command, check=True, timeout=max(DOWNLOAD_S, job["seconds_max"]) if job.get("seconds_max") else None
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the data set was not downloaded within {error.timeout:.0f} s") from error


@contextmanager
def ray_cluster(cpus_count: int, *, store_bytes: int = 80 << 20) -> Iterator[None]:
    """Start a Ray cluster on this machine and end it, unless ``RAY_ADDRESS`` names one."""
    if os.environ.get("RAY_ADDRESS"):
        yield
        return
    os.environ.update(RAY_DEDUP_LOGS="0", RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    import ray

    ray.init(
        address="local", num_cpus=cpus_count, object_store_memory=store_bytes, include_dashboard=False,
        log_to_driver=False, configure_logging=False,
    )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


def cluster_workers(stack: ExitStack, count: int) -> dict[str, Any]:
    """Options of a ``Loader`` with so many workers on a Ray cluster, which `stack` ends; none for 0."""
    if not count:
        return {}
    import penstock as ps

    stack.enter_context(ray_cluster(count))
    return {"workers": ps.ray.Workers(count=count)}


@contextmanager
def piped(url: str | None, bucket: str, keys: list[str]) -> Iterator[Any]:
    """Objects one after the other in a pipe.

    Raises:
        RuntimeError: One of them could not be read.
    """
    command = [*PENSTOCK, "cat", *(f"s3://{bucket}/{key}" for key in keys), *_connection(url)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=1 << 20) as process:
        try:
            yield process.stdout
        except GeneratorExit:
            process.terminate()
            raise
    if process.returncode:
        raise RuntimeError(f"penstock cat ended with status {process.returncode}")
