"""Finds what a request names: bucket and key in its host name, its path or an ARN, parameters of its query, headers. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote_to_bytes

from multidict import CIMultiDict

from penstock.gateway.authentication import SIGNING_PARAMETERS
from penstock.gateway.objects import S3Error
from penstock.store.base import KEY_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

_SIGNING = frozenset(map(str.lower, SIGNING_PARAMETERS))

_HEADERS_IN_QUERY = frozenset({"content-type", "x-amz-acl", "x-amz-storage-class", "x-amz-tagging"})
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_PARAMETERS_COUNT_MAX = 256
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_ARN = re.compile(r"arn:[a-z-]+:s3(?:-object-lambda)?:[^:/]*:[^:/]*:accesspoint[/:]([^/:]+)(?:/(.*))?\Z", re.DOTALL)
_OBJECT_LAMBDA_LABEL = re.compile(r"([a-z0-9](?:[a-z0-9-]*[a-z0-9])?)-([0-9]{12})\Z")


class Target(NamedTuple):
    """The target of a request line, in its parts.

    Attributes:
        raw_path: Path as it was sent, with the first slash.
        raw_query: Query as it was sent, without the question mark.
        host: Host of an absolute URL; empty if the line named none.
    """

    raw_path: str
    raw_query: str
    host: str


class Address(NamedTuple):
    """The bucket and key that a request names.

    Attributes:
        bucket: Name of a bucket or access point; empty for the service itself.
        key: Key; empty for the bucket itself.
        other_bucket: Name to try if there is no such bucket: the access point of a host name ``<name>-<account>``. Empty for
            none.
        is_host_bucket: Whether the host name names the bucket, and not the path.
    """

    bucket: str
    key: str
    other_bucket: str = ""
    is_host_bucket: bool = False


def split_target(target: str) -> Target:
    """Take a request line's target apart.

    Raises:
        S3Error: The target is neither a path nor an http(s) URL.
    """
    host = ""
    if not target.startswith("/"):
        scheme, colon, rest = target.partition("://")
        if not colon or scheme.lower() not in ("http", "https"):
            raise _invalid_uri("The target of the request is neither a path nor a URL.")
        offset = min((found for found in map(rest.find, "/?") if found >= 0), default=len(rest))
        host, target = rest[:offset], rest[offset:]
        if not host or "@" in host:
            raise _invalid_uri("The URL of the request has no host, or names a user.")
        if not target.startswith("/"):
            target = "/" + target
    return Target(*path_and_query(target), host)


def path_and_query(target: str) -> tuple[str, str]:
    """Return the path and the query of a request line's target, as they were sent."""
    path, _, query = target.partition("?")
    return path, query


def decoded(text: str, what: str) -> str:
    """Undo percent-encoding.

    Args:
        text: Encoded text.
        what: A name of the text, for the message.

    Raises:
        S3Error: The encoding is broken, the bytes are not UTF-8, or there is a NUL.
    """
    if "%" not in text and text.isascii() and "\0" not in text:
        return text
    if _BAD_ESCAPE.search(text):
        raise _invalid_uri(f"The {what} is not percent-encoded correctly.")
    try:
        result = unquote_to_bytes(text.encode("utf-8", "surrogateescape")).decode()
    except UnicodeDecodeError:
        raise _invalid_uri(f"The {what} is not valid UTF-8.") from None
    if "\0" in result:
        raise _invalid_uri(f"The {what} contains a NUL character.")
    return result


def parse_query(raw_query: str) -> dict[str, str]:
    """Return the parameters of a query, decoded, without those that sign it.

    Raises:
        S3Error: The encoding is broken, a parameter is repeated, or there are too many.
    """
    if not raw_query:
        return {}
    found: dict[str, str] = {}
    pieces = raw_query.split("&")
    if len(pieces) > _PARAMETERS_COUNT_MAX:
        raise S3Error("InvalidRequest", f"A query has at most {_PARAMETERS_COUNT_MAX} parameters.")
    for piece in pieces:
        if not piece:
            continue
        name, _, value = piece.partition("=")
        name = decoded(name.replace("+", " "), "query")
        if name.lower() in _SIGNING:
            continue
        if name in found:
            raise S3Error("InvalidArgument", "A parameter of the query is repeated.")
        found[name] = decoded(value.replace("+", " "), "query")
    return found


def joined_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return headers, repeated ones joined with commas; looking one up ignores case.

    Raises:
        S3Error: There is more than one host.
    """
    if len(set(map(str.lower, headers))) == len(headers):
        return headers
    joined: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() == "host" and "Host" in joined:
            raise S3Error("InvalidRequest", "The request names more than one host.")
        joined[name] = f"{joined[name]},{value}" if name in joined else value
    return joined


def take_headers(query: dict[str, str]) -> dict[str, str]:
    """Take the headers out of the query of a presigned URL that are parameters there.

    Only headers that describe the object are taken; others, e.g. checksums, must be sent as headers.

    Raises:
        S3Error: No header could have such a name or value.
    """
    names = [name for name in query if name.lower() in _HEADERS_IN_QUERY or name.lower().startswith("x-amz-meta-")]
    for name in names:
        if not _HEADER_NAME.fullmatch(name) or not query[name].isprintable():
            raise S3Error("InvalidArgument", "A header in the query has a name or value that no header can have.")
    return {name: query.pop(name) for name in names}


def public_query(raw_query: str) -> str:
    """Return a query as it was sent, without the parameters that sign it."""
    if not raw_query:
        return ""
    return "&".join(piece for piece in raw_query.split("&") if piece.partition("=")[0].lower() not in _SIGNING)


def find_address(raw_path: str, host: str, domains: tuple[str, ...]) -> Address:
    """Find the bucket and the key that a request names.

    Args:
        raw_path: Path as it was sent.
        host: Host that the request names, with or without a port.
        domains: Domains whose subdomains are bucket names.

    Raises:
        S3Error: The path is not encoded correctly, or the key is too long.
    """
    path = decoded(raw_path, "path")[1:]
    label = _label(host, domains)
    if label:
        match = _OBJECT_LAMBDA_LABEL.match(label)
        return Address(label, _checked(path), match[1] if match else "", is_host_bucket=True)
    if path.startswith("arn:") and (arn := _ARN.match(path)):
        return Address(arn[1], _checked(arn[2] or ""))
    bucket, _, key = path.partition("/")
    return Address(bucket, _checked(key))


def _label(host: str, domains: tuple[str, ...]) -> str:
    """Return the part of a host name before one of the domains; empty if it is not a subdomain of any."""
    name = host.lower()
    if name.endswith("]"):
        return ""
    name = name.rpartition(":")[0] if ":" in name else name
    name = name.removesuffix(".")
    for domain in domains:
        if name.endswith(domain) and name[: -len(domain)].endswith("."):
            return name[: -len(domain) - 1]
    return ""


def _checked(key: str) -> str:
    if len(key) > KEY_BYTES_MAX // 4 and len(key.encode()) > KEY_BYTES_MAX:
        raise S3Error(
            "KeyTooLongError",
            "Your key is too long.",
            details={"MaxSizeAllowed": str(KEY_BYTES_MAX), "Size": str(len(key.encode()))},
        )
    return key


def _invalid_uri(message: str) -> S3Error:
    return S3Error("InvalidURI", message)
