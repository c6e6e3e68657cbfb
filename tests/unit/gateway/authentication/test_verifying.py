"""Signatures of real clients are accepted however they encode a request, and nothing else is."""

from __future__ import annotations

import hashlib
import hmac
import string
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from penstock.gateway.authentication import AccessKey, AccessKeys, OpenAuthenticator, presign
from penstock.gateway.objects import RequestHead, S3Error
from penstock.transport import signing_key
from signed_requests import HOST, KEY, READER, authenticator, changed, presigned, signed, signed_at_s, signed_by_crt

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=20)
NAMES = st.text(string.ascii_letters + string.digits + "-._~ /+%&=?üß漢", min_size=1, max_size=10)
HEADERS = st.dictionaries(
    st.sampled_from(["x-amz-meta-a", "x-amz-meta-b", "Range", "Content-Type", "x-amz-checksum-mode", "If-Match"]),
    st.text(string.ascii_letters + string.digits + "=/+;,\" '", min_size=1, max_size=20).map(str.strip).filter(bool),
    max_size=4,
)


def refused(head: RequestHead, **options: Any) -> S3Error:
    """The error with which a request is refused."""
    with pytest.raises(S3Error) as caught:
        authenticator(**options).verify(head)
    return caught.value


def encoded(pairs: list[tuple[str, str]]) -> str:
    return "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in pairs)


# ── what clients send ───────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=150, deadline=None)
@given(key=TEXT, pairs=st.lists(st.tuples(NAMES, st.text(max_size=8) | NAMES), max_size=4), headers=HEADERS)
def test_what_botocore_signs_is_accepted(key: str, pairs: list[tuple[str, str]], headers: dict[str, str]) -> None:
    """Any key, any query and any header, signed in the headers."""
    pairs = [(name, value.encode("utf-8", "replace").decode()) for name, value in pairs]
    target = f"/bucket/{quote(key, safe='/-_.~')}" + (f"?{encoded(pairs)}" if pairs else "")
    caller = authenticator().verify(signed(target, headers=headers)).caller
    assert caller == (KEY.access_key, True)


@settings(max_examples=100, deadline=None)
@given(key=TEXT, pairs=st.lists(st.tuples(NAMES, NAMES), max_size=3), headers=HEADERS)
def test_what_the_common_runtime_signs_is_accepted(
    key: str, pairs: list[tuple[str, str]], headers: dict[str, str]
) -> None:
    """The signer in C that Mountpoint, s3torchconnector and the AWS CLI 2 use, in headers and in the query."""
    target = f"/bucket/{quote(key, safe='/-_.~')}" + (f"?{encoded(pairs)}" if pairs else "")
    assert authenticator().verify(signed_by_crt(target, headers=headers)).caller.access_key == KEY.access_key
    assert authenticator().verify(signed_by_crt(target, is_presigned=True)).caller.access_key == KEY.access_key


@settings(max_examples=100, deadline=None)
@given(key=TEXT, pairs=st.lists(st.tuples(NAMES, NAMES), max_size=3, unique_by=lambda pair: pair[0]))
def test_what_botocore_presigns_is_accepted(key: str, pairs: list[tuple[str, str]]) -> None:
    """Any key and any query, signed in the query."""
    target = f"/bucket/{quote(key, safe='/-_.~')}" + (f"?{encoded(pairs)}" if pairs else "")
    assert authenticator().verify(presigned(target, key=READER)).caller == ("READER", False)


SAME = {
    "lower-case hexadecimal": ("/bucket/a%C3%BC%2B", "/bucket/a%c3%bc%2b"),
    "tilde encoded": ("/bucket/~a", "/bucket/%7Ea"),
    "slash encoded": ("/bucket/a/b", "/bucket/a%2Fb"),
    "plain characters": ("/bucket/a%28b%29%21%2A%27", "/bucket/a(b)!*'"),
    "plain UTF-8": ("/bucket/%C3%BC", "/bucket/ü"),
    "bytes that are not UTF-8": ("/bucket/%FF", "/bucket/\udcff"),
    "space as plus in the query": ("/bucket?prefix=a%20b", "/bucket?prefix=a+b"),
    "sub-resource": ("/bucket?uploads=", "/bucket?uploads"),
    "order of the query": ("/bucket?a=1&a=2&b=3", "/bucket?b=3&a=2&a=1"),
    "empty values": ("/bucket?delimiter=&prefix=", "/bucket?prefix&delimiter="),
    "empty parts": ("/bucket?prefix=a", "/bucket?&prefix=a&"),
    "a plus that is a plus": ("/bucket/a%2Bb", "/bucket/a+b"),
    "slash in the query": ("/bucket?prefix=a%2Fb", "/bucket?prefix=a/b"),
}


@pytest.mark.parametrize(("canonical", "sent"), SAME.values(), ids=SAME.keys())
def test_other_spellings_of_one_request_are_accepted(canonical: str, sent: str) -> None:
    """Clients sign S3's own spelling and send another one."""
    head = signed(canonical)
    path, _, query = sent.partition("?")
    assert authenticator().verify(head._replace(raw_path=path, raw_query=query)).caller.access_key == KEY.access_key


@pytest.mark.parametrize("target", ["/bucket/a(b)!*'", "/bucket/%7Ea", "/bucket?prefix=a/b&x=(1)", "/bucket/a%c3%bc"])
def test_what_is_signed_as_it_is_sent_is_accepted(target: str) -> None:
    """Some clients sign the characters that they send; botocore does, for a URL that it is given."""
    assert authenticator().verify(signed(target)).caller.access_key == KEY.access_key


def test_a_query_that_is_signed_in_its_own_order_is_accepted() -> None:
    """curl 7 neither sorts nor encodes the query that it signs."""
    head = signed("/bucket?list-type=2&prefix=a%20b&delimiter=/")
    text = "GET\n/bucket\nlist-type=2&prefix=a%20b&delimiter=/\n" + "".join(
        f"{name}:{head.headers[name]}\n" for name in ("host", "x-amz-content-sha256", "x-amz-date")
    )
    text += f"\nhost;x-amz-content-sha256;x-amz-date\n{head.headers['x-amz-content-sha256']}"
    scope = f"{head.headers['x-amz-date'][:8]}/us-east-1/s3/aws4_request"
    digest = hashlib.sha256(text.encode()).hexdigest()
    to_sign = f"AWS4-HMAC-SHA256\n{head.headers['x-amz-date']}\n{scope}\n{digest}"
    signature = hmac.digest(signing_key(KEY.secret_key, scope), to_sign.encode(), "sha256").hex()
    authorization = head.headers["Authorization"].split("Signature=")[0] + f"Signature={signature}"
    assert authenticator().verify(changed(head, Authorization=authorization)).caller.access_key == KEY.access_key


@pytest.mark.parametrize("value", ["a  b", " a b ", "a\tb"])
def test_spaces_in_headers_are_collapsed(value: str) -> None:
    """What is sent with many spaces is signed with one."""
    head = signed(headers={"x-amz-meta-a": "a b"})
    assert authenticator().verify(changed(head, x_amz_meta_a=value)).caller.access_key == KEY.access_key


@pytest.mark.parametrize("service", ["s3", "s3-object-lambda"])
def test_both_services_are_accepted(service: str) -> None:
    """Clients of Object Lambda access points sign for another service."""
    for head in (signed(service=service), presigned(service=service)):
        assert authenticator(region="us-east-1").verify(head).caller.access_key == KEY.access_key


def test_our_own_urls_are_accepted() -> None:
    """A URL of ``presign`` is verified by any process that has the key, with the headers that it signs."""
    key = AccessKey.generate()
    url = presign(
        f"http://{HOST}/bucket/a%20b", key, headers={"x-amz-checksum-mode": "ENABLED"}, query={"versionId": "1"}
    )
    path, _, query = url.removeprefix(f"http://{HOST}").partition("?")
    known = authenticator()
    known.keys = known.keys.with_key(key)
    head = RequestHead("GET", path, query, CIMultiDict({"Host": HOST, "X-Amz-Checksum-Mode": "ENABLED"}))
    assert known.verify(head).caller == (key.access_key, False)
    with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
        known.verify(changed(head, x_amz_checksum_mode=""))
    with pytest.raises(S3Error, match="InvalidAccessKeyId"):
        authenticator().verify(head)


def test_unsigned_requests_are_refused_unless_a_line_allows_them() -> None:
    """Anonymous callers never write."""
    head = RequestHead("GET", "/bucket/key", "", CIMultiDict({"Host": HOST}))
    assert refused(head).code == "AccessDenied"
    open_to_all = authenticator()
    open_to_all.keys = AccessKeys.parse("anonymous::ro:bucket", source="test")
    caller = open_to_all.verify(head).caller
    assert caller == ("", False)
    assert open_to_all.may_use(caller, "bucket")
    assert not open_to_all.may_use(caller, "other")


def test_a_gateway_without_keys_takes_everything() -> None:
    """Clients that must sign may do so with any key."""
    for head in (signed(), presigned(), RequestHead("GET", "/", "", CIMultiDict({"Host": HOST}))):
        found = OpenAuthenticator(may_write=False)
        assert found.verify(head).caller == ("", False)
        assert found.may_use(found.verify(head).caller, "bucket")


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1:9000", True),
        ("[::1]:9000", True),
        ("localhost", True),
        ("bucket.LOCALHOST.:80", True),
        ("bucket.gateway.example", True),
        ("evil.example", False),
        ("notlocalhost", False),
        ("127.0.0.1.evil.example", False),
        ("10.0.0.1", False),
        ("[", False),
        ("", False),
    ],
)
def test_without_keys_the_host_must_be_this_one(host: str, is_local: bool) -> None:
    """A web page cannot use a user's browser to reach the gateway under a name of its own."""
    head = RequestHead("GET", "/", "", CIMultiDict({"Host": host}))
    found = OpenAuthenticator(domains=["gateway.example"])
    if is_local:
        assert found.verify(head).caller == ("", True)
    else:
        with pytest.raises(S3Error, match="AccessDenied"):
            found.verify(head)


def test_keys_are_replaced_as_a_whole() -> None:
    """After a reload the old secret is worth nothing, although the day's key was kept."""
    found = authenticator()
    head = signed()
    assert found.verify(head).caller.may_write
    found.keys = AccessKeys([AccessKey(access_key=KEY.access_key, secret_key="a new secret")])
    with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
        found.verify(head)
    assert not found.verify(
        signed(key=AccessKey(access_key=KEY.access_key, secret_key="a new secret"))
    ).caller.may_write


# ── hostile clients ─────────────────────────────────────────────────────────────────────────────────────────────────


def signature_cut(head: RequestHead, count: int = 3) -> RequestHead:
    """The request without the last characters of its signature, which is at the end of the header or of the query."""
    if head.raw_query:
        return head._replace(raw_query=head.raw_query[:-count])
    return changed(head, Authorization=head.headers["Authorization"][:-count])


HOSTILE: dict[str, tuple[Callable[[], RequestHead], str]] = {
    "wrong secret": (lambda: signed(key=AccessKey(access_key=KEY.access_key, secret_key="guess")), "SignatureDoesNotMatch"),
    "unknown key": (lambda: signed(key=AccessKey(access_key="UNKNOWN", secret_key="guess")), "InvalidAccessKeyId"),
    "wrong service": (lambda: signed(service="ec2"), "AuthorizationHeaderMalformed"),
    "wrong service in the query": (lambda: presigned(service="ec2"), "AuthorizationQueryParametersError"),
    "another method": (lambda: signed()._replace(method="DELETE"), "SignatureDoesNotMatch"),
    "another key": (lambda: signed()._replace(raw_path="/bucket/other"), "SignatureDoesNotMatch"),
    "another host": (lambda: changed(signed(), Host="elsewhere"), "SignatureDoesNotMatch"),
    "another query": (lambda: signed()._replace(raw_query="acl"), "SignatureDoesNotMatch"),
    "another range": (lambda: changed(signed(headers={"Range": "bytes=0-1"}), Range="bytes=0-9"), "SignatureDoesNotMatch"),
    "another payload": (
        lambda: changed(signed(method="PUT", body=b"a"), x_amz_content_sha256="UNSIGNED-PAYLOAD"),
        "SignatureDoesNotMatch",
    ),
    "another day": (lambda: changed(signed(), x_amz_date="20200101T000000Z"), "AuthorizationHeaderMalformed"),
    "a header of S3 added": (lambda: changed(signed(), x_amz_copy_source="/b/k"), "AccessDenied"),
    "Content-MD5 added": (lambda: changed(signed(), content_md5="1B2M2Y8AsgTpgAmY7PhCfg=="), "AccessDenied"),
    "a header added to a URL": (lambda: changed(presigned(), x_amz_acl="public-read"), "AccessDenied"),
    "a parameter added to a URL": (
        lambda: (head := presigned())._replace(raw_query=head.raw_query + "&versionId=1"), "SignatureDoesNotMatch"
    ),
    "a short signature": (lambda: signature_cut(signed()), "SignatureDoesNotMatch"),
    "a short signature in the query": (lambda: signature_cut(presigned()), "SignatureDoesNotMatch"),
    "a long signature": (lambda: changed(head := signed(), Authorization=head.headers["Authorization"] + "00"),
                         "SignatureDoesNotMatch"),
    "an empty signature": (lambda: signature_cut(signed(), 64), "AuthorizationHeaderMalformed"),
    "a longer life of a URL": (
        lambda: (head := presigned())._replace(raw_query=head.raw_query.replace("Expires=600", "Expires=601")),
        "SignatureDoesNotMatch",
    ),
    "a life of more than a week": (lambda: presigned(expires_s=604_801), "AuthorizationQueryParametersError"),
    "no life": (lambda: presigned(expires_s=0), "AuthorizationQueryParametersError"),
    "a negative life": (lambda: presigned(expires_s=-1), "AuthorizationQueryParametersError"),
    "a parameter twice": (
        lambda: (head := presigned())._replace(raw_query=head.raw_query + "&X-Amz-Expires=600"),
        "AuthorizationQueryParametersError",
    ),
    "a parameter missing": (
        lambda: (head := presigned())._replace(raw_query=head.raw_query.replace("X-Amz-Date", "X-Date")),
        "AuthorizationQueryParametersError",
    ),
    "signed twice": (lambda: presigned()._replace(headers=signed().headers), "InvalidArgument"),
    "a session token": (lambda: signed(token="token"), "InvalidToken"),
    "a session token in the query": (lambda: presigned(token="token"), "InvalidToken"),
    "version 2": (lambda: changed(signed(), Authorization="AWS AKID:c2lnbmF0dXJl"), "InvalidRequest"),
    "version 2 in the query": (
        lambda: RequestHead("GET", "/b/k", "AWSAccessKeyId=A&Signature=x&Expires=1", CIMultiDict({"Host": HOST})),
        "InvalidRequest",
    ),
    "asymmetric": (lambda: changed(signed(), Authorization="AWS4-ECDSA-P256-SHA256 Credential=a"), "InvalidRequest"),
    "nothing but the algorithm": (lambda: changed(signed(), Authorization="AWS4-HMAC-SHA256 "), "AuthorizationHeaderMalformed"),
    "a bearer token": (lambda: changed(signed(), Authorization="Bearer x"), "InvalidRequest"),
    "no content hash": (lambda: changed(signed(), x_amz_content_sha256="garbage"), "InvalidArgument"),
    "signed chunks in a URL": (
        lambda: presigned(headers={"x-amz-content-sha256": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"}), "InvalidRequest",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "code"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_requests_are_refused(make: Callable[[], RequestHead], code: str) -> None:
    """Each has its code, and no message shows a secret or the right signature."""
    error = refused(make())
    assert error.code == code
    shown = f"{error} {error.details} {error.headers}"
    assert KEY.secret_key not in shown
    assert error.status in (400, 403)


def test_the_host_must_be_signed() -> None:
    """Otherwise a request could be sent to another virtual host."""
    head = signed()
    value = head.headers["Authorization"].replace("SignedHeaders=host;", "SignedHeaders=")
    assert refused(changed(head, Authorization=value)).details == {"HeadersNotSigned": "host"}


def test_the_right_region_is_named() -> None:
    """Clients correct themselves by the element Region, or by the header."""
    for head, code in ((signed(region="eu-west-1"), "AuthorizationHeaderMalformed"),
                       (presigned(region="eu-west-1"), "AuthorizationQueryParametersError")):  # fmt: skip
        error = refused(head, region="us-east-1")
        assert (error.code, error.details["Region"]) == (code, "us-east-1")
        assert error.headers == {"x-amz-bucket-region": "us-east-1"}
        assert authenticator(region="").verify(head).caller.access_key == KEY.access_key


@pytest.mark.parametrize(
    ("offset_s", "code"), [(-901, "RequestTimeTooSkewed"), (901, "RequestTimeTooSkewed"), (899, "")]
)
def test_the_clock_may_differ_by_a_quarter_of_an_hour(offset_s: int, code: str) -> None:
    """Older and future signatures are worth nothing."""
    head = signed()
    found = authenticator(now_s=signed_at_s(head) + offset_s)
    if not code:
        assert found.verify(head).caller.access_key == KEY.access_key
        return
    with pytest.raises(S3Error) as caught:
        found.verify(head)
    assert caught.value.code == code
    assert caught.value.details["MaxAllowedSkewMilliseconds"] == "900000"


@pytest.mark.parametrize(
    ("offset_s", "message"), [(600, ""), (601, "Request has expired"), (-901, "not valid yet"), (-899, "")]
)
def test_urls_expire(offset_s: int, message: str) -> None:
    """A URL is valid for its own time, and from a quarter of an hour before it was signed."""
    head = presigned(expires_s=600)
    found = authenticator(now_s=signed_at_s(head) + offset_s)
    if not message:
        assert found.verify(head).caller.access_key == KEY.access_key
        return
    with pytest.raises(S3Error, match=message) as caught:
        found.verify(head)
    assert (caught.value.code, caught.value.status) == ("AccessDenied", 403)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_byte_of_what_is_signed_can_be_changed(data: st.DataObject) -> None:
    """One other character in method, path, query, or any signed header refuses the request, with an ``S3Error``."""
    head = signed("/bucket/key?prefix=abc", headers={"Range": "bytes=0-99", "x-amz-meta-a": "value"})
    known = authenticator(now_s=signed_at_s(head))
    assert known.verify(head)
    signed_names = ["Authorization", "Host", "Range", "x-amz-meta-a", "x-amz-date", "x-amz-content-sha256"]
    part = data.draw(st.sampled_from(["method", "raw_path", "raw_query", *signed_names]))
    text = getattr(head, part) if part in head._fields else head.headers[part]
    place = data.draw(st.integers(0, len(text) - 1))
    character = data.draw(st.characters(min_codepoint=33, max_codepoint=126).filter(lambda c: c != text[place]))
    new = text[:place] + character + text[place + 1 :]
    tampered = head._replace(**{part: new}) if part in head._fields else changed(head, **{part.replace("-", "_"): new})
    with pytest.raises(S3Error):
        known.verify(tampered)


@settings(max_examples=300, deadline=None)
@given(
    authorization=st.none() | st.text(max_size=60) | st.text("AWS4-HMC256 Credntial=/,Sigu;hos0", max_size=200),
    query=st.text(max_size=60) | st.text("X-Amz-SigntureCdlDE=/&%0123456789", max_size=100),
    date=st.none() | st.text(max_size=20),
)
def test_garbage_is_refused_and_nothing_else_happens(authorization: str | None, query: str, date: str | None) -> None:
    """Whatever the headers and the query contain, the answer is an ``S3Error``."""
    headers = CIMultiDict({"Host": HOST})
    if authorization is not None:
        headers["Authorization"] = authorization
    if date is not None:
        headers["x-amz-date"] = date
    wire = query.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
    with pytest.raises(S3Error):
        authenticator().verify(RequestHead("GET", "/bucket/key", wire, headers))


def test_memory_is_bounded_by_those_who_have_a_key() -> None:
    """Refused requests leave nothing behind, and those with many scopes are bounded."""
    found = authenticator()
    for number in range(50):
        with pytest.raises(S3Error):
            found.verify(signed(key=AccessKey(access_key=KEY.access_key, secret_key="x"), region=f"r-{number}"))
    assert not found._day_keys
    for number in range(1100):
        found._keep(KEY, f"20260102/r-{number}/s3/aws4_request", b"")
    assert len(found._day_keys) <= 1026
