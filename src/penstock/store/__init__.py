"""Stores: bytes by (key, range). README.md in this folder says what is where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.system.lazy import lazy_getattr

if TYPE_CHECKING:
    from penstock.store.base import Store as Store
    from penstock.store.base import Wrapper as Wrapper
    from penstock.store.credentials import Credentials as Credentials
    from penstock.store.faulty import Faulty as Faulty
    from penstock.store.fsspec import FsspecStore as FsspecStore
    from penstock.store.hedged import Hedged as Hedged
    from penstock.store.http import HttpStore as HttpStore
    from penstock.store.limited import Limited as Limited
    from penstock.store.local import LocalStore as LocalStore
    from penstock.store.memory import MemoryStore as MemoryStore
    from penstock.store.retrying import Retrying as Retrying
    from penstock.store.s3 import S3Store as S3Store
    from penstock.store.traced import Traced as Traced
    from penstock.store.writing import Writer as Writer

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


if not TYPE_CHECKING:  # a type checker that saw it would accept every name
    __getattr__ = lazy_getattr(__name__, _ORIGIN)
