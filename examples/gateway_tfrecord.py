"""Read WebDataset tars as TFRecord: the gateway transforms each shard while it is read.

The example writes a shard, starts ``penstock gateway`` beside itself, and reads the samples through it. Any S3 client could.
"""

import io
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import penstock as ps


def write_shard(path: Path) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(100):
            data = f"{number % 10}".encode()
            info = tarfile.TarInfo(f"{number:06d}.cls")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_shard(Path(folder) / "train-000000.tar")
        command = [sys.executable, "-m", "penstock", "gateway", "--upstream", folder, "--name", "train"]
        command += ["--transform", "tar2tfrecord", "--processes", "1", "--port", "0", "--cache", f"{folder}/.cache:1GB"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as gateway:
            assert gateway.stderr is not None
            found = re.search(r" at (http://\S+) ", gateway.stderr.readline())
            assert found is not None, gateway.stderr.read()
            with ps.connect("s3://train/", endpoint_url=found[1], anonymous=True) as store:
                shard = store.read("train-000000.tar")
                print(
                    f"{len(shard)} bytes of TFRecord from a tar of {(Path(folder) / 'train-000000.tar').stat().st_size}"
                )
            gateway.terminate()


if __name__ == "__main__":
    main()
