"""The guide's example on a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from pages import run_page


def test_the_page_runs(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page shows as runnable runs on the cluster that Ray finds."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    run_page("docs/guides/ray.md", "ray", tmp_path)
