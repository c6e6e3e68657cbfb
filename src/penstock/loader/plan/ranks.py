"""The rank of this process: from arguments, a device mesh, ``torch.distributed``, or the program that started the job."""

from __future__ import annotations

import os
import sys
from typing import Any

from penstock.errors import ConfigError

LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),  # torchrun, and most others
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)
"""Environment variables of rank and world size. The first pair that is set counts."""


def rank_and_world_size(rank: int | None = None, world_size: int | None = None, *, mesh: Any = None) -> tuple[int, int]:
    """The data-parallel rank of this process, and the number of ranks.

    They come from the first of: the arguments; the mesh; ``torch.distributed``, if the program has imported and initialised
    it; the environment of torchrun, SLURM or Open MPI. Otherwise it is rank 0 of 1.

    Args:
        rank: Rank, in [0, world_size).
        world_size: Number of ranks, at least 1.
        mesh: One dimension of a ``torch`` device mesh, e.g. ``device_mesh["dp"]``: model-parallel peers share its rank, and so
            get the same batches.

    Raises:
        ConfigError: A number is out of range or not whole, or only one of the two is given.
    """
    if rank is not None or world_size is not None:
        for name, value in (("rank", rank), ("world_size", world_size)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{name}={value!r} must be a whole number", hint="rank= and world_size= go together")
        assert rank is not None
        assert world_size is not None
        found = rank, world_size
    elif mesh is not None:
        found = _of_mesh(mesh)
    else:
        found = _of_process_group() or _of_environment() or (0, 1)
    rank, world_size = found
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} must lie in [0, world_size={world_size})")
    return rank, world_size


def _of_mesh(mesh: Any) -> tuple[int, int]:
    dimensions = getattr(mesh, "ndim", 1)
    if dimensions != 1:
        raise ConfigError(
            f"mesh={mesh!r} has {dimensions} dimensions", hint='give the data-parallel one: mesh=device_mesh["dp"]'
        )
    try:
        return int(mesh.get_local_rank()), int(mesh.size())
    except (AttributeError, TypeError, RuntimeError) as error:
        raise ConfigError(f"mesh={mesh!r} tells no rank: {error}", hint='mesh=device_mesh["dp"]') from error


def _of_process_group() -> tuple[int, int] | None:
    """The rank in the default process group. ``sys.modules`` has torch if the program uses it; importing it takes seconds."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _of_environment() -> tuple[int, int] | None:
    for rank_name, size_name in LAUNCHERS:
        rank, world_size = os.environ.get(rank_name), os.environ.get(size_name)
        if rank is None and world_size is None:
            continue
        if rank is None or world_size is None:
            if rank_name != LAUNCHERS[0][0]:
                continue  # sbatch sets SLURM_NTASKS outside of any task, too
            present, absent = (size_name, rank_name) if rank is None else (rank_name, size_name)
            raise ConfigError(f"the environment has {present} and not {absent}")
        return _whole(rank_name, rank), _whole(size_name, world_size)
    return None


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment has {name}={text!r}, not a whole number") from None
