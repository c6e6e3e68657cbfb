from __future__ import annotations

import io
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import pipeline, write_counted
from penstock.loader.statistics import LiveLine, LoaderStatistics, Meter, bottleneck_of, prometheus


def statistics(**values: float) -> LoaderStatistics:
    meter = Meter()
    for name, value in values.items():
        setattr(meter, name, value)
    return meter.read(threads_count=2, dropped={})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"elapsed_s": 100, "stall_s": 1, "store_s": 90}, "consumer"),
        ({"elapsed_s": 100, "stall_s": 50, "store_s": 60, "parse_s": 3, "wait_s": 20}, "store"),
        ({"elapsed_s": 100, "stall_s": 50, "store_s": 6, "parse_s": 60, "wait_s": 20}, "parse"),
        ({"elapsed_s": 100, "stall_s": 50, "store_s": 6, "parse_s": 3, "wait_s": 80, "decode_s": 190}, "decode"),
        ({}, "consumer"),
    ],
)
def test_bottleneck(values: dict[str, float], expected: str) -> None:
    """Without stall it is the consumer; with stall it is where the reader's time went."""
    assert statistics(**values).bottleneck == expected


@pytest.mark.parametrize(
    ("step_s", "threads_s", "waited_s", "expected"),
    [(90, 20, 100, True), (90, 20, 4, False), (10, 20, 100, False), (90, 1, 100, False), (0, 0, 0, False)],
)
def test_contention_needs_a_loop_that_computes_and_threads_that_wait(
    step_s: float, threads_s: float, waited_s: float, expected: bool
) -> None:
    """Both sides run, and the threads wait longer than they run: else there is no contention for the interpreter."""
    done = statistics(elapsed_s=100, step_cpu_s=step_s, threads_cpu_s=threads_s, threads_wait_s=waited_s)
    assert done.contends == expected


def test_rates() -> None:
    """Rates are per second of iterating."""
    done = statistics(samples=200, bytes=4000, elapsed_s=4, stall_s=1)
    assert (done.samples_per_s, done.bytes_per_s, done.stall_ratio) == (50, 1000, 0.25)
    assert (statistics().samples_per_s, statistics().bytes_per_s, statistics().stall_ratio) == (0, 0, 0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def loader(tmp_path: Path) -> ps.Loader:
    """One that has gone through an epoch."""
    write_counted(tmp_path, (20, 30))
    made = ps.Loader(pipeline(tmp_path, batch=10))
    list(made)
    return made


def test_the_bottleneck_shows_its_evidence(loader: ps.Loader) -> None:
    """It names a part, the seconds that prove it, and what to change, also as one line."""
    found = loader.bottleneck()
    assert found.part == loader.statistics().bottleneck
    assert set(found.seconds) == {"stalled", "store", "parse", "decode", "waited", "step", "threads", "contended"}
    assert str(found).startswith(f"{found.part}: ")
    assert found.hint in str(found)


def test_a_loop_that_contends_is_told_so_with_its_milliseconds() -> None:
    """Without stall, too: a step's own milliseconds, the threads' and their waiting, and that processes take these out."""
    meter = Meter()
    meter.batches, meter.elapsed_s, meter.wait_s = 100, 2.8, 2.0
    meter.step_cpu_s, meter.threads_cpu_s, meter.threads_wait_s = 2.0, 0.4, 1.2
    found = bottleneck_of(meter.read(threads_count=2, dropped={}))
    assert found.part == "consumer"
    for text in ("step of 28.0 ms", "ran for 20.0 ms", "ran for 4.0 ms", "waiting for 12.0 ms", "processes=1"):
        assert text in found.hint


def test_a_store_that_did_not_answer_is_the_bottleneck() -> None:
    """The seconds are among the evidence, in the hint if they are most of the waits, and in the live line."""
    meter = Meter()
    meter.elapsed_s, meter.stall_s, meter.store_s = 100.0, 50.0, 50.0
    done = meter.read(threads_count=1, dropped={}, of_stores={"unreachable_s": 40.0})
    found = bottleneck_of(done)
    assert "the store was unreachable for 40 s" in found.hint
    assert found.seconds["unreachable"] == 40
    meter.unreachable_s = 20.0
    found = bottleneck_of(meter.read(threads_count=1, dropped={}))
    assert (found.seconds["unreachable"], "unreachable" in found.hint) == (20, False)
    line = LiveLine(stream := io.StringIO())
    line.draw(done, epoch=0, batch=1, batches=None, now_s=line._drawn_s + 1)
    assert "store unreachable for 40 s" in stream.getvalue()


def test_the_loop_and_the_threads_are_measured(tmp_path: Path) -> None:
    """What a loop computes between batches is its own, what reading and decoding run is the threads'."""
    write_counted(tmp_path, (40,))
    with ps.Loader(pipeline(tmp_path, batch=10), index="stream") as loader:
        before_s = time.thread_time()
        for _ in loader:
            while time.thread_time() - before_s < 0.02:
                pass
        done = loader.statistics()
    assert 0.015 < done.step_cpu_s < done.elapsed_s
    assert done.threads_cpu_s > 0


def test_stalls_per_step_are_quantiles() -> None:
    """The median and the 99th percentile of the last steps' waits; 0 before the first."""
    meter = Meter()
    assert meter.read(threads_count=1, dropped={}).stall_p99_s == 0
    for step in range(100):
        meter.stepped(step, step + 1.0, step + 1.0 + (5.0 if step == 50 else 0.25))
    done = meter.read(threads_count=1, dropped={})
    assert (done.stall_p50_s, done.stall_p99_s) == (0.25, 5.0)
    assert done.stall_s == 99 * 0.25 + 5
    assert bottleneck_of(done).stall_ratio == done.stall_ratio


def test_metrics_are_prometheus_text(loader: ps.Loader) -> None:
    """Every line is a comment or a sample with its labels; counters end in _total; what people ask for is there."""
    text = loader.metrics(rank="3", host='a"b')
    for line in text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) penstock_loader_\w+ .+|penstock_loader_\w+\{[^{}]+\} [-+0-9.e]+", line), (
            line
        )
    assert 'penstock_loader_samples_total{rank="3",host="a\\"b"} 50' in text
    assert "# TYPE penstock_loader_stall_seconds_total counter" in text
    assert "# TYPE penstock_loader_stall_p99_seconds gauge" in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_dropped_samples_are_labelled_by_stage() -> None:
    """One line for each stage, under one head."""
    done = Meter().read(threads_count=1, dropped={"map[0]": 2, "decode": 1})
    text = prometheus(done, epoch=0, labels={})
    assert 'penstock_loader_dropped_total{stage="map[0]"} 2' in text
    assert text.count("# TYPE penstock_loader_dropped_total") == 1


def test_scalars_go_to_any_writer(loader: ps.Loader) -> None:
    """Rates and ratios, under a prefix, at the step."""
    written: dict[str, tuple[float, int | None]] = {}

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
            written[tag] = scalar_value, global_step

    loader.write_scalars(Writer(), 7, prefix="data/")
    assert written["data/samples_per_s"][0] > 0
    assert {step for _, step in written.values()} == {7}
    assert {"data/stall_ratio", "data/stall_p50_s", "data/stall_p99_s", "data/bytes_per_s"} < set(written)


def test_the_live_line_overwrites_itself_on_a_terminal_only(loader: ps.Loader) -> None:
    """On a terminal one line, drawn at most twice a second; in a file a line now and then."""
    done = loader.statistics()
    for stream, due_s in ((Terminal(), 1.0), (io.StringIO(), 40.0)):
        line = LiveLine(stream)
        assert not line.is_due(line._drawn_s + due_s / 4)
        assert line.is_due(line._drawn_s + due_s)
        for _ in range(2):
            line.draw(done, epoch=3, batch=4, batches=9, now_s=line._drawn_s + due_s)
        line.end()
        line.end()
        text = stream.getvalue()
        assert "epoch 3  batch 4/9" in text
        assert text.count("\r") == (2 if stream.isatty() else 0)
        assert text.count("\n") == (1 if stream.isatty() else 2)


def test_progress_draws_while_iterating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """progress=True says how it goes on standard error, without a call of its own."""

    monkeypatch.setattr("penstock.loader.statistics.LINE_PLAIN_S_MIN", 0.0)
    write_counted(tmp_path, (20,))
    with ps.Loader(pipeline(tmp_path, batch=10), progress=True) as loader:
        list(loader)
    assert "epoch 0  batch 2  " in capsys.readouterr().err


def test_progress_ends_with_the_whole_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However short it was, the last line of each epoch has all its batches, and its rates are of the whole epoch."""
    write_counted(tmp_path, (50,))
    with ps.Loader(pipeline(tmp_path, batch=10), progress=True) as loader:
        for epoch in loader.epochs(2):
            for _ in loader:
                pass
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"epoch {epoch}  batch 5/5  ")
            assert not line.startswith(f"epoch {epoch}  batch 5/5  0 samples/s")


@pytest.mark.parametrize("processes", [0, 2])
def test_cache_hits_are_counted(tmp_path: Path, processes: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The first epoch misses, the next one hits: in the statistics, also after close, the live line and the metrics."""
    write_counted(tmp_path / "data", (20, 30))
    made = pipeline(tmp_path / "data", batch=10)
    options: dict[str, Any] = {
        "cache": f"{tmp_path}/cache:100MB",
        "processes": processes,
        "index": "stream",
        "lanes": 2,
    }
    with ps.Loader(made, progress=True, **options) as loader:
        assert loader.statistics().cache_hit_ratio == 0
        list(loader)
        first = loader.statistics()
        assert (first.cache_hit_count, first.cache_miss_count) == (0, 2)
        assert first.cache_fetched_bytes == first.bytes
        list(loader)
    done = loader.statistics()
    assert (done.cache_hit_count, done.cache_miss_count, done.cache_hit_ratio) == (2, 2, 0.5)
    assert done.cache_hit_bytes == first.bytes
    assert [" cache 0% " in line for line in capsys.readouterr().err.splitlines()] == [True, False]
    assert f"penstock_loader_cache_hit_bytes_total {first.bytes}" in loader.metrics()


def test_statistics_say_first_what_matters(loader: ps.Loader) -> None:
    """Rate, stall and bottleneck; then what is not 0."""
    said = repr(loader.statistics())
    assert re.match(
        r"<LoaderStatistics: [\d,]+ samples/s, stalled \d+%, bottleneck \w+; samples=50, batches=5, bytes=", said
    )
    assert "skipped" not in said


def test_statistics_of_another_version_are_read() -> None:
    """A state that on_epoch left keeps the fields that both versions have."""
    said = {**asdict(Meter().read(threads_count=3, dropped={})), "new_in_the_next": 1}
    del said["cache_hit_count"]
    assert LoaderStatistics.of(said) == Meter().read(threads_count=3, dropped={})
