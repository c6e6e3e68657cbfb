"""The rules for keys that hold in every store, so that data can move between them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.types import Key

KEY_BYTES_MAX = 1024
"""Longest key in bytes of UTF-8; this is S3's limit."""

_DOT_SEGMENT = re.compile(r"(^|/)\.\.?(/|$)")


def check_key(key: Key) -> None:
    """Refuse what no store accepts as a key.

    Raises:
        ConfigError: The key is not a str, is empty, cannot be encoded as UTF-8, or is longer than 1 024 bytes.
    """
    if not isinstance(key, str):
        raise ConfigError(f"a key must be a str, not {type(key).__name__}: {key!r}")
    try:
        length = len(key.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"key {key!r} is not encodable as UTF-8 at character {error.start}") from error
    if not 0 < length <= KEY_BYTES_MAX:
        raise ConfigError(f"key {key[:40]!r}... has {length} bytes as UTF-8; it must have 1 to {KEY_BYTES_MAX}")


def has_dot_segment(key: Key) -> bool:
    """Whether a segment of `key` is ``.`` or ``..``, which HTTP clients, proxies and file systems resolve away."""
    return _DOT_SEGMENT.search(key) is not None
