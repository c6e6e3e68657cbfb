"""fsspec's own suite for file systems, on S3 and on a local directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fsspec.tests import abstract

from penstock.fsspec import PenstockFileSystem, PenstockS3FileSystem

if TYPE_CHECKING:
    from penstock.testing.s3_server import S3Server


class S3Fixtures(abstract.AbstractFixtures):  # type: ignore[misc]
    """The suite's fixtures for a bucket."""

    @pytest.fixture
    def fs(self, s3_endpoint: S3Server) -> Any:
        return PenstockS3FileSystem(
            endpoint_url=s3_endpoint.endpoint_url, key=s3_endpoint.access_key, secret=s3_endpoint.secret_key
        )

    @pytest.fixture
    def fs_path(self, bucket: str) -> str:
        return bucket

    @pytest.fixture
    def fs_join(self) -> Any:
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False


class LocalFixtures(S3Fixtures):
    """The suite's fixtures for a directory."""

    @pytest.fixture
    def fs(self) -> Any:
        return PenstockFileSystem()

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> str:
        folder = tmp_path / "remote"
        folder.mkdir()
        return f"file{folder}"


class TestCopyS3(abstract.AbstractCopyTests, S3Fixtures):  # type: ignore[misc]
    """Copying inside a bucket."""


class TestGetS3(abstract.AbstractGetTests, S3Fixtures):  # type: ignore[misc]
    """Downloading from a bucket."""


class TestPutS3(abstract.AbstractPutTests, S3Fixtures):  # type: ignore[misc]
    """Uploading to a bucket."""


class TestOpenS3(abstract.AbstractOpenTests, S3Fixtures):  # type: ignore[misc]
    """Opening objects."""


class TestPipeS3(abstract.AbstractPipeTests, S3Fixtures):  # type: ignore[misc]
    """Writing objects at once."""


class TestCopyLocal(abstract.AbstractCopyTests, LocalFixtures):  # type: ignore[misc]
    """Copying inside a directory."""


class TestGetLocal(abstract.AbstractGetTests, LocalFixtures):  # type: ignore[misc]
    """Downloading from a directory."""


class TestPutLocal(abstract.AbstractPutTests, LocalFixtures):  # type: ignore[misc]
    """Uploading to a directory."""


class TestOpenLocal(abstract.AbstractOpenTests, LocalFixtures):  # type: ignore[misc]
    """Opening files."""


class TestPipeLocal(abstract.AbstractPipeTests, LocalFixtures):  # type: ignore[misc]
    """Writing files at once."""
