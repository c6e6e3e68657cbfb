"""``penstock mb`` and ``penstock presign``: make a bucket, and a URL with which others can read one object."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cli.options import ConnectionGroup, StoreLocation, Stores, argument, expand_groups, option
from penstock.cli.output import print_message, print_result
from penstock.errors import ConfigError
from penstock.store.base import innermost
from penstock.store.inflight import perform
from penstock.store.s3 import S3Store, presigned_get
from penstock.text.sizes import parse_seconds
from penstock.types import Forward

if TYPE_CHECKING:
    from penstock.store.s3_endpoint import S3Endpoint

EXPIRES_S_MAX = 7 * 86400
"""Longest time for which S3 accepts a signed URL."""


@expand_groups
def presign(
    url: str = argument("URL", "An object: s3://bucket/key."),
    *,
    expires: str = option(
        "DURATION", "How long the URL is valid, e.g. 90s, 10min, 24h or 7d, which is the most.", default="1h"
    ),
    connection: ConnectionGroup,
) -> None:
    """Print a URL with which anybody can read one object, until it expires. No request is sent.

    The URL is a secret: whoever has it can read the object. It ends sooner if your keys are temporary and expire. Whether
    there is such an object shows only when the URL is used.

    For example:

        penstock presign s3://bucket/model.pt
        curl -O "$(penstock presign --expires 10min s3://bucket/model.pt)"
    """
    with Stores(connection) as stores:
        location = stores.locate(url)
        _check_s3(location)
        if location.is_folder:
            raise ConfigError(f"{location.url} is not one object", hint="s3://bucket/key")
        seconds = parse_seconds(expires, option="--expires")
        if not 1 <= seconds <= EXPIRES_S_MAX:
            raise ConfigError(f"--expires {expires!r} must be from 1 second to 7 days")
        print_result(presigned_get(location.store, location.key, expires_s=int(seconds)))


@expand_groups
def mb(
    url: str = argument("URL", "The bucket: s3://NAME."),
    *,
    connection: ConnectionGroup,
) -> None:
    """Make a bucket, in the region of --region.

    It is an error if there is a bucket of this name already.

    For example:

        penstock mb s3://checkpoints
        penstock mb --region eu-west-1 s3://my-training-data
    """
    with Stores(connection) as stores:
        location = stores.locate(url)
        endpoint = _check_s3(location)
        if location.key or not endpoint.bucket:
            raise ConfigError(f"{location.url} is not a bucket", hint="s3://NAME")
        place = f"<LocationConstraint>{endpoint.region}</LocationConstraint>" if endpoint.region != "us-east-1" else ""
        body = f"<CreateBucketConfiguration>{place}</CreateBucketConfiguration>".encode() if place else b""
        perform(innermost(location.store), Forward("PUT", "", "", (), body))
    print_message(f"made s3://{endpoint.bucket}")


def _check_s3(location: StoreLocation) -> S3Endpoint:
    """Return where a bucket is.

    Raises:
        ConfigError: The URL is not one of S3.
    """
    core = innermost(location.store)
    if not isinstance(core, S3Store):
        raise ConfigError(f"{location.url} is not in S3", hint="s3://bucket/key")
    return core.endpoint
