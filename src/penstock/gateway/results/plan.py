"""A result, and how it is produced if it does not exist yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.config import GIB

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from penstock.gateway.objects import ResultWriter
    from penstock.gateway.results.identity import ResultName


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultPlan:
    """A result, and how it is produced.

    Attributes:
        name: How the result is found.
        produce: Writes the result; see ``Transform.run``. Cancelling its task ends it. None if the result can only be read as
            long as it is kept.
        transform: Name of the transform, for logs and messages.
        access_point: Name of the access point, for metrics.
        waits_for_results: Whether the result is made of other results. Then it takes no turn from the transforms of these.
        arguments: Arguments of the transform, shown by ``penstock gateway ls``.
        is_deterministic: Whether producing it again gives the same bytes.
        size_bytes: Size of the result in bytes if it is known beforehand; a result of another size is an error.
        last_modified_s: Time of the last change of the source, in seconds since 1970.
        time_s_max: Longest time for producing it, in seconds.
        output_bytes_max: Largest size of the result in bytes.
    """

    name: ResultName
    produce: Callable[[ResultWriter], Awaitable[None]] | None
    transform: str = ""
    access_point: str = ""
    waits_for_results: bool = False
    arguments: Mapping[str, str] = field(default_factory=dict)
    is_deterministic: bool = True
    size_bytes: int | None = None
    last_modified_s: float = 0.0
    time_s_max: float = 300.0
    output_bytes_max: int = 1024 * GIB
