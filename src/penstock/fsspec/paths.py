"""Paths of the file system: which store a path lies in, and its key there."""

from __future__ import annotations

from typing import NamedTuple

from penstock.compose import split, split_s3
from penstock.errors import ConfigError

SCHEMES = ("s3", "file", "memory", "http", "https")
"""Schemes of stores that penstock reads by itself; fsspec has file systems for all others."""


class StorePath(NamedTuple):
    """A path, taken apart.

    Attributes:
        url: URL of the store.
        base: Beginning of all paths of the store; ``base + key`` is a path.
        key: Key in the store; empty for the store itself.
    """

    url: str
    base: str
    key: str

    @property
    def folder(self) -> str:
        """The prefix of the keys below this path: empty, or it ends with a slash."""
        return f"{self.key}/" if self.key else ""


def split_path(path: str, *, scheme: str) -> StorePath:
    """Take a path apart.

    Args:
        path: Path without protocol, such as ``bucket/key``; with an empty `scheme` it begins with one, as ``s3/bucket/key``.
        scheme: Scheme of all paths of the file system; empty if each path names its own.

    Raises:
        ConfigError: The path names no store, or a scheme that penstock does not read by itself.
    """
    if scheme:
        return _in_scheme(scheme, path, "")
    name, _, rest = path.partition("/")
    if name not in SCHEMES:
        raise ConfigError(
            f"penstock://{path} must begin with one of {', '.join(SCHEMES)}", hint="penstock://s3/bucket/key"
        )
    return _in_scheme(name, rest, f"{name}/")


def _in_scheme(scheme: str, path: str, before: str) -> StorePath:
    if scheme == "file":
        rest = path.lstrip("/")
        return StorePath("file:///", before + path[: len(path) - len(rest)], rest)
    if scheme == "s3":
        bucket, key = split_s3(f"s3://{path}")
        return StorePath(f"s3://{bucket}", f"{before}{bucket}/", key)
    url, key = split(f"{scheme}://{path}")
    if scheme in ("http", "https"):
        return StorePath(url, before + path[: len(path) - len(key)], key)
    name = url.partition("://")[2]
    if not name:
        raise ConfigError(f"{scheme}://{path} does not name a store", hint=f"{scheme}://name/key")
    return StorePath(url, f"{before}{name}/", key)
