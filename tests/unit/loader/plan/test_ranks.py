from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.loader.plan.ranks import LAUNCHERS, rank_and_world_size


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's variables, whoever runs the tests."""
    for pair in LAUNCHERS:
        for name in pair:
            monkeypatch.delenv(name, raising=False)


class Mesh:
    ndim = 1

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def get_local_rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def test_alone() -> None:
    """Without anything that says otherwise there is one rank."""
    assert rank_and_world_size() == (0, 1)


@pytest.mark.parametrize("names", LAUNCHERS)
def test_every_launcher(monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]) -> None:
    """torchrun, SLURM and Open MPI each name rank and world size in the environment."""
    monkeypatch.setenv(names[0], "3")
    monkeypatch.setenv(names[1], "8")
    assert rank_and_world_size() == (3, 8)


def test_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments win over the mesh, the mesh over the environment, torchrun over SLURM."""
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURM_NTASKS", "6")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert rank_and_world_size() == (1, 4)
    assert rank_and_world_size(mesh=Mesh(0, 2)) == (0, 2)
    assert rank_and_world_size(2, 3, mesh=Mesh(0, 2)) == (2, 3)


def test_sbatch_alone_is_no_job_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM_NTASKS without SLURM_PROCID is a batch script, not one of its tasks."""
    monkeypatch.setenv("SLURM_NTASKS", "6")
    assert rank_and_world_size() == (0, 1)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank=2 must lie in"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"RANK": "0"}, "RANK and not WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE and not RANK"),
    ],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str) -> None:
    """Half of a pair, words and ranks out of range are refused by name."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        rank_and_world_size()


@pytest.mark.parametrize("given", [(1, None), (None, 2), ("1", "2"), (1.0, 2), (True, 2)])
def test_arguments_that_are_no_pair_of_numbers_are_refused(given: Any) -> None:
    """Half of a pair would be rank 0 of 1, without a word; texts from the environment are no numbers."""
    with pytest.raises(ConfigError, match="must be a whole number"):
        rank_and_world_size(*given)


def test_a_mesh_must_be_one_dimension() -> None:
    """A whole mesh has no one rank: it is refused with the way to name a dimension."""
    mesh: Any = Mesh(0, 2)
    mesh.ndim = 2
    with pytest.raises(ConfigError, match="2 dimensions"):
        rank_and_world_size(mesh=mesh)
    with pytest.raises(ConfigError, match="tells no rank"):
        rank_and_world_size(mesh=object())


def test_torch_is_not_imported() -> None:
    """Reading ranks imports no torch; where it is imported and not initialised, the environment decides."""
    code = (
        "import sys\n"
        "from penstock.loader.plan.ranks import rank_and_world_size\n"
        "assert rank_and_world_size() == (1, 2)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RANK": "1", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
