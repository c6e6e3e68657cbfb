"""Bodies of requests are decoded wherever they are cut, and compared with everything that was said about them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.checksums.crc32c import crc32c
from penstock.gateway.authentication import OpenAuthenticator
from penstock.gateway.objects import RequestHead, S3Error, VerifiedRequest
from signed_requests import authenticator, changed, pieces_of, signed, signed_at_s, signed_chunks

DATA = bytes(range(256)) * 2
CHUNKS = [DATA[:120], DATA[120:400], DATA[400:]]
SIGNED = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
SIGNED_TRAILER = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"
UNSIGNED_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"


def text(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


CRC32 = text(zlib.crc32(DATA).to_bytes(4, "big"))
CHECKSUMS = {
    "crc32": CRC32,
    "crc32c": text(crc32c(DATA).to_bytes(4, "big")),
    "sha1": text(hashlib.sha1(DATA, usedforsecurity=False).digest()),
    "sha256": text(hashlib.sha256(DATA).digest()),
}


def put(payload: str, *, body: bytes = b"", target: str = "/bucket/key", **headers: str) -> RequestHead:
    """The head of a PUT whose payload is described by `payload`; empty for the hash of `body`."""
    described = {name.replace("_", "-"): value for name, value in headers.items()}
    if payload:
        described["X-Amz-Content-SHA256"] = payload
    return signed(target, method="PUT", headers=described, body=body)


def streaming(payload: str, *, length_bytes: int = len(DATA), **headers: str) -> RequestHead:
    """The head of a PUT in chunks."""
    return put(payload, x_amz_decoded_content_length=str(length_bytes), content_encoding="aws-chunked", **headers)


def read(request: VerifiedRequest, pieces: Any) -> tuple[bytes, dict[str, str]]:
    """Body and matched checksums."""

    async def run() -> tuple[bytes, dict[str, str]]:
        body = request.open_body(pieces)
        return b"".join([piece async for piece in body]), dict(body.checksums)

    return asyncio.run(run())


def received(head: RequestHead, encoded: bytes, *cuts: int) -> bytes:
    """Body of a request, which arrives cut at these places."""
    found = authenticator(now_s=signed_at_s(head)).verify(head)
    return read(found, pieces_of(encoded, cuts))[0]


def error_of(head: RequestHead, encoded: bytes, *cuts: int) -> S3Error:
    """The error that the body ends with; never after all of the data was handed out."""
    found = authenticator(now_s=signed_at_s(head)).verify(head)
    taken = bytearray()

    async def run() -> None:
        async for piece in found.open_body(pieces_of(encoded, cuts)):
            taken.extend(piece)

    with pytest.raises(S3Error) as caught:
        asyncio.run(run())
    assert bytes(taken) != DATA
    return caught.value


def encoding(kind: str) -> tuple[RequestHead, bytes]:
    """Head and encoded body of each kind of streamed upload."""
    if kind == "signed":
        head = streaming(SIGNED)
        return head, b"".join(signed_chunks(head, CHUNKS))
    name, _, value = f"x-amz-checksum-crc32:{CRC32}".partition(":")
    if kind == "signed with trailer":
        head = streaming(SIGNED_TRAILER, x_amz_trailer=name)
        return head, b"".join(signed_chunks(head, CHUNKS, trailer=f"{name}:{value}\n"))
    head = streaming(UNSIGNED_TRAILER, x_amz_trailer=name)
    lines = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in CHUNKS)
    return head, lines + f"0\r\n{name}:{value}\r\n\r\n".encode()


KINDS = ["signed", "signed with trailer", "unsigned with trailer"]


# ── right bodies ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_may_be_cut_anywhere(kind: str) -> None:
    """Two pieces with every possible cut, and pieces of one byte, give the same data."""
    head, encoded = encoding(kind)
    for cut in range(len(encoded)):
        assert received(head, encoded, cut) == DATA
    assert received(head, encoded, *range(1, len(encoded))) == DATA


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_a_body_may_be_cut_often(kind: str, cuts: list[int]) -> None:
    """Any number of cuts at any places gives the same data."""
    head, encoded = encoding(kind)
    assert received(head, encoded, *(cut for cut in cuts if cut < len(encoded))) == DATA


@pytest.mark.parametrize("algorithm", CHECKSUMS)
def test_checksums_in_headers_and_trailers_are_told(algorithm: str) -> None:
    """What matched is known afterwards, so that it can be stored with the object."""
    name = f"x_amz_checksum_{algorithm}"
    head = put("", body=DATA, **{name: CHECKSUMS[algorithm]})
    found = authenticator().verify(head)
    assert read(found, pieces_of(DATA, [5])) == (DATA, {algorithm: CHECKSUMS[algorithm]})
    trailer = name.replace("_", "-")
    head = streaming(UNSIGNED_TRAILER, x_amz_trailer=trailer)
    encoded = b"%x\r\n%b\r\n0\r\n" % (len(DATA), DATA) + f"{trailer}:{CHECKSUMS[algorithm]}\r\n\r\n".encode()
    found = authenticator().verify(head)
    assert read(found, pieces_of(encoded, [9])) == (DATA, {algorithm: CHECKSUMS[algorithm]})


def test_a_body_that_nothing_protects_is_handed_out_at_once() -> None:
    """An unsigned body of unknown length streams: no piece waits for the next one."""
    head = put("UNSIGNED-PAYLOAD")
    body = authenticator().verify(head).open_body(pieces_of(b"abcd", [2]))
    assert body.length_bytes is None

    async def first() -> bytes:
        return await anext(aiter(body))

    assert asyncio.run(first()) == b"ab"


def test_a_body_without_a_hash_must_be_empty() -> None:
    """Without ``x-amz-content-sha256`` the signature covers an empty body."""
    head = changed(put(""), x_amz_content_sha256="")
    with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
        authenticator().verify(head)
    assert received(put(""), b"") == b""
    assert error_of(put(""), b"x").code == "XAmzContentSHA256Mismatch"


def test_completing_an_upload_names_the_checksum_of_the_object() -> None:
    """It is not compared with the list of parts."""
    head = signed("/bucket/key?uploadId=1", method="POST", headers={"x-amz-checksum-crc32": CRC32}, body=b"<x/>")
    assert received(head, b"<x/>") == b"<x/>"


def test_a_gateway_without_keys_decodes_all_the_same() -> None:
    """Nobody can verify the signatures of chunks there, but their form and the checksums are checked."""
    for kind in KINDS:
        head, encoded = encoding(kind)
        assert read(OpenAuthenticator().verify(head), pieces_of(encoded, [100]))[0] == DATA
        unsigned = encoded.replace(b";chunk-signature=", b";x=")
        if unsigned != encoded:
            with pytest.raises(S3Error):
                read(OpenAuthenticator().verify(head), pieces_of(unsigned))


# ── wrong bodies ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_body_that_is_not_the_signed_one_is_refused() -> None:
    """The hash of the whole body is compared before its last piece is handed out."""
    head = put("", body=DATA)
    assert received(head, DATA, 100) == DATA
    wrong = DATA[:-1] + b"\0"
    assert error_of(head, wrong, 100).code == "XAmzContentSHA256Mismatch"
    assert error_of(head, DATA[:-1], 100).code in ("XAmzContentSHA256Mismatch", "IncompleteBody")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"content_md5": text(hashlib.md5(b"x", usedforsecurity=False).digest())}, "BadDigest"),
        ({"content_md5": "short"}, "InvalidDigest"),
        ({"x_amz_checksum_crc32": "AAAAAA=="}, "BadDigest"),
        ({"x_amz_checksum_crc32": "AAAA"}, "InvalidRequest"),
        ({"x_amz_checksum_crc32": "!"}, "InvalidRequest"),
        ({"x_amz_checksum_md17": "AAAA"}, "InvalidRequest"),
        ({"x_amz_checksum_crc32": CRC32, "x_amz_checksum_sha1": CHECKSUMS["sha1"]}, "InvalidRequest"),
    ],
)
def test_a_wrong_checksum_is_refused(headers: dict[str, str], code: str) -> None:
    """Content-MD5 and checksums are compared; those that cannot be are refused."""
    assert error_of(put("UNSIGNED-PAYLOAD", **headers), DATA, 10).code == code
    md5 = text(hashlib.md5(DATA, usedforsecurity=False).digest())
    assert received(put("UNSIGNED-PAYLOAD", content_md5=md5), DATA, 10) == DATA


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_byte_of_signed_chunks_can_be_changed(data: st.DataObject) -> None:
    """Any other byte anywhere refuses the body."""
    head, encoded = encoding(data.draw(st.sampled_from(KINDS[:2])))
    place = data.draw(st.integers(0, len(encoded) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != encoded[place]))
    tampered = encoded[:place] + bytes([byte]) + encoded[place + 1 :]
    if tampered.lower() == encoded.lower():  # the digits of a size, or the name of a trailer
        return
    try:
        taken = received(head, tampered)
    except S3Error:
        return
    assert taken == DATA
    assert tampered[:place].endswith((b"crc32:", b"crc32: ")) or encoded[place : place + 1] in b" \t"


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_that_is_cut_short_is_refused(kind: str) -> None:
    """Wherever it ends early, something is missing."""
    head, encoded = encoding(kind)
    for length in [*range(0, len(encoded) - 250, 97), *range(len(encoded) - 250, len(encoded))]:
        assert error_of(head, encoded[:length]).code in ("IncompleteBody", "MalformedTrailerError")


def hostile_chunks(name: str) -> tuple[RequestHead, bytes, str]:
    """Head, encoded body, and the code of the refusal."""
    head = streaming(SIGNED)
    chunks = signed_chunks(head, CHUNKS)
    unsigned = b"%x\r\n%b\r\n0\r\n\r\n" % (len(DATA), DATA)
    table = {
        "exchanged": (chunks[1] + chunks[0] + chunks[2] + chunks[3], "SignatureDoesNotMatch"),
        "repeated": (chunks[0] * 2 + chunks[1] + chunks[3], "SignatureDoesNotMatch"),
        "left out": (chunks[0] + chunks[2] + chunks[3], "SignatureDoesNotMatch"),
        "ended early": (chunks[0] + chunks[3], "SignatureDoesNotMatch"),
        "of another request": (b"".join(signed_chunks(streaming(SIGNED, x_amz_meta_a="1"), CHUNKS)), "SignatureDoesNotMatch"),
        "unsigned": (unsigned, "SignatureDoesNotMatch"),
        "more after the end": (b"".join(chunks) + b"0", "InvalidRequest"),
        "a second body": (b"".join(chunks) * 2, "InvalidRequest"),
        "a header without an end": (b"1" * 100_000, "InvalidRequest"),
        "a header of zeros": (b"0" * 127 + b"1;chunk-signature=" + b"0" * 64, "InvalidRequest"),
        "a negative size": (b"-1;chunk-signature=" + b"0" * 64 + b"\r\n", "InvalidRequest"),
        "a prefixed size": (b"0x1;chunk-signature=" + b"0" * 64 + b"\r\n", "InvalidRequest"),
        "a huge size": (b"f" * 16 + b";chunk-signature=" + b"0" * 64 + b"\r\n", "IncompleteBody"),
        "no CR": (chunks[0].replace(b"\r\n", b"\n"), "InvalidRequest"),
        "a trailer that was not announced": (
            b"".join(chunks)[:-2] + b"x-amz-checksum-crc32:AAAAAA==\r\n\r\n", "MalformedTrailerError"
        ),
        "nothing": (b"", "IncompleteBody"),
    }  # fmt: skip
    return head, *table[name]


@pytest.mark.parametrize(
    "name",
    ["exchanged", "repeated", "left out", "ended early", "of another request", "unsigned", "more after the end",
     "a second body", "a header without an end", "a header of zeros", "a negative size", "a prefixed size", "a huge size",
     "no CR", "a trailer that was not announced", "nothing"],
)  # fmt: skip
def test_hostile_chunks_are_refused(name: str) -> None:
    """Each has its code, in one piece and in many."""
    head, encoded, code = hostile_chunks(name)
    for cuts in ((), range(1, min(len(encoded), 3000))):
        found = authenticator(now_s=signed_at_s(head)).verify(head)
        with pytest.raises(S3Error) as caught:
            read(found, pieces_of(encoded, cuts))
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("trailer", "code"),
    [
        (b"", "MalformedTrailerError"),
        (b"x-amz-checksum-crc32:AAAAAA==\r\n", "BadDigest"),
        (b"x-amz-checksum-crc32:AAAA\r\n", "InvalidRequest"),
        (b"x-amz-checksum-sha1:AAAA\r\n", "MalformedTrailerError"),
        (f"x-amz-checksum-crc32:{CRC32}\r\n".encode() * 2, "MalformedTrailerError"),
        (b"x-amz-checksum-crc32 AAAA\r\n", "MalformedTrailerError"),
        (f"x-amz-checksum-crc32:{CRC32}\r\nx-amz-trailer-signature:00\r\n".encode(), "InvalidRequest"),
        (b"a" * 5000, "InvalidRequest"),
    ],
)
def test_trailers_are_what_was_announced(trailer: bytes, code: str) -> None:
    """A missing, wrong, repeated, unknown or endless trailer refuses the body."""
    head = streaming(UNSIGNED_TRAILER, x_amz_trailer="x-amz-checksum-crc32")
    encoded = b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(DATA), DATA, trailer)
    assert error_of(head, encoded, 700).code == code


@pytest.mark.parametrize(
    ("payload", "headers", "code"),
    [
        (SIGNED, {}, "MissingContentLength"),
        (SIGNED, {"x_amz_decoded_content_length": "-1"}, "InvalidArgument"),
        (SIGNED, {"x_amz_decoded_content_length": "9" * 30}, "InvalidArgument"),
        (UNSIGNED_TRAILER, {"x_amz_decoded_content_length": "1", "x_amz_trailer": "x-amz-meta-a"}, "InvalidRequest"),
        (
            UNSIGNED_TRAILER,
            {"x_amz_decoded_content_length": "1", "x_amz_trailer": "x-amz-checksum-type"},
            "InvalidRequest",
        ),
        (
            UNSIGNED_TRAILER,
            {"x_amz_decoded_content_length": "1", "x_amz_trailer": "x-amz-checksum-x"},
            "InvalidRequest",
        ),
        (
            UNSIGNED_TRAILER,
            {"x_amz_decoded_content_length": "1", "x_amz_trailer": "x-amz-checksum-crc32, x-amz-checksum-sha1"},
            "InvalidRequest",
        ),
    ],
)
def test_headers_of_chunked_bodies_are_checked(payload: str, headers: dict[str, str], code: str) -> None:
    """Before the first byte is read."""
    found = authenticator().verify(put(payload, **headers))
    with pytest.raises(S3Error) as caught:
        found.open_body(pieces_of(b""))
    assert caught.value.code == code


def test_asymmetric_chunks_are_not_supported() -> None:
    """The answer says so, and does not call the signature wrong."""
    with pytest.raises(S3Error) as caught:
        authenticator().verify(put("STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD"))
    assert (caught.value.code, caught.value.status) == ("NotImplemented", 501)
