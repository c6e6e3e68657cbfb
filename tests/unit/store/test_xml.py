"""S3's XML answers: fast columns and careful rows agree, and nothing hostile gets through."""

import pytest

from penstock.errors import ProtocolError
from penstock.store import xml
from penstock.store.answers import object_info
from penstock.types import ObjectInfo, Part, strong_etag

NS = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


def listing(rows, *, more="", truncated="false"):
    truncated = f"<IsTruncated>{truncated}</IsTruncated>"
    return f"<?xml version='1.0'?><ListBucketResult {NS}>{truncated}{more}{rows}</ListBucketResult>".encode()


def row(key, size=3, etag="&quot;e&quot;", time="2026-11-21T00:00:00.500Z"):
    etag = f"<ETag>{etag}</ETag>" if etag else ""
    return f"<Contents><Key>{key}</Key><LastModified>{time}</LastModified>{etag}<Size>{size}</Size></Contents>"


URL = "<EncodingType>url</EncodingType>"


@pytest.mark.parametrize("etag", ["&quot;e&quot;", ""])
@pytest.mark.parametrize(
    ("sent", "key", "more"),
    [
        ("plain/key.jpg", "plain/key.jpg", ""),
        ("a&amp;b&lt;c&gt;&#x1F600;&#65;", "a&b<c>\U0001f600A", ""),
        ("a+b%20c", "a+b%20c", ""),
        ("a+b%20c%2Bd%2Fe", "a b c+d/e", URL),
        ("%E6%97%A5", "日", URL),
        ("nul%00newline%0A", "nul\0newline\n", URL),
        ("line\nbreak", "line\nbreak", ""),
    ],
)
def test_keys_are_decoded_exactly(sent, key, more, etag):
    """Character references and encoding-type=url are undone, by column and (without an ETag) by row alike."""
    page = xml.parse_list(listing(row(sent, etag=etag) + row("z", etag=etag), more=more))
    assert page.objects[0] == ObjectInfo(key, 3, '"e"' if etag else None, 1795219200.5)
    assert [info.key for info in page.objects] == [key, "z"]


def test_each_object_has_its_own_time():
    """Times stay with their objects, whether others have the same one or not, and a time without a zone is UTC."""
    day = "2026-11-21T"
    times = {"a": f"{day}00:00:01Z", "b": f"{day}00:00:00", "c": f"{day}00:00:01Z", "d": f"{day}01:00:00+01:00"}
    page = xml.parse_list(listing("".join(row(key, time=time) for key, time in times.items())))
    assert [info.last_modified_s - 1795219200 for info in page.objects] == [1.0, 0.0, 1.0, 0.0]
    assert page.objects[0].last_modified_s is page.objects[2].last_modified_s


def test_prefixes_and_token():
    """Common prefixes are decoded like keys; the token is there exactly if the listing is truncated."""
    more = f"{URL}<NextContinuationToken>a&amp;b+c</NextContinuationToken><Prefix>x</Prefix>"
    rows = (
        row("k")
        + "<CommonPrefixes><Prefix>p+q/</Prefix></CommonPrefixes><CommonPrefixes><Prefix>r/</Prefix></CommonPrefixes>"
    )
    page = xml.parse_list(listing(rows, more=more, truncated="true"))
    assert (page.prefixes, page.next_token) == (["p q/", "r/"], "a&b+c")
    assert xml.parse_list(listing(rows, more=more)).next_token is None
    assert xml.parse_list(listing("")) == ([], [], None)


BOMB = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]>'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html><body>login</body></html>",
        listing(row("k"))[:-30],
        listing(row("k"), truncated="true"),
        listing(row("k", time="yesterday")),
        *(
            listing(row("k", size=size))
            for size in ("many", "", -1, "1.5", "1_0", "\u00b2", "\u0661", 1 << 62, "9" * 5000)
        ),
        listing("<Contents></Contents>"),
        listing(row("&#xD800;")),
        listing(row("&#x110000;")),
        b"\xff\xfe" + listing(row("k")),
        (BOMB + listing(row("&b;")).decode()).encode(),
        listing(row("k")).decode().encode("utf-16"),
    ],
)
def test_what_is_no_listing_is_refused(body):
    """HTML, cut, hostile and impossible bodies are a ProtocolError, never a shorter listing."""
    with pytest.raises(ProtocolError):
        xml.parse_list(body)


def test_errors_are_read_or_none():
    """An error document gives its fields; anything else gives None and never raises."""
    body = b"<Code>NoSuchKey</Code><Message>none &amp; such</Message><RequestId>R1</RequestId><Region>eu-1</Region>"
    body = b"<Error>" + body + b"</Error>"
    assert xml.parse_error(body) == ("NoSuchKey", "none & such", "eu-1")
    for other in (b"", b"<html>", b"\xff", b"<Error><Code>", BOMB.encode() + body, b"<Other><Error></Error></Other>"):
        assert xml.parse_error(other) is None


def test_uploads_and_copies():
    """Upload ids, commits and copies are read; an error inside a 200 comes out as the error."""
    body = f"<InitiateMultipartUploadResult {NS}><UploadId>u/1</UploadId></InitiateMultipartUploadResult>".encode()
    assert xml.parse_upload_id(body) == "u/1"
    body = "<ETag>&quot;e-2&quot;</ETag><ChecksumCRC32C>abc=</ChecksumCRC32C>"
    body = f"<CompleteMultipartUploadResult {NS}>{body}</CompleteMultipartUploadResult>"
    assert xml.parse_complete(body.encode()) == Part(0, '"e-2"', {"crc32c": "abc="})
    kept = body.replace("<ETag>", "<ChecksumType>FULL_OBJECT</ChecksumType><ETag>")
    assert xml.parse_complete(kept.encode()) == Part(0, '"e-2"', {"crc32c": "abc="})
    for composite in (kept.replace("FULL_OBJECT", "COMPOSITE"), body.replace("abc=", "abc=-2")):
        assert xml.parse_complete(composite.encode()) == Part(0, '"e-2"')
    assert xml.parse_complete(b"<Error><Code>InternalError</Code></Error>").code == "InternalError"
    assert xml.parse_complete(b"<CompleteMultipartUploadResult><ETag/></CompleteMultipartUploadResult>") == Part(0, "")
    assert xml.parse_copy(b"<CopyPartResult><ETag>e</ETag></CopyPartResult>", 7) == Part(7, '"e"')
    assert xml.parse_copy(b"<Error><Code>SlowDown</Code></Error>").code == "SlowDown"
    for parse in (xml.parse_upload_id, xml.parse_complete, xml.parse_copy, xml.parse_delete):
        with pytest.raises(ProtocolError):
            parse(b"<html></html>")


@pytest.mark.parametrize("root", ["InitiateMultipartUpload", "CreateMultipartUploadResult", "x"])
def test_the_root_of_an_upload_may_have_any_name(root):
    """The upload id and the ETag are found whatever the server calls the document that they are in."""
    assert xml.parse_upload_id(f"<{root} {NS}><UploadId> u/1 </UploadId></{root}>".encode()) == "u/1"
    assert xml.parse_complete(f"<{root} {NS}><ETag>e-1</ETag></{root}>".encode()) == Part(0, '"e-1"')


ETAGS = {
    '"e"': '"e"',
    "e": '"e"',
    ' "e" ': '"e"',
    " e ": '"e"',
    '""e""': '"e"',
    '"a b"': '"a b"',
    'a"b': '"a"b"',
    '"e': '"e"',
    "": None,
    '""': None,
    "  ": None,
    'W/"e"': None,
    'w/"e"': None,
    "W/e": None,
    '"e\r\nx: y"': None,
    '"\u00e9"': None,
    '"e\u200b"': None,
}


@pytest.mark.parametrize(("told", "etag"), ETAGS.items())
def test_an_etag_has_one_form(told, etag):
    """Whatever a store puts around an ETag, headers and listings give the same text or both give none."""
    assert strong_etag(told) == etag
    assert strong_etag(etag) == etag
    sent = told.replace('"', "&quot;").replace("\r", "&#13;").replace("\n", "&#10;")
    for others in ("", row("z", etag="&#34;f&#34;")):
        page = xml.parse_list(listing(row("a", etag=sent) + others))
        assert page.objects[0].etag == etag
    if "\n" not in told:
        headers = {b"etag": told.encode()}
        assert object_info("a", headers, 3, {}).etag == etag


def test_deletes_tell_what_failed():
    """A quiet answer names the keys that could not be deleted, and why."""
    body = (
        b"<DeleteResult><Error><Key>a&amp;b</Key><Code>AccessDenied</Code><Message>no</Message></Error></DeleteResult>"
    )
    assert xml.parse_delete(body) == {"a&b": "AccessDenied: no"}
    assert xml.parse_delete(b"<DeleteResult/>") == {}


def test_bodies_that_are_sent_are_escaped():
    """Keys with markup and line breaks survive the way out."""
    body = xml.delete_body(["a&b<c>\r\n"])
    assert b"<Key>a&amp;b&lt;c&gt;&#13;&#10;</Key>" in body
    body = xml.complete_body([Part(1, '"e"', {"crc32c": "x="})])
    assert b'<Part><ETag>"e"</ETag><ChecksumCRC32C>x=</ChecksumCRC32C><PartNumber>1</PartNumber></Part>' in body
