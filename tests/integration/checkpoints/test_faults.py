"""A store that fails in the middle of a save: the error reaches the program, and the earlier checkpoint stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import penstock as ps
from penstock.checkpoints import Checkpoints
from penstock.config import RetryConfig
from penstock.errors import AccessDeniedError, StoreError, UnavailableError

if TYPE_CHECKING:
    from servers.faulty import FaultyServer
    from servers.records import Request

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.server, pytest.mark.torch]

URL = "s3://bucket/run/"


def is_write(request: Request) -> bool:
    return request.method in ("PUT", "POST")


def options_of(server: FaultyServer) -> dict[str, Any]:
    return {
        "endpoint_url": server.endpoint_url,
        "anonymous": True,
        "retry": RetryConfig(attempts_max=2, total_s_max=0.2, backoff_s=0.001, backoff_s_max=0.002),
    }


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("kind", "error"), [("403", AccessDeniedError), ("reset_head", UnavailableError), ("500", UnavailableError)]
)
@pytest.mark.parametrize("written", [0, 1, 2, 3])
def test_a_store_that_fails_in_the_middle(
    faulty: FaultyServer, kind: str, error: type[StoreError], wait: bool, written: int
) -> None:
    """Whichever write fails, the save raises it and the checkpoint before is restored; the next save leaves no debris."""
    model = torch.nn.Linear(3, 3)
    weights = model.weight.detach().clone()
    checkpoint = ps.torch.Checkpoint(model=model, **options_of(faulty))
    checkpoint.save(URL, step=1)
    seen: list[Request] = []

    def fails(request: Request) -> bool:
        if is_write(request):
            seen.append(request)
        return is_write(request) and len(seen) > written

    faulty.fail(kind, times=None, match=fails)
    with torch.no_grad():
        model.weight.zero_()

    def save() -> None:
        checkpoint.save(URL, step=2, wait=wait)
        checkpoint.wait()

    with pytest.raises(error):
        save()
    faulty.heal()
    assert checkpoint.latest(URL) == 1
    assert checkpoint.restore(URL) == 1
    assert torch.equal(model.weight, weights)
    checkpoint.save(URL, step=3)
    assert checkpoint.latest(URL) == 3
    with Checkpoints(URL, **options_of(faulty)) as checkpoints:
        assert checkpoints.steps() == [1, 3]
        assert checkpoints.debris() == []
    checkpoint.close()


def test_a_store_that_fails_while_it_is_read(faulty: FaultyServer) -> None:
    """A restore that cannot read its data changes nothing."""
    model = torch.nn.Linear(300, 300)
    checkpoint = ps.torch.Checkpoint(model=model, **options_of(faulty))
    checkpoint.save(URL, step=1)
    with torch.no_grad():
        model.weight.zero_()
    rng = torch.get_rng_state()
    faulty.fail("close", times=None, match=".distcp")
    with pytest.raises(StoreError):
        checkpoint.restore(URL)
    assert not model.weight.any()
    assert torch.equal(torch.get_rng_state(), rng)
    faulty.heal()
    assert checkpoint.restore(URL) == 1
    assert model.weight.any()
    checkpoint.close()


def test_keys_that_may_not_delete(faulty: FaultyServer, caplog: pytest.LogCaptureFixture) -> None:
    """If older checkpoints cannot be removed, the new one is saved all the same, and a warning tells why."""
    model = torch.nn.Linear(3, 3)
    with ps.torch.Checkpoint(model=model, **options_of(faulty)) as checkpoint:
        checkpoint.save(URL, step=1)
        faulty.fail("403", times=None, match=lambda request: request.method == "DELETE" or "delete" in request.path)
        checkpoint.save(URL, step=2, keep_last=1)
        assert checkpoint.latest(URL) == 2
    assert "older ones were not removed" in caplog.text
