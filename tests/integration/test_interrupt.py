"""Ctrl-C in a program that reads: it returns promptly, at whatever moment, and leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from servers.faulty import FaultyServer

pytestmark = pytest.mark.server

READS = {
    "read": "store.read('large')",
    "read_many": "list(store.read_many(['small'] * 50))",
    "read_parts": "[chunk.last for chunk in store.read_parts(['large'], part_bytes=1 << 16)]",
    "list": "list(store.list())",
    "write": "store.write('w', bytes(100_000))",
}
SCRIPT = """
import sys
import penstock as ps
store = ps.connect(sys.argv[1], endpoint_url=sys.argv[2], anonymous=True)
try:
    while True:
        {statement}
except KeyboardInterrupt:
    from penstock.transport import engine
    engine.close()
    import threading
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"], threading.enumerate()
    sys.exit(77)
"""


@pytest.mark.parametrize("requests_before", [1, 60])
@pytest.mark.parametrize("what", sorted(READS))
def test_ctrl_c_returns_at_once_and_leaves_nothing(faulty: FaultyServer, what: str, requests_before: int) -> None:
    """SIGINT after so many requests ends the loop within seconds, by KeyboardInterrupt, with no thread left."""
    faulty.objects["small"] = b"x" * 1000
    faulty.objects["large"] = b"y" * 3_000_000
    script = SCRIPT.format(statement=READS[what])
    child = subprocess.Popen([sys.executable, "-c", script, faulty.url, faulty.endpoint_url], stderr=subprocess.PIPE)
    try:
        while len(faulty.requests) < requests_before:
            assert child.poll() is None, child.communicate()[1].decode()
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=10)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 77, errors.decode()
