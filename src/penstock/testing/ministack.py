"""An S3 server on loopback for tests, demos and experiments: ministack, with generated keys.

ministack does not verify the signatures of its root key. Therefore ``Ministack`` returns the keys of an IAM user whose policy
allows everything, so that the server refuses a wrong secret as a real store does. The server always ends with its owner:
``close()`` ends it by its pid, and it exits by itself when its standard input is closed, which the kernel does if the owner
is killed.

It needs the packages ``ministack`` and ``botocore``. Cost: one process of about 100 MB, which takes 1 to 3 seconds to start.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, UnavailableError
from penstock.testing.s3_server import S3Server, free_ports

if TYPE_CHECKING:
    from collections.abc import Mapping

_POLICY = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}'
_STARTS_MAX = 3  # another process may take the free port before the server binds it
_POLL_S = 0.05


class Ministack(S3Server):
    """A running server. It is a context manager, and ``close()`` is idempotent.

    Args:
        settings: Further environment variables for ministack, e.g. ``{"SERVICES": "s3,iam,sts"}``.
        ready_s_max: Longest time to wait for the first answer, in seconds.

    Attributes:
        endpoint_url: URL of the server, ``http://127.0.0.1:port``.
        access_key: Access key of an IAM user who may do everything.
        secret_key: Secret key of that user.
        region: Region of the server, ``us-east-1``.
        pid: Process id of the server.

    Raises:
        ConfigError: ministack is not installed, or too old to verify signatures.
        UnavailableError: The server did not answer in time; the message ends with its log.
    """

    def __init__(self, *, settings: Mapping[str, str] | None = None, ready_s_max: float = 60.0) -> None:
        if find_spec("ministack") is None:
            raise ConfigError("ministack is not installed", hint="pip install 'ministack>=1.5.20'")
        self._root = secrets.token_hex(8).upper(), secrets.token_urlsafe(24)
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-ministack-"))
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._start(dict(settings or {}), ready_s_max)
            self.access_key, self.secret_key = self._make_user()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server, wait for its end, and remove its files."""
        self._end_process()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __repr__(self) -> str:
        return f"<Ministack {self.endpoint_url} pid {self.pid}>" if self._process else "<Ministack closed>"

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def _start(self, settings: dict[str, str], ready_s_max: float) -> None:
        deadline_s = time.monotonic() + ready_s_max
        for _ in range(_STARTS_MAX):
            (port,) = free_ports(1)
            self.endpoint_url = f"http://127.0.0.1:{port}"
            log = self._folder / "log"
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    # -P keeps this folder off sys.path, where a module might have the name of one of the server's
                    [sys.executable, "-P", __file__],
                    env=self._server_environment(port) | settings,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches only the owner, who then closes the server
                )
            self.pid = self._process.pid
            if self._wait_ready(deadline_s):
                return
            is_alive = self._process.poll() is None
            self._end_process()
            if is_alive:
                break
        raise UnavailableError(
            f"ministack did not answer at {self.endpoint_url} within {ready_s_max:g} s; its log ends: "
            f"{log.read_text(errors='replace')[-2000:]!r}"
        )

    def _server_environment(self, port: int) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MINISTACK_"))}
        return ours | {
            "BIND_HOST": "127.0.0.1",
            "GATEWAY_PORT": str(port),
            "AUTH": "true",
            "AWS_ACCESS_KEY_ID": self._root[0],
            "AWS_SECRET_ACCESS_KEY": self._root[1],
            "SERVICES": "s3,iam,sts",
            "SFTP_ENABLED": "0",  # this service and the next would listen on fixed ports
            "IOT_MTLS_ENABLED": "0",
            "LOG_LEVEL": "WARNING",
            "TMPDIR": str(self._folder),
            "S3_DATA_DIR": str(self._folder / "s3"),
        }

    def _wait_ready(self, deadline_s: float) -> bool:
        """Wait for an answer; False if the server exited or the time is over."""
        assert self._process is not None
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < deadline_s:
            try:
                with opener.open(f"{self.endpoint_url}/_ministack/health", timeout=5) as answer:
                    health = json.load(answer)
            except OSError:  # includes URLError: nobody listens yet
                pass
            else:
                if self._process.poll() is not None:
                    return False  # another server has taken the port, and answered
                if health.get("auth") != "enabled":
                    raise ConfigError(
                        f"ministack {health.get('version')} does not verify signatures",
                        hint="pip install 'ministack>=1.5.20'",
                    )
                return True
            try:
                self._process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
            return False
        return False

    def _make_user(self) -> tuple[str, str]:
        iam = self._client("iam", *self._root)
        iam.create_user(UserName="penstock")
        iam.put_user_policy(UserName="penstock", PolicyName="all", PolicyDocument=_POLICY)
        key = iam.create_access_key(UserName="penstock")["AccessKey"]
        iam.close()
        return key["AccessKeyId"], key["SecretAccessKey"]


def _serve() -> None:
    """Run ministack in this process until its owner closes the standard input."""
    import signal
    import threading

    from ministack.app import main  # type: ignore[import-untyped,unused-ignore]

    def leave_with_owner() -> None:
        sys.stdin.buffer.read()
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)  # the folder that the owner created
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=leave_with_owner, daemon=True).start()
    sys.argv = ["ministack"]
    main()


if __name__ == "__main__":
    _serve()
