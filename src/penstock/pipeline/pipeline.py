"""``Pipeline``: a source and the stages after it. Each method gives a new one; nothing is opened, listed or read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from penstock.errors import ConfigError
from penstock.pipeline.source import Connection, Shards
from penstock.pipeline.stages import Batch, Decode, Map, Shuffle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.config import HedgeConfig, RetryConfig, TransportConfig
    from penstock.pipeline.fields import Field
    from penstock.pipeline.stages import Sample, Stage
    from penstock.store import Credentials

_S = TypeVar("_S", bound="Stage")


@dataclass(frozen=True, slots=True, repr=False)
class Pipeline:
    """What a ``Loader`` is to do, and in which order. Made by ``penstock.shards``; its ``repr`` reads like the code.

    Attributes:
        source: Where samples come from.
        stages: What happens to them, first to last.
    """

    source: Shards
    stages: tuple[Stage, ...] = ()

    def shuffle(self, *, window: int = 16_384, seed: int = 0) -> Pipeline:
        """Permute the shards of each epoch, and the samples within runs of ``window / lanes``.

        Args:
            window: Samples that the job holds in memory to draw from: all ranks together, each holds its share.
            seed: In [0, 2**64); the order is a pure function of it, the epoch and the shards.

        Raises:
            ConfigError: out of bounds, or the pipeline is shuffled already.
        """
        return self._then(Shuffle(window=window, seed=seed), once=True)

    def decode(self, *fields: Field) -> Pipeline:
        """Turn the named members into values, and leave the others out.

        Args:
            *fields: ``Image``, ``Integer``, ``Text``, ``Json``, ``Bytes``; all that the samples shall have.

        Raises:
            ConfigError: no field, one named twice, or the pipeline decodes already.
        """
        return self._then(Decode(fields), once=True)

    def map(self, fn: Callable[..., Sample]) -> Pipeline:
        """Call ``fn(sample)`` or ``fn(sample, rng)`` on every sample, in the decode threads.

        Args:
            fn: Takes a dict of values, with ``__key__``, ``__shard__`` and ``__position__``, and returns one. Its first
                result fixes names, dtypes and shapes. `rng` is a ``numpy.random.Generator`` that depends on (seed,
                epoch, position) alone and is valid during the call; it is made only if the function takes it.

        Raises:
            ConfigError: not a function, or one of more than two required arguments.
        """
        return self._then(Map(fn))

    def batch(self, n: int, *, drop_last: bool = False) -> Pipeline:
        """Deliver `n` samples at a time, per rank.

        Args:
            n: At least 1.
            drop_last: Leave out the last samples of an epoch where they do not fill a batch, instead of a shorter one.

        Raises:
            ConfigError: out of bounds, or the pipeline has batches already.
        """
        return self._then(Batch(size=n, drop_last=drop_last), once=True)

    def stage(self, kind: type[_S]) -> _S | None:
        """The first stage of a kind, where there is one."""
        return next((stage for stage in self.stages if isinstance(stage, kind)), None)

    def _then(self, stage: Stage, *, once: bool = False) -> Pipeline:
        name = type(stage).__name__.lower()
        if self.stage(Batch) is not None:
            raise ConfigError(f"{self!r}: .{name}() comes before .batch(), the last stage")
        if once and self.stage(type(stage)) is not None:
            raise ConfigError(f"{self!r} has a .{name}() already; one says it all")
        return Pipeline(self.source, (*self.stages, stage))

    def __repr__(self) -> str:
        return "".join(map(repr, (self.source, *self.stages)))


def shards(
    urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    credentials: Credentials | None = None,
    anonymous: bool = False,
    addressing: Literal["auto", "path", "virtual"] = "auto",
    transport: TransportConfig | None = None,
    retry: RetryConfig | None = None,
    hedge: HedgeConfig | None = None,
    requester_pays: bool = False,
    sse_customer_key: bytes | None = None,
    expected_bucket_owner: str | None = None,
) -> Pipeline:
    """Describe samples that lie in shards (tar files as WebDataset writes them). Looks at nothing until a loader runs.

    Args:
        urls: A prefix (``s3://bucket/train/``: the shards below it, in key order), a pattern
            (``s3://bucket/train-{000000..000099}.tar``, ``s3://bucket/*/train-*.tar``), one shard, or a list of URLs
            taken literally, in which only those that end with ``/`` are prefixes.
        endpoint_url: This and the others as in ``penstock.connect``.
        region: See there.
        profile: See there.
        credentials: See there.
        anonymous: See there.
        addressing: See there.
        transport: See there.
        retry: See there.
        hedge: See there.
        requester_pays: See there.
        sse_customer_key: See there.
        expected_bucket_owner: See there.

    Returns:
        A pipeline to which stages are added.

    Raises:
        ConfigError: no URL, or a pattern that does not unfold.
    """
    is_list = not isinstance(urls, str | os.PathLike)
    listed: tuple[Any, ...] = tuple(urls) if is_list else (urls,)  # type: ignore[arg-type]
    connection = Connection(
        endpoint_url=endpoint_url,
        region=region,
        profile=profile,
        credentials=credentials,
        anonymous=anonymous,
        addressing=addressing,
        transport=transport,
        retry=retry,
        hedge=hedge,
        requester_pays=requester_pays,
        sse_customer_key=sse_customer_key,
        expected_bucket_owner=expected_bucket_owner,
    )
    paths = tuple(os.fspath(url) if isinstance(url, os.PathLike) else url for url in listed)
    return Pipeline(Shards(paths, is_list, connection))
