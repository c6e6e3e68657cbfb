"""``S3Writer``, and ``S3Checkpoint``: files for ``torch.save`` and ``torch.load``."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from penstock.compat.s3torchconnector.objects import ObjectLocation, ObjectSource
from penstock.compat.s3torchconnector.readers import kind_of
from penstock.compat.s3torchconnector.stores import BucketStores, parse_uri
from penstock.errors import ConfigError
from penstock.system.tracebacks import boundary
from penstock.torch.writing import CheckpointWriter

if TYPE_CHECKING:
    from penstock.compat.s3torchconnector.readers import ReaderConstructor, S3Reader
    from penstock.compat.s3torchconnector.stores import S3ClientConfig
    from penstock.store.base import Store
    from penstock.types import Key


@boundary
class S3Writer(CheckpointWriter):
    """A file that writes one object, as ``S3Checkpoint.writer`` returns it.

    The whole object becomes visible when ``close()`` returns or the ``with`` block ends normally. If an exception ends the
    block, the writer is dropped without being closed, or the process ends, nothing becomes visible.
    """

    MADE_BY = "checkpoint.writer(uri)"

    def __init__(self, store: Store, key: Key) -> None:
        self._closing = threading.Lock()
        super().__init__(store, key)

    def write(self, data: Any, /) -> int:
        """Take all of `data`, any contiguous buffer, and return its length in bytes.

        Raises:
            TypeError: `data` is not a buffer.
            ValueError: The writer is closed.
            StoreError: An earlier part could not be sent; the writer is then aborted.
        """
        if self.closed:
            raise ValueError(f"{self!r} is not open")
        return super().write(memoryview(data))

    def close(self) -> None:
        """Make the object visible; any number of threads may call it, and all return when it is.

        Raises:
            StoreError: The object could not be stored.
        """
        with self._closing:
            super().close()

    def writable(self) -> bool:
        """Return whether it is open."""
        return not self.closed


@boundary
class S3Checkpoint:
    """Opens objects for ``torch.save`` and ``torch.load``.

    Args:
        region: Region of the buckets. If it is wrong, the store's answer corrects it; None takes the environment's.
        endpoint: URL of an S3-compatible store; None takes the environment's, else Amazon's.
        s3client_config: Options of the client.
        reader_constructor: Kind of the readers; None is ``S3ReaderConstructor.sequential()``.
    """

    def __init__(
        self,
        region: str | None = None,
        endpoint: str | None = None,
        s3client_config: S3ClientConfig | None = None,
        *,
        reader_constructor: ReaderConstructor | None = None,
    ) -> None:
        self.region = region
        self.endpoint = endpoint
        self._stores = BucketStores(region=region, endpoint=endpoint, config=s3client_config)
        self._kind = kind_of(reader_constructor)

    def reader(self, s3_uri: str) -> S3Reader:
        """Return a reader of an object, for ``torch.load``. No request is sent before it is read.

        Raises:
            ConfigError: `s3_uri` is not the URI of an object.
        """
        return self._kind.make(ObjectSource(self._stores, ObjectLocation(*object_uri(s3_uri))))

    def writer(self, s3_uri: str) -> S3Writer:
        """Return a writer of an object, for ``torch.save``: ``with checkpoint.writer(uri) as file: torch.save(obj, file)``.

        Raises:
            ConfigError: `s3_uri` is not the URI of an object.
        """
        bucket, key = object_uri(s3_uri)
        return S3Writer(self._stores.store(bucket), key)


def object_uri(uri: object) -> tuple[str, str]:
    """Return bucket and key of the URI of an object.

    Raises:
        ConfigError: It is not an ``s3://`` URI, or it lacks a bucket or a key.
    """
    bucket, key = parse_uri(uri)
    if not key:
        raise ConfigError(f"{uri!r} has no key", hint="s3://bucket/key")
    return bucket, key
