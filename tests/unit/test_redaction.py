"""What is shown of URLs, and of text that contains URLs."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.redaction import public_text, public_url, showable, stored_key, url_parts

SECRET = "Pl4nted"
SCHEMES = st.sampled_from(["http", "https", "s3", "gs", "az", "abfs", "ftp", "sftp", "socks5h", "simplecache::https"])
NAMES = st.sampled_from(
    ["X-Amz-Signature", "x-amz-security-token", "X%2DAmz%2DSignature", "sig", "X-Goog-Signature", "token", "api_key",
     "access_token", "password", "AWSAccessKeyId", "X-Goog-Credential", "GoogleAccessId"]
)  # fmt: skip
AROUND = st.sampled_from(["{}", "{!r}", "the URL {}, which", "[{!r}, {!r}]", "({})", "<{}>", "x={}", '{{"url":"{}"}}'])
PATHS = st.text(st.sampled_from("ab/.@é%20-_~'()"), max_size=12)


@st.composite
def urls(draw: st.DrawFn) -> str:
    """Draw URLs that contain ``SECRET`` as a password, as a parameter, or as both."""
    login = draw(st.sampled_from(["", f"user:{SECRET}@", f"a:{SECRET}/b@", f":{SECRET}@"]))
    query = f"?x=1&{draw(NAMES)}={SECRET}" if not login or draw(st.booleans()) else ""
    return f"{draw(SCHEMES)}://{login}host/{draw(PATHS)}{query}{draw(st.sampled_from(['', '&y=2', '#part']))}"


@settings(deadline=None)
@given(url=urls(), around=AROUND)
def test_no_secret_is_shown(url: str, around: str) -> None:
    """A URL is shown without its secret, alone or inside a text, and redacting twice changes nothing."""
    assert SECRET not in public_url(url)
    assert public_url(public_url(url)) == public_url(url)
    text = public_text(around.format(url, url))
    assert SECRET not in text
    assert public_text(text) == text


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a@b/c?versionId=1.tar", "file:///data/user@host:1/x.tar", "/data/a?b.tar", "abfs://box@acct/x",
        "https://host:80/a/{000..009}.tar", "http://[::1]:9000/a@b", "s3://arn:aws:s3:us-east-1:1:accesspoint/p/a@b",
        "memory://name/x", "a=b/c.tar", "C:/data", "https://host:{8000..8009}/a@b",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(url: str) -> None:
    """URLs and keys without a secret are unchanged, including ports, ``@`` in paths, and containers."""
    assert public_url(url) == url
    assert public_text(f"{url!r} is missing") == f"{url!r} is missing"


def test_a_query_over_http_is_never_shown() -> None:
    """The whole query of an HTTP URL is removed, since a signature may have any name or none."""
    assert public_url(f"https://host/a.tar?{SECRET}") == "https://host/a.tar"
    assert public_text(f"GET https://host/a.tar?{SECRET}: gone") == "GET https://host/a.tar: gone"


def test_logins_without_a_scheme_are_hidden_in_text() -> None:
    """``user:password@host`` in another library's message is hidden, even without a scheme."""
    assert public_text(f"no proxy user:{SECRET}/x@host:80 here") == "no proxy ...@host:80 here"


def test_stored_keys_tell_queries_apart_and_hide_them() -> None:
    """A stored key has a digest of its query, which distinguishes queries without revealing them."""
    one, other = stored_key(f"a.tar?sig={SECRET}"), stored_key("a.tar?id=5")
    assert one != other
    assert one.startswith("a.tar?")
    assert other.startswith("a.tar?")
    assert SECRET not in one
    assert stored_key("a.tar") == "a.tar"


def test_urls_that_cannot_be_split_give_none() -> None:
    """Python's own error quotes the host with its password, and does not escape."""
    assert url_parts(f"http://user:{SECRET}℀@host/") is None
    assert url_parts(f"http://host:{SECRET}/") is None
    assert url_parts("http://[::1") is None


def test_only_harmless_errors_stand_behind_ours() -> None:
    """Another library's error is kept as a cause only if neither it nor its causes show a secret."""
    harmful = OSError("no")
    harmful.__cause__ = ValueError(f"https://h/?sig={SECRET}")
    assert not showable(harmful)
    assert showable(OSError("no such file /data/x"))


def test_long_texts_cost_linear_time() -> None:
    """Text without URLs takes milliseconds, even if it is full of words and signs that begin a URL."""
    words = ["a" * 200_000 + "=://", "=" * 200_000, "a:b" * 60_000 + "@", "http" * 50_000, "token" * 40_000]
    for text in (*words, "token" * 40_000 + "=", "@" + "=x:y" * 50_000, "token-" * 9 + "=" * 90_000):
        began_s = time.process_time()
        public_text(text)
        assert time.process_time() - began_s < 2


@pytest.mark.parametrize("kind", [getattr(ps, name) for name in ps.__all__ if name.endswith("Error")])
def test_every_error_hides_what_it_is_given(kind: type[ps.PenstockError]) -> None:
    """An error of penstock shows no secret, whichever field it is in and whenever it was set."""
    url = f"https://user:{SECRET}@host/a.tar?sig={SECRET}"
    fields = {name: url for name in ("url", "shard", "sample_key") if name in kind.FIELDS}
    error = kind(f"cannot read {url!r}", hint=f"see {url}", **fields)
    for name in fields:
        setattr(error, name, url)
    error.hint = f"see {url}"
    assert SECRET not in str(error) + repr(error) + repr(error.args) + repr(vars(error))
