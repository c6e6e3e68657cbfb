"""Which path a key has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.buckets.directory.files import (
    HIDDEN,
    check_bucket_name,
    check_key,
    escaped_path,
    is_folder_name,
    natural_path,
    unescaped,
)
from penstock.gateway.objects import S3Error
from penstock.store.tree import TEMPORARY_PREFIX, TEMPORARY_SUFFIX

KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=300) | st.lists(
    st.sampled_from(["a", "b", "/", ".", "..", "+", "!", "%", "%2F", ".penstock-x.tmp", "é", "\n"]), min_size=1
).map("".join)


@given(KEYS)
def test_escaped_paths_are_distinct_and_reversible(key: str) -> None:
    """Every key has one escaped path, from which it is found again; its names are short and lead nowhere else."""
    path = escaped_path(key)
    assert unescaped(path) == key
    for name in path.split("/"):
        assert 0 < len(name) <= 255
        assert name not in (".", "..")
        assert name.isascii()


@given(st.lists(KEYS, min_size=2, max_size=2, unique=True))
def test_no_escaped_path_is_in_the_way_of_another(keys: list[str]) -> None:
    """No escaped path is the folder of another one, so that all keys fit beside each other."""
    one, other = map(escaped_path, keys)
    assert one != other
    assert not other.startswith(f"{one}/")
    assert not one.startswith(f"{other}/")


@given(KEYS)
def test_natural_paths_stay_inside(key: str) -> None:
    """A key is a path only if every segment names a file that is neither hidden nor another folder."""
    path = natural_path(key)
    if path is not None:
        assert path == key
        for segment in path.split("/"):
            assert segment not in ("", ".", "..")
            assert len(segment.encode()) <= 255
            assert not (segment.startswith(TEMPORARY_PREFIX) and segment.endswith(TEMPORARY_SUFFIX))


@pytest.mark.parametrize("path", ["", "a", "a/b!", "a+", "%zz!", "a%2fb!", "..!/x!", "%ff!", "a+/b!"])
def test_foreign_names_are_no_keys(path: str) -> None:
    """What nobody escaped is no key, so that each object has one name."""
    assert unescaped(path) is None


@pytest.mark.parametrize(
    ("key", "code"),
    [("k" * 1025, "KeyTooLongError"), ("é" * 513, "KeyTooLongError"), ("", "InvalidArgument"), ("a\0b", "InvalidArgument"),
     ("\udcff", "InvalidURI")],
    ids=["long", "long in bytes", "empty", "nul", "surrogate"],
)  # fmt: skip
def test_keys_that_are_refused(key: str, code: str) -> None:
    """S3's limits on keys hold, and NUL is refused."""
    with pytest.raises(S3Error) as caught:
        check_key(key)
    assert caught.value.code == code


@pytest.mark.parametrize("name", ["abc", "a-b.c", "1a2", "a" * 63, "192.168.1"])
def test_names_of_new_buckets(name: str) -> None:
    """What S3 accepts is accepted."""
    check_bucket_name(name)


@pytest.mark.parametrize(
    "name",
    ["ab", "a" * 64, "Abc", "a_b", "-ab", "ab-", "a..b", "a.-b", "a-.b", "10.0.0.1", "xn--abc", "abc-s3alias", "a/b", "", "..",
     "abc\n", HIDDEN],
    ids=ascii,
)  # fmt: skip
def test_names_that_no_new_bucket_gets(name: str) -> None:
    """What S3 refuses is refused."""
    with pytest.raises(S3Error) as caught:
        check_bucket_name(name)
    assert caught.value.code == "InvalidBucketName"


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "/a", "a\0", "a\n", HIDDEN], ids=ascii)
def test_folders_that_are_no_buckets(name: str) -> None:
    """No name leads out of the directory, and hidden folders are not served."""
    assert not is_folder_name(name)
