"""``penstock bench`` as a process, against real servers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import penstock as ps
from penstock.bench.origin.server import MODULE

pytestmark = pytest.mark.server


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock", "bench", *arguments]


@pytest.mark.skipif(not MODULE.exists(), reason="nginx has no Lua")
def test_the_origin_serves_until_ctrl_c(tmp_path: Path) -> None:
    """``bench origin`` says where it serves, delays its answers, logs them, and ends on Ctrl-C without an error."""
    (tmp_path / "data/bucket").mkdir(parents=True)
    (tmp_path / "data/bucket/key").write_bytes(b"0123456789")
    log = tmp_path / "log"
    options = ["--ttfb-ms", "40", "--rate", "10MB", "--log", str(log)]
    process = subprocess.Popen(
        command("origin", str(tmp_path / "data"), *options), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stderr is not None
        url = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
        assert url is not None
        with ps.connect("s3://bucket/", endpoint_url=url[0], anonymous=True) as store:
            assert bytes(store.read("key").data) == b"0123456789"
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(20) == 0, process.stderr.read()
        process.stderr.close()
    finally:
        process.kill()
        process.wait()
    assert "GET 20" in log.read_text()


def test_without_nginx_the_origin_says_what_to_install(tmp_path: Path) -> None:
    """Where nginx is missing, ``bench origin`` is a usage error that names the packages."""
    code = (
        "import penstock.bench.origin.server as s; s.MODULE = s.Path('/nowhere'); from penstock.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", "origin", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "apt-get install nginx libnginx-mod-http-lua" in done.stderr
