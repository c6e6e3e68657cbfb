"""A careful handler: it sends the headers that the URL signs, passes errors on, and checks and forwards what it read."""

import base64
import hashlib
from urllib.parse import parse_qs, urlparse

import boto3
import requests

s3 = boto3.client("s3")
CONDITIONS = {"if-match", "if-none-match", "if-modified-since", "if-unmodified-since"}
FORWARDED = {"content-type": "ContentType", "cache-control": "CacheControl", "content-language": "ContentLanguage"}


def headers_to_send(event):
    url = urlparse(event["getObjectContext"]["inputS3Url"])
    signed = parse_qs(url.query).get("X-Amz-SignedHeaders", [""])[0].lower().split(";")
    wanted = CONDITIONS | set(signed) - {"host"}
    return {name: value for name, value in event["userRequest"]["headers"].items() if name.lower() in wanted}


def lambda_handler(event, context):
    get_context = event["getObjectContext"]
    route = {"RequestRoute": get_context["outputRoute"], "RequestToken": get_context["outputToken"]}
    response = requests.get(get_context["inputS3Url"], headers=headers_to_send(event))
    if response.status_code >= 300:
        s3.write_get_object_response(StatusCode=response.status_code, Body=response.content, **route)
        return
    body = response.content[::-1]
    forwarded = {FORWARDED[name]: response.headers[name] for name in FORWARDED if name in response.headers}
    metadata = {
        name[len("x-amz-meta-") :]: value for name, value in response.headers.items() if name.startswith("x-amz-meta-")
    }
    digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
    s3.write_get_object_response(Body=body, ChecksumSHA256=digest, Metadata=metadata, **forwarded, **route)
