"""The dtypes of safetensors files in PyTorch."""

from __future__ import annotations

import torch

from penstock.errors import UnsupportedFormatError

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in _TORCH_NAMES.items() if hasattr(torch, torch_name)
}
"""PyTorch's dtype for each dtype of the format that this version of PyTorch has."""

FORMAT_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""The name in the format for each dtype of PyTorch that the format has."""


def torch_dtype(dtype: str, *, shard: str, name: str) -> torch.dtype:
    """Return PyTorch's dtype for a dtype of the format.

    Args:
        dtype: Name of the dtype in the format.
        shard: URL of the file, for the message.
        name: Name of the tensor, for the message.

    Raises:
        UnsupportedFormatError: This version of PyTorch has no such dtype.
    """
    if dtype not in TORCH_DTYPES:
        what = f"PyTorch {torch.__version__} has no dtype for {dtype}"
        raise UnsupportedFormatError(what, shard=shard, field=name)
    return TORCH_DTYPES[dtype]
