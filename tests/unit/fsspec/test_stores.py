"""Paths of the file system."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.fsspec import PenstockFileSystem, PenstockS3FileSystem, register
from penstock.fsspec.stores import split_path


@pytest.mark.parametrize(
    ("path", "scheme", "expected"),
    [
        ("bucket", "s3", ("s3://bucket", "bucket/", "")),
        ("bucket/a/b", "s3", ("s3://bucket", "bucket/", "a/b")),
        ("bucket//a", "s3", ("s3://bucket", "bucket/", "/a")),
        ("s3/bucket/a", "", ("s3://bucket", "s3/bucket/", "a")),
        ("file/tmp/x", "", ("file:///", "file/", "tmp/x")),
        ("file//tmp/x", "", ("file:///", "file//", "tmp/x")),
        ("memory/name/a/b", "", ("memory://name", "memory/name/", "a/b")),
        ("https/host/dir/a", "", ("https://host/dir/", "https/host/dir/", "a")),
    ],
)
def test_a_path_is_a_store_and_a_key(path: str, scheme: str, expected: tuple[str, str, str]) -> None:
    """The base and the key together are the path, if it has a key."""
    where = split_path(path, scheme=scheme)
    assert tuple(where) == expected
    assert where.base + where.key == path or not where.key


@pytest.mark.parametrize("path", ["gs/bucket/key", "bucket/key", "memory", "s3"])
def test_a_path_without_a_store_is_refused(path: str) -> None:
    """A path that names no store says how one is written."""
    with pytest.raises(ps.ConfigError, match="Hint: "):
        split_path(path, scheme="")


def test_protocols_are_stripped() -> None:
    """``s3://`` and ``s3a://`` are the same, and slashes at the end do not count."""
    files = PenstockS3FileSystem(skip_instance_cache=True)
    assert files.stripped("s3a://bucket/a/") == files.stripped("s3://bucket/a") == "bucket/a"
    assert files.unstrip_protocol("bucket/a") == "s3://bucket/a"
    assert PenstockFileSystem().stripped("penstock://s3/bucket/a/") == "s3/bucket/a"


def test_only_known_protocols_are_registered() -> None:
    """A protocol that penstock does not offer is refused with those that it does."""
    with pytest.raises(ps.ConfigError, match="'penstock', 's3', 's3a'"):
        register("gs")
