"""Bytes by (key, range): see README.md in this folder."""

from __future__ import annotations

import importlib
from typing import Any

_ORIGIN = {
    "Store": "base",
    "Wrapper": "base",
    "Credentials": "credentials",
    "S3Store": "s3",
    "HttpStore": "http",
    "LocalStore": "local",
    "MemoryStore": "memory",
    "FsspecStore": "fsspec",
    "Retrying": "retrying",
    "Hedged": "hedged",
    "Limited": "limited",
    "Faulty": "faulty",
    "Traced": "traced",
    "Writer": "writing",
}

__all__ = sorted(_ORIGIN)  # noqa: PLE0605 - computed from the one table


def __getattr__(name: str) -> Any:
    if name not in _ORIGIN:
        raise AttributeError(f"module 'penstock.store' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"penstock.store.{_ORIGIN[name]}"), name)
    globals()[name] = value
    return value
