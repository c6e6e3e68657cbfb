"""The same program on the connector and on penstock: the same results, or a row of the page that says what differs and why."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import connector_behaviours
from connector_behaviours import (
    NAMES,
    OBJECTS,
    Library,
    Place,
    dcp_loaded,
    dcp_saved,
    is_same,
    map_of,
    state_of,
    stream_of,
)
from penstock.testing.s3_server import free_ports
from servers.faulty import FaultyServer

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/coming-from/s3-connector.md"
JOBS = Path(__file__).with_name("jobs.py")

pytestmark = [
    pytest.mark.timeout(300),  # the processes that a test starts import PyTorch, on a machine that may be busy
    pytest.mark.filterwarnings("ignore::UserWarning"),  # PyTorch's and the connector's advice
]

DIFFERENT: dict[str, tuple[Any, Any]] = {
    "a_generator_of_uris_iterated_twice": ((2, 0), (2, 2)),
    "when_an_odd_uri_is_refused": (True, "ValueError"),
    "a_reader_that_was_read_crosses_processes": ("TypeError", True),
    "a_reader_that_was_closed": ((True, b"e "), (True, "ValueError")),
    "writing_a_bytearray": ("TypeError", 3),
    "a_writer_after_an_exception": (b"half", None),
    "a_writer_that_is_dropped": (b"half", None),
    "a_wrong_region": ((8, "S3Exception"), (8, 8)),
    "an_endpoint_without_a_scheme": (("S3Exception", "S3Exception"), (8, 8)),
}
"""What a program sees that differs: on the connector, and here. The page has a row for each, in this order."""

WRITING = {
    "a_writer", "writing_nothing", "writing_other_types", "writing_a_bytearray", "replacing_an_object", "a_checkpoint",
    "a_distributed_checkpoint", "a_distributed_checkpoint_that_must_not_be_replaced", "checkpoints_of_lightning",
}  # fmt: skip
"""What the connector cannot do on stores that answer a PUT without an ETag header in the letters that it expects."""

DEPENDS_ON_THE_STORE = {"an_empty_object", "a_wrong_region"}
"""Where the connector's result is another one on another store; ours is the same on all of them."""


@pytest.mark.parametrize("name", sorted(connector_behaviours.ALL))
def test_a_program_sees_the_same(name: str, place: Place, libraries: Any, connector_writes: bool) -> None:
    """What a program sees of the connector it sees of penstock, except where the page says otherwise."""
    if name in WRITING and not connector_writes:
        connector_behaviours.ALL[name](libraries[1], place)
        pytest.skip("the connector cannot write to this store, and penstock can")
    theirs, ours = (connector_behaviours.ALL[name](library, place) for library in libraries)
    if name in DIFFERENT:
        assert ours == DIFFERENT[name][1]
        assert theirs == DIFFERENT[name][0] or name in DEPENDS_ON_THE_STORE
    elif name in DEPENDS_ON_THE_STORE:
        assert set(ours) == {b""}
    else:
        assert ours == theirs


def test_the_page_names_every_difference() -> None:
    """The page's table of differences has a row for each, and for nothing else that this suite compares."""
    rows = re.findall(r"<!-- (\w+_\w+) -->", PAGE.read_text())
    assert rows == [*DIFFERENT, "an_empty_object", "bytes_that_are_wrong", "when_the_rank_is_read", "writing_to_ceph"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_read_the_same(method: str, place: Place, libraries: Any) -> None:
    """With each start method, workers of both kinds of data sets yield the same samples in the same order."""
    found = []
    for library in libraries:
        options = {"num_workers": 2, "multiprocessing_context": method}
        batches = torch.utils.data.DataLoader(map_of(library, place), batch_size=3, collate_fn=list, **options)
        sharded, whole = (stream_of(library, place, enable_sharding=sharding) for sharding in (True, False))
        streams = [list(torch.utils.data.DataLoader(data, batch_size=None, **options)) for data in (sharded, whole)]
        found.append((list(batches), streams))
    assert found[0] == found[1]
    assert sorted(name for name, _ in found[1][1][0]) == sorted(NAMES)
    assert len(found[1][1][1]) == 2 * len(NAMES)


def ranks(library: Library, place: Place, when: str) -> list[Any]:
    """What each of two ranks read, as ``jobs.py`` prints it."""
    (port,) = free_ports(1)
    processes = []
    for rank in range(2):
        group = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, str(JOBS), "ranks", library.name, f"{place.uri}/data/", when]
        processes.append(subprocess.Popen(command, env=os.environ | group, stdout=subprocess.PIPE, text=True))
    return [json.loads(process.communicate(timeout=250)[0]) for process in processes]


def test_ranks_and_workers_divide_the_objects_alike(place: Place, libraries: Any) -> None:
    """A data set that is made after the process group is divided among ranks, and then among workers, as the connector's is."""
    theirs, ours = (ranks(library, place, "after") for library in libraries)
    assert ours == theirs
    names = [key.rpartition("/")[2] for key in sorted(OBJECTS)]
    for way in range(3):
        assert sorted(ours[0][way] + ours[1][way]) == sorted(names)
        assert sorted(ours[0][way]) == sorted(names[::2])


def test_when_the_rank_is_read(place: Place, libraries: Any) -> None:
    """A data set that is made before the process group is divided among the ranks here; in the connector it is not."""
    theirs, ours = (ranks(library, place, "before") for library in libraries)
    assert sorted(ours[0][0] + ours[1][0]) == sorted(name.rpartition("/")[2] for name in OBJECTS)
    assert [len(way) for way in theirs[0]] == [len(OBJECTS)] * 3
    assert ours == ranks(libraries[1], place, "after")


@pytest.mark.parametrize("written", [0, 1], ids=["written by the connector", "written by penstock"])
@pytest.mark.parametrize("read", [0, 1], ids=["read by the connector", "read by penstock"])
def test_either_reads_distributed_checkpoints_of_either(
    written: int, read: int, place: Place, libraries: Any, connector_writes: bool
) -> None:
    """A distributed checkpoint that one library wrote, the other one loads."""
    if written == 0 and not connector_writes:
        pytest.skip("the connector cannot write to this store")
    uri = f"{place.uri}/exchanged-{written}-{read}"
    dcp_saved(libraries[written], uri, state_of(9), thread_count=2)
    assert is_same(dcp_loaded(libraries[read], uri), state_of(9))


@pytest.mark.parametrize(
    ("fault", "theirs"),
    [
        ("close", "S3Exception"),
        ("chunked_cut", "S3Exception"),
        ("wrong_range", "wrong"),
        ("corrupt", "wrong"),
        ("unsized", "wrong"),
    ],
)
def test_bytes_that_are_wrong(fault: str, theirs: str, libraries: Any) -> None:
    """A store that breaks off, or sends other bytes than were asked for, gives right bytes or an error here."""
    content, found = random.Random(7).randbytes(5000), {}
    with FaultyServer({"data": content}) as server:
        server.fail(fault, times=1000, match="data")
        for library in libraries:
            environment = os.environ | {"AWS_ENDPOINT_URL": server.endpoint_url}
            done = subprocess.run(
                [sys.executable, str(JOBS), "weather", library.name, "s3://bucket/data"], env=environment,
                capture_output=True, text=True, timeout=250, check=False,
            )  # fmt: skip
            found[library.name] = json.loads(done.stdout)
    assert set(found["penstock"]) <= {"right", "S3Exception"}
    assert theirs in found["connector"]


def test_an_endpoint_without_a_scheme_is_told(place: Place, libraries: Any) -> None:
    """What was taken for the endpoint is told in a warning."""
    host = place.endpoint.removeprefix("http://")
    with pytest.warns(UserWarning, match=re.escape(place.endpoint)):
        assert len(map_of(libraries[1], place, endpoint=host)) == len(OBJECTS)
