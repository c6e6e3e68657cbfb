"""Transforms that their authors try in their own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, ObjectMissingError
from penstock.gateway import Response, SourceReader, TransformRequest, transform, try_transform


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A file of six bytes."""
    path = tmp_path / "words.txt"
    path.write_bytes(b"a b\nc\n")
    return path


def upper(reader: SourceReader, request: TransformRequest, *, times: int = 1) -> bytes:
    return reader.read().upper() * times


def test_a_function_and_its_arguments(words: Path) -> None:
    """A function runs here, with arguments as a configuration has them."""
    with try_transform(upper, words, arguments={"times": "2"}) as trial:
        assert trial.size_bytes == 12
        assert trial.read() == b"A B\nC\n" * 2
        assert trial.headers == {"Content-Type": "application/octet-stream"}


def test_a_function_is_not_copied(words: Path) -> None:
    """The function itself is called, so that a debugger stops in it and it may count its calls."""
    calls: list[str] = []

    def count(reader: SourceReader, request: TransformRequest) -> bytes:
        calls.append(request.key)
        return b""

    assert try_transform(count, words).read() == b""
    assert calls == ["words.txt"]


def test_a_spelling_with_a_path(words: Path, tmp_path: Path) -> None:
    """A path is relative to the folder, and several transforms follow each other."""
    (tmp_path / "mine.py").write_text(
        "def lines(reader, request, *, end: str):\n"
        "    while line := reader.readline():\n"
        "        yield line.strip() + end.encode()\n"
    )
    trial = try_transform("./mine.py:lines(end=';') | ./mine.py:lines(end='.')", words, folder=tmp_path)
    assert trial.read() == b"a b;c;."


def test_what_a_request_says(words: Path) -> None:
    """Epoch, seed, declared parameters and headers arrive; equal ones give equal random numbers."""

    @transform(uses_epoch=True, query=("a",), headers=("Accept",))
    def say(reader: SourceReader, request: TransformRequest) -> bytes:
        return repr(
            (request.epoch, request.seed, dict(request.query), dict(request.headers), request.rng_seed)
        ).encode()

    def said(**options: Any) -> Any:
        return try_transform(say, words, query={"a": "1", "b": "2"}, headers={"ACCEPT": "x"}, **options).read()

    assert said(epoch=3, seed=4).startswith(b"(3, 4, {'a': '1'}, {'accept': 'x'}, ")
    assert said(epoch=3) == said(epoch=3)
    assert said(epoch=3) != said(epoch=4)
    with pytest.raises(ConfigError, match="epoch='-1'"):
        said(epoch=-1)


@pytest.mark.parametrize("name", ["epoch", "seed", "rng", "rng_seed"])
def test_an_epoch_that_is_not_declared_is_an_error(words: Path, name: str) -> None:
    """A transform that would give every epoch the same numbers is told so."""

    def say(reader: SourceReader, request: TransformRequest) -> bytes:
        return repr(getattr(request, name)).encode()

    with pytest.raises(ConfigError, match=f"request.{name} is not available.*uses_epoch=True"):
        try_transform(say, words, epoch=3).read()


@pytest.mark.parametrize("by", ["Response", "size()"])
def test_a_wrong_size_is_found(words: Path, by: str) -> None:
    """A result whose length is not the one that was promised is an error at its end."""

    @transform(size=lambda info, arguments: 7 if by == "size()" else None)
    def wrong(reader: SourceReader, request: TransformRequest) -> Response:
        return Response(iter([b"12345"]), size_bytes=7 if by == "Response" else None)

    trial = try_transform(wrong, words)
    assert trial.size_bytes == 7
    with pytest.raises(ValueError, match="made 5 bytes") as caught:
        trial.read()
    assert by in str(caught.value)


def test_closing_early_runs_the_clean_up(words: Path) -> None:
    """Closing a trial closes the author's generator."""
    ended = []

    def generate(reader: SourceReader, request: TransformRequest) -> Any:
        try:
            yield b"1"
            yield b"2"
        finally:
            ended.append(True)

    with try_transform(generate, words) as trial:
        assert next(iter(trial)) == b"1"
    assert ended == [True]


def test_missing_things(words: Path, tmp_path: Path) -> None:
    """A missing source, a missing module and an unknown name are clear errors."""
    with pytest.raises(ObjectMissingError):
        try_transform(upper, tmp_path / "missing")
    with pytest.raises(ConfigError, match="there is no module nowhere_at_all"):
        try_transform("nowhere_at_all:f", words)
    with pytest.raises(ConfigError, match=r"no built-in transform gzib.*did you mean gzip\?"):
        try_transform("gzib(level=1)", words)
    with pytest.raises(ConfigError, match=r"no built-in transform nosuchname.*module:function"):
        try_transform("nosuchname", words)
    with pytest.raises(ConfigError, match="neither built in nor module:function"):
        try_transform("some.module:", words)
    with pytest.raises(ConfigError, match="must take a reader and a request"):
        try_transform(lambda reader: b"", words)
