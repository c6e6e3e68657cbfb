"""nginx as an S3 origin that costs nearly nothing: started and ended here. README.md says what it does not model."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import ssl
import string
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from penstock.bench.process import BenchError
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

HERE = Path(__file__).resolve().parent
START_S_MAX = 20.0
CONNECTIONS_MAX = 8192
FILES_MAX = 65536
PACKAGES = "nginx libnginx-mod-http-lua lua-resty-core gcc libc6-dev openssl"
MODULE = Path("/usr/lib/nginx/modules/ngx_http_lua_module.so")


class Listed(NamedTuple):
    """What a listing says of a key."""

    key: str
    size_bytes: int = 100_000
    etag: str = "d41d8cd98f00b204e9800998ecf8427e"


def ends_with_us(signal_name: str) -> list[str]:
    """Words before a command that make the kernel end it if this process is killed.

    Such a command gets a session of its own, so that Ctrl-C reaches Python alone, which then ends it in order.
    """
    return ["setpriv", "--pdeathsig", signal_name] if shutil.which("setpriv") else []


def shared_memory_folder(prefix: str) -> Path:
    """Make a new private folder in /dev/shm (else the temporary folder), after removing those that a killed run left."""
    parent = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    for old in parent.glob(f"{prefix}-*-*"):
        owner = old.name.removeprefix(f"{prefix}-").split("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}-{os.getpid()}-", dir=parent))


class Origin:
    """The server; ``root/<bucket>/<key>`` are its objects.

    Args:
        root: Folder of buckets; must not change while the origin runs, since its listings are read at the start.
        listed: bucket -> keys that are listed without being files: 100 000 of them cost no inode.
        content: Bytes of every listed key that has no file; with None, such a key does not exist.
        ttfb_ms: Milliseconds before any answer begins: fixed, or the median of a log-normal if `ttfb_sigma`.
        ttfb_sigma: Sigma of the logarithm of the delay.
        rate_bytes_per_s: Bandwidth of each connection, paced by the kernel; 0 is unlimited.
        total_bytes_per_s: Bandwidth of all connections together; 0 is unlimited.
        error_503: Share of requests that are answered 503 SlowDown.
        lists_writes: Whether listings also have the names and sizes of what clients write, whose bytes are dropped.
        tls: Serve https with a certificate of its own authority, `ca_path`.
        workers: nginx processes; more than one only where a client is to be faster than one of them.
        log: A file to which every answer is appended as "METHOD STATUS BODY-BYTES" when its request ends.

    Raises:
        ConfigError: nginx, its Lua module or a C compiler is not installed.
        BenchError: nginx does not start.
    """

    def __init__(
        self,
        root: Path,
        *,
        listed: dict[str, Iterable[str]] | None = None,
        content: bytes | None = None,
        ttfb_ms: float = 0.0,
        ttfb_sigma: float = 0.0,
        rate_bytes_per_s: int = 0,
        total_bytes_per_s: int = 0,
        error_503: float = 0.0,
        lists_writes: bool = False,
        tls: bool = False,
        workers: int = 1,
        log: Path | None = None,
    ) -> None:
        self.root = root
        self.listed = listed or {}
        self.content = content
        self.ttfb_ms, self.ttfb_sigma = ttfb_ms, ttfb_sigma
        self.rate_bytes_per_s, self.total_bytes_per_s = rate_bytes_per_s, total_bytes_per_s
        self.error_503, self.tls = error_503, tls
        self.lists_writes = lists_writes
        self.workers = workers
        self.log = log
        self.port = 0
        self.ca_path: Path | None = None
        self._looks = 0
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which clients find the server. It checks no keys, but clients want some."""
        keys = {"AWS_ACCESS_KEY_ID": "penstock", "AWS_SECRET_ACCESS_KEY": "penstock", "AWS_REGION": "us-east-1"}
        return {**keys, "AWS_ENDPOINT_URL": self.url}

    def __enter__(self) -> Self:
        nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
        if nginx is None or not MODULE.exists() or shutil.which("cc") is None:
            raise ConfigError(
                "nginx with its Lua module, or a C compiler, is missing", hint=f"apt-get install {PACKAGES}"
            )
        self._folder = shared_memory_folder("penstock-origin")
        try:
            self._write_listings()
            if self.tls:
                self._make_certificate()
            self._start(nginx)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server by its pid and remove its folder; may be called twice."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)  # nginx: at once, workers included
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @property
    def _run(self) -> Path:
        assert self._folder is not None
        return self._folder

    def cpu_s(self) -> float:
        """Return the user and system seconds that the workers have used so far."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in children]
        return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")

    def connections_accepted(self) -> int:
        """Return how many connections clients have opened since the start, except those of this method."""
        context = ssl.create_default_context(cafile=str(self.ca_path)) if self.tls else None
        with urllib.request.urlopen(f"{self.url}/connections", context=context) as answer:
            accepted = int(answer.read().split()[7])  # "server accepts handled requests", then the three counts
        self._looks += 1
        return accepted - self._looks

    def _write_listings(self) -> None:
        folder = self._run / "listings"
        folder.mkdir()
        buckets = {path.name: list(_files(path)) for path in self.root.iterdir() if path.is_dir()}
        facts: tuple[int, str] | tuple[()] = ()
        if self.content is not None:
            (self._run / "content").write_bytes(self.content)
            status = (self._run / "content").stat()
            facts = status.st_size, _etag(status)
        for name, extra in self.listed.items():
            buckets.setdefault(name, []).extend(Listed(key, *facts) for key in extra)
        for name, objects in buckets.items():
            objects.sort(key=lambda item: item.key.encode())  # S3 lists in UTF-8 byte order
            (folder / f"{name}.tsv").write_text("".join(f"{o.key}\t{o.size_bytes}\t{o.etag}\n" for o in objects))
        (folder / "buckets").write_text("".join(f"{name}\n" for name in buckets))

    def _make_certificate(self) -> None:
        """Make an authority, and a certificate for 127.0.0.1 and localhost that it signed."""
        ca, run = self._run / "ca.pem", self._run
        new: list[str | Path] = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "7"]
        names = "subjectAltName=IP:127.0.0.1,DNS:localhost"
        authority: list[str | Path] = ["-keyout", run / "ca.key", "-out", ca, "-subj", "/CN=penstock bench authority"]
        server: list[str | Path] = [
            "-keyout",
            run / "server.key",
            "-out",
            run / "server.pem",
            "-subj",
            "/CN=localhost",
            "-addext",
            names,
        ]
        signed: list[str | Path] = [
            "-CA",
            ca,
            "-CAkey",
            run / "ca.key",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
        ]
        for command in ([*new, *authority], [*new, *server, *signed]):
            subprocess.run(command, check=True, capture_output=True)
        self.ca_path = ca

    def _start(self, nginx: str) -> None:
        run = self._run
        shim = run / "pace.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(shim), str(HERE / "pace.c"), "-ldl"], check=True)
        environment = {**os.environ, "LD_PRELOAD": str(shim), "PACE_CC": "cubic"}
        if self.rate_bytes_per_s:
            environment["PACE_RATE"] = str(self.rate_bytes_per_s)
        if self.total_bytes_per_s:
            environment["PACE_TOTAL"] = str(self.total_bytes_per_s)
        for _ in range(5):
            self.port = _free_port()
            (run / "nginx.conf").write_text(self._configuration())
            with (run / "out.log").open("wb") as log:
                self._process = subprocess.Popen(
                    [*ends_with_us("TERM"), nginx, "-c", str(run / "nginx.conf"), "-e", str(run / "error.log")],
                    env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            if self._ready():
                return
            self._process.wait()
            self._process = None
            problem = (run / "out.log").read_text() + (run / "error.log").read_text()
            if "Address already in use" not in problem:
                raise BenchError(f"nginx did not start: {problem.strip()}")
        raise BenchError("nginx found no free port in 5 attempts")

    def _configuration(self) -> str:
        run = self._run
        certificate = f"ssl_certificate {run}/server.pem; ssl_certificate_key {run}/server.key;"
        files = min(FILES_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[1])  # nginx may not raise it here
        return string.Template((HERE / "nginx.conf").read_text()).substitute(
            run=run,
            workers=self.workers,
            root=self.root,
            here=HERE,
            port=self.port,
            access_log=f"log_format counted '$request_method $status $body_bytes_sent'; access_log {self.log} counted;"
            if self.log
            else "access_log off;",
            files=files,
            files_kept=max(64, files - CONNECTIONS_MAX - 1024),  # each of them is open
            connections=CONNECTIONS_MAX,
            user="user root;" if os.geteuid() == 0 else "",
            ssl="ssl" if self.tls else "",
            certificate=certificate if self.tls else "",
            without_file="try_files $uri @listed;" if self.content is not None else "",
            ttfb_s=self.ttfb_ms / 1000,
            ttfb_sigma=self.ttfb_sigma,
            error_503=self.error_503,
            lists_writes="true" if self.lists_writes else "false",
        )

    def _ready(self) -> bool:
        """Wait until the port accepts; False if nginx ended first."""
        assert self._process is not None
        deadline_s = time.monotonic() + START_S_MAX
        while self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                if time.monotonic() > deadline_s:
                    raise BenchError(f"nginx accepted no connection within {START_S_MAX} s") from None
                time.sleep(0.02)
            else:
                return True
        return False


def _files(bucket: Path) -> Iterable[Listed]:
    for path in bucket.rglob("*"):
        if path.is_file():
            status = path.stat()
            yield Listed(str(path.relative_to(bucket)), status.st_size, _etag(status))


def _etag(status: os.stat_result) -> str:
    """The ETag that nginx gives a file."""
    return f"{int(status.st_mtime):x}-{status.st_size:x}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
