"""What this suite shares: a small model of every form that weights take, and options to reach the bucket."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from connecting import connection_to

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.testing.ministack import Ministack


@pytest.fixture
def options(ministack: Ministack) -> dict[str, Any]:
    """Options of ``ps.connect`` for ministack."""
    return connection_to(ministack)


@pytest.fixture
def model() -> Any:
    """A model of 130 KB with random weights, without a network."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=128,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def state() -> dict[str, Any]:
    """Tensors of many dtypes, a scalar, an empty and a large one."""
    dtypes = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn)
    state = {str(dtype): torch.randint(0, 2, (5, 3)).to(dtype) for dtype in dtypes}
    return {**state, "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "large.ü": torch.randn(3_000_000)}


@pytest.fixture
def saved(model: Any, tmp_path: Path) -> Path:
    """A directory that ``save_pretrained`` wrote, with several files and an index."""
    model.save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    return tmp_path / "saved"
