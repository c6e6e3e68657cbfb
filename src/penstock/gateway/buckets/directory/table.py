"""``DirectoryBuckets``: each folder in a directory as a bucket."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.gateway.buckets.directory.bodies import FileThreads
from penstock.gateway.buckets.directory.bucket import DirectoryBucket, s3_errors
from penstock.gateway.buckets.directory.files import bucket_missing, make_below
from penstock.gateway.buckets.directory.layout import HIDDEN, REGION_FILE, check_bucket_name, is_folder_name
from penstock.gateway.buckets.requests import access_denied
from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from penstock.gateway.objects import Bucket, BucketTable, Caller


class DirectoryBuckets:
    """Each folder in a directory as a bucket; a ``BucketTable``.

    Files that other programs put there are objects. What clients write becomes a plain file at its natural path, whole or not
    at all; ``layout`` says which keys cannot be paths and where they are kept. Folders whose names begin with a dot are hidden.

    Args:
        root: The directory.
        read_write: Whether clients may write, and create and delete buckets.
        is_durable: Whether every change is synced to the disk, file and folder, before it is confirmed. False survives the
            death of the process, but may lose the last changes in a power cut.
        threads_max: Largest number of threads that use files.

    Raises:
        ConfigError: The directory does not exist.

    Attributes:
        root: The directory.
        sources: Table in which the source of a copy is found: this one, unless a gateway serves more than the directory.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        read_write: bool = False,
        is_durable: bool = True,
        threads_max: int = 16,
    ) -> None:
        self.root = Path(root).resolve()
        if not self.root.is_dir():
            raise ConfigError(f"the directory {self.root} does not exist", hint="create it, or name another one")
        self._read_write = read_write
        self.sources: BucketTable = self
        self._is_durable = is_durable
        self._threads = FileThreads(threads_max)
        self._buckets: dict[str, DirectoryBucket] = {}
        if read_write:
            for name in self._folder_names():
                with suppress(OSError):
                    self._bucket(name).remove_debris()

    def _folder_names(self) -> list[str]:
        with os.scandir(self.root) as entries:
            return sorted(entry.name for entry in entries if is_folder_name(entry.name) and entry.is_dir())

    def _bucket(self, name: str) -> DirectoryBucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = DirectoryBucket(
                self.root / name,
                threads=self._threads,
                find_bucket=self._find_source,
                may_write=self._read_write,
                is_durable=self._is_durable,
            )
        return bucket

    async def _find_source(self, name: str, caller: Caller) -> Bucket | None:
        return await self.sources.get(name, caller)

    async def get(self, name: str, caller: Caller) -> Bucket | None:
        """Return the bucket of a name; None if there is no such folder."""
        if not is_folder_name(name) or len(name.encode("utf-8", "replace")) > 255:
            return None
        with s3_errors():
            if await self._threads.run((self.root / name).is_dir):
                return self._bucket(name)
        self._buckets.pop(name, None)
        return None

    def get_nowait(self, name: str) -> None:
        """Return None: a folder may have gone, and only the file system can tell."""

    async def names(self, caller: Caller) -> list[Bucket]:
        """Return all buckets, in the order of their names."""
        with s3_errors():
            return [self._bucket(name) for name in await self._threads.run(self._folder_names)]

    async def create(self, name: str, caller: Caller, *, region: str) -> None:
        """Make a folder, and note its region if there is one.

        Raises:
            S3Error: The name is not valid or taken, or the caller may not write.
        """
        self._check_may_write(caller)
        check_bucket_name(name)
        with s3_errors():
            await self._threads.run(_make_folder, self.root / name, region)

    async def delete(self, name: str, caller: Caller) -> None:
        """Remove the folder of an empty bucket, with its unfinished uploads.

        Raises:
            S3Error: There is none, it is not empty, or the caller may not write.
        """
        self._check_may_write(caller)
        bucket = await self.get(name, caller)
        if not isinstance(bucket, DirectoryBucket):
            raise bucket_missing(name)
        with s3_errors():
            await self._threads.run_long(_remove_bucket, bucket)
        self._buckets.pop(name, None)

    def _check_may_write(self, caller: Caller) -> None:
        if not self._read_write:
            raise access_denied("This gateway serves the directory read-only.")
        if not caller.may_write:
            raise access_denied("This access key may only read.")

    async def close(self) -> None:
        """Wait for the operations that run, and end the threads; idempotent."""
        self._threads.close()


def _make_folder(path: Path, region: str) -> None:
    try:
        path.mkdir()
    except FileExistsError as error:
        raise S3Error(
            "BucketAlreadyOwnedByYou",
            "Your previous request to create the named bucket succeeded and you already own it.",
            status=409,
            details={"BucketName": path.name},
        ) from error
    if region:
        make_below(path, path / HIDDEN)
        (path / REGION_FILE).write_text(region, encoding="ascii")


def _remove_bucket(bucket: DirectoryBucket) -> None:
    """Remove an empty bucket. Only folders that are empty are removed, so an object that arrives meanwhile is never lost."""
    folder, hidden = bucket.files.folder, bucket.files.hidden
    if folder.is_symlink():
        raise access_denied("The bucket is a link, which is not removed.")
    try:
        if not bucket.is_empty():
            raise _not_empty(bucket.name)
        _remove_empty_folders(bucket.files.escaped)
        if not bucket.files.escaped.exists():
            shutil.rmtree(hidden, ignore_errors=True)
        _remove_empty_folders(folder)
    except OSError as error:
        raise _not_empty(bucket.name) from error


def _remove_empty_folders(folder: Path) -> None:
    """Remove a folder and the folders in it, from the innermost on.

    Raises:
        OSError: There is a file somewhere.
    """
    if folder.is_dir():
        for path, _, _ in os.walk(folder, topdown=False):
            Path(path).rmdir()


def _not_empty(name: str) -> S3Error:
    message = "The bucket you tried to delete is not empty"
    return S3Error("BucketNotEmpty", message, status=409, details={"BucketName": name})
