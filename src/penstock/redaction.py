"""Removes secrets from URLs, and from text that may contain URLs. No other module decides which parts of a URL are shown.

A URL can contain three kinds of secrets: a password or token before the ``@`` of its host, a signature in its query
(presigned URLs, Azure's SAS), and named parameters such as ``token=``. All code that prints or stores a URL calls
``public_url``. Every error of penstock passes its own text through ``public_text``, so code that raises one need not.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from urllib.parse import SplitResult, urlsplit

HIDDEN = "..."

_SCHEME = re.compile(r"(?<![A-Za-z0-9+.-])(https?:/*|[A-Za-z0-9+.-]+://)", re.IGNORECASE)
"""The look-behind keeps the search linear: a match begins only at the start of a word."""

_AUTHORITY_END = re.compile(r"[/?#]")
_PORT = re.compile(r"(?:\[[^\]]*\]|[^:\[\]]*)(?::(?:[0-9]*|\{[^}]*\}))?")
_LOGIN_SCHEMES = frozenset({"abfs", "abfss", "adl", "ftp", "ftps", "hdfs", "sftp", "smb", "ssh", "wasb", "wasbs"})
"""With these schemes the name before the ``@`` is a container or an account, which the URL needs to name its place."""

_CONTROL_IN_LINES = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)
"""Control characters, marks that change the direction of text, and surrogates, which cannot be printed."""

_CONTROL = re.compile(f"[\\t\\n]|{_CONTROL_IN_LINES.pattern}")

_CLOSING = "'\")]}>,.;:!"
"""Characters that may follow a URL in a sentence and do not belong to it."""

_PARAMETER = re.compile(
    r"(?<![\w.%-])([\w.%-]{0,64}(?:signature|token|secret|passw|credential|access_?-?key|api_?-?key|authorization)[\w.%-]{0,64}"
    r"|sig|pwd|auth|policy|key-pair-id|googleaccessid)=('[^']*'|\"[^\"]*\"|[^\s&;#'\",)]+)",
    re.IGNORECASE,
)
"""The bounds keep the search linear, as they do below."""

_LOGIN = re.compile(r"(?<![^\s'\"(=,])[^\s/:@'\"(=,]+:[^\s@'\"]{1,256}@(?=[\w.\[-])")
"""``user:password@host`` without a scheme."""


def public_url(url: str) -> str:
    """Return a URL without its password and secret parameters, and for ``http(s)`` without its query.

    Args:
        url: A URL, path or key, or a chain of URLs such as ``simplecache::https://...``.
    """
    head, *rest = _SCHEME.split(url)
    if not rest:
        return _without_parameters(url)
    shown = [head]
    for scheme, text in zip(rest[::2], rest[1::2], strict=True):
        shown.append(_public(scheme, text))
    return "".join(shown)


def public_key(key: str) -> str:
    """Return a key as a repr shows it: without its query, which over HTTP may be signed."""
    name, mark, _ = key.partition("?")
    return f"{name}?{HIDDEN}" if mark else key


def stored_key(key: str) -> str:
    """Return the key of an HTTP store as it may be stored on disk: with a digest in place of its query, which may be signed."""
    name, mark, query = key.partition("?")
    return f"{name}?{blake2b(query.encode('utf-8', 'surrogateescape'), digest_size=16).hexdigest()}" if mark else key


def public_text(text: str) -> str:
    """Return a text with every URL in it replaced by what ``public_url`` returns.

    Args:
        text: A message, which may quote URLs and messages of servers and other libraries.
    """
    if "://" not in text and "=" not in text and "@" not in text and "http" not in text:
        return text
    head, *rest = _SCHEME.split(text)
    shown = [_without_logins(head)]
    for scheme, tail in zip(rest[::2], rest[1::2], strict=True):
        url = tail.split(maxsplit=1)[0].rstrip(_CLOSING) if tail[:1].strip() else ""
        shown += [_public(scheme, url), _without_logins(tail[len(url) :])]
    return _without_parameters("".join(shown))


def url_parts(url: str) -> SplitResult | None:
    """Split a URL with ``urllib``. The result is None if that fails, because Python's own error quotes the password."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError if it is not a number
    except ValueError:
        return None
    return parts


def printable(text: str, *, lines: bool = False) -> str:
    """Return a text with control characters escaped as in Python literals, so that names in a store cannot control a terminal.

    Args:
        text: One line, or with `lines` several lines.
        lines: Whether to keep line breaks and tabs.
    """
    return (_CONTROL_IN_LINES if lines else _CONTROL).sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def showable(error: BaseException) -> bool:
    """Whether another library's error, with its causes, can be the cause of one of penstock's without showing a secret."""
    following: BaseException | None = error
    while following is not None:
        if public_text(text := str(following)) != text or public_text(text := repr(following)) != text:
            return False
        following = following.__cause__ or following.__context__
    return True


def _public(scheme: str, rest: str) -> str:
    name = scheme.partition(":")[0].lower()
    is_http = name in ("http", "https")
    authority = _AUTHORITY_END.split(rest, maxsplit=1)[0]
    path = rest[len(authority) :]
    login, at, host = authority.rpartition("@")
    if "@" in path and not _PORT.fullmatch(host) and not authority.startswith("arn:"):
        login, at, host, path = "", "", path.rpartition("@")[2], ""  # a password with a slash or a question mark
    if not (at and name in _LOGIN_SCHEMES):
        login = at = ""
    if is_http:
        host, path = host.partition("?")[0], path.partition("?")[0]
    return scheme + login.partition(":")[0] + at + _without_parameters(host + path)


def _without_logins(text: str) -> str:
    return _LOGIN.sub(f"{HIDDEN}@", text) if "@" in text else text


def _without_parameters(text: str) -> str:
    return _PARAMETER.sub(rf"\1={HIDDEN}", text) if "=" in text else text
