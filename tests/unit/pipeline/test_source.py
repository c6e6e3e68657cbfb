from __future__ import annotations

import pytest

import penstock as ps
from penstock.errors import ConfigError
from penstock.pipeline.source import braces_unfolded, has_glob


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a.tar", ["a.tar"]),
        ("a-{0..2}.tar", ["a-0.tar", "a-1.tar", "a-2.tar"]),
        ("a-{008..010}.tar", ["a-008.tar", "a-009.tar", "a-010.tar"]),
        ("a-{8..10}", ["a-8", "a-9", "a-10"]),
        ("{x,y}/{0..1}", ["x/0", "x/1", "y/0", "y/1"]),
        ("{a,}b", ["ab", "b"]),
    ],
)
def test_braces_unfold_as_in_a_shell(pattern: str, expected: list[str]) -> None:
    """Ranges keep their zeros, lists keep their order, several multiply with the last running fastest."""
    assert braces_unfolded(pattern) == expected


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


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://b/*.tar", True),
        ("s3://b/a?.tar", True),
        ("s3://b/[ab].tar", True),
        ("s3://b/a.tar", False),
        ("https://h/a.tar?x=1", False),
    ],
)
def test_globs_are_told_from_urls(url: str, expected: bool) -> None:
    """An HTTP query is no wildcard."""
    assert has_glob(url) is expected


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
