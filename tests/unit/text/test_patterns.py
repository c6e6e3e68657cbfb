"""Patterns of names, as users write them."""

from __future__ import annotations

import pytest

from penstock.text.patterns import expand_braces, glob_matcher, has_glob, is_pattern, matcher, split_glob


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
    """Ranges keep leading zeros, lists keep their order, and several braces combine with the last one varying fastest."""
    assert expand_braces(pattern) == expected


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
    """The query of an HTTP URL is not a wildcard."""
    assert has_glob(url) is expected


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("*.tar", "a.tar", True),
        ("*.tar", "x/a.tar", False),
        ("**/*.tar", "x/y/a.tar", True),
        ("**/*.tar", "a.tar", True),
        ("a?.tar", "ab.tar", True),
        ("a?.tar", "a/.tar", False),
        ("[!a]*.tar", "b.tar", True),
        ("[!a]*.tar", "a.tar", False),
        ("a.tar", "aXtar", False),
        ("a+(b).tar", "a+(b).tar", True),
        ("[a-c]1", "b1", True),
        ("x[", "x[", True),
    ],
)
def test_glob_semantics(pattern: str, name: str, expected: bool) -> None:
    """As in a shell, ``*`` and ``?`` stop at a slash, ``**`` does not, and everything else is literal."""
    assert (glob_matcher(pattern)(name) is not None) is expected


def test_glob_folder() -> None:
    """The folder above the first wildcard is split off, to be listed."""
    assert split_glob("s3://b/a/x-*/y.tar") == ("s3://b/a/", "x-*/y.tar")
    assert split_glob("*.tar") == ("./", "*.tar")
    assert split_glob("s3://b/a/x-{0..3}/*.tar") == ("s3://b/a/", "x-{0..3}/*.tar")


def test_braces_and_wildcards_together() -> None:
    """A key matches if it equals a name, or matches a glob, that the braces expand to."""
    taken = matcher("*-0000{0..3}.tar")
    assert [taken(f"x-0000{number}.tar") for number in (0, 3, 4)] == [True, True, False]
    assert matcher("{a,b*}.tar")("a.tar")
    assert matcher("{a,b*}.tar")("bc.tar")
    assert not matcher("{a,b*}.tar")("ac.tar")


def test_urls_of_servers_are_no_patterns() -> None:
    """A URL that cannot be listed has no wildcards."""
    assert is_pattern("s3://b/{a,b}.tar")
    assert not is_pattern("https://host/{a,b}*.tar")
