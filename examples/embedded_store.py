"""Run a program next to an S3 server of its own: started on a free loopback port, with generated keys, ended with it.

    python embedded_store.py                                  # runs digits.py
    python embedded_store.py python train.py s3://bucket/data # any program
    python embedded_store.py bash --norc                      # a shell with this environment, until you leave it

The program finds the server through the AWS variables, and in it one empty bucket, named `bucket`.
Needs: pip install ministack
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from penstock.testing.ministack import Ministack


def main() -> int:
    command = sys.argv[1:] or [sys.executable, str(Path(__file__).with_name("digits.py")), "s3://bucket/digits/"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `with` ends the server
    with Ministack() as server:
        server.create_bucket("bucket")
        print(f"{server.endpoint_url} (pid {server.pid}), s3://bucket/", file=sys.stderr)
        return subprocess.call(command, env={**os.environ, **server.environment})


if __name__ == "__main__":
    sys.exit(main())
