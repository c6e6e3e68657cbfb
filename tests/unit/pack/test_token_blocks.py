"""Documents packed ahead into blocks of tokens: those that the loader gives, after any interruption and by the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.cli.app import run
from penstock.errors import ConfigError
from penstock.pack import pack, writer
from penstock.pack.recipes import NullListener

END = 256


def encoded(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": list(sample["txt"].encode())}


@pytest.fixture
def blocks(tmp_path: Path) -> Any:
    """Blocks of 16 tokens of 40 documents in two shards."""
    with writer(tmp_path / "documents/x-%06d.tar", samples_max=20) as out:
        for number in range(40):
            out.write({"__key__": f"k{number:04d}", "txt": "abcdefgh" * (number % 5)})
    documents = ps.shards(f"{tmp_path}/documents/").decode(ps.Text("txt")).map(encoded)
    return documents.token_blocks(16, separator=END, dtype="int32")


def tokens_in(pipeline: Any) -> np.ndarray:
    with ps.Loader(pipeline.batch(8)) as loader:
        return np.concatenate([batch["tokens"] for batch in loader])


def packed(folder: Path) -> np.ndarray:
    return tokens_in(ps.shards(f"{folder}/").decode(ps.Numpy("tokens")))


def test_packed_blocks_are_those_of_the_loader(blocks: Any, tmp_path: Path) -> None:
    """Without a format they become MDS, with dtype and shape, and an index that gives them a length."""
    assert pack(blocks, tmp_path / "out/", samples_max=16, verify=True).samples_count == len(tokens_in(blocks))
    assert min(path.name for path in (tmp_path / "out").glob("*.mds")) == "shard.00000.mds"
    found = packed(tmp_path / "out")
    assert found.dtype == np.int32
    assert found.tolist() == tokens_in(blocks).tolist()
    with ps.Loader(ps.shards(f"{tmp_path}/out/").batch(8)) as loader:
        assert len(loader) == -(-len(found) // 8)
    assert pack(blocks, tmp_path / "parquet/", format="parquet").rows[0].format == "parquet"


def test_batches_are_refused(blocks: Any, tmp_path: Path) -> None:
    """A pipeline with a batch stage gives batches, which are no samples."""
    with pytest.raises(ConfigError, match="leave out"):
        pack(blocks.batch(8), tmp_path / "out/")


def test_a_killed_run_goes_on(blocks: Any, tmp_path: Path) -> None:
    """Finished shards stay, and together they are what an undisturbed run writes."""

    class Killed(NullListener):
        def finished(self, row: Any, *, known: bool) -> None:
            if not known:
                raise KeyboardInterrupt

    for shards_count in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            pack(blocks, tmp_path / "out/", samples_max=16, listener=Killed())
        assert len(list((tmp_path / "out").glob("*.mds"))) == shards_count
    assert pack(blocks, tmp_path / "out/", samples_max=16).shards_written == 1
    assert packed(tmp_path / "out").tolist() == tokens_in(blocks).tolist()


def test_the_command_packs_blocks(blocks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--tokens`` gives the same blocks; the tokeniser is a function of a module in the working directory."""
    (tmp_path / "tokens_of_a_test.py").write_text("def encode(text): return list(text.encode())\n")
    monkeypatch.chdir(tmp_path)
    tokens = f"--tokens 16 --tokenizer tokens_of_a_test:encode --separator {END} --token-field txt".split()
    assert run(["pack", "documents/", "out/", *tokens]) == 0
    assert packed(tmp_path / "out").tolist() == tokens_in(blocks).tolist()
    assert run(["pack", "documents/", "other/", "--separator", f"{END}"]) == 2
