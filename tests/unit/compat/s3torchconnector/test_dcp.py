"""Distributed checkpoints by the connector's names: arguments, prefix strategies, pickling."""

from __future__ import annotations

import pickle
from pathlib import PurePosixPath
from typing import Any

import pytest

pytest.importorskip("torch")

from penstock.compat.s3torchconnector import S3ClientConfig, S3ReaderConstructor
from penstock.compat.s3torchconnector.dcp import (
    BinaryPrefixStrategy,
    DefaultPrefixStrategy,
    HexPrefixStrategy,
    NumericPrefixStrategy,
    RoundRobinPrefixStrategy,
    S3PrefixStrategyBase,
    S3StorageReader,
    S3StorageWriter,
    _without_rank,
)

pytestmark = pytest.mark.torch

URI = "s3://bucket/run/step"


def test_prefixes_have_the_connectors_form() -> None:
    """Digits are reversed, so that neighbours differ early; the epoch's directory and the rank follow."""
    assert DefaultPrefixStrategy()(3) == "__3_"
    assert BinaryPrefixStrategy(epoch_num=5, prefix_count=4)(3) == "1100000000/epoch_5/__3_"
    assert HexPrefixStrategy(min_prefix_length=2, prefix_count=300)(299) == "b21/__299_"
    assert [RoundRobinPrefixStrategy(["x", "y"], epoch_num=0)(rank) for rank in (0, 1, 2)] == [
        "x/epoch_0/__0_", "y/epoch_0/__1_", "x/epoch_0/__2_"
    ]  # fmt: skip


def test_a_strategy_of_the_users_is_called_with_the_rank() -> None:
    """The part that names the rank is not repeated; text that has none is taken as it is."""

    class Own(S3PrefixStrategyBase):
        def generate_prefix(self, rank: int) -> str:
            return f"own/{rank % 2}/__{rank}_" if rank else "plain-"

    assert [_without_rank(Own(), rank, 8) for rank in (0, 3)] == ["plain-", "own/1/"]
    assert _without_rank(DefaultPrefixStrategy(), 3, 8) == ""


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: NumericPrefixStrategy(10), "base=10"),
        (lambda: HexPrefixStrategy(epoch_num=True), "epoch_num"),
        (lambda: HexPrefixStrategy(min_prefix_length=0), "length_min"),
        (lambda: BinaryPrefixStrategy(prefix_count=0), "prefixes_count"),
        (lambda: RoundRobinPrefixStrategy([]), "prefixes"),
        (lambda: RoundRobinPrefixStrategy(["a//b"]), "segment"),
        (lambda: S3StorageWriter("us-east-1", "bucket/run"), "s3://"),
        (lambda: S3StorageReader("us-east-1", PurePosixPath("/tmp/run")), "s3://"),
        (lambda: S3StorageWriter("us-east-1", URI, thread_count=0), "thread_count"),
        (lambda: S3StorageWriter("us-east-1", URI, threads=3), "threads"),
        (lambda: S3StorageWriter("us-east-1", URI, prefix_strategy="hex"), "prefix_strategy='hex'"),
        (lambda: S3StorageWriter("us-east-1", URI, s3client_config="fast"), "s3client_config='fast'"),
        (lambda: S3StorageReader("us-east-1", URI, reader_constructor=3), "reader_constructor=3"),
        (lambda: S3StorageReader(3, URI), "region=3"),
    ],
)
def test_odd_arguments_are_refused_at_once(call: Any, named: str) -> None:
    """An argument that cannot be meant is a ``ValueError`` that names it, before anything is sent."""
    with pytest.raises(ValueError, match=named):
        call()


def test_the_options_reach_the_store() -> None:
    """Options of the client, the largest gap and the endpoint are those of the store; a pickled copy has the same."""
    config = S3ClientConfig(part_size=16 << 20, unsigned=True)
    kind = S3ReaderConstructor.dcp_optimized(max_gap_size=float("inf"))
    reader = S3StorageReader("eu-west-1", URI, config, kind, endpoint="http://localhost:9000", weights_only=False)
    writer = S3StorageWriter(
        "eu-west-1", URI, config, HexPrefixStrategy(), thread_count=2, single_file_per_rank=True, endpoint="http://h:1"
    )
    copies = pickle.loads(pickle.dumps(reader)), pickle.loads(pickle.dumps(writer))
    assert [repr(copy) for copy in copies] == [repr(reader), repr(writer)]
    assert [copy.checkpoint_id for copy in copies] == [f"{URI}/"] * 2
    assert copies[0].__reduce__()[0].keywords == reader.__reduce__()[0].keywords
    assert not copies[0]._weights_only
    assert S3StorageWriter.validate_checkpoint_id(URI)
    assert not S3StorageReader.validate_checkpoint_id("/tmp/x")
