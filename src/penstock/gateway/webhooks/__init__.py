"""MinIO's dialect of object lambdas: calling webhooks, and serving as one."""

from penstock.gateway.webhooks.buckets import ArnBucket
from penstock.gateway.webhooks.service import PREFIX, ServedTransform, WebhookService
from penstock.gateway.webhooks.transform import WebhookTransform

__all__ = ["PREFIX", "ArnBucket", "ServedTransform", "WebhookService", "WebhookTransform"]
