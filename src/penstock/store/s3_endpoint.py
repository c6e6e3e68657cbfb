"""The location of a bucket: endpoint, region, addressing, and the store's clock; answers of the store correct it.

Amazon's hosts are ``bucket.s3.region.amazonaws.com``. A bucket whose name has dots, or cannot be a host name, is addressed by
path, because the certificate would not match. Other endpoints are addressed by path by default, because most have no
wildcard DNS. An Object Lambda access point at another endpoint is ``name-account.endpoint``, as boto3 addresses it; at an IP
address, at ``localhost``, or with path addressing it is ``endpoint/name``, which boto3 cannot send but the gateway accepts.
Source: S3 user guide, "Virtual hosting", "Access point ARNs"; tried on ministack and Ceph RGW, and compared with boto3.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock.errors import ConfigError
from penstock.redaction import url_parts
from penstock.store.answers import http_date_s

if TYPE_CHECKING:
    from collections.abc import Mapping

_HOST_NAME = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{1,253}[A-Za-z0-9]")
_ACCESS_POINT = re.compile(r"arn:(aws[a-z-]*):s3:([a-z0-9-]+):([0-9]{12}):accesspoint[:/]([a-z0-9-]+)")
_OBJECT_LAMBDA = re.compile(
    r"arn:(aws[a-z-]*):s3-object-lambda:([a-z0-9-]+):([0-9]{12}):accesspoint[:/]([a-z0-9](?:[a-z0-9-]{1,43})[a-z0-9])"
)
_IP_ADDRESS = re.compile(r"[0-9.]+|[0-9a-fA-F:]*:[0-9a-fA-F:.]*")
_SKEW_S_MIN = 300.0
"""S3 refuses requests whose time is more than 15 minutes off; from 5 minutes on, a 403 without a reason is taken for that."""


@dataclass(slots=True, kw_only=True)
class S3Endpoint:
    """Where one bucket is, and below which prefix its keys are.

    Attributes:
        bucket: Name of the bucket, or an access point's ARN; empty for the service itself, which lists its buckets.
        prefix: String before every key; may be empty, and usually ends with ``/``.
        endpoint_url: ``http(s)://host[:port][/path]``; None means Amazon.
        region: Region to sign for.
        addressing: ``"auto"``, ``"path"`` or ``"virtual"``.
        clock_offset_s: Seconds that the store's clock is ahead of this host's; 0 unless the store complained.
        base_url: URL before the encoded key, derived from the others.
        copy_source: Name of the bucket in ``x-amz-copy-source``, derived from the others.
        service: Service to sign for, derived from the bucket: ``"s3"`` or ``"s3-object-lambda"``.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str = "us-east-1"
    addressing: str = "auto"
    clock_offset_s: float = 0.0
    base_url: str = ""
    copy_source: str = ""
    service: str = "s3"

    def __post_init__(self) -> None:
        if self.addressing not in ("auto", "path", "virtual"):
            raise ConfigError(f"addressing={self.addressing!r} must be 'auto', 'path' or 'virtual'")
        if self.endpoint_url is not None:
            self.endpoint_url = _checked_endpoint(self.endpoint_url)
        if not self.bucket:
            self._rebase()
            return
        if (point := _ACCESS_POINT.fullmatch(self.bucket)) is not None:
            self.region = point[2]
        elif (point := _OBJECT_LAMBDA.fullmatch(self.bucket)) is not None:
            self.region, self.service = point[2], "s3-object-lambda"
        elif not _BUCKET.fullmatch(self.bucket) or ".." in self.bucket or ":" in self.bucket.replace("::", ""):
            raise ConfigError(f"{self.bucket!r} is not a bucket name", hint="s3://bucket/key, or an access point's ARN")
        if self.bucket.endswith("--x-s3"):
            raise ConfigError(f"{self.bucket!r} is a directory bucket (S3 Express One Zone), which needs session keys",
                              hint="not supported; mount it, or copy to a general purpose bucket")  # fmt: skip
        self._rebase()

    def _rebase(self) -> None:
        if self.service == "s3-object-lambda":
            self._rebase_object_lambda()
            return
        point = _ACCESS_POINT.fullmatch(self.bucket)
        domain = f"{self.region}.amazonaws.com" + (".cn" if self.region.startswith("cn-") else "")
        service_url = self.endpoint_url or f"https://s3.{domain}"
        self.base_url = f"{service_url}/{self.bucket}/" if self.bucket else f"{service_url}/"
        if self.endpoint_url is None:
            if point is not None:
                self.base_url = f"https://{point[4]}-{point[3]}.s3-accesspoint.{domain}/"
            elif self.addressing != "path" and _HOST_NAME.fullmatch(self.bucket):
                self.base_url = f"https://{self.bucket}.s3.{domain}/"
        elif self.addressing == "virtual" and self.bucket:
            parts = urlsplit(self.endpoint_url)
            self.base_url = f"{parts.scheme}://{self.bucket}.{parts.netloc}{parts.path}/"
        self.copy_source = f"/{self.bucket}"
        if point is not None:
            self.copy_source = f"arn:{point[1]}:s3:{point[2]}:{point[3]}:accesspoint/{point[4]}/object"

    def _rebase_object_lambda(self) -> None:
        """Address an Object Lambda access point as boto3 does, except where no name can lead to the endpoint."""
        point = _OBJECT_LAMBDA.fullmatch(self.bucket)
        assert point is not None
        name, host_label = point[4], f"{point[4]}-{point[3]}"
        self.copy_source = f"/{name}"
        if self.endpoint_url is None:
            suffix = ".cn" if self.region.startswith("cn-") else ""
            self.base_url = f"https://{host_label}.s3-object-lambda.{self.region}.amazonaws.com{suffix}/"
            return
        parts = urlsplit(self.endpoint_url)
        is_nameless = parts.hostname == "localhost" or _IP_ADDRESS.fullmatch(parts.hostname or "") is not None
        if self.addressing == "path" or (self.addressing == "auto" and is_nameless):
            self.base_url = f"{self.endpoint_url}/{name}/"
        else:
            self.base_url = f"{parts.scheme}://{host_label}.{parts.netloc}{parts.path}/"

    @property
    def domain(self) -> str:
        """Domain of the endpoint's operator; a redirect out of it is not followed."""
        if self.endpoint_url is not None:
            return urlsplit(self.endpoint_url).hostname or ""
        return "amazonaws.com.cn" if self.region.startswith("cn-") else "amazonaws.com"

    @property
    def over_tls(self) -> bool:
        """Whether requests are encrypted."""
        return self.base_url.startswith("https:")

    def move(self, region: str) -> None:
        """Use another region, in which the store says that the bucket is."""
        self.region = region
        self._rebase()

    def set_clock(self, store_now_s: float) -> None:
        """Use the store's time, in seconds since the epoch, from now on."""
        self.clock_offset_s = store_now_s - time.time()

    def is_skewed(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether an answer's ``Date`` is far from this host's time; the answer to a HEAD has no body that could say so."""
        date_s = http_date_s(headers.get(b"date", b""))
        return date_s is not None and abs(date_s - time.time() - self.clock_offset_s) > _SKEW_S_MIN


def _checked_endpoint(url: str) -> str:
    parts = url_parts(url)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ConfigError(f"endpoint_url {url!r} is not http(s)://host[:port]")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError("endpoint_url must not hold credentials, a query or a fragment", hint="pass credentials=")
    return url.rstrip("/")
