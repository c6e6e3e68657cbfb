"""``save_pretrained`` and ``from_pretrained`` with a bucket between them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import penstock as ps
from mounting import needs_fuse
from penstock.torch.checkpoint import load_safetensors, save_safetensors


def assert_equal(found: Any, model: Any) -> None:
    expected = model.state_dict()
    assert {name: tensor.shape for name, tensor in found.state_dict().items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())


def test_a_directory_loads_after_it_was_downloaded(model: Any, saved: Path, bucket: str, options: Any) -> None:
    """upload_directory, download_directory, from_pretrained: the same weights, from several files."""
    ps.torch.upload_directory(saved, f"s3://{bucket}/llama", **options)
    shutil.rmtree(saved)
    ps.torch.download_directory(f"s3://{bucket}/llama", saved, **options)
    assert_equal(AutoModelForCausalLM.from_pretrained(saved), model)


def test_an_upload_that_was_not_finished_does_not_load(saved: Path, bucket: str, options: Any, tmp_path: Path) -> None:
    """Without the files that are written last, transformers finds no model, instead of half of one."""
    ps.upload_directory(saved, f"s3://{bucket}/llama", **options)
    with ps.connect(f"s3://{bucket}/llama/", **options) as store:
        store.delete(["config.json", "model.safetensors.index.json"])
    ps.download_directory(f"s3://{bucket}/llama", tmp_path / "half", **options)
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(tmp_path / "half")


def test_weights_load_straight_from_the_store(model: Any, saved: Path, bucket: str, options: Any) -> None:
    """Without local files: a model made of its configuration takes what load_safetensors reads, as its own memory."""
    ps.upload_directory(saved, f"s3://{bucket}/llama", **options)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    loaded = load_safetensors(f"s3://{bucket}/llama/", **options)
    empty.load_state_dict(loaded, assign=True)
    assert_equal(empty, model)
    assert empty.lm_head.weight.data_ptr() == loaded["lm_head.weight"].data_ptr()


@pytest.mark.parametrize("shard_bytes_max", [50_000, None])
def test_from_pretrained_loads_what_we_saved(
    model: Any, bucket: str, options: Any, tmp_path: Path, shard_bytes_max: int | None
) -> None:
    """save_safetensors beside a config.json is a directory for from_pretrained, as one file or several."""
    url = f"s3://{bucket}/llama/"
    save_safetensors(model.state_dict(), url, shard_bytes_max=shard_bytes_max, **options)
    ps.download_directory(url, tmp_path / "llama", **options)
    model.config.save_pretrained(tmp_path / "llama")
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "llama"), model)


@needs_fuse
@pytest.mark.timeout(100, method="thread")
def test_a_mounted_directory_loads(model: Any, saved: Path, bucket: str, options: Any, tmp_path: Path) -> None:
    """from_pretrained on a mount reads the bucket as a local directory."""
    ps.upload_directory(saved, f"s3://{bucket}/llama", **options)
    (tmp_path / "mounted").mkdir()
    with ps.mount(f"s3://{bucket}/", tmp_path / "mounted", **options):
        assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "mounted/llama"), model)
