"""What may be shown of a URL, and of text in which URLs may stand: the one place that decides.

A URL can hold three kinds of secrets: a password or token before the ``@`` of its host, a signature in its query
(presigned URLs, Azure's SAS), and named parameters such as ``token=``. Everything that prints or stores a URL calls
``public_url``; every error of penstock passes its own text through ``public_text``, so no message has to remember it.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from urllib.parse import SplitResult, urlsplit

HIDDEN = "..."

_SCHEME = re.compile(r"(?<![A-Za-z0-9+.-])(https?:/*|[A-Za-z0-9+.-]+://)", re.IGNORECASE)
"""The look-behind keeps the search linear: a match begins only where a word does."""

_AUTHORITY_END = re.compile(r"[/?#]")
_PORT = re.compile(r"(?:\[[^\]]*\]|[^:\[\]]*)(?::(?:[0-9]*|\{[^}]*\}))?")
_LOGIN_SCHEMES = frozenset({"abfs", "abfss", "adl", "ftp", "ftps", "hdfs", "sftp", "smb", "ssh", "wasb", "wasbs"})
"""Here the name before the ``@`` is a container or an account, without which the URL means another place."""

_CONTROL_IN_LINES = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)
"""Control characters, marks that reverse the direction of text, and halves of characters, which cannot be printed."""

_CONTROL = re.compile(f"[\\t\\n]|{_CONTROL_IN_LINES.pattern}")

_CLOSING = "'\")]}>,.;:!"
"""What follows a URL in a sentence and is no part of it."""

_PARAMETER = re.compile(
    r"(?<![\w.%-])([\w.%-]{0,64}(?:signature|token|secret|passw|credential|access_?-?key|api_?-?key|authorization)[\w.%-]{0,64}"
    r"|sig|pwd|auth|policy|key-pair-id|googleaccessid)=('[^']*'|\"[^\"]*\"|[^\s&;#'\",)]+)",
    re.IGNORECASE,
)
"""Bounds keep the search linear, here as below."""

_LOGIN = re.compile(r"(?<![^\s'\"(=,])[^\s/:@'\"(=,]+:[^\s@'\"]{1,256}@(?=[\w.\[-])")
"""``user:password@host`` where no scheme says that it is a URL."""


def public_url(url: str) -> str:
    """`url` without its password, without secret parameters, and for ``http(s)`` without its query.

    Args:
        url: One URL, path or key; also several that are chained, as ``simplecache::https://...``.
    """
    head, *rest = _SCHEME.split(url)
    if not rest:
        return _without_parameters(url)
    shown = [head]
    for scheme, text in zip(rest[::2], rest[1::2], strict=True):
        shown.append(_public(scheme, text))
    return "".join(shown)


def public_key(key: str) -> str:
    """`key`, which over HTTP may end with a signed query, as a repr shows it."""
    name, mark, _ = key.partition("?")
    return f"{name}?{HIDDEN}" if mark else key


def stored_key(key: str) -> str:
    """`key` of an HTTP store as it may lie on a disk: with a digest for its query, which may be a signature."""
    name, mark, query = key.partition("?")
    return f"{name}?{blake2b(query.encode('utf-8', 'surrogateescape'), digest_size=16).hexdigest()}" if mark else key


def public_text(text: str) -> str:
    """`text` with every URL in it as ``public_url`` shows it; other words stay as they are.

    Args:
        text: A message, which may quote URLs, and what servers and other libraries said.
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
    """`url` split by ``urllib``; None where that cannot be done: Python's own error quotes the password."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError where it is no number
    except ValueError:
        return None
    return parts


def printable(text: str, *, lines: bool = False) -> str:
    """`text` with control characters escaped, as Python writes them in literals: names in a store must not command a terminal.

    Args:
        text: One line, or with `lines` several.
        lines: Keep line breaks and tabs as they are.
    """
    return (_CONTROL_IN_LINES if lines else _CONTROL).sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def showable(error: BaseException) -> bool:
    """Whether a foreign error, and what caused it, can stand behind one of ours in a traceback without showing a secret."""
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
