"""The XML documents of operations that write, in both directions. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from penstock.gateway.objects import Answer, S3Error
from penstock.gateway.s3_text import DECLARATION, NAMESPACE, escaped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CHECKSUM_ELEMENTS = {
    "crc32": "ChecksumCRC32",
    "crc32c": "ChecksumCRC32C",
    "crc64nvme": "ChecksumCRC64NVME",
    "sha1": "ChecksumSHA1",
    "sha256": "ChecksumSHA256",
}
_CONTROL = re.compile("[\x01-\x08\x0b\x0c\x0e-\x1f]")
_REFERENCE = re.compile(r"&#(?:x0*([0-9a-fA-F]{1,2})|0*([0-9]{1,2}));")
_STAND_IN = 0x10FE00  # private use: what a control character is while an XML parser, which refuses it, looks at it


def element(name: str, content: object, *, encode: Callable[[str], str] | None = None) -> str:
    """Return an element.

    Args:
        name: Name of the element.
        content: Text of the element, or its children as pairs of name and content. A child whose content is None is left out.
        encode: How to write text; None escapes it.
    """
    if isinstance(content, str | int):
        text = str(content)
        return f"<{name}>{encode(text) if encode else escaped(text)}</{name}>"
    children = "".join(element(child, value) for child, value in content if value is not None)  # type: ignore[attr-defined]
    return f"<{name}>{children}</{name}>"


def document(name: str, content: object, *, headers: Mapping[str, str] | None = None) -> Answer:
    """Return an answer whose body is a document with one root element."""
    body = element(name, content).replace(f"<{name}>", f'<{name} xmlns="{NAMESPACE}">', 1)
    return Answer(200, {"Content-Type": "application/xml", **(headers or {})}, f"{DECLARATION}{body}".encode())


def checksum_elements(checksums: Mapping[str, str], kind: str | None = None) -> list[tuple[str, str]]:
    """Return checksums as pairs for ``element``, and their type if there are any."""
    rows = [(CHECKSUM_ELEMENTS[name], value) for name, value in checksums.items() if name in CHECKSUM_ELEMENTS]
    return [*rows, ("ChecksumType", kind)] if rows and kind else rows


def parsed(body: bytes, *, root: str) -> ET.Element:
    """Parse the body of a request. Namespaces are dropped, and control characters are accepted although XML forbids them.

    Args:
        body: The body.
        root: Name of its root element.

    Raises:
        S3Error: ``MalformedXML``.
    """
    try:
        text = body.decode("utf-8")
        if "<!DOCTYPE" in text or "<!ENTITY" in text:
            raise malformed()
        text = _REFERENCE.sub(_stand_in, text)
        text = _CONTROL.sub(lambda match: chr(_STAND_IN + ord(match[0])), text)
        tree = ET.fromstring(text)
    except (UnicodeDecodeError, ET.ParseError) as error:
        raise malformed() from error
    for node in tree.iter():
        node.tag = node.tag.rpartition("}")[2]
        if node.text:
            node.text = "".join(
                chr(ord(letter) - _STAND_IN) if _STAND_IN <= ord(letter) < _STAND_IN + 0x20 else letter
                for letter in node.text
            )
    if tree.tag != root:
        raise malformed()
    return tree


def _stand_in(match: re.Match[str]) -> str:
    code = int(match[1], 16) if match[1] else int(match[2])
    return chr(_STAND_IN + code) if code < 0x20 and code not in (9, 10, 13) else match[0]


def malformed() -> S3Error:
    """Return the error of a document that is not what it should be."""
    return S3Error(
        "MalformedXML",
        "The XML you provided was not well-formed or did not validate against our published schema",
        status=400,
    )
