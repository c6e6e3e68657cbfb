"""``Workers``: the workers of a loader on a Ray cluster, as a user asks for them."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock.config import check_whole
from penstock.errors import ConfigError
from penstock.version import install_hint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.loader.statistics import Meter
    from penstock.loader.workers.process_pool import WorkerPool

COUNT_MAX = 512
SECRET_NAMES = re.compile("SECRET|PASSW|(TOKEN|KEY|CREDENTIAL)S?(_|$)", re.IGNORECASE)
"""In the names of environment variables whose values Ray's dashboard must not show; TOKENIZERS_PARALLELISM is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Workers on a Ray cluster: ``Loader(pipeline, workers=Workers(count=4))`` has them fetch, parse, decode and map.

    The batches, their order and the state are those of the same loader without workers, whatever happens to the cluster
    meanwhile. A worker owns lanes, like a process of ``Loader(processes=)``, so there are no more of them than the rank has
    lanes. The lanes of a worker that is lost go on elsewhere, from the last batch of which its rows had arrived.

    Args:
        count: Number of workers of this loader.
        min: In place of `count`: number of workers to begin with, and at least to keep.
        max: Number of workers at most. While the training loop stalls, there are more of them, and fewer when it has not
            stalled for a minute. It bounds the whole pool if `pool` is given.
        pool: Name of a pool that several loaders of the cluster share, such as those of the ranks of a job. All of them give
            the same `max`, which is divided fairly among those that want workers.
        cpus: CPUs of the cluster that each worker takes; it has as many decode threads.
        resources: Other resources of the cluster that each worker takes, e.g. ``{"preprocessing": 1}``, which only some of
            its nodes offer.
        address: Address of the cluster; None uses the one that this process has joined or that Ray finds, or starts one on
            this machine.
        runtime_env: Ray's runtime environment of the workers: packages, files, environment variables. Ray shows it to
            everybody who sees its dashboard, so it must not hold secrets.
        fallback: Go on in threads of this process while the cluster has no worker. The next epoch looks for workers again.
            Otherwise that is an error.
        wait_s: Seconds without any worker after which there is none. The first ones take five seconds or more to start.
        answer_s_max: Seconds after which a worker that has not finished its rows is replaced: a function of the user hangs.
        memory_bytes_max: Memory of a worker, in bytes, above which it is replaced: a function of the user leaks. None does not
            look at it.

    Raises:
        ConfigError: Ray is not installed, an argument is out of bounds, or `runtime_env` holds a secret.
    """

    count: int | None = None
    min: int | None = None
    max: int | None = None
    pool: str | None = None
    cpus: float = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    address: str | None = None
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    fallback: bool = False
    wait_s: float = 60.0
    answer_s_max: float = 300.0
    memory_bytes_max: int | None = None

    def __post_init__(self) -> None:
        if find_spec("ray") is None:
            raise ConfigError("Workers() need Ray", hint=install_hint("ray"))
        if (self.count is None) == (self.max is None) or (self.max is None) != (self.min is None):
            raise ConfigError("Workers() needs either count=, or min= and max=")
        for name in ("count", "min", "max"):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, 1, COUNT_MAX)
        if self.low > self.high:
            raise ConfigError(f"min={self.min} must not be larger than max={self.max}")
        if self.pool is not None and self.max is None:
            raise ConfigError(
                f"pool={self.pool!r} divides max=, which is not given", hint="Workers(min=1, max=16, pool=...)"
            )
        if self.memory_bytes_max is not None:
            check_whole("memory_bytes_max", self.memory_bytes_max, 1)
        for name in ("cpus", "wait_s", "answer_s_max"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be positive")
        for name in self.runtime_env.get("env_vars") or ():
            if SECRET_NAMES.search(name):
                raise ConfigError(
                    f"runtime_env= sets {name}, and Ray's dashboard shows runtime environments",
                    hint="connection options of the pipeline reach the workers without Ray; or set it where the nodes start",
                )

    @property
    def low(self) -> int:
        """Smallest number of workers."""
        found = self.count if self.min is None else self.min
        assert found is not None
        return found

    @property
    def high(self) -> int:
        """Largest number of workers."""
        found = self.count if self.max is None else self.max
        assert found is not None
        return found

    def open(self, meter: Meter) -> WorkerPool:
        """The workers for one loader, whose statistics are counted by `meter`; they start in the background."""
        from penstock.ray.pool import RayPool

        return RayPool(self, meter, address=self.address or _joined_address())


def _joined_address() -> str | None:
    """Address of the cluster that this process has joined, if it has."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return str(ray.get_runtime_context().gcs_address)
