"""Run a program next to an S3 server of its own: started on a free loopback port, with generated keys, ended with it.

    python embedded_store.py                                # runs digits.py
    python embedded_store.py python train.py s3://{bucket}/ # {bucket} is the name of a new bucket

The program finds the server through the AWS variables. Needs: pip install ministack
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from penstock.testing.ministack import Ministack


def main() -> int:
    command = sys.argv[1:] or [sys.executable, str(Path(__file__).with_name("digits.py")), "s3://{bucket}/digits/"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `with` ends the server
    with Ministack() as server:
        bucket = server.create_bucket()
        print(f"{server.endpoint_url} (pid {server.pid}), bucket {bucket}", file=sys.stderr)
        environment = {**os.environ, **server.environment}
        return subprocess.call([word.replace("{bucket}", bucket) for word in command], env=environment)


if __name__ == "__main__":
    sys.exit(main())
