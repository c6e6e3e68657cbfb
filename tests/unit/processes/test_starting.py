"""The processors that processes use."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

import penstock as ps
from penstock.config import cores_count
from penstock.gateway.serving.assembly import stays_on_one_processor
from penstock.processes import starting

PLAIN = {"endpoint_url": "http://127.0.0.1:1", "anonymous": True}
BY_TLS = {"endpoint_url": "https://127.0.0.1:1", "anonymous": True}


@pytest.mark.parametrize(
    ("url", "options", "expected"),
    [
        pytest.param("s3://bucket/", PLAIN, True, id="S3"),
        pytest.param("s3://bucket/", BY_TLS, False, id="S3 by TLS"),
        pytest.param("s3://bucket/", {"anonymous": True, "endpoint_url": None}, False, id="Amazon"),
        pytest.param("https://127.0.0.1:1/", {}, False, id="HTTPS"),
        pytest.param("http://127.0.0.1:1/", {}, True, id="HTTP"),
        pytest.param("memory://affinity", {}, True, id="memory"),
    ],
)
def test_upstreams_by_tls_keep_all_processors(
    monkeypatch: pytest.MonkeyPatch, url: str, options: dict[str, object], expected: bool
) -> None:
    """A process stays on one processor unless an upstream is read by TLS; the setting decides otherwise."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    with ps.connect(url, **options) as store, ps.connect("memory://other") as other:  # type: ignore[arg-type]
        assert stays_on_one_processor("auto", [other, store]) is expected
        assert stays_on_one_processor("one", [store])
        assert not stays_on_one_processor("all", [other])


def test_threads_stay_and_children_do_not() -> None:
    """Threads that start later share the one processor, the number of cores does not change, and children may use all."""
    found: dict[str, object] = {}
    before, cores = os.sched_getaffinity(0), cores_count()

    def run() -> None:
        starting.stay_on_one_processor(7)
        thread = threading.Thread(target=lambda: found.update(thread=os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        found["cores"] = cores_count()
        child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
        starting.use_all_processors(child.pid)
        found["child"] = os.sched_getaffinity(child.pid)
        child.communicate(b"\n")
        starting.use_all_processors(child.pid)  # it has ended, which is no error

    bound = threading.Thread(target=run)  # so that this test's own thread keeps its processors
    bound.start()
    bound.join()
    assert found == {"thread": {sorted(before)[7 % len(before)]}, "cores": cores, "child": before}
