"""A job of filling: access points, the requests whose results are made, and where these are kept."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from penstock.errors import ConfigError
from penstock.gateway.config import WebhookServiceConfig
from penstock.gateway.serving.assembly import is_transformed
from penstock.gateway.serving.checks import check_config
from penstock.gateway.serving.startup import with_defaults

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.gateway.config import AccessPoint, GatewayConfig
    from penstock.gateway.filling.keys import FillKey

Place = Literal["results", "cache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FillJob:
    """The work of every process that makes results.

    Attributes:
        config: The gateway, with only the access points that are filled.
        places: Where a result must be in the end: in the bucket of results, in the cache of the node that makes it, or both.
        query: Parameters of the query of the requests whose results are made, e.g. ``{"x-penstock-epoch": "3"}``.
        caller: ID of the access key that sends them, for Lambda handlers whose answers depend on it.
    """

    config: GatewayConfig
    places: frozenset[Place]
    query: Mapping[str, str] = field(default_factory=dict)
    caller: str = ""

    def point(self, name: str) -> AccessPoint:
        """Return an access point by its name."""
        return next(point for point in self.config.access_points if point.name == name)


def fill_job(
    config: GatewayConfig,
    points: Iterable[str] = (),
    *,
    into: str | None = None,
    query: Mapping[str, str] | None = None,
    caller: str = "",
) -> FillJob:
    """Return the job that fills access points of a gateway.

    Args:
        config: The gateway.
        points: Names of access points; empty for all that have a transform.
        into: ``"results"``, ``"cache"`` or ``"both"``; None takes the bucket of results if there is one, else the cache.
        query: Parameters of the query of the requests whose results are made; None for none.
        caller: ID of the access key that sends them; empty for none.

    Raises:
        ConfigError: The configuration is not valid, or there is nothing to fill or no place for it.
    """
    config = with_defaults(config)
    check_config(config)
    names = list(points)
    known = {point.name: point for point in config.access_points}
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no access point {name!r}", hint=f"there are {', '.join(sorted(known))}")
        if not is_transformed(known[name]):
            raise ConfigError(f"access point {name!r} has no transform, so it has no results")
    chosen = tuple(point for point in config.access_points if (point.name in names if names else is_transformed(point)))
    if not chosen:
        raise ConfigError("no access point has a transform, so there are no results", hint="--transform NAME")
    for point in chosen:
        if point.handler is not None and "GetObject" not in point.handler.actions:
            raise ConfigError(f"the handler of access point {point.name!r} does not answer GetObject")
    if not config.cache:
        raise ConfigError("results are made in the cache, and the cache is switched off", hint="--cache PATH:SIZE")
    alone = replace(
        config, access_points=chosen, directory="", read_write=False, webhook_service=WebhookServiceConfig()
    )
    return FillJob(config=alone, places=_places(config, into), query=query or {}, caller=caller)


def _places(config: GatewayConfig, into: str | None) -> frozenset[Place]:
    chosen = into or ("results" if config.results else "cache")
    places: dict[str, frozenset[Place]] = {
        "results": frozenset({"results"}),
        "cache": frozenset({"cache"}),
        "both": frozenset({"results", "cache"}),
    }
    if chosen not in places:
        raise ConfigError(f"--into {chosen!r} must be one of {', '.join(places)}")
    if "results" in places[chosen] and not config.results:
        raise ConfigError(f"--into {chosen} needs a bucket of results", hint="--results s3://bucket/derived/")
    return places[chosen]


class Filled(NamedTuple):
    """The outcome of one result.

    Attributes:
        source: Source of the result.
        outcome: ``made`` by the transform; ``copied`` from one place to another; ``present`` in all places already;
            ``left-out`` because the access point does not serve its key; ``failed``.
        etag: ETag of the result; empty if it failed before that was known.
        size_bytes: Size of the result; 0 unless it was made or copied.
        error: Why it failed.
    """

    source: FillKey
    outcome: Literal["made", "copied", "present", "left-out", "failed"]
    etag: str = ""
    size_bytes: int = 0
    error: str = ""


class FillListener(Protocol):
    """Receives the progress of ``fill``, in the thread that calls it."""

    def planned(self, results_count: int, source_bytes: int) -> None:
        """Report how many results will be made or found, and the size of their sources in bytes."""

    def filled(self, result: Filled) -> None:
        """Report the outcome of one result."""
