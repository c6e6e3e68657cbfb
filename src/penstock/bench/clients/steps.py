"""Training steps between batches: none, an emulated GPU, Python, a real ViT-base, or the user's own. Standard library only."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GPU_SAMPLES_PER_S = 138.0
"""Samples per second of ViT-base on an A10G in PyTorch training, as published articles measured it."""
PYTHON_S = 0.02

Step = Callable[[Any], object]


def make_step(name: str | None) -> Step | None:
    """Return the step of this name: ``gpu`` (a wait of batch / 138 s), ``python`` (20 ms), ``vit`` or ``module:function``."""
    if not name or name == "none":
        return None
    if name == "gpu":
        return lambda batch: time.sleep(len(batch[0]) / GPU_SAMPLES_PER_S)
    if name == "python":
        return _compute
    if name == "vit":
        return _vision_transformer()
    step: Step = users_object(name)
    return lambda batch: step(getattr(batch, "own", batch))


def users_object(name: str) -> Any:
    """Return what ``module:name`` is, of the user's modules in this folder or on the path."""
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"{name!r} is not module:name")
    sys.path.insert(0, str(Path.cwd()))
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def _compute(_batch: Any) -> None:
    """Hold the interpreter for 20 ms, as the Python of a training step does."""
    end_s = time.perf_counter() + PYTHON_S
    total = 0
    while time.perf_counter() < end_s:
        for number in range(1000):
            total += number & 3


def _vision_transformer() -> Step:
    """Forward, backward and update of ViT-base/16 with random weights, in bfloat16 on the GPU (Dosovitskiy et al., 2021)."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("the step `vit` needs a GPU; `gpu` emulates one")
    layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, norm_first=True, activation="gelu")
    patches = torch.nn.Conv2d(3, 768, 16, 16)
    model = torch.nn.ModuleList([patches, torch.nn.TransformerEncoder(layer, 12), torch.nn.Linear(768, 1000)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> None:
        images = batch[0]
        if not hasattr(images, "shape"):
            raise TypeError("the step `vit` needs decoded pictures: --decode")
        pixels = torch.as_tensor(images).cuda(non_blocking=True).permute(0, 3, 1, 2).to(torch.bfloat16) / 255
        with torch.autocast("cuda", torch.bfloat16):
            hidden = patches(pixels).flatten(2).transpose(1, 2)
            loss = model[2](model[1](hidden).mean(1)).float().logsumexp(1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    return step
