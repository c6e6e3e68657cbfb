"""Servers and stores that the tests share.

``s3_endpoint`` is ministack, or the server that ``PENSTOCK_TEST_S3`` names (``make test-ceph``, ``make test-servers``):
suites written on ``bucket`` or ``s3_store`` run on all of them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from penstock.store import Store
    from penstock.testing.ministack import Ministack
    from penstock.testing.s3_server import S3Server
    from servers.ceph import Ceph
    from servers.faulty import FaultyServer


# A deadline for each example measures how busy the machine is, not the code under test; `timeout` in pyproject.toml still
# bounds every test. `make test` tries the same examples every time; `make fuzz` searches for others, by a seed.
with contextlib.suppress(ImportError):  # the environments of tests/doors do without hypothesis
    import hypothesis

    hypothesis.settings.register_profile("penstock", deadline=None, derandomize=True)
    hypothesis.settings.register_profile("search", deadline=None, derandomize=False, database=None)
    hypothesis.settings.load_profile("penstock")

S3_SERVERS = ("ministack", "ceph", "moto", "rclone")

# Whoever reads a failed test needs every frame of it; test_tracebacks.py tests what users see.
os.environ.setdefault("PENSTOCK_TRACEBACK", "full")

# A shell that starts a job in the background has it ignore Ctrl-C, as nohup does with SIGHUP, and children inherit that:
# tests that send them to children would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD):
    signal.signal(_number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On another server than the usual one, what does not use it is left out: it has run, and would be the same again."""
    if "PENSTOCK_TEST_S3" in os.environ:
        config.hook.pytest_deselected(items=[item for item in items if "s3_endpoint" not in _fixtures_of(item)])
        items[:] = [item for item in items if "s3_endpoint" in _fixtures_of(item)]


def _fixtures_of(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


def pytest_runtest_teardown() -> None:
    """A test's byte budget is not the next one's, and a port that answered it may be that of another server there."""
    budget = sys.modules.get("penstock.fetch.budget")
    if budget is not None:
        budget.set_process_budget(budget.default_budget_bytes())
    reachability = sys.modules.get("penstock.store.reachability")
    if reachability is not None:
        reachability._endpoints.clear()


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Keep what is imported out of the collector's way: tests that count what is left call it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_aws_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The developer's AWS settings, proxies, credentials and indexes are not part of any test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("AWS_") or name.lower() in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
                patch.delenv(name)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        nowhere = tmp_path_factory.mktemp("cache") / "file"
        nowhere.touch()  # a test's second loader reads as its first one, unless the test says where an index may be kept
        patch.setenv("XDG_CACHE_HOME", str(nowhere))
        yield


@pytest.fixture(scope="session")
def ministack() -> Iterator[Ministack]:
    """ministack, checking signatures; one per session."""
    from penstock.testing.ministack import Ministack

    with Ministack() as server:
        yield server


@pytest.fixture(scope="session")
def ceph() -> Iterator[Ceph]:
    """Ceph's RGW, one node in memory; installed from Debian where root may and it is missing."""
    from servers.ceph import Ceph

    with Ceph() as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    """moto's server."""
    from servers.others import Moto

    with Moto() as server:
        yield server


@pytest.fixture(scope="session")
def rclone() -> Iterator[S3Server]:
    """``rclone serve s3`` on a folder."""
    from servers.others import Rclone

    with Rclone() as server:
        yield server


@pytest.fixture(scope="session")
def s3_endpoint(request: pytest.FixtureRequest) -> S3Server:
    """The S3 of this session: ``endpoint_url``, ``access_key``, ``secret_key``, ``region``, ``client()``."""
    name = os.environ.get("PENSTOCK_TEST_S3", "ministack")
    if name not in S3_SERVERS:
        pytest.exit(f"PENSTOCK_TEST_S3={name!r} must be one of {', '.join(S3_SERVERS)}", 4)
    return request.getfixturevalue(name)  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def s3_client(s3_endpoint: Any) -> Iterator[Any]:
    """botocore's client of ``s3_endpoint``: the independent witness."""
    client = s3_endpoint.client()
    yield client
    client.close()


@pytest.fixture
def bucket(s3_endpoint: Any) -> str:
    """A new, empty bucket."""
    name: str = s3_endpoint.create_bucket()
    return name


@pytest.fixture
def connection(s3_endpoint: Any) -> dict[str, Any]:
    """The arguments with which ``penstock.connect`` reaches the session's S3."""
    from connecting import connection_to

    return connection_to(s3_endpoint)


@pytest.fixture
def user(s3_endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The session's S3, whose address and keys the environment names, as it does for its users."""
    for name, value in s3_endpoint.environment.items():
        monkeypatch.setenv(name, value)
    return s3_endpoint


@pytest.fixture
def connect_s3(connection: dict[str, Any]) -> Iterator[Callable[..., Store]]:
    """``penstock.connect`` with the endpoint's settings; the stores are closed after the test."""
    import penstock as ps

    stores = []

    def connect(url: str, **changes: Any) -> Store:
        stores.append(ps.connect(url, **(connection | changes)))
        return stores[-1]

    yield connect
    for store in stores:
        store.close()


@pytest.fixture
def s3_store(connect_s3: Callable[..., Store], bucket: str) -> Store:
    """A store on a new, empty bucket of ``s3_endpoint``, as ``connect`` composes it."""
    return connect_s3(f"s3://{bucket}")


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    """The server that misbehaves on command: see ``tests/servers/faulty.py``."""
    from servers.faulty import FaultyServer

    with FaultyServer() as server:
        yield server


@pytest.fixture
def connect_faulty(faulty: FaultyServer) -> Iterator[Callable[..., Store]]:
    """``penstock.connect`` to ``faulty``'s bucket, without credentials; the stores are closed after the test."""
    import penstock as ps

    stores = []

    def connect(prefix: str = "", **settings: Any) -> Store:
        defaults = {"endpoint_url": faulty.endpoint_url, "anonymous": True}
        stores.append(ps.connect(f"{faulty.url}/{prefix}", **(defaults | settings)))
        return stores[-1]

    yield connect
    for store in stores:
        store.close()


@pytest.fixture
def nothing_left() -> Callable[[], AbstractContextManager[None]]:
    """``with nothing_left():`` fails if its block leaves a thread, descriptor or child process behind."""
    from servers.leaks import nothing_left as check

    return check
