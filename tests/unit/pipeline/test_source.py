from __future__ import annotations

import pytest

import penstock as ps
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    "pattern", ["a{0..1", "a}b", "{{0..1}}", "{x}", "{}", "{5..3}", "{0..9999999}", "{0..9999}{0..9999}"]
)
def test_bad_braces_are_refused(pattern: str) -> None:
    """A pattern that does not unfold, or unfolds into too much, is refused when it is written."""
    with pytest.raises(ConfigError):
        ps.shards(f"s3://bucket/{pattern}.tar")


def test_a_list_is_taken_literally() -> None:
    """Braces in a list of URLs are names, not patterns."""
    assert ps.shards(["s3://b/{x}.tar"]).source.urls == ("s3://b/{x}.tar",)


@pytest.mark.parametrize("urls", [[], [""], "", [3], 3])
def test_no_url_is_refused(urls: object) -> None:
    """Nothing to read is an error when it is written."""
    with pytest.raises((ConfigError, TypeError)):
        ps.shards(urls)  # type: ignore[arg-type]


def test_repr_hides_secrets() -> None:
    """No credential, customer key, password or presigned query shows in a repr."""
    shown = repr(ps.shards("https://user:secret@host/a.tar?X-Amz-Signature=secret", sse_customer_key=b"secret" * 5))
    assert "secret" not in shown
    assert "host/a.tar" in shown


def test_repr_of_many_urls_is_short() -> None:
    """A list of a thousand shards prints as a few and a count."""
    assert repr(ps.shards([f"{i}.tar" for i in range(1000)])) == "shards(['0.tar', '1.tar', ... 998 more])"
