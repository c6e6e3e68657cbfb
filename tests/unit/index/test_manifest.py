"""Manifests: our own, written and read, and those of other tools."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

from penstock.compose import check_reach
from penstock.errors import ConfigError, DataError
from penstock.index import ManifestEntry, is_manifest_name, iter_manifest, read_manifest, write_manifest
from penstock.index import manifest as manifest_module
from penstock.types import ObjectInfo
from penstock.version import install_hint

URL = "s3://b/lists/train.manifest"
INFOS = [ObjectInfo("a/é.tar", 5, '"e1"'), ObjectInfo("b.tar", 0, None)]
ENTRIES = [ManifestEntry("s3://b/train/a/é.tar", 5, '"e1"'), ManifestEntry("s3://b/train/b.tar", 0, None)]


def written(format_name: str) -> bytes:
    out = io.BytesIO()
    assert write_manifest(INFOS, out, base_url="s3://b/train/", format=format_name) == 2
    return out.getvalue()


@pytest.mark.parametrize("format_name", ["jsonl", "parquet"])
def test_what_was_written_is_read(format_name: str) -> None:
    """Keys become URLs below the base that the manifest names; sizes and ETags come back."""
    pytest.importorskip("pyarrow")
    assert read_manifest(written(format_name), url=URL) == ENTRIES


def test_parquet_in_several_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written a group at a time, so that memory is bounded, and come back in order."""
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(manifest_module, "ROWS_PER_GROUP", 3)
    out = io.BytesIO()
    write_manifest((ObjectInfo(f"{n}", n) for n in range(10)), out, base_url="s3://b/", format="parquet")
    assert [entry.size_bytes for entry in read_manifest(out.getvalue(), url=URL)] == list(range(10))


def test_parquet_needs_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pyarrow, the error names the package to install."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=re.escape(install_hint("parquet"))):
        write_manifest([], io.BytesIO(), base_url="s3://b/", format="parquet")
    with pytest.raises(ConfigError, match="pyarrow"):
        read_manifest(b"PAR1....", url=URL)


def test_another_format_is_refused() -> None:
    """Only JSON lines and Parquet are written."""
    with pytest.raises(ConfigError, match="'jsonl' or 'parquet'"):
        write_manifest([], io.BytesIO(), base_url="s3://b/", format="csv")


def test_json_lines_of_others() -> None:
    """Other column names, absolute URLs, and keys relative to the manifest's folder are read."""
    lines = [
        {"url": "s3://other/x.tar", "size": 3},
        {"path": "sub/y.tar", "filesize": 4, "ETag": "e"},
        {"key": "z.tar"},
    ]
    assert read_manifest("\n\n".join(map(json.dumps, lines)).encode(), url=URL) == [
        ManifestEntry("s3://other/x.tar", 3),
        ManifestEntry("s3://b/lists/sub/y.tar", 4, '"e"'),
        ManifestEntry("s3://b/lists/z.tar"),
    ]


def test_sagemaker() -> None:
    """SageMaker's prefix and names are concatenated."""
    text = b' [{"prefix": "s3://bucket/some/pre"}, "fix/1.tar", "-2.tar"]'
    assert [entry.url for entry in read_manifest(text, url=URL)] == [
        "s3://bucket/some/prefix/1.tar",
        "s3://bucket/some/pre-2.tar",
    ]
    for wrong in (b"[" * 100_000, b"[]", b'["a"]', b'[{"prefix": ""}]', b'[{"prefix": "s3://b/"}, 3]', b"[1"):
        with pytest.raises(DataError, match="manifest"):
            read_manifest(wrong, url=URL)


def test_sagemaker_augmented() -> None:
    """References are objects and keep the line's other attributes; selected references come in their order."""
    line = b'{"image-ref": "s3://m/1.jpg", "mask-ref": "s3://m/1.png", "is-a-cat": 1}\n'
    cat = {"is-a-cat": 1}
    image, mask = (ManifestEntry(url, attributes=cat) for url in ("s3://m/1.jpg", "s3://m/1.png"))
    assert read_manifest(line, url=URL) == [image, mask]
    assert read_manifest(line, url=URL, refs=["mask-ref"]) == [mask]
    with pytest.raises(DataError, match=r"line 1 .* no URL in 'Image-ref'"):
        read_manifest(line, url=URL, refs=["Image-ref"])


def test_wrong_lines_are_named() -> None:
    """The error names the line and its fault."""
    good = b'{"key": "a"}\n'
    for wrong, what in (
        (b"{", "line 2 of the manifest is not JSON"),
        (b"3", "line 2 of the manifest is a int"),
        (b'{"size": 3}', "line 2 of the manifest names no object"),
        (b'{"key": "a", "size": -1}', "line 2 of the manifest has the size -1"),
        (b'{"key": "a", "size": 1.5}', "line 2 of the manifest has the size 1.5"),
        (b'{"key": "a", "size": 4611686018427387904}', "line 2 of the manifest has the size 46116"),
        (b'{"key": "a", "size": ' + b"9" * 5000 + b"}", "line 2 of the manifest"),
        (b'{"penstock_manifest": 9}', "version is 9"),
    ):
        with pytest.raises(DataError, match=what):
            read_manifest(good + wrong, url=URL)
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match="not a Parquet file"):
        read_manifest(b"PAR1 and nothing else", url=URL)


def test_lines_are_read_as_they_are_used() -> None:
    """The first objects of a manifest are there before its later lines are looked at."""
    lines = [json.dumps({"key": f"{index}", "size_bytes": index, "etag": '"e"'}) for index in range(2)]
    found = iter_manifest("\n".join([*lines, "{"]).encode(), url=URL)
    assert [next(found), next(found)] == [ManifestEntry(f"s3://b/lists/{at}", at, '"e"') for at in range(2)]
    with pytest.raises(DataError, match="line 3"):
        next(found)


def test_lines_of_other_encodings() -> None:
    """A byte order mark, Windows line ends and blank lines do not matter; rows of our fields are checked like all others."""
    line = json.dumps({"key": "a", "size_bytes": 1, "etag": None}).encode()
    text = b"\xef\xbb\xbf" + line + b"\r\n  \r\n" + line + b"\r\n"
    assert read_manifest(text, url=URL) == [ManifestEntry("s3://b/lists/a", 1, None)] * 2
    for row, message in (
        ({"key": "a", "size_bytes": -1, "etag": "e"}, "line 1 of the manifest has the size -1"),
        ({"key": "a", "size_bytes": 1 << 63, "etag": "e"}, "line 1 of the manifest has the size 9223"),
        ({"key": "a", "size_bytes": 1, "etag": 7}, "line 1 of the manifest has the ETag 7"),
        ({"key": "", "size_bytes": 1, "etag": "e"}, "line 1 of the manifest names no object"),
    ):
        with pytest.raises(DataError, match=message):
            read_manifest(json.dumps(row).encode(), url=URL)


def test_names_of_manifests() -> None:
    """A manifest's name distinguishes it from a shard of JSON lines or Parquet."""
    assert all(
        map(is_manifest_name, ("train.manifest.jsonl", "s3://b/manifest.parquet", "x.manifest", "Manifest.json"))
    )
    assert not any(map(is_manifest_name, ("train.jsonl", "manifest/train.jsonl", "a.parquet", "manifest.tar")))


HOSTILE = [
    "/etc/passwd",
    "file:///etc/passwd",
    "http://127.0.0.1:80/latest/meta-data",
    "memory://other/x",
    "simplecache::file:///etc/passwd",
    "S3://b/x",
]


@pytest.mark.parametrize("url", HOSTILE)
@pytest.mark.parametrize("kind", ["sagemaker", "augmented", "key", "header", "parquet"])
def test_a_manifest_names_nothing_outside_its_own_store(kind: str, url: str) -> None:
    """A manifest in a store that names files of this machine, another scheme or another host is refused, whatever its kind."""
    folder, _, name = url.rpartition("/")
    out = io.BytesIO()
    if kind == "parquet":
        pytest.importorskip("pyarrow")
        write_manifest([ObjectInfo(name, 1)], out, base_url=f"{folder}/", format="parquet")
    text = {
        "sagemaker": json.dumps([{"prefix": f"{folder}/"}, name]),
        "augmented": json.dumps({"image-ref": url, "label": 1}),
        "key": json.dumps({"key": url, "size_bytes": 1, "etag": "e"}),
        "header": json.dumps({"penstock_manifest": 1, "base_url": f"{folder}/"}) + "\n" + json.dumps({"key": name}),
        "parquet": "",
    }[kind]
    with pytest.raises(DataError, match=r"a file in a store may name only what begins with s3://"):
        read_manifest(text.encode() or out.getvalue(), url=URL)
    assert [entry.url for entry in read_manifest(text.encode() or out.getvalue(), url="/here/m.jsonl")] == [url]


@pytest.mark.parametrize(
    ("url", "reached", "refused"),
    [
        ("https://u:p@h:81/a/m", ["https://h:81/b", "https://u:p@h:81/c"], ["https://h/b", "http://h:81/b", "https://h:81.x/"]),
        ("https://h/m?sig=/x", ["https://h/y?sig=z"], ["https://h?y", "https://hh/", "https://h@x/"]),
        ("gs://b/m", ["gs://c/x"], ["gs://c/x::file:///etc/passwd"]),
        ("s3://b/m", ["s3://c/x::y"], ["s3:/c", "x"]),
        ("memory://b/m", ["memory://c/x"], ["file:///memory://"]),
    ],
)  # fmt: skip
def test_what_a_manifest_may_name(url: str, reached: list[str], refused: list[str]) -> None:
    """Objects of the same scheme can be named, for HTTP only on the same host, and by no chain of fsspec's."""
    for each in reached:
        check_reach(each, named_by=url)
    for each in refused:
        with pytest.raises(DataError, match="may name only"):
            check_reach(each, named_by=url)


@pytest.mark.parametrize("row", ["[" * 100_000, '{"a":' * 100_000, '{"key": "a", "size": ' + "9" * 5000 + "}"])
def test_json_that_python_cannot_hold(row: str) -> None:
    """JSON that is nested too deeply, or has a number of too many digits, is an error that names the line."""
    with pytest.raises(DataError, match="line 2 of the manifest is not JSON"):
        read_manifest(b'{"key": "a"}\n' + row.encode(), url=URL)
