"""Worker processes: the same batches as threads give, and nothing left behind, however it ends."""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from forking import exit_code_of, start_child
from loading import index, numbers, pipeline, write_counted
from penstock.errors import ClosedError, ConfigError, DecodeError, PenstockError, WorkerDiedError
from penstock.loader.workers.worker import NICENESS
from resuming import assert_same, children, in_step, together, valid_rows
from servers.leaks import has_ended, is_alive

pytestmark = pytest.mark.server

SIZES = (9, 0, 30, 14, 1, 22)
DEATH_S_MAX = 5.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_counted(tmp_path / "data", SIZES)
    return tmp_path / "data"


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    """An index of the shards."""
    return index(pipeline(folder), tmp_path / "index")


def held() -> tuple[int, int, int, int]:
    """Threads, child processes, descriptors, entries of /dev/shm."""
    gc.collect()
    shared = Path("/dev/shm")
    return (
        threading.active_count(),
        len(children()),
        len(os.listdir("/proc/self/fd")),
        sum(entry.is_file() for entry in shared.glob("*penstock*")),  # benchmarks keep folders there
    )


@pytest.fixture
def nothing_left(folder: Path, place: Path) -> Iterator[None]:
    """After the test there is no more than before it. First passes, without processes and with, start what is shared."""
    for processes in (0, 1):
        with ps.Loader(pipeline(folder), processes=processes, index_dir=place) as loader:
            for _ in loader:
                pass
    before = held()
    yield
    deadline_s = time.monotonic() + 20
    while not all(now <= then for now, then in zip(held(), before, strict=True)):  # a thread was told to end, and will
        assert time.monotonic() < deadline_s, (before, held(), threading.enumerate())


def _image(sample: dict[str, Any]) -> dict[str, Any]:
    number = int(sample["cls"])
    return {"cls": number, "picture": np.full((5, 3), number, np.uint8), "text": f"{number} ü", "raw": b"x" * number}


def _boxes(sample: dict[str, Any]) -> Any:
    """Structured arrays, of unequal lengths."""
    number = int(sample["cls"])
    return np.array([(number, 0.5)] * (number % 4), [("class", "<i4"), ("score", "<f4")])


def _repeated(sample: dict[str, Any], rng: np.random.Generator) -> list[dict[str, Any]]:
    """A sample n mod 3 times, with values of all kinds, each with a number of its own."""
    return [{**_image(sample), "again": again, "drawn": rng.random()} for again in range(int(sample["cls"]) % 3)]


def _noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "noise": rng.standard_normal(3)}


MADE = {
    "decoded": lambda folder: pipeline(folder, window=40, seed=3, batch=8),
    "dropped": lambda folder: pipeline(folder, window=40, seed=3, batch=8, drop_last=True),
    "stored": lambda folder: ps.shards(f"{folder}/").shuffle(window=20, seed=1).batch(7),
    "filtered": lambda folder: (
        ps.shards(f"{folder}/")
        .shuffle(window=20, seed=1)
        .decode(ps.Integer("cls"))
        .filter(lambda sample: sample["cls"] % 3 != 0 and sample["cls"] > 8)
        .batch(5)
    ),
    "mapped": lambda folder: ps.shards(f"{folder}/").shuffle(window=20, seed=1).map(_image).batch(6),
    "random": lambda folder: (
        ps.shards(f"{folder}/")
        .shuffle(window=20, seed=1)
        .map(lambda sample, rng: {"cls": int(sample["cls"]), "noise": rng.standard_normal(3)})
        .batch(6)
    ),
    "padded": lambda folder: (
        ps.shards(f"{folder}/")
        .shuffle(window=20, seed=1)
        .map(lambda sample: {"cls": int(sample["cls"]), "ids": np.arange(int(sample["cls"]) % 5)})
        .batch(6, pad={"ids": -1})
    ),
    "ragged": lambda folder: (
        ps.shards(f"{folder}/")
        .shuffle(window=20, seed=1)
        .map(lambda sample: _image(sample) | {"ids": np.arange(int(sample["cls"]) % 5), "boxes": _boxes(sample)})
        .batch(6, ragged=["ids", "boxes"])
    ),
    "refilled": lambda folder: (
        ps.shards(f"{folder}/")
        .shuffle(window=20, seed=1)
        .decode(ps.Integer("cls"))
        .filter(lambda sample: sample["cls"] % 3 != 0, refill=True)
        .batch(5)
    ),
    "multiplied": lambda folder: (
        ps.shards(f"{folder}/").shuffle(window=20, seed=1).flat_map(_repeated).map(_noisy).batch(7, drop_last=True)
    ),
    "by size": lambda folder: (
        ps.shards(f"{folder}/")
        .shuffle(window=20, seed=1)
        .map(_image)
        .batch_by_size(150, size=lambda sample: sample["cls"], oversize="alone")
    ),
    "token blocks": lambda folder: (
        ps.shards(f"{folder}/")
        .shuffle(window=20, seed=1)
        .map(lambda sample: {"tokens": np.arange(int(sample["cls"]) % 9)})
        .token_blocks(7, separator=99, position_ids=True)
        .batch(3)
    ),
    "stored order": lambda folder: pipeline(folder, window=None),
    "taken": lambda folder: ps.shards(f"{folder}/").shuffle(window=9).decode(ps.Integer("cls")).take(21).batch(4),
}


def assert_same_batch(left: Any, right: Any) -> None:
    """As ``assert_same``, also where a column is ragged."""
    for name, column in left.items():
        if isinstance(column, tuple):
            for part, other in zip(column, right[name], strict=True):
                np.testing.assert_array_equal(part, other)
    assert_same(
        {name: column for name, column in left.items() if not isinstance(column, tuple)},
        {name: column for name, column in right.items() if not isinstance(column, tuple)},
    )


@pytest.mark.parametrize(("mode", "processes"), [("require", 2), ("stream", 3)])
@pytest.mark.parametrize("kind", sorted(MADE))
def test_the_batches_are_those_of_threads(folder: Path, place: Path, kind: str, mode: Any, processes: int) -> None:
    """Two epochs: the same batches, in the same order, of the same types."""
    made = MADE[kind](folder)
    options: dict[str, Any] = {"index": mode, "index_dir": place, "lanes": 4 if kind != "stored order" else None}
    with ps.Loader(made, **options) as loader:
        expected = [batch for _ in loader.epochs(2) for batch in loader]
    with ps.Loader(made, processes=processes, **options) as loader:
        found = [batch for _ in loader.epochs(2) for batch in loader]
    for left, right in zip(expected, found, strict=True):
        assert_same_batch(left, right)


@pytest.mark.parametrize("mode", ["require", "stream"])
def test_batches_come_in_order_in_any_case(folder: Path, place: Path, mode: Any) -> None:
    """Without in_order, too, a batch that a worker completes before an earlier one keeps its place and its rows."""
    meeting = folder.parent / "meeting"
    os.mkfifo(meeting)

    def crossed(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__position__"] in (4, 6):  # of one worker: each waits until the other has begun
            with meeting.open("r" if sample["__position__"] == 4 else "w"):
                pass
        return sample

    made = ps.shards(f"{folder}/").decode(ps.Integer("cls"))
    options: dict[str, Any] = {"index": mode, "index_dir": place, "lanes": 4, "threads": 4, "prefetch_batches": 4}
    with ps.Loader(made.batch(1), **options) as loader:
        expected = list(loader)
    with ps.Loader(made.map(crossed).batch(1), processes=2, in_order=False, **options) as loader:
        for left, right in zip(expected, loader, strict=True):
            assert_same(left, right)


@pytest.mark.parametrize("mode", ["require", "stream"])
@pytest.mark.parametrize("ways", [(0, 2), (2, 0), (2, 1)])
def test_a_state_goes_on_with_other_processes(folder: Path, place: Path, ways: tuple[int, int], mode: Any) -> None:
    """Saved behind any batch with so many processes, gone on with as many others: nothing lost, nothing twice."""
    options: dict[str, Any] = {"index": mode, "index_dir": place, "lanes": 4}
    with ps.Loader(pipeline(folder), processes=ways[0], **options) as loader:
        states, seen = [], []
        for batch in loader:
            states.append(json.loads(json.dumps(loader.state_dict())))
            seen.append(numbers([batch]))
    for at in range(0, len(states), 3):
        with ps.Loader(pipeline(folder), processes=ways[1], **options) as loader:
            loader.load_state_dict(states[at])
            assert [numbers([batch]) for batch in loader] == seen[at + 1 :]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_are_masked_alike(folder: Path, place: Path, rank: int) -> None:
    """With two ranks the last batch is padded and masked as without processes."""
    options: dict[str, Any] = {"index_dir": place, "lanes": 4, "rank": rank, "world_size": 2}
    with ps.Loader(pipeline(folder), **options) as loader:
        expected = list(loader)
    with ps.Loader(pipeline(folder), processes=2, **options) as loader:
        for left, right in zip(expected, list(loader), strict=True):
            assert_same(left, right)


def test_objects_are_divided(tmp_path: Path) -> None:
    """Single objects and a mix come in the same order."""
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(23):
            (tmp_path / name / f"{number:03d}.cls").write_text(str(number))
    one, two = (ps.objects(f"{tmp_path}/{name}/").decode(ps.Integer("cls")) for name in "ab")
    for mixed in (one, ps.mix({one: 0.6, two: 0.4})):
        made = mixed.shuffle(window=8, seed=2).batch(4)
        with ps.Loader(made, lanes=4) as loader:
            expected = list(loader)
        with ps.Loader(made, lanes=4, processes=3) as loader:
            for left, right in zip(expected, list(loader), strict=True):
                assert_same(left, right)


# ── workers that die ───────────────────────────────────────────────────────────────────────────────────────────────────


def _many(folder: Path) -> Path:
    write_counted(folder, [100] * 8)
    return folder


@pytest.mark.parametrize("mode", ["require", "stream"])
def test_a_worker_that_is_killed_is_an_error_that_names_it(tmp_path: Path, mode: Any) -> None:
    """SIGKILL: within 5 s the loop gets an error with the process's id, and again at each further call."""
    made = pipeline(_many(tmp_path / "many"), batch=4)
    place = index(made, tmp_path / "index")
    with ps.Loader(made, processes=2, lanes=4, index=mode, index_dir=place) as loader:
        before = children()
        steps = iter(loader)
        next(steps)
        victim = min(children() - before)
        os.kill(victim, signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(WorkerDiedError, match=rf"{victim}\b.*SIGKILL") as raised:
            for _ in steps:
                pass
        assert time.monotonic() - began_s < DEATH_S_MAX
        assert (raised.value.process_id, raised.value.exit_code) == (victim, -signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=str(victim)):
            next(steps)


@pytest.mark.parametrize("mode", ["require", "stream"])
def test_a_worker_that_is_killed_is_replaced(tmp_path: Path, mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With restart_workers, killed again and again at any batch: no sample is lost or comes twice, order included."""
    made = pipeline(_many(tmp_path / "many"), batch=16)
    options: dict[str, Any] = {"lanes": 4, "index": mode, "index_dir": index(made, tmp_path / "index")}
    with ps.Loader(made, **options) as loader:
        expected = list(loader)
    with ps.Loader(made, processes=2, restart_workers=True, **options) as loader, caplog.at_level(logging.WARNING):
        before = children()
        found = []
        for step, batch in enumerate(loader):
            found.append(batch)
            if step % 12 == 2:
                os.kill(sorted(children() - before)[step // 12 % 2], signal.SIGKILL)
    for left, right in zip(expected, found, strict=True):
        assert_same(left, right)
    assert "SIGKILL" in caplog.text


def test_a_worker_that_always_dies_is_an_error(folder: Path, place: Path) -> None:
    """A sample that kills its worker each time does not restart it for ever."""

    def dies(sample: dict[str, Any]) -> dict[str, Any]:
        if int(sample["cls"]) == 40:
            os._exit(3)
        return {"cls": int(sample["cls"])}

    made = ps.shards(f"{folder}/").map(dies).batch(4)
    with ps.Loader(made, processes=1, restart_workers=True, index_dir=place) as loader:
        with pytest.raises(PenstockError, match=r"(?s)exit status 3.*3 replacements in a row"):
            list(loader)


class _Arriving:
    """A function that does something to the worker where it arrives, before that has read anything."""

    def __init__(self, arrive: Callable[..., None], *arguments: Any) -> None:
        self._arrival = arrive, *arguments

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return _image(sample)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, self._arrival


def _arrived(arrive: Callable[..., None], *arguments: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    arrive(*arguments)
    return _image


def _lacks_a_module() -> None:
    raise ImportError("no module named 'elsewhere'")


def _dies() -> None:
    os._exit(3)


def _dies_once(died: Path) -> None:
    if not died.exists():
        died.touch()
        os._exit(3)


@pytest.mark.parametrize(
    ("arrive", "told", "restarts"), [(_lacks_a_module, "elsewhere", False), (_dies, "3 replacements in a row", True)]
)
def test_all_ranks_hear_of_a_worker_that_fails_before_its_first_batch(
    folder: Path, arrive: Callable[..., None], told: str, restarts: bool
) -> None:
    """Without an index ranks agree on each batch: the rank of the worker raises its error, and the other one stops, too."""

    def train(rank: int, agree: Callable[[int], int]) -> str:
        made = ps.shards(f"{folder}/").map(_image if rank else _Arriving(arrive)).batch(4)
        options: dict[str, Any] = {"processes": 1, "lanes": 2, "index": "stream", "restart_workers": restarts}
        with ps.Loader(made, rank=rank, world_size=2, agree=agree, **options) as loader:
            with pytest.raises((PenstockError, ImportError)) as raised:
                list(loader)
        return str(raised.value)

    own, other = together(train, 2)
    assert told in own
    assert "another rank failed" in other


def test_a_worker_that_is_replaced_before_its_first_batch_does_not_end_the_job(folder: Path, tmp_path: Path) -> None:
    """It dies once, before it has read anything: the ranks have all samples nevertheless."""

    def make(rank: int, **job: Any) -> ps.Loader:
        made = ps.shards(f"{folder}/").map(_image if rank else _Arriving(_dies_once, tmp_path / "died")).batch(4)
        return ps.Loader(made, processes=1, lanes=2, index="stream", restart_workers=True, rank=rank, **job)

    ranks = in_step(make, 2)
    assert sorted(number for batches in ranks for number in valid_rows(batches, "cls")) == list(range(sum(SIZES)))
    assert (tmp_path / "died").exists()


def _forks(sample: dict[str, Any]) -> dict[str, Any]:
    """Leaves a child of the worker behind, once, which holds all that the worker has open."""
    lived = Path(os.environ["PENSTOCK_TEST_FORKED"])
    if not lived.exists() and not (child := os.fork()):
        os.setsid()
        signal.pause()
    elif not lived.exists():
        lived.write_text(str(child))
    return {"cls": int(sample["cls"])}


def test_a_worker_that_leaves_children_is_seen_to_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other end of its socket stays open in its child; that it died is noticed nevertheless."""
    forked = tmp_path / "forked"
    monkeypatch.setenv("PENSTOCK_TEST_FORKED", str(forked))
    made = ps.shards(f"{_many(tmp_path / 'many')}/").map(_forks).batch(4)
    try:
        with ps.Loader(made, processes=1, threads=1, index="stream") as loader:
            before = children()
            steps = iter(loader)
            next(steps)
            os.kill(min(children() - before), signal.SIGKILL)
            began_s = time.monotonic()
            with pytest.raises(WorkerDiedError, match="SIGKILL"):
                list(steps)
            assert time.monotonic() - began_s < DEATH_S_MAX
    finally:
        os.kill(int(forked.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("way", ["closed", "killed"])
def test_programs_that_a_worker_started_end_with_it(tmp_path: Path, way: str) -> None:
    """A function waits for a program that hangs: when the loader is closed, or the worker has died, the program ends."""
    note = tmp_path / "program"

    def waits(sample: dict[str, Any]) -> dict[str, Any]:
        if int(sample["cls"]) == 8:  # of a batch that is made ahead
            with subprocess.Popen(["sleep", "1000"]) as program:
                (tmp_path / "writing").write_text(str(program.pid))
                (tmp_path / "writing").rename(note)
        return {"cls": int(sample["cls"])}

    made = ps.shards(f"{_many(tmp_path / 'many')}/").map(waits).batch(4)
    with ps.Loader(made, processes=1, threads=1, index="stream") as loader:
        before = children()
        steps = iter(loader)
        next(steps)
        (worker,) = children() - before
        while not note.exists():
            time.sleep(0.01)
        program = int(note.read_text())
        try:
            if way == "killed":
                os.kill(worker, signal.SIGKILL)
                with pytest.raises(WorkerDiedError, match="SIGKILL"):
                    list(steps)
            else:
                loader.close()
            assert has_ended(program)
        finally:
            if is_alive(program):
                os.kill(program, signal.SIGKILL)


def test_a_fork_leaves_the_parent_undisturbed(tmp_path: Path) -> None:
    """A child that is forked in the middle is told so, reads with workers of its own, and takes nothing from the parent."""
    made = pipeline(_many(tmp_path / "many"), batch=8)
    with ps.Loader(made, processes=2, lanes=4, index="stream") as loader:
        steps = iter(loader)
        first = next(steps)

        def reads_anew() -> bool:
            with pytest.raises(ClosedError, match="in the child"):
                next(steps)
            loader.close()
            with ps.Loader(made, processes=2, lanes=4, index="stream") as own:
                return sorted(numbers(own)) == list(range(800))

        assert exit_code_of(start_child(reads_anew)) == 0
        assert sorted(numbers([first, *steps])) == list(range(800))


_SPAWNED = """
import multiprocessing, sys
import penstock as ps

def doubled(sample):
    return {"cls": 2 * sample["cls"]}

def train(data):
    made = ps.shards(data).decode(ps.Integer("cls")).map(doubled).batch(16)
    with ps.Loader(made, processes=1) as loader:
        print(sum(int(batch["cls"].sum()) for batch in loader))

if __name__ == "__main__":
    rank = multiprocessing.get_context("spawn").Process(target=train, args=(sys.argv[1],))
    rank.start()
    rank.join()
"""


def test_functions_of_a_spawned_main_module_reach_the_workers(folder: Path, tmp_path: Path) -> None:
    """A rank that ``spawn`` started has its script's functions in a module that no worker can import: they go along."""
    script = tmp_path / "train.py"
    script.write_text(_SPAWNED)
    command = [sys.executable, str(script), f"{folder}/"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{2 * sum(range(sum(SIZES)))}\n"


def test_an_exception_crosses_with_its_traceback(folder: Path, place: Path) -> None:
    """A user's error keeps class, fields, notes and the worker's traceback; batches before it are delivered."""

    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        if int(sample["cls"]) == 30:
            error = ValueError("not this one")
            error.add_note("a note of the user's")
            raise error
        return {"cls": int(sample["cls"])}

    made = ps.shards(f"{folder}/").map(fails).batch(4)
    seen = []
    with ps.Loader(made, processes=2, lanes=2, index_dir=place) as loader, pytest.raises(DecodeError) as raised:
        seen.extend(loader)
    before = []
    with ps.Loader(made, lanes=2, index_dir=place) as loader, pytest.raises(DecodeError) as expected:
        before.extend(loader)
    for left, right in zip(before, seen, strict=True):
        assert_same(left, right)
    assert str(raised.value) == str(expected.value)
    told = "\n".join(raised.value.__notes__)
    assert "in fails" in told
    assert "not this one" in told
    assert "a note of the user's" in told
    assert "worker" in told


def test_a_corrupt_shard_is_told(folder: Path, place: Path) -> None:
    """What a worker cannot read is the same error as without workers."""
    (folder / "s-002.tar").write_bytes(b"\1" * (folder / "s-002.tar").stat().st_size)
    for processes in (0, 2):
        with ps.Loader(pipeline(folder), processes=processes, lanes=2, index="stream") as loader:
            with pytest.raises(PenstockError, match=r"s-002\.tar"):
                list(loader)


# ── nothing left ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("mode", ["require", "stream"])
@pytest.mark.parametrize("way", ["end", "break", "error", "dropped", "unstarted"])
def test_everything_is_released(folder: Path, place: Path, way: str, mode: Any) -> None:
    """Threads, processes, descriptors and memory are gone after close, break, an error in the loop, and collection."""
    before = children()
    loader: Any = ps.Loader(pipeline(folder), processes=2, lanes=4, index=mode, index_dir=place)
    kept: Any = None
    if way == "error":
        with pytest.raises(ZeroDivisionError), loader:  # noqa: PT012 - what is tested is a loop that fails
            for kept in loader:  # noqa: B007 - looked at below
                _ = 1 / 0
    elif way == "dropped":
        kept = next(iter(loader))
    else:
        with loader:
            for kept in loader if way != "unstarted" else ():  # noqa: B007
                if way == "break":
                    break
    if kept is not None:
        seen = numbers([kept])
        del loader
        gc.collect()
        assert numbers([kept]) == seen
        assert not children() - before
    del kept


SCRIPT = """
import sys
import penstock as ps

def slow(sample):
    return {"cls": int(sample["cls"])}

made = ps.shards(sys.argv[1]).shuffle(window=16).map(slow).batch(2)
if __name__ == "__main__":
    try:
        with ps.Loader(made, processes=2, lanes=2, index="stream") as loader:
            while True:
                for step, batch in enumerate(loader):
                    if step == 3:
                        from pathlib import Path
                        pids = [p for t in Path("/proc/self/task").iterdir() for p in (t / "children").read_text().split()]
                        print(*pids, flush=True)
    except KeyboardInterrupt:
        sys.exit(77)
"""


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_workers_do_not_outlive_the_program(folder: Path, signal_number: signal.Signals) -> None:
    """Ctrl-C, which a terminal sends to the whole group, ends it cleanly; SIGKILL ends the workers too."""
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, f"{folder}/"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert child.stdout is not None
    try:
        workers = list(map(int, child.stdout.readline().split()))
        assert len(workers) == 2
        if signal_number == signal.SIGINT:
            os.killpg(child.pid, signal_number)
        else:
            os.kill(child.pid, signal_number)
        _, errors = child.communicate(timeout=10)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == (77 if signal_number == signal.SIGINT else -signal.SIGKILL), errors
    assert not errors
    deadline_s = time.monotonic() + DEATH_S_MAX
    while any(map(is_alive, workers)):
        assert time.monotonic() < deadline_s, workers
        os.sched_yield()


# ── the limit of open files ────────────────────────────────────────────────────────────────────────────────────────────


def _use_all_descriptors() -> None:
    """What a leak elsewhere in the program does."""
    os.close(lowest := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def test_a_loader_without_descriptors_gives_no_wrong_values(tmp_path: Path) -> None:
    """A worker replaces its heap by a larger one, whose descriptor the kernel drops: the old heap is not read instead."""

    def longer(sample: dict[str, Any]) -> dict[str, Any]:
        number = int(sample["cls"])
        return {"cls": number, "text": f"{number:05d}" * (2_400 if number < 100 else 12_000)}

    made = ps.shards(f"{_many(tmp_path / 'many')}/").map(longer).batch(4)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ps.Loader(made, processes=1, index="stream") as loader:
        steps = iter(loader)
        try:
            with pytest.raises(PenstockError, match=r"too many open files.*ulimit -n") as raised:  # noqa: PT012
                for step, batch in enumerate(steps):
                    for number, text in zip(batch["cls"].tolist(), batch["text"], strict=True):
                        assert text == longer({"cls": number})["text"]
                    if step == 12:
                        _use_all_descriptors()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert not isinstance(raised.value, OSError)
        with pytest.raises(PenstockError, match="ulimit -n"):
            next(steps)


@pytest.mark.parametrize("free_count", [0, 1])
def test_a_worker_without_descriptors_is_an_error(tmp_path: Path, free_count: int) -> None:
    """It gets no memory of another slot, or cannot map it: the loader learns why, in place of waiting."""
    marker = tmp_path / "limited"

    def limited(sample: dict[str, Any]) -> dict[str, Any]:
        if not marker.exists():
            marker.touch()
            os.close(lowest := os.dup(0))
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (lowest + free_count, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
            )
        return {"cls": int(sample["cls"])}

    made = ps.shards(f"{_many(tmp_path / 'many')}/").map(limited).batch(4)
    with ps.Loader(made, processes=1, threads=1, index="stream") as loader:
        with pytest.raises(PenstockError, match=r"(?i)too many open files.*ulimit -n"):
            list(loader)


# ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_batches_that_are_kept_stay_as_they_are(folder: Path, place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Memory comes back only when a batch is dropped; for a loop that keeps all, more is made, with one warning."""
    made = ps.shards(f"{folder}/").shuffle(window=9).map(_image).batch(2)
    with ps.Loader(made, lanes=4, index_dir=place) as loader:
        expected = list(loader)
    with ps.Loader(made, processes=2, lanes=4, index_dir=place) as loader, caplog.at_level(logging.WARNING):
        kept = list(loader)
        addresses = {batch["picture"].ctypes.data for batch in kept}
        assert len(addresses) == len(kept)
        assert not any(batch["picture"].flags.owndata for batch in kept)
        warnings = [record for record in caplog.records if "holds" in record.getMessage()]
        assert len(warnings) == 1
    for left, right in zip(expected, kept, strict=True):
        assert_same(left, right)


def _start_saving(batch: dict[str, Any], expected: dict[str, Any], reading: int, writing: int) -> int:
    """A forked child that takes its time with a batch: it looks at it when the parent has closed the pipe."""

    def is_kept() -> bool:
        os.close(writing)
        os.read(reading, 1)
        assert_same(expected, batch)
        return True

    return start_child(is_kept)


def test_a_forked_child_keeps_its_batch(folder: Path, place: Path) -> None:
    """A child that saves a batch while the loop goes on has what it was given, and the loop gets its batches as ever."""
    made = ps.shards(f"{folder}/").shuffle(window=9).map(_image).batch(2)
    with ps.Loader(made, lanes=4, index_dir=place) as loader:
        expected = list(loader)
    reading, writing = os.pipe()
    saving = []
    with ps.Loader(made, processes=2, lanes=4, index_dir=place, prefetch_batches=1) as loader:
        for step, batch in enumerate(loader):
            assert_same(expected[step], batch)
            if step in (2, 3, 9):
                saving.append(_start_saving(batch, expected[step], reading, writing))
    os.close(writing)
    assert [exit_code_of(child) for child in saving] == [0, 0, 0]
    os.close(reading)


def test_memory_is_used_again(folder: Path, place: Path) -> None:
    """A loop that drops its batches sees the same few addresses, and no warning."""
    made = ps.shards(f"{folder}/").shuffle(window=9).map(_image).batch(2)
    with ps.Loader(made, processes=2, lanes=4, index_dir=place, prefetch_batches=2) as loader:
        addresses = {batch["picture"].ctypes.data for batch in loader}
    assert len(addresses) <= 6


def test_statistics_are_the_sums_of_the_workers(folder: Path, place: Path) -> None:
    """Samples, batches and bytes as without processes; seconds of reading and decoding come across."""
    made = ps.shards(f"{folder}/").shuffle(window=9).map(_image).batch(6)
    found = []
    for processes in (0, 2):
        with ps.Loader(made, processes=processes, lanes=4, index="stream") as loader:
            for _ in loader:
                pass
            found.append(loader.statistics())
    none, two = found
    assert (two.samples, two.batches, two.bytes) == (none.samples, none.batches, none.bytes)
    assert two.parse_s > 0
    assert two.decode_s > 0


def test_what_cannot_cross_is_refused(folder: Path, place: Path) -> None:
    """Objects that are no numbers, arrays, str or bytes need processes=0, and the error says so."""
    made = ps.shards(f"{folder}/").map(lambda sample: {"cls": int(sample["cls"]), "what": {"a": 1}}).batch(4)
    with ps.Loader(made, processes=1, index_dir=place) as loader:
        with pytest.raises(ConfigError, match=r"'what': dict cannot be sent.*processes=0"):
            next(iter(loader))
    later = ps.shards(f"{folder}/").map(lambda sample: {"what": "a" if int(sample["cls"]) < 30 else None}).batch(4)
    with ps.Loader(later, processes=1, lanes=1, index_dir=place) as loader:
        with pytest.raises(ConfigError, match=r"'what': NoneType.* cannot be sent.*processes=0"):
            list(loader)
    flat = ps.shards(f"{folder}/").flat_map(lambda sample: [{"cls": 1, "lock": threading.Lock()}]).batch(4)
    with ps.Loader(flat, processes=1, index_dir=place) as loader:
        with pytest.raises(ConfigError, match=r"'lock': lock cannot be sent.*processes=0"):
            next(iter(loader))
    with pytest.raises(ConfigError, match="processes=-1"):
        ps.Loader(flat, processes=-1)


def test_max_errors_is_of_all_workers(folder: Path, place: Path) -> None:
    """max_errors bounds what all workers drop together, and statistics count it."""

    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        if int(sample["cls"]) % 10 == 0:
            raise ValueError("a tenth of them")
        return {"cls": int(sample["cls"])}

    enough = ps.shards(f"{folder}/").map(fails, max_errors=8).batch(4)
    with ps.Loader(enough, processes=2, lanes=4, index_dir=place) as loader:
        assert len(numbers(loader)) == sum(SIZES) - 8
        assert loader.statistics().dropped == {"map[0]": 8}
    few = ps.shards(f"{folder}/").map(fails, max_errors=6).batch(4)
    with ps.Loader(few, processes=2, lanes=4, index_dir=place) as loader:
        with pytest.raises(DecodeError, match="a tenth"):
            list(loader)


@pytest.mark.parametrize("mode", ["stream", "require"])
@pytest.mark.parametrize("kept", [range(40, 60), range(75, 76), ()], ids=["the last", "one", "none"])
def test_a_worker_may_drop_whole_batches(folder: Path, place: Path, mode: Any, kept: Any) -> None:
    """A filter that leaves nothing of a worker's first batches, or of any, gives what it gives without workers."""

    def made(processes: int) -> ps.Loader:
        filtered = ps.shards(f"{folder}/").filter(lambda sample: int(sample["cls"]) in kept)
        return ps.Loader(filtered.batch(4), processes=processes, lanes=4, index=mode, index_dir=place)

    with made(0) as near, made(2) as far:
        for left, right in zip(near, far, strict=True):  # its columns are known from the first sample that is kept
            assert_same(left, right)


def test_workers_wait_between_epochs(folder: Path, place: Path) -> None:
    """The next epoch is done by the same processes, which give way to the loop; a restart in the middle takes new ones."""
    with ps.Loader(pipeline(folder), processes=2, lanes=4, index_dir=place) as loader:
        before = children()
        seen = []
        for _ in loader.epochs(3):
            for _ in loader:
                pass
            seen.append(children() - before)
        assert len(seen[0]) == 2
        assert seen[0] == seen[1] == seen[2]
        assert {os.getpriority(os.PRIO_PROCESS, each) for each in seen[0]} == {min(19, os.nice(0) + NICENESS)}
        assert loader.statistics().threads_cpu_s == 0
        os.kill(min(seen[0]), signal.SIGKILL)
        os.waitid(os.P_PID, min(seen[0]), os.WEXITED | os.WNOWAIT)
        expected = numbers(loader)
        assert len(children() - before) == 2
        loader.restart(3)
        next(iter(loader))
        loader.restart()
        assert numbers(loader) == expected
    assert not children() - before
