"""Doors that need no framework: the loader, random access, programs, the mount, the gateway and the channels."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import penstock as ps
from doors.matrix.data_set import Record, as_record, parsed
from doors.matrix.door import BATCH, Door, Job, ProgramError, in_batches
from doors.matrix.streams import records_of_tar

PROGRAM = Path(__file__).with_name("channel_program.py")


def samples(job: Job) -> ps.Pipeline:
    """Return the pipeline of a job, without batches."""
    pipeline = ps.shards(job.url)
    if job.seed is not None:
        pipeline = pipeline.shuffle(window=32, seed=job.seed)
    return pipeline.map(as_record)


def pipeline(job: Job) -> ps.Pipeline:
    """Return the pipeline of a job."""
    return samples(job).batch(BATCH)


def records(values: Any) -> list[Record]:
    """Return the records of a batch's column."""
    return [parsed(bytes(value)) for value in values]


class LoaderDoor(Door):
    """``ps.Loader``; its workers are decode processes."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.loader = self.open.enter_context(ps.Loader(pipeline(job), processes=job.workers, cache=job.node_cache))

    def epoch(self) -> Iterator[list[Record]]:
        for batch in self.loader:
            yield records(batch["record"])

    def state(self) -> Any:
        return self.loader.state_dict()

    def restore(self, state: Any) -> None:
        self.loader.load_state_dict(state)


class RandomAccessDoor(Door):
    """``pipeline.open()``: every sample by its number."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.dataset = self.open.enter_context(samples(job).open(index="auto", cache=job.node_cache))

    def epoch(self) -> Iterator[list[Record]]:
        for start in range(0, len(self.dataset), BATCH):
            yield records(sample["record"] for sample in self.dataset[start : start + BATCH])


class CatDoor(Door):
    """``penstock cat``, whose output Python's ``tarfile`` reads while it comes."""

    def epoch(self) -> Iterator[list[Record]]:
        command = [sys.executable, "-m", "penstock", "cat", *self.job.urls]
        with (self.folder() / "errors").open("w+") as errors:
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=self.environment()) as process:
                assert process.stdout is not None
                try:
                    yield from in_batches(records_of_tar(process.stdout, name="the output of penstock cat"))
                    process.stdout.read()
                finally:
                    process.stdout.close()
                    code = process.wait()
                    errors.seek(0)
                    if code > 0:  # set -o pipefail would make a shell say the same
                        raise ProgramError(code, errors.read())


class MountDoor(Door):
    """``ps.mount``: the files of a mounted bucket, read by Python's ``tarfile``."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.directory = self.folder()
        self.mount = self.open.enter_context(
            ps.mount(job.url, self.directory, cache=job.node_cache, metadata_ttl_s=0.0)
        )

    def epoch(self) -> Iterator[list[Record]]:
        for path in sorted(self.directory.iterdir()):
            with path.open("rb") as file:
                yield from in_batches(records_of_tar(file, name=path.name))


class GatewayDoor(Door):
    """``penstock gateway``, whose objects boto3 reads."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import boto3
        from botocore.config import Config

        from gateways import ACCESS_KEY, REGION, SECRET_KEY, RunningGateway

        cache = Path(job.cache) if job.cache else self.folder()
        upstream = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        self.gateway = RunningGateway(cache, "--upstream", job.url, upstream=upstream)
        self.open.callback(self.gateway.close)
        self.client = boto3.client(
            "s3", endpoint_url=self.gateway.url, aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY,
            region_name=REGION, config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        )  # fmt: skip
        self.open.callback(self.client.close)

    def epoch(self) -> Iterator[list[Record]]:
        listed = self.client.list_objects_v2(Bucket=self.job.bucket)
        for key in sorted(entry["Key"] for entry in listed["Contents"]):
            yield from in_batches(records_of_tar(io.BytesIO(self._read(key)), name=key))

    def _read(self, key: str) -> bytes:
        try:
            body: bytes = self.client.get_object(Bucket=self.job.bucket, Key=key)["Body"].read()
        except Exception as error:
            error.add_note(f"while {key} was read")  # boto3 does not say it
            raise
        return body


class FsspecDoor(Door):
    """``fsspec.open`` of a ``penstock://`` URL, read by Python's ``tarfile``."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        import fsspec

        self.system = fsspec.filesystem("penstock", cache=job.node_cache, skip_instance_cache=True)

    def epoch(self) -> Iterator[list[Record]]:
        for path in self.system.ls(f"s3/{self.job.bucket}/{self.job.prefix}", detail=False):
            with self.system.open(path, "rb") as file:
                yield from in_batches(records_of_tar(file, name=path))


class RunDoor(Door):
    """``penstock run``: a program that reads its channel ``train``, in one of the modes."""

    mode = "file"
    program = "file"  # what the program is told to do

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._position: dict[str, Any] | None = None

    def epoch(self) -> Iterator[list[Record]]:
        yield from in_batches(iter(self._run(None)[0]))

    def head(self, batches_count: int) -> tuple[list[Record], Any]:
        return self._run(batches_count)

    def restore(self, state: Any) -> None:
        self._position = state

    def _run(self, samples_max: int | None) -> tuple[list[Record], Any]:
        folder = self.folder()
        (folder / "job.json").write_text(json.dumps({"state": self._position, "samples_max": samples_max}))
        seed = f",seed={self.job.seed}" if self.job.seed is not None else ""
        downloads = ["--downloads", self.job.cache] if self.job.cache is not None else []
        command = [
            sys.executable, "-m", "penstock", "run", *downloads, "--channel", f"train={self.job.url},mode={self.mode}{seed}",
            "--", sys.executable, str(PROGRAM), self.program, str(folder),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment(), timeout=100, check=False)
        if done.returncode:
            raise ProgramError(done.returncode, done.stderr)
        found = json.loads((folder / "found.json").read_text())
        return [parsed(json.dumps(record)) for record in found["records"]], found["state"]


class RunPipeDoor(RunDoor):
    """``penstock run`` in Pipe mode."""

    mode = program = "pipe"


class RunFastFileDoor(RunDoor):
    """``penstock run`` in Fast File mode."""

    mode = "fastfile"
