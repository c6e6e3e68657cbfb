"""An S3 store in a process of its own that is killed and comes back: on the same port, with the same objects."""

from __future__ import annotations

import threading
from pathlib import Path

from penstock.testing.s3_server import S3Server, free_ports
from servers.gateway import Gateway


class RestartingStore(S3Server):
    """The package's own gateway on a directory.

    Args:
        folder: Folder of its buckets and of its log.

    Attributes:
        bucket: Folder of the objects of its bucket, ``bucket``.
        keys: The environment variable that gives a gateway the same keys.
    """

    access_key, secret_key = "AKPENSTOCKRESTARTS00", "restarts/secret/restarts/secret/restarts"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.bucket = folder / "buckets" / "bucket"
        self.bucket.mkdir(parents=True)
        self._port = free_ports(1)[0]
        self.endpoint_url = f"http://127.0.0.1:{self._port}"
        self.keys = {"PENSTOCK_GATEWAY_KEYS": f"{self.access_key}:{self.secret_key}:rw"}
        self._closed = threading.Event()
        self._outage: threading.Thread | None = None
        self._start()

    def _start(self) -> None:
        where = ["--upstream", str(self.bucket.parent), "--read-write", "--port", str(self._port)]
        self._gateway = Gateway(*where, folder=self._folder, environment=self.keys)

    def fail(self, seconds: float) -> None:
        """Kill it now, and start it again after `seconds`, in the background."""
        self._gateway.kill()

        def come_back() -> None:
            if not self._closed.wait(seconds):
                self._start()

        self._outage = threading.Thread(target=come_back)
        self._outage.start()

    def wait_back(self) -> None:
        """Wait until it is back."""
        if self._outage is not None:
            self._outage.join()

    def close(self) -> None:
        """End it; idempotent."""
        self._closed.set()
        self.wait_back()
        self._gateway.kill()
