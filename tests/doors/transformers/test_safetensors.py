"""The format, side by side with the library ``safetensors``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import penstock as ps
from penstock.errors import DataError
from penstock.torch.checkpoint import load_safetensors, open_safetensors, save_safetensors


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_the_library_reads_our_files(
    state: dict[str, Any], bucket: str, s3_client: Any, options: Any, tmp_path: Path
) -> None:
    """A file that was saved to the store, fetched by another client, is what the library expects, metadata included."""
    save_safetensors(state, f"s3://{bucket}/m.safetensors", metadata={"epoch": "3"}, **options)
    stored = s3_client.get_object(Bucket=bucket, Key="m.safetensors")["Body"].read()
    (tmp_path / "m.safetensors").write_bytes(stored)
    assert_same(load_file(tmp_path / "m.safetensors"), state)
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "epoch": "3"}


def test_we_read_files_of_the_library(
    state: dict[str, Any], bucket: str, s3_client: Any, options: Any, tmp_path: Path
) -> None:
    """A file that the library wrote and another client uploaded loads whole, in part, and in slices."""
    save_file(state, tmp_path / "m.safetensors", {"epoch": "3"})
    s3_client.put_object(Bucket=bucket, Key="m.safetensors", Body=(tmp_path / "m.safetensors").read_bytes())
    url = f"s3://{bucket}/m.safetensors"
    assert_same(load_safetensors(url, **options), state)
    assert_same(load_safetensors(url, names=["scalar"], **options), {"scalar": state["scalar"]})
    with (
        safe_open(tmp_path / "m.safetensors", framework="pt") as theirs,
        open_safetensors(url, **options) as ours,
    ):
        assert sorted(ours.keys()) == sorted(theirs.keys())
        assert ours.metadata() == theirs.metadata()
        for cut in (slice(1, 3), slice(None), (slice(None), slice(1, 2)), slice(-2, None)):
            assert torch.equal(ours.get_slice("torch.float16")[cut], theirs.get_slice("torch.float16")[cut])
        assert ours.get_slice("large.ü").get_shape() == theirs.get_slice("large.ü").get_shape()
        assert ours.get_slice("large.ü").get_dtype() == theirs.get_slice("large.ü").get_dtype()


@pytest.mark.parametrize("seed", range(40))
def test_we_refuse_what_the_library_refuses(state: dict[str, Any], tmp_path: Path, seed: int) -> None:
    """A damaged header that the library does not load is not loaded here; and what both load is the same."""
    state = {"w": state["torch.float16"], "v": state["torch.uint8"], "scalar": state["scalar"]}
    save_file(state, tmp_path / "m.safetensors")
    data = bytearray((tmp_path / "m.safetensors").read_bytes())
    generator = torch.Generator().manual_seed(seed)
    place = int(torch.randint(0, len(data) - 60, (), generator=generator))
    data[place] = int(torch.randint(0, 256, (), generator=generator))
    (tmp_path / "m.safetensors").write_bytes(data)
    try:
        theirs = load_file(tmp_path / "m.safetensors")
    except (SafetensorError, KeyError, ValueError):
        with pytest.raises(DataError):
            load_safetensors(tmp_path / "m.safetensors")
    else:
        assert_same(load_safetensors(tmp_path / "m.safetensors"), theirs)


def test_an_index_is_the_same_as_that_of_save_pretrained(model: Any, saved: Path, bucket: str, options: Any) -> None:
    """A sharded save has the names, the index and the tensors of ``save_pretrained`` with the same limit."""
    with ps.connect(f"s3://{bucket}", **options) as store:
        save_safetensors(model.state_dict(), f"s3://{bucket}/", shard_bytes_max=50_000, **options)
        ours = {info.key for info in store.list()}
    assert ours == {path.name for path in saved.glob("model*")}
    assert_same(load_safetensors(f"s3://{bucket}/", **options), load_safetensors(f"{saved}/"))
