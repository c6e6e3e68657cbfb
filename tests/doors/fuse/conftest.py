"""What this suite shares: a data set as local files, and the same in a bucket that is mounted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from connecting import connection_to
from doors.fuse.data_set import Folders, upload, write_data_set
from mounting import needs_fuse
from penstock.testing.ministack import Ministack


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the kernel's FUSE where it is missing, and end a test that waits for a mount that does not answer.

    The timeout ends the whole process: a program that waits in the kernel for a page ends only when it is killed.
    """
    for item in items:
        item.add_marker(pytest.mark.timeout(100, method="thread"))
        item.add_marker(needs_fuse)


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set as local files."""
    folder = tmp_path_factory.mktemp("local") / "data"
    folder.mkdir()
    write_data_set(folder)
    return folder


@pytest.fixture(scope="session")
def bucket_url(local: Path, ministack: Ministack) -> str:
    """A bucket that contains the data set."""
    bucket = ministack.create_bucket()
    client = ministack.client()
    upload(local, client, bucket)
    client.close()
    return f"s3://{bucket}/"


@pytest.fixture(scope="module")
def folders(
    local: Path, bucket_url: str, ministack: Ministack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Folders]:
    """The data set, mounted for one module, and as local files."""
    directory = tmp_path_factory.mktemp("mounted")
    with ps.mount(bucket_url, directory, **connection_to(ministack)) as mount:
        yield Folders(directory, local)
        mount.check()
