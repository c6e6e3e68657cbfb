"""penstock's transport in a process with TensorFlow, which exports a libcurl of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

STORE = "from penstock.testing.ministack import Ministack; import penstock as ps, penstock.store.s3"
READ = """
import os
with Ministack() as server:
    os.environ |= server.environment
    with ps.connect("s3://" + server.create_bucket()) as store:
        store.write("a", b"x" * 3_000_000)
        assert len(store.read("a").data) == 3_000_000
    from penstock.system.libcurl import pycurl, has_foreign_libcurl
    assert has_foreign_libcurl()
    print(pycurl.version_info()[1])
"""


@pytest.mark.parametrize("order", [("import tensorflow", STORE), (STORE, "import tensorflow")], ids=["after", "before"])
def test_the_store_uses_its_own_libcurl(order: tuple[str, str]) -> None:
    """Whether TensorFlow is imported before or after the transport, requests go through pycurl's own libcurl."""
    code = "\n".join([*order, READ])
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    alone = subprocess.run(
        [sys.executable, "-c", "import pycurl; print(pycurl.version_info()[1])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == alone.stdout.strip()
