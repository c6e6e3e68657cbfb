from __future__ import annotations

import functools
import pickle
import socket
from typing import Any

import pytest

import penstock as ps
from penstock.errors import ConfigError
from penstock.pipeline import Map


def identity(sample: Any) -> Any:
    return sample


def with_rng(sample: Any, rng: Any) -> Any:
    return sample


def with_size(sample: Any, size: int = 3) -> Any:
    return sample


def with_both(sample: Any, rng: Any = None) -> Any:
    return sample


def with_three(sample: Any, rng: Any, size: int) -> Any:
    return sample


class Callable:
    def __call__(self, sample: Any, rng: Any) -> Any:
        return sample


def test_repr_reads_like_the_code() -> None:
    """A pipeline prints as it was written, defaults spelled out where they matter."""
    pipeline = (
        ps.shards("s3://b/t/", endpoint_url="http://h:1")
        .shuffle(window=10, seed=3)
        .decode(ps.Image("jpg"), ps.Integer("cls"))
        .map(identity)
        .batch(4, drop_last=True)
    )
    assert repr(pipeline) == (
        "shards('s3://b/t/', endpoint_url='http://h:1').shuffle(window=10, seed=3)"
        ".decode(Image('jpg'), Integer('cls')).map(identity).batch(4, drop_last=True)"
    )


def test_describing_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No socket is opened for a pipeline whose store does not exist."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    ps.shards("s3://nowhere/x/", endpoint_url="http://127.0.0.1:1").shuffle().decode(ps.Text("t")).batch(1)


def test_stages_make_new_pipelines() -> None:
    """A pipeline never changes; two that are written alike are equal, hash alike, and pickle."""
    base = ps.shards("s3://b/t/")
    one, two = base.shuffle(seed=1).batch(2), base.shuffle(seed=1).batch(2)
    assert base.stages == ()
    assert one == two
    assert hash(one) == hash(two)
    assert pickle.loads(pickle.dumps(one)) == one
    assert base.shuffle(seed=2).batch(2) != one


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.shuffle(window=0),
        lambda p: p.shuffle(0),
        lambda p: p.shuffle("16"),
        lambda p: p.shuffle(seed=-1),
        lambda p: p.shuffle(seed=2**64),
        lambda p: p.shuffle(seed=1.5),
        lambda p: p.shuffle().shuffle(),
        lambda p: p.decode(),
        lambda p: p.decode("jpg"),
        lambda p: p.decode(ps.Text("a"), ps.Bytes("a")),
        lambda p: p.decode(ps.Text("a")).decode(ps.Text("b")),
        lambda p: p.map(3),
        lambda p: p.map(with_three),
        lambda p: p.batch(0),
        lambda p: p.batch(True),
        lambda p: p.batch(2.0),
        lambda p: p.batch(2).batch(2),
        lambda p: p.batch(2).map(identity),
        lambda p: p.batch(2).shuffle(),
    ],
)
def test_bad_stages_are_refused_where_they_are_written(write: Any) -> None:
    """Each bad argument is a ConfigError at once, not when an epoch starts."""
    with pytest.raises(ConfigError):
        write(ps.shards("s3://b/t/"))


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (identity, False),
        (with_rng, True),
        (with_size, False),
        (with_both, True),
        (Callable(), True),
        (functools.partial(with_three, size=3), True),
        (functools.partial(with_size, size=3), False),
        (dict, False),
        (lambda sample: sample, False),
    ],
)
def test_rng_is_passed_only_to_functions_that_take_it(fn: Any, expected: bool) -> None:
    """A second parameter that is required, or is called rng, gets the generator."""
    assert Map(fn).takes_rng is expected
