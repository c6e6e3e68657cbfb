from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import ConfigError, ObjectExistsError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def state() -> dict[str, Any]:
    """A checkpoint as training makes them: a model, and where the data were."""
    return {"model": torch.nn.Linear(5, 3).state_dict(), "data": {"epoch": 2, "position": 77}}


def test_a_checkpoint_comes_back(tmp_path: Path, state: dict[str, Any]) -> None:
    """What torch.save writes through it, torch.load reads through penstock.open, weights only."""
    url = f"{tmp_path}/ckpt/1.pt"
    with ps.torch.checkpoint_writer(url) as file:
        torch.save(state, file)
    found = torch.load(ps.open(url), weights_only=True)
    assert found["data"] == state["data"]
    assert torch.equal(found["model"]["weight"], state["model"]["weight"])
    assert file.info is not None
    assert file.info.size_bytes == (tmp_path / "ckpt/1.pt").stat().st_size


def test_an_exception_keeps_what_was_there(tmp_path: Path, state: dict[str, Any]) -> None:
    """A save that fails half-way leaves the checkpoint before it untouched."""
    (tmp_path / "last.pt").write_bytes(b"before")
    with (
        pytest.raises((pickle.PicklingError, AttributeError)),
        ps.torch.checkpoint_writer(f"{tmp_path}/last.pt") as file,
    ):
        torch.save({**state, "bad": lambda: 0}, file)
    assert (tmp_path / "last.pt").read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_a_dropped_checkpoint_is_noticed(tmp_path: Path, state: dict[str, Any]) -> None:
    """A file that nobody closes stores nothing, and says so: torch.save does not close what it is given."""
    with pytest.warns(RuntimeWarning, match=r"never closed. Hint: with ps\.torch\.checkpoint_writer\(url\)"):
        torch.save(state, ps.torch.checkpoint_writer(f"{tmp_path}/1.pt"))
    assert list(tmp_path.iterdir()) == []


def test_absent_is_kept(tmp_path: Path, state: dict[str, Any]) -> None:
    """if_absent never replaces an object."""
    (tmp_path / "1.pt").write_bytes(b"mine")
    with pytest.raises(ObjectExistsError), ps.torch.checkpoint_writer(f"{tmp_path}/1.pt", if_absent=True) as file:
        torch.save(state, file)
    assert (tmp_path / "1.pt").read_bytes() == b"mine"


def test_a_url_without_a_name_is_refused(tmp_path: Path) -> None:
    """A bucket or a folder is no object."""
    with pytest.raises(ConfigError, match="does not name an object"):
        ps.torch.checkpoint_writer(f"{tmp_path}/")
