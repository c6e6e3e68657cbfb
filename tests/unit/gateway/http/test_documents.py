"""Parameters of listings, and the XML of answers."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.http.documents import ListQuery, error_document, http_date, object_list, sealed_token
from penstock.gateway.objects import S3Error
from penstock.gateway.s3_text import timestamp
from penstock.store.xml import parse_list
from penstock.types import ListPage, ObjectInfo, Page


@pytest.mark.parametrize(
    ("query", "operation"),
    [
        ({"list-type": "2"}, ListPage()),
        ({"list-type": "2", "max-keys": "0"}, ListPage(keys_max=0)),
        ({"list-type": "2", "max-keys": "5000"}, ListPage(keys_max=1000)),
        ({"list-type": "2", "start-after": "a", "prefix": "p", "delimiter": "/"}, ListPage("p", "/", None, "a")),
        ({"list-type": "2", "continuation-token": sealed_token("k\0é")}, ListPage(token="k\0é")),
        ({"marker": "a/", "delimiter": "/"}, ListPage("", "/", None, "a/\U0010ffff")),
        ({"marker": "a/b", "delimiter": "/"}, ListPage("", "/", None, "a/b")),
        ({"marker": "a/b/", "delimiter": "/", "prefix": "a/"}, ListPage("a/", "/", None, "a/b/\U0010ffff")),
        ({"marker": "a/b/", "delimiter": "/"}, ListPage("", "/", None, "a/b/")),
        ({"marker": "a/"}, ListPage(start_after="a/")),
        ({}, ListPage()),
    ],
)
def test_queries_become_operations(query: dict[str, str], operation: ListPage) -> None:
    """Both versions of the listing become one operation; a marker that is a common prefix skips what it stands for."""
    assert ListQuery.parse(query).operation() == operation


@pytest.mark.parametrize(
    "query",
    [
        {"max-keys": "-1"},
        {"max-keys": "x"},
        {"max-keys": "99999999999"},
        {"list-type": "3"},
        {"encoding-type": "xml"},
        {"list-type": "2", "continuation-token": ""},
        {"list-type": "2", "continuation-token": "not base64!"},
        {"list-type": "2", "continuation-token": "/" * 9000},
        {"prefix": "x" * 1025},
        {"marker": "é" * 513},
    ],
)
def test_bad_queries_are_refused(query: dict[str, str]) -> None:
    """Each parameter has a form and a bound."""
    with pytest.raises(S3Error) as caught:
        ListQuery.parse(query)
    assert (caught.value.code, caught.value.status) == ("InvalidArgument", 400)


keys = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)


@given(st.lists(keys, max_size=5), st.lists(keys, max_size=3), keys, st.booleans())
def test_listings_survive_xml(names: list[str], prefixes: list[str], token: str, is_encoded: bool) -> None:
    """Our own client finds the keys of a listing again; without url encoding only those that XML can hold."""
    page = Page([ObjectInfo(name, 7, '"e"', 1.7e9) for name in names], prefixes, token)
    query = ListQuery.parse({"list-type": "2", "encoding-type": "url" if is_encoded else "", "prefix": token})
    found = parse_list(object_list("bucket", query, page))
    if is_encoded:
        assert [info.key for info in found.objects] == names
        assert found.prefixes == prefixes
        assert found.next_token == sealed_token(token)
    else:
        assert len(found.objects) == len(names)


def test_the_first_version_tells_the_next_marker() -> None:
    """With a delimiter, the last entry of a truncated page is its NextMarker: an object or a prefix."""
    query = ListQuery.parse({"delimiter": "/", "marker": "0"})
    for objects, prefixes, last in ((["a"], ["b/"], "b/"), (["c"], ["b/"], "c"), (["c"], [], "c"), ([], ["b/"], "b/")):
        page = Page([ObjectInfo(key, 1, '"e"', 0.0) for key in objects], prefixes, "token")
        assert f"<NextMarker>{last}</NextMarker>" in object_list("b", query, page).decode()


def test_errors_are_well_formed() -> None:
    """No text breaks out of an error document."""
    odd = "<a>&\"'\x01\ud800"
    root = ET.fromstring(error_document("Code", odd, resource=odd, request_id="1", host_id="2", details={"Key": odd}))
    assert [child.tag for child in root] == ["Code", "Message", "Key", "Resource", "RequestId", "HostId"]
    assert root.findtext("Message") == "<a>&\"'\ufffd\ufffd"


def test_times() -> None:
    """Times have S3's form in XML, and HTTP's form in headers."""
    assert timestamp(1_700_000_000.9) == "2023-11-14T22:13:20.000Z"
    assert timestamp(None) == "1970-01-01T00:00:00.000Z"
    assert http_date(1_700_000_000.9) == "Tue, 14 Nov 2023 22:13:20 GMT"
    assert http_date(-5) == "Thu, 01 Jan 1970 00:00:00 GMT"
