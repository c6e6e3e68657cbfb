"""Transforms in real worker processes: output, errors, limits, and what is left behind."""

from __future__ import annotations

import asyncio
import bisect
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import penstock as ps
from fronts import RunningFront
from penstock.errors import ClosedError, ConfigError, ObjectChangedError
from penstock.gateway.buckets.upstream import UpstreamBucket
from penstock.gateway.objects import S3Error
from penstock.types import ByteRange, ObjectInfo
from servers.leaks import is_alive
from transforming import FolderSource, MemoryOutput, get_request, running

pytestmark = [pytest.mark.server, pytest.mark.heavy]

LIMIT_S = 30.0
"""Time for what takes milliseconds on a machine without other work."""


async def gone(process_id: int) -> None:
    """Wait until a process has ended."""
    async with asyncio.timeout(LIMIT_S):
        while is_alive(process_id):
            await asyncio.sleep(0.01)


def test_bytes_headers_and_size(tmp_path: Path) -> None:
    """A function that returns bytes has a known size; one that returns a Response chooses headers and size."""

    async def run() -> None:
        async with running("upper", tmp_path, times=2, suffix="!") as bench:
            output = await bench.run()
            assert bytes(output.data) == b"HELLO WORLDHELLO WORLD!"
            assert (output.size_bytes, output.headers) == (23, {"Content-Type": "application/octet-stream"})
        async with running("with_headers", tmp_path) as bench:
            output = await bench.run()
            assert (bytes(output.data), output.size_bytes) == (b"abcdef", 6)
            assert output.headers == {"Content-Type": "text/x-test", "x-amz-meta-key": "key"}

    asyncio.run(run())


@pytest.mark.parametrize("size", [0, 1, 70_000, 5_000_000], ids=str)
def test_a_source_passes_through(tmp_path: Path, size: int) -> None:
    """Iterating over the reader gives all bytes of the source, whatever its size."""
    data = os.urandom(size)
    (tmp_path / "key").write_bytes(data)

    async def run() -> None:
        async with running("copy", tmp_path) as bench:
            assert bytes((await bench.run()).data) == data
            assert bytes((await bench.run()).data) == data

    asyncio.run(run())


@pytest.mark.parametrize("size", [1, 200, 32 * 1024, 32 * 1024 + 1, 300_000], ids=str)
def test_pieces_of_all_sizes(tmp_path: Path, size: int) -> None:
    """Pieces that are gathered and pieces that are sent directly arrive whole and in order."""

    async def run() -> None:
        async with running("small_pieces", tmp_path, count=50, size=size) as bench:
            assert bytes((await bench.run()).data) == b"x" * size * 50
        async with running("reused_buffer", tmp_path) as bench:
            assert bytes((await bench.run()).data) == b"".join(bytes([number]) * 100 for number in range(100))

    asyncio.run(run())


def test_the_first_byte_is_early(tmp_path: Path) -> None:
    """Bytes that were yielded arrive while the transform still works."""

    async def run() -> None:
        until = tmp_path / "until"
        async with running("first_then_wait", tmp_path, until=until) as bench:
            output = MemoryOutput()
            task = asyncio.create_task(bench.run(output))
            async with asyncio.timeout(LIMIT_S):
                await output.arrived.wait()
            assert bytes(output.data) == b"first"
            until.touch()
            await task
            assert bytes(output.data) == b"firstlast"

    asyncio.run(run())


def test_a_source_that_changes_fails(tmp_path: Path) -> None:
    """If the source is replaced after the call began, the call fails and mixes no versions."""
    (tmp_path / "key").write_bytes(b"a" * 50_000_000)

    async def run() -> None:
        source = FolderSource(tmp_path, "key")
        async with running("copy", tmp_path) as bench:
            (tmp_path / "new").write_bytes(b"b" * 50_000_000)
            (tmp_path / "new").replace(tmp_path / "key")
            with pytest.raises(ObjectChangedError, match="replaced"):
                await bench.run(source=source)
            assert (await bench.run(MemoryOutput(keeps=False))).length_bytes == 50_000_000

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("half", {}, "failed with ValueError"),
        ("fails_at_once", {}, "failed with ValueError"),
        ("text", {}, "failed with WrongOutputError"),
        ("nothing", {}, "failed with WrongOutputError"),
        ("wrong_size", {}, "failed with DataError"),
        ("system_exit", {}, "failed with SystemExit"),
        ("bad_header", {}, "a header that a result cannot have"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_errors_are_short_for_clients(
    tmp_path: Path, name: str, arguments: dict[str, str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the author's names its class and no path or text to the client, and the process goes on."""

    async def run() -> None:
        async with running(name, tmp_path, **arguments) as bench:
            before = bench.transform.pool.process_ids
            for _ in range(2):
                with pytest.raises(S3Error, match=message) as caught:
                    await bench.run()
                assert caught.value.code == "TransformFailed"
                assert not re.search(r"/\w|secret|Traceback", caught.value.message)
            assert bench.transform.pool.process_ids == before or name == "bad_header"

    asyncio.run(run())
    assert name == "bad_header" or "Traceback" in caplog.text


def test_the_log_has_the_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log names access point, transform, key and request, and shows the author's lines only."""
    monkeypatch.delenv("PENSTOCK_TRACEBACK", raising=False)

    async def run() -> None:
        async with running("half", tmp_path) as bench:
            with pytest.raises(S3Error):
                await bench.run()

    asyncio.run(run())
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    text = record.getMessage()
    assert "train" in text
    assert "'key'" in text
    assert "REQ1" in text
    assert 'raise ValueError("the secret file' in text
    assert "penstock/gateway" not in text


def test_an_author_may_refuse(tmp_path: Path) -> None:
    """An ``S3Error`` that a transform raises reaches the client as it is."""

    async def run() -> None:
        async with running("refuses", tmp_path) as bench:
            with pytest.raises(S3Error, match="This is not a picture") as caught:
                await bench.run()
            assert (caught.value.code, caught.value.status) == ("InvalidRequest", 415)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "how"),
    [("segfault", "signal 11"), ("exits", "exit status 7"), ("kills", "signal 9")],
    ids=["segfault", "exits", "kills"],
)
def test_a_dead_worker_fails_one_call(tmp_path: Path, name: str, how: str) -> None:
    """A worker that dies fails its own call with the reason, and another process takes the next one."""

    async def run() -> None:
        async with running(name, tmp_path) as bench:
            for _ in range(2):
                with pytest.raises(S3Error, match=how) as caught:
                    async with asyncio.timeout(LIMIT_S):
                        await bench.run()
                assert caught.value.status == 500

    asyncio.run(run())


@pytest.mark.parametrize("name", ["hang", "hang_deaf"])
def test_a_call_that_hangs_is_stopped(tmp_path: Path, name: str) -> None:
    """After its time a call fails, its process is replaced, and the next call is tried again."""

    async def run() -> None:
        async with running(name, tmp_path, time_s_max=0.2) as bench:
            before = bench.transform.pool.process_ids
            with pytest.raises(S3Error, match=r"longer than 0\.2 s") as caught:
                await bench.run()
            assert caught.value.code == "TransformTimeout"
            with pytest.raises(S3Error, match="longer than"):
                await bench.run()
            assert not set(before) & set(bench.transform.pool.process_ids)

    asyncio.run(run())


def test_time_in_which_nothing_is_taken_does_not_count(tmp_path: Path) -> None:
    """A reader that is slower than the time limit does not end the call."""

    async def run() -> None:
        async with running("large_pieces", tmp_path, count=8, time_s_max=1.0) as bench:
            output = MemoryOutput()
            output.takes.clear()
            task = asyncio.create_task(bench.run(output))
            await output.arrived.wait()
            await asyncio.sleep(1.2)
            output.takes.set()
            await task
            assert output.length_bytes == 8 << 20

    asyncio.run(run())


def test_a_flood_is_stopped(tmp_path: Path) -> None:
    """Output beyond the limit fails the call, and the process takes the next one."""

    async def run() -> None:
        async with running("flood", tmp_path, output_bytes_max=50_000_000) as bench:
            for _ in range(2):
                output = MemoryOutput(keeps=False)
                with pytest.raises(S3Error, match="larger than allowed"):
                    await bench.run(output)
                assert output.length_bytes <= 50_000_000
            assert bench.transform.pool.starts_count == 1

    asyncio.run(run())


def test_memory_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A transform that takes more memory than allowed fails with that reason, and its process is replaced."""

    async def run() -> None:
        async with running("gobble", tmp_path, memory_bytes_max=1 << 30) as bench:
            before = bench.transform.pool.process_ids
            for _ in range(2):
                with pytest.raises(S3Error, match="needs more memory"):
                    await bench.run()
            assert not set(before) & set(bench.transform.pool.process_ids)

    asyncio.run(run())


def test_cancelling_ends_the_call(tmp_path: Path) -> None:
    """A cancelled call runs the author's clean-up, and its process takes the next call."""
    folder = tmp_path / "temporary"
    folder.mkdir()

    async def run() -> None:
        async with running("cleans_up", tmp_path, scratch=folder) as bench:
            for _ in range(3):
                output = MemoryOutput()
                task = asyncio.create_task(bench.run(output))
                async with asyncio.timeout(LIMIT_S):
                    await output.arrived.wait()
                assert len(list(folder.iterdir())) == 1
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            output = MemoryOutput()
            task = asyncio.create_task(bench.run(output))
            await output.arrived.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert bench.transform.pool.starts_count == 1

    asyncio.run(run())
    assert list(folder.iterdir()) == []


def test_cancelling_at_every_moment(tmp_path: Path) -> None:
    """Wherever a call is cancelled, the next call of the same process gets its own output."""
    (tmp_path / "key").write_bytes(b"k" * 3_000_000)
    (tmp_path / "other").write_bytes(b"o" * 3_000_000)

    async def run() -> None:
        async with running("copy", tmp_path) as bench:
            for turns in range(0, 60, 3):
                task = asyncio.create_task(bench.run())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert bytes((await bench.run(key="other")).data) == b"o" * 3_000_000
            assert bench.transform.pool.starts_count == 1

    asyncio.run(run())


def longest_decreasing(numbers: list[int]) -> int:
    """Length of the longest subsequence that decreases: 2 if two increasing sequences were merged."""
    tails: list[int] = []
    for number in numbers:
        at = bisect.bisect_left(tails, -number)
        tails[at : at + 1] = [-number]
    return len(tails)


def test_many_calls_share_few_processes(tmp_path: Path) -> None:
    """A hundred calls at once on two processes all succeed, first come, first served."""

    async def run() -> None:
        async with running("upper", tmp_path, processes=2) as bench:
            for number in range(100):
                (tmp_path / f"{number}.txt").write_text(f"text {number}")
            ended: list[int] = []

            async def one(number: int) -> None:
                assert await bench.text(key=f"{number}.txt") == f"TEXT {number}"
                ended.append(number)

            await asyncio.gather(*(one(number) for number in range(100)))
            # Calls in line on two processes end as two increasing sequences merged, whatever holds one process up.
            assert longest_decreasing(ended) < 10
            assert len(bench.transform.pool.process_ids) == 2

    asyncio.run(run())


def test_cancelled_waiting_calls_lose_nothing(tmp_path: Path) -> None:
    """Calls that are cancelled while they wait for a process leave the line, and the process serves the others."""

    async def run() -> None:
        until = tmp_path / "until"
        async with running("first_then_wait", tmp_path, until=until) as bench:
            tasks = [asyncio.create_task(bench.run()) for _ in range(10)]
            await asyncio.sleep(0)
            for task in tasks[1::2]:
                task.cancel()
            until.touch()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(each, MemoryOutput) for each in done] == [True, False] * 5
            assert bench.transform.pool.waiting_count == 0

    asyncio.run(run())


def test_an_idle_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    """If a process dies while it waits, no call notices."""

    async def run() -> None:
        async with running("process_id", tmp_path) as bench:
            first = int(await bench.text())
            os.kill(first, signal.SIGKILL)
            await gone(first)
            await asyncio.sleep(0)
            async with asyncio.timeout(LIMIT_S):
                while bench.transform.pool.starts_count < 2:
                    await asyncio.sleep(0.01)
            assert int(await bench.text()) != first

    asyncio.run(run())


def test_nothing_is_left(tmp_path: Path, nothing_left: Callable[[], AbstractContextManager[None]]) -> None:
    """After ``close`` no process, descriptor or thread is left, also if calls ran, waited, or had killed their worker."""

    async def run() -> None:
        with nothing_left():
            async with running("hang", tmp_path, processes=2) as bench:
                tasks = [asyncio.create_task(bench.run()) for _ in range(5)]
                await asyncio.sleep(0.1)
            failed = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(each, S3Error | ClosedError) for each in failed)
            async with running("exits", tmp_path) as bench:
                with pytest.raises(S3Error):
                    await bench.run()
            with pytest.raises(ConfigError):
                async with running("missing", tmp_path):
                    pass

    asyncio.run(run())


def test_children_of_a_worker_end_with_it(tmp_path: Path) -> None:
    """A process that a transform started does not outlive its worker."""

    async def run() -> None:
        async with running("child", tmp_path) as bench:
            output = MemoryOutput()
            with pytest.raises(S3Error):
                await bench.run(output)
        # the piece may be lost with the process; then no number is known
        if output.data:
            await gone(int(output.data))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("missing", {}, "has no function missing"),
        ("undigestible", {}, "UNSTABLE holds an object"),
        ("upper", {"arguments": {"tims": "1"}}, "did you mean times="),
        ("upper", {"arguments": {"times": "many"}}, "must be a whole number"),
        ("copy", {"arguments": {"level": "1"}}, "takes no arguments"),
        ("sized", {}, "needs the argument width"),
        ("sized", {"arguments": {"width": "1000", "height": "1000"}}, "the picture would be too large"),
        ("no.such.module:function", {}, "there is no module no.such.module"),
        ("./nowhere.py:function", {}, "there is no file"),
    ],
    ids=["function", "digest", "unknown", "ill-typed", "none", "required", "check", "module", "file"],
)
def test_wrong_configurations_fail_at_the_start(
    tmp_path: Path, name: str, settings: dict[str, object], message: str
) -> None:
    """A transform that cannot work as it is configured is refused before the first request."""

    async def run() -> None:
        with pytest.raises(ConfigError, match=message):
            async with running(name, tmp_path, **settings):
                pass

    asyncio.run(run())


def test_a_module_that_fails_to_import_shows_its_traceback(tmp_path: Path) -> None:
    """The error at the start has the author's traceback."""
    (tmp_path / "broken.py").write_text("import json\n\nVALUE = json.loads('{')\n")

    async def run() -> None:
        with pytest.raises(ConfigError, match=r"broken\.py.*line 3") as caught:
            async with running(f"{tmp_path}/broken.py:transform", tmp_path):
                pass
        assert "JSONDecodeError" in str(caught.value)

    asyncio.run(run())


def test_code_that_changes_is_not_used_for_old_results(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A process that is started after the author changed the code does not serve under the old ETag."""
    path = tmp_path / "mine.py"
    path.write_text("import os\ndef one(reader, request):\n    os._exit(1)\n")

    async def run() -> None:
        async with running(f"{path}:one", tmp_path) as bench:
            path.write_text("def one(reader, request):\n    return b'two'\n")
            with pytest.raises(S3Error, match="exit status 1"):
                await bench.run()
            with pytest.raises(S3Error, match="cannot be started") as caught:
                async with asyncio.timeout(LIMIT_S):
                    await bench.run()
            assert caught.value.status == 503

    asyncio.run(run())
    assert "its code has changed" in caplog.text


def test_identities_differ_where_bytes_may(tmp_path: Path) -> None:
    """Code, version and arguments are part of the identity, and equal ones give equal identities."""

    async def identity(name: str, **settings: object) -> str:
        async with running(name, tmp_path, **settings) as bench:
            return bench.transform.identity

    async def run() -> None:
        found = [
            await identity("upper"),
            await identity("upper", times=2),
            await identity("upper", times=3),
            await identity("copy"),
            await identity("repeated"),
        ]
        assert len(set(found)) == 5
        assert await identity("upper", times=2) == found[1]
        path = tmp_path / "mine.py"
        path.write_text("def one(reader, request):\n    return b'one'\n")
        first = await identity(f"{path}:one")
        path.write_text("\n\ndef one(reader, request):\n    # a comment\n    return b'one'\n")
        assert await identity(f"{path}:one") == first
        path.write_text("def one(reader, request):\n    return b'two'\n")
        assert await identity(f"{path}:one") != first
        assert await identity("versioned")

    asyncio.run(run())


def test_epoch_and_seed(tmp_path: Path) -> None:
    """Epoch and seed come from query, header or access point, are arguments, and decide the random numbers."""

    async def run() -> None:
        async with running("augmented", tmp_path, epoch="7") as bench:
            assert bench.transform.is_deterministic
            arguments = bench.transform.arguments
            assert arguments(get_request()) == {"epoch": "7"}
            query = {"x-penstock-epoch": "03", "x-penstock-seed": "5"}
            assert arguments(get_request(query=query)) == {"epoch": "3", "seed": "5"}
            assert arguments(get_request(headers={"x-penstock-epoch": "4"})) == {"epoch": "4"}
            with pytest.raises(S3Error, match="must be a whole number"):
                arguments(get_request(query={"x-penstock-epoch": "-1"}))
            one, again = await bench.text(query=query), await bench.text(query=query)
            assert one == again
            assert one.startswith("3 5 ")
            assert (await bench.text()).startswith("7 0 ")
            assert await bench.text(query=query | {"x-penstock-epoch": "4"}) != one
        async with running("sees_no_epoch", tmp_path, epoch="7") as bench:
            request = {"query": {"x-penstock-epoch": "3", "a": "b"}, "headers": {"accept": "c"}}
            assert bench.transform.arguments(get_request(**request)) == {}
            assert await bench.text(**request) == "{} {}"

    asyncio.run(run())


def test_random_augmentations_differ(tmp_path: Path) -> None:
    """A transform that is not deterministic draws new numbers unless the request names an epoch or a seed."""

    async def run() -> None:
        async with running("random_bytes", tmp_path) as bench:
            assert not bench.transform.is_deterministic
            assert (await bench.run()).data != (await bench.run()).data
            query = {"x-penstock-epoch": "1"}
            assert (await bench.run(query=query)).data == (await bench.run(query=query)).data
        async with running("random_bytes", tmp_path, deterministic=True) as bench:
            assert bench.transform.is_deterministic

    asyncio.run(run())


def test_declared_parameters_and_headers(tmp_path: Path) -> None:
    """What a transform declares of query and headers is part of the arguments, typed, and all that it sees."""

    async def run() -> None:
        arguments = {"width": "4", "fit": "pad", "names": "a, b", "scale": "0.5", "box": "1x2"}
        async with running("sized", tmp_path, arguments=arguments) as bench:
            request = {"query": {"width": "9", "mode": "x", "other": "y"}, "headers": {"accept": "image/png"}}
            assert bench.transform.arguments(get_request(**request)) == {
                "query.width": "9",
                "query.mode": "x",
                "header.accept": "image/png",
            }
            expected = (9, 8, "pad", ("a", "b"), 0.5, [1, 2], {"mode": "x", "width": "9"}, {"accept": "image/png"})
            assert await bench.text(**request) == repr(expected)
            for width, message in (("wide", "must be a whole number"), ("100000", "too large")):
                with pytest.raises(S3Error, match=message) as caught:
                    await bench.run(query={"width": width})
                assert (caught.value.code, caught.value.status) == ("InvalidArgument", 400)

    asyncio.run(run())


def test_sizes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A declared size is told without producing the result, many by one question, and while all processes work."""

    async def run() -> None:
        infos = [ObjectInfo(f"key{number}", number) for number in range(1500)] + [ObjectInfo("a.unknown", 1)]
        async with running("repeated", tmp_path, times=3) as bench:
            sizes = await asyncio.gather(*(bench.transform.size_bytes(info, {}) for info in infos))
            assert sizes == [3 * number for number in range(1500)] + [None]
            assert bytes((await bench.run()).data) == b"hello world" * 3
        async with running("copy", tmp_path) as bench:
            assert await bench.transform.size_bytes(infos[5], {}) is None
        async with running("broken_size", tmp_path) as bench:
            assert await bench.transform.size_bytes(infos[5], {}) is None

    asyncio.run(run())
    assert "RuntimeError: no size" in caplog.text


def test_ranges(tmp_path: Path) -> None:
    """A transform that maps ranges produces the range that is wanted."""

    async def run() -> None:
        async with running("swapped", tmp_path) as bench:
            assert bench.transform.maps_ranges
            assert await bench.text() == "HELLO WORLD"
            assert await bench.text(span=ByteRange(6, 9)) == "WOR"
        async with running("copy", tmp_path) as bench:
            assert not bench.transform.maps_ranges

    asyncio.run(run())


def test_pipelines(tmp_path: Path) -> None:
    """Transforms that follow each other run in one process, with the arguments in their parentheses."""
    (tmp_path / "key").write_bytes(b"ab" * 100_000)
    here = Path(__file__).parent / "authored.py"

    async def run() -> None:
        async with running(f"{here}:copy | {here}:upper(times=2) | {here}:upper(suffix='a, b | c')", tmp_path) as bench:
            assert await bench.text() == "AB" * 200_000 + "a, b | c"
        async with running(f"{here}:reused_buffer | {here}:copy", tmp_path) as bench:
            assert bytes((await bench.run()).data) == b"".join(bytes([number]) * 100 for number in range(100))
        async with running(f"{here}:selecting(jpg, cls, invert=true)", tmp_path) as bench:
            assert await bench.text() == "(('jpg', 'cls'), True)"
        async with running(f"{here}:copy | {here}:repeated", tmp_path) as bench:
            assert await bench.transform.size_bytes(ObjectInfo("key", 5), {}) is None
            with pytest.raises(S3Error, match="UnsupportedOperation"):
                await bench.run()
        with pytest.raises(ConfigError, match="belong to no step"):
            async with running(f"{here}:copy | {here}:upper", tmp_path, times=2):
                pass

    asyncio.run(run())


def test_workers_have_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a transform has neither the upstream's keys nor those of the gateway's clients."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("AWS_PROFILE", "hidden")
    monkeypatch.setenv("PENSTOCK_GATEWAY_KEYS", "A:hidden:rw")
    monkeypatch.setenv("MODEL_PATH", "shown")

    async def run() -> None:
        async with running("environment", tmp_path) as bench:
            text = await bench.text()
            assert "hidden" not in text
            assert "MODEL_PATH=shown" in text

    asyncio.run(run())


def test_prints_go_to_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a transform prints is logged with the access point's name."""
    caplog.set_level(logging.INFO, logger="penstock.gateway.transforms")

    async def run() -> None:
        async with running("prints", tmp_path) as bench:
            await bench.run()

    asyncio.run(run())
    assert re.search(r"train\[\d+\]: hello from a transform", caplog.text)
    assert "and a warning" in caplog.text


GATEWAY = """
import asyncio, sys
from pathlib import Path
from transforming import running, MemoryOutput

async def main():
    async with running(sys.argv[1], Path(sys.argv[2]), processes=2) as bench:
        pool = bench.transform.pool
        while len(pool.process_ids) < 2:
            await asyncio.sleep(0.01)
        task = asyncio.create_task(bench.run(MemoryOutput(keeps=False)))
        await asyncio.sleep(0.3)
        print(*pool.process_ids, flush=True)
        await asyncio.gather(task)

def run():
    asyncio.run(main())

if sys.argv[3] == "thread":
    import threading
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
else:
    run()
"""


@pytest.mark.parametrize("where", ["main", "thread"])
@pytest.mark.parametrize("name", ["hang", "flood"])
def test_workers_end_with_a_killed_gateway(tmp_path: Path, name: str, where: str) -> None:
    """If the gateway is killed, its workers end, whether they wait for a call, compute or write."""
    script = tmp_path / "gateway.py"
    script.write_text(GATEWAY)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, script, name, tmp_path, where], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        workers = [int(number) for number in process.stdout.readline().split()]
        assert len(workers) == 2
    finally:
        process.kill()
        process.communicate()

    async def run() -> None:
        await asyncio.gather(*map(gone, workers))

    asyncio.run(run())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_workers_ignore_signals_to_their_group(tmp_path: Path, number: signal.Signals) -> None:
    """Signals that a terminal or a service manager sends to all processes do not end a call."""

    async def run() -> None:
        until = tmp_path / "until"
        async with running("first_then_wait", tmp_path, until=until) as bench:
            output = MemoryOutput()
            task = asyncio.create_task(bench.run(output))
            await output.arrived.wait()
            for process_id in bench.transform.pool.process_ids:
                os.kill(process_id, number)
            until.touch()
            await task
            assert bytes(output.data) == b"firstlast"

    asyncio.run(run())


class LinkedSource:
    """A source that workers read at an HTTP endpoint."""

    def __init__(self, url: str, source: FolderSource) -> None:
        self.key = source.key
        self.head = source.head
        self.signed_url = source.signed_url
        self.read = source.read
        self._url = url

    def worker_url(self) -> tuple[str, str]:
        return self._url, f"{self.key}?X-Amz-Signature=0"


def test_a_source_behind_a_signed_url(tmp_path: Path) -> None:
    """Workers read URLs with a query, large and empty objects, and refuse another version."""
    data = os.urandom(5_000_000)
    (tmp_path / "data.bin").write_bytes(data)
    (tmp_path / "empty").write_bytes(b"")

    async def run(url: str) -> None:
        async with running("copy", tmp_path) as bench:
            for key, expected in (("data.bin", data), ("empty", b"")):
                source = LinkedSource(url, FolderSource(tmp_path, key))
                assert bytes((await bench.run(source=source)).data) == expected
            source = LinkedSource(url, FolderSource(tmp_path, "data.bin"))
            (tmp_path / "new").write_bytes(data)
            (tmp_path / "new").replace(tmp_path / "data.bin")
            with pytest.raises(ObjectChangedError):
                await bench.run(source=source)
        async with running("seeks", tmp_path) as bench:
            source = LinkedSource(url, FolderSource(tmp_path, "data.bin"))
            assert (await bench.text(source=source)).startswith(f"4999996 {data[-4:]!r} {data[:4]!r} {data[4:8]!r} ")

    with RunningFront(UpstreamBucket("train", ps.connect(tmp_path))) as front:
        asyncio.run(run(f"{front.url}/train"))


def test_a_source_of_the_gateway_is_read_without_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers reach the gateway's internal endpoint also where everything else goes through a proxy."""
    monkeypatch.setenv("no_proxy", "example.test")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    async def run(url: str) -> None:
        async with running("copy", tmp_path) as bench:
            source = LinkedSource(url, FolderSource(tmp_path, "key"))
            assert bytes((await bench.run(source=source)).data) == b"hello world"

    with RunningFront(UpstreamBucket("train", ps.connect(tmp_path))) as front:
        asyncio.run(run(f"{front.url}/train"))


def test_a_forked_child_does_not_hide_the_death(tmp_path: Path) -> None:
    """A worker that dies is noticed at once, even if a process that it forked still holds its socket."""

    async def run() -> None:
        async with running("forked_child_holds_socket", tmp_path) as bench:
            for _ in range(2):
                with pytest.raises(S3Error, match="exit status 5"):
                    async with asyncio.timeout(LIMIT_S):
                        await bench.run()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (5, "{"),
        (5, "[]"),
        (5, '{"headers": {"a": 1}, "size_bytes": 1}'),
        (5, '{"headers": {}, "size_bytes": -1}'),
        (5, "[" * 100_000),
        (8, '{"kind": 1}'),
        (8, '{"kind":"S3Error","message":"","traceback":"","store_error":false,"refusal":["a"]}'),
        (4, "{}"),
        (77, ""),
    ],
    ids=["json", "list", "header", "size", "deep", "error", "refusal", "ready", "kind"],
)
def test_forged_frames_end_the_worker(tmp_path: Path, kind: int, payload: str) -> None:
    """A transform that writes to the gateway's socket fails its call, and the gateway replaces its process."""

    async def run() -> None:
        async with running("forges", tmp_path, arguments={"kind": str(kind), "payload": payload}) as bench:
            with pytest.raises(S3Error, match="TransformFailed"):
                await bench.run()
            with pytest.raises(S3Error, match="TransformFailed"):
                await bench.run()

    asyncio.run(run())


def test_a_flood_of_prints_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A transform that prints much is slowed down, and long lines are cut."""
    caplog.set_level(logging.INFO, logger="penstock.gateway.transforms")

    async def run() -> None:
        async with running("floods_the_log", tmp_path) as bench:
            assert await bench.text() == "done"

    asyncio.run(run())
    lengths = [len(record.getMessage()) for record in caplog.records]
    assert 500 <= len(lengths) <= 1100
    assert max(lengths) <= 8 * 1024 + 100


def test_processes_are_replaced_after_some_calls(tmp_path: Path) -> None:
    """With ``calls_max`` a process serves so many calls, and another one the next."""

    async def run() -> None:
        async with running("process_id", tmp_path, calls_max=2) as bench:
            found = [await bench.text() for _ in range(5)]
            assert found[0] == found[1] != found[2] == found[3] != found[4]

    asyncio.run(run())
