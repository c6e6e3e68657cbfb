"""``S3Checkpoint``: files for ``torch.save`` and ``torch.load``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.compat.s3torchconnector.constructors import kind_of
from penstock.compat.s3torchconnector.objects import ObjectLocation, ObjectSource
from penstock.compat.s3torchconnector.stores import BucketStores, parse_uri
from penstock.compat.s3torchconnector.writer import S3Writer
from penstock.errors import ConfigError
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from penstock.compat.s3torchconnector.constructors import ReaderConstructor
    from penstock.compat.s3torchconnector.options import S3ClientConfig
    from penstock.compat.s3torchconnector.readers import S3Reader


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
