"""Carrying out a plan: what travels to other machines, and what is refused before anything is written."""

from __future__ import annotations

import pickle
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import ConfigError
from penstock.pack import pack
from penstock.pack.cluster import ClusterTask
from penstock.pack.fields import parse_fields
from penstock.pack.recipes import EntriesRecipe, ShardsRecipe
from penstock.pack.workers import ExecutionOptions, memory_shares
from penstock.version import install_hint

MIB = 1 << 20


def test_what_other_machines_need_pickles() -> None:
    """A recipe, the stores' URLs and their connection options pickle."""
    connection = {
        "endpoint_url": "http://127.0.0.1:1",
        "credentials": ps.Credentials(access_key="a", secret_key="b"),
        "retry": ps.RetryConfig(attempts_max=2),
    }
    rewriting = ShardsRecipe(
        format="mds.zst",
        source_format=None,
        on_corrupt="raise",
        specs=parse_fields("a=b:int"),
        key_field=None,
        bytes_max=9,
    )
    for recipe in (EntriesRecipe(format="tar", transform=str.upper), rewriting):  # type: ignore[arg-type]
        roots, options = ("s3://bucket/in/",), ExecutionOptions(verify=True)
        task = ClusterTask(recipe, "s3://bucket/out/", connection, roots, connection, "run", options)  # type: ignore[arg-type]
        assert pickle.loads(pickle.dumps(task)) == task


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is here")
def test_ray_is_an_extra(tmp_path: Path) -> None:
    """Without Ray, the error names the package to install, and nothing is written."""
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match=re.escape(f"needs Ray. Hint: {install_hint('ray')}")):
        pack(f"{tmp_path}/a.txt", tmp_path / "out", executor="ray")
    assert not (tmp_path / "out").exists()


def test_memory_is_divided() -> None:
    """Writers get at most half of the memory, 40 MiB per shard and 136 for Parquet; too little memory is refused."""
    assert memory_shares(400 * MIB, 4, "tar") == (240 * MIB, 4)
    assert memory_shares(400 * MIB, 9, "tar") == (200 * MIB, 5)
    assert memory_shares(400 * MIB, 4, "parquet.zst") == (264 * MIB, 1)
    with pytest.raises(ConfigError, match="to write parquet"):
        memory_shares(200 * MIB, 1, "parquet")
    with pytest.raises(ConfigError, match="at least 83886080"):
        ExecutionOptions(memory_bytes_max=1)
