"""The endpoint of a loader for Prometheus, and the dashboard that shows what it and the gateway export."""

from __future__ import annotations

import gc
import json
import os
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import penstock as ps
from loading import pipeline, write_counted
from penstock.errors import ClosedError, ConfigError
from penstock.gateway.serving.prometheus import HELP
from penstock.loader.statistics import Meter, prometheus

DASHBOARD = Path(__file__).parents[3] / "deploy/grafana/penstock.json"


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return bytes(answer.read()).decode()


def test_a_loader_serves_its_numbers_until_it_is_closed(tmp_path: Path) -> None:
    """Each answer has the present numbers; other paths are 404; closing, or dropping the loader, ends the server."""
    write_counted(tmp_path, (10,))
    with ps.Loader(pipeline(tmp_path)) as loader:
        url = loader.serve_metrics(rank="3").url
        assert 'penstock_loader_samples_total{rank="3"} 0' in read(url)
        list(loader)
        assert 'penstock_loader_samples_total{rank="3"} 10' in read(url)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            read(url.replace("/metrics", "/"))
        port = int(url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*port=0"):
            loader.serve_metrics(port)
    with pytest.raises(urllib.error.URLError, match="refused"):
        read(url)
    with pytest.raises(ClosedError):
        loader.serve_metrics()
    dropped = ps.Loader(pipeline(tmp_path))
    url = dropped.serve_metrics().url
    assert "penstock_loader_epoch 0" in read(url)
    del dropped
    gc.collect()
    with pytest.raises(urllib.error.URLError, match="refused"):
        read(url)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_end_the_server(tmp_path: Path) -> None:
    """It closes its copy of the socket without waiting for a thread that it does not have."""
    write_counted(tmp_path, (10,))
    with ps.Loader(pipeline(tmp_path)) as loader:
        server = loader.serve_metrics()
        child = os.fork()
        if child == 0:
            server.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert "penstock_loader_epoch 0" in read(server.url)


def test_the_dashboard_shows_what_there_is() -> None:
    """Every metric in it is one that a loader or the gateway exports."""
    exported = prometheus(Meter().read(threads_count=1, dropped={"decode": 1}), epoch=0, labels={})
    known = {*re.findall(r"# TYPE (\w+)", exported), *HELP, *(f"{name}_bucket" for name in HELP)}
    board = json.loads(DASHBOARD.read_text())
    shown = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"penstock_\w+", target["expr"])
    }
    assert len(shown) > 15
    assert shown - known == set()
