"""Answers to questions about settings that a bucket or an object here never has, such as a policy. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.gateway.buckets.documents import document
from penstock.gateway.buckets.requests import not_implemented
from penstock.gateway.objects import SUB_RESOURCES, Answer, S3Error
from penstock.gateway.s3_text import OWNER

if TYPE_CHECKING:
    from penstock.gateway.objects import GatewayRequest

_MISSING = {
    "policy": ("NoSuchBucketPolicy", "The bucket policy does not exist"),
    "policyStatus": ("NoSuchBucketPolicy", "The bucket policy does not exist"),
    "cors": ("NoSuchCORSConfiguration", "The CORS configuration does not exist"),
    "lifecycle": ("NoSuchLifecycleConfiguration", "The lifecycle configuration does not exist"),
    "encryption": (
        "ServerSideEncryptionConfigurationNotFoundError",
        "The server side encryption configuration was not found",
    ),
    "tagging": ("NoSuchTagSet", "The TagSet does not exist"),
    "object-lock": (
        "ObjectLockConfigurationNotFoundError",
        "Object Lock configuration does not exist for this bucket",
    ),
    "website": ("NoSuchWebsiteConfiguration", "The specified bucket does not have a website configuration"),
    "replication": ("ReplicationConfigurationNotFoundError", "The replication configuration was not found"),
    "publicAccessBlock": (
        "NoSuchPublicAccessBlockConfiguration",
        "The public access block configuration was not found",
    ),
    "ownershipControls": ("OwnershipControlsNotFoundError", "The bucket ownership controls were not found"),
    "metadataTable": ("MetadataTableConfigurationNotFound", "The metadata table configuration was not found"),
}
_MISSING_OF_OBJECTS = {
    "retention": ("NoSuchObjectLockConfiguration", "The specified object does not have a ObjectLock configuration"),
    "legal-hold": ("NoSuchObjectLockConfiguration", "The specified object does not have a ObjectLock configuration"),
}
_EMPTY = {
    "versioning": "VersioningConfiguration",
    "logging": "BucketLoggingStatus",
    "notification": "NotificationConfiguration",
    "accelerate": "AccelerateConfiguration",
}
_EMPTY_LISTS = {
    "analytics": "ListBucketAnalyticsConfigurationResult",
    "inventory": "ListInventoryConfigurationsResult",
    "metrics": "ListMetricsConfigurationsResult",
    "intelligent-tiering": "ListBucketIntelligentTieringConfigurationsOutput",
}


def setting_named(request: GatewayRequest) -> str | None:
    """Return the name of the setting that a request is about; None if it is about none."""
    return next((name for name in request.query if name in SUB_RESOURCES and name != "uploadId"), None)


def default_setting(request: GatewayRequest, name: str) -> Answer:
    """Answer a GET for a setting with S3's answer for a setting that was not made.

    Args:
        request: The request.
        name: Name of the setting, as ``setting_named`` returned it.

    Raises:
        S3Error: S3 answers with an error if the setting was not made, or the setting does not exist.
    """
    missing = _MISSING_OF_OBJECTS.get(name) if request.key else _MISSING.get(name)
    if missing is not None:
        code, message = missing
        raise S3Error(code, message, status=404, details={"BucketName": request.bucket})
    if name == "acl":
        return access_control_list()
    if not request.key:
        if name in _EMPTY:
            return document(_EMPTY[name], ())
        if name in _EMPTY_LISTS:
            return document(_EMPTY_LISTS[name], [("IsTruncated", "false")])
        if name == "requestPayment":
            return document("RequestPaymentConfiguration", [("Payer", "BucketOwner")])
    raise not_implemented(name)


def access_control_list() -> Answer:
    """Return the list that grants everything to the one owner."""
    grantee = "".join(
        (
            '<Grantee xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:type="CanonicalUser">',
            *(f"<{name}>{value}</{name}>" for name, value in OWNER),
            "</Grantee>",
        )
    )
    answer = document(
        "AccessControlPolicy", [("Owner", OWNER), ("AccessControlList", [("Grant", [("Permission", "FULL_CONTROL")])])]
    )
    return answer._replace(body=answer.body.replace(b"<Grant>", b"<Grant>" + grantee.encode()))
