"""WebDataset over ``s3://``: the samples of local files, in their order, whatever the weather and whoever reads."""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from torch.utils.data import DataLoader
from webdataset.tariterators import group_by_keys, tar_file_expander

import penstock as ps
import penstock.webdataset
from doors.webdataset.conftest import URL
from penstock.webdataset import opening
from servers.faulty import FaultyServer
from servers.leaks import threads

WEATHER = ("503", "reset", "close", "reset_head", "500")


def contents(samples: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Samples without the fields that name where they come from."""
    return [{name: value for name, value in sample.items() if name[:2] != "__"} for sample in samples]


def read(url: Any, **options: Any) -> list[dict[str, Any]]:
    """All samples of a data set, in order."""
    return contents(wds.WebDataset(url, shardshuffle=False, **options))


@pytest.fixture(scope="session")
def local(folder: Path) -> list[dict[str, Any]]:
    """The samples as WebDataset reads them from local files."""
    return read(f"{folder}/train-{{000..004}}.tar")


def wait_until(happened: Callable[[], bool]) -> None:
    """Wait, for 20 seconds at most, until something that another thread does has happened."""
    deadline_s = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def charged_bytes(store: ps.Store) -> int:
    """Bytes of the process's budget that something uses."""
    gc.collect()
    statistics = store.budget.statistics()
    return statistics.used_bytes - statistics.free_bytes


@pytest.mark.parametrize("prefix", ["s3://", "penstock+s3://"])
def test_the_samples_of_local_files(bucket: FaultyServer, local: list[dict[str, Any]], prefix: str) -> None:
    """The same samples come in the same order; each names the URL of its shard."""
    url = URL.replace("s3://", prefix)
    assert read(url) == local
    first = next(iter(wds.WebDataset(url, shardshuffle=False)))
    assert first["__url__"] == f"{prefix}bucket/train-000.tar"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers(bucket: FaultyServer, local: list[dict[str, Any]], method: str) -> None:
    """Workers share the shards as they share local files, and spawned ones have the options of ``register``."""
    data = wds.WebDataset(URL, shardshuffle=False)
    loader = DataLoader(data, num_workers=2, batch_size=None, multiprocessing_context=method)
    names = [sample["cls"] for sample in loader]
    assert sorted(names) == sorted(sample["cls"] for sample in local)
    assert len(set(names)) == len(local)


def test_splitting_is_untouched(bucket: FaultyServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``split_by_node`` gives a rank the shards that it gives it of local files, and the shuffle of shards is the same."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = {"nodesplitter": wds.split_by_node, "shardshuffle": 100, "detshuffle": True, "seed": 5}
    urls = (URL, f"{folder}/train-{{000..004}}.tar")
    remote, there = (contents(wds.WebDataset(url, **options)) for url in urls)
    assert remote == there
    assert 0 < len(remote) < 80


def test_weather(bucket: FaultyServer, local: list[dict[str, Any]]) -> None:
    """With a fifth of all requests failing, the samples are the same: the engine tries again and resumes."""
    bucket.random_faults(WEATHER, ratio=0.2, seed=3)
    assert read(URL) == local
    assert any(request.fault for request in bucket.requests)


def test_the_next_shards_are_requested_before_this_one_ends(bucket: FaultyServer) -> None:
    """One sample has been taken, and the shards behind the first one are on their way."""
    data = iter(wds.WebDataset(URL, shardshuffle=False))
    next(data)
    wait_until(lambda: {request.key for request in bucket.requests} >= {f"train-00{i}.tar" for i in range(3)})
    data.close()  # type: ignore[attr-defined]


def test_one_request_per_part(bucket: FaultyServer, local: list[dict[str, Any]]) -> None:
    """No byte is requested twice, although a tar file ends before its object does."""
    read(URL)
    sizes = sum(map(len, bucket.objects.values()))
    spans = [request.span for request in bucket.requests if request.method == "GET"]
    ended = [(start, end) for start, end in (span or (0, None) for span in spans) if end is not None]
    assert len(spans) <= len(bucket.objects) + sizes // (8 << 20) + 2, spans
    assert sum(end - start for start, end in ended) <= sizes


# ── handlers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_missing_shard_is_raised(bucket: FaultyServer) -> None:
    """``reraise_exception``, the default, ends the iteration where the shard is missing, with the error of the engine."""
    del bucket.objects["train-001.tar"]
    data, got = iter(wds.WebDataset(URL, shardshuffle=False)), []
    with pytest.raises(ps.ObjectMissingError, match=r"s3://bucket/train-001\.tar") as caught:
        got.extend(data)
    assert len(got) == 30
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), ps.ObjectMissingError)


def test_a_missing_shard_is_skipped(
    bucket: FaultyServer, local: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``warn_and_continue`` warns once for each shard that is missing, naming it, and reads all others."""
    monkeypatch.setattr(time, "sleep", lambda _: None)  # it waits half a second for each warning
    del bucket.objects["train-000.tar"], bucket.objects["train-003.tar"]
    with pytest.warns(UserWarning, match="ObjectMissing") as warned:
        got = read(URL, handler=wds.warn_and_continue)
    assert got == local[30:74] + local[75:]
    missing = [f"s3://bucket/train-00{index}.tar" for index in (0, 3)]
    assert [url for url, warning in zip(missing, warned, strict=True) if url in str(warning.message)] == missing


def test_a_handler_that_ends(bucket: FaultyServer, local: list[dict[str, Any]]) -> None:
    """A handler that returns false ends the data set at the shard that cannot be opened."""
    del bucket.objects["train-002.tar"]
    assert read(URL, handler=wds.ignore_and_stop) == local[:34]


@pytest.mark.parametrize("spoil", [lambda data: data[:100_000], lambda data: b"x" * len(data), lambda _: b""])
def test_damaged_shards_are_as_local_ones(
    bucket: FaultyServer, tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    """Shards that are cut, empty or not tar at all give the samples and the errors that they give as local files."""
    for index in (0, 2):
        bucket.objects[f"train-00{index}.tar"] = spoil(bucket.objects[f"train-00{index}.tar"])
    for name, data in bucket.objects.items():
        (tmp_path / name).write_bytes(data)
    results = []
    for url in (URL, f"{tmp_path}/train-{{000..004}}.tar"):
        errors: list[str] = []

        def note(error: Exception, errors: list[str] = errors) -> bool:
            errors.append(type(error).__name__)
            return True

        results.append((read(url, handler=note), errors))
    assert results[0] == results[1]


def test_a_store_that_fails_for_good(bucket: FaultyServer, local: list[dict[str, Any]]) -> None:
    """A shard whose second part is refused ends there; nothing after it is taken for its rest, and the next shard follows."""
    bucket.fail(
        "403",
        times=None,
        match=lambda request: request.key == "train-002.tar" and bool(request.span and request.span[0]),
    )
    errors: list[Exception] = []
    got = read(URL, handler=lambda error: errors.append(error) or True)
    assert isinstance(errors[0], ps.AccessDeniedError)
    whole = [sample["cls"] for sample in local]
    kept = [sample["cls"] for sample in got]
    assert kept[:34] == whole[:34]
    assert kept[-13:] == whole[-13:]
    assert [sample for sample in got if sample not in local] == []


# ── stages, streams and pipes ───────────────────────────────────────────────────────────────────────────────────────


def stages(urls: list[str], **options: Any) -> Iterator[dict[str, Any]]:
    """The stages of older programs."""
    opened = penstock.webdataset.url_opener([{"url": url} for url in urls], **options)
    return group_by_keys(tar_file_expander(opened))


def names(count: int = 5) -> list[str]:
    """URLs of the shards."""
    return [f"s3://bucket/train-{index:03d}.tar" for index in range(count)]


def test_the_older_stage(faulty: FaultyServer, folder: Path, local: list[dict[str, Any]]) -> None:
    """``url_opener(data, handler, **options)`` takes the options of a connection, and is also WebDataset's own now."""
    for path in folder.iterdir():
        faulty.objects[path.name] = path.read_bytes()
    options = {"endpoint_url": faulty.endpoint_url, "anonymous": True}
    assert contents(stages(names(), **options)) == local
    penstock.webdataset.register(**options)
    data = wds.DataPipeline(wds.SimpleShardList(names()), wds.split_by_worker, wds.tarfile_to_samples())
    assert contents(data) == local
    penstock.webdataset.register()


def test_streams_that_are_not_read_in_turn(bucket: FaultyServer, folder: Path) -> None:
    """Streams can be opened first and read later, in any order and in parts: each has the bytes of its shard."""
    opened = list(penstock.webdataset.url_opener([{"url": url} for url in names()]))
    parts = [sample["stream"].read(1000) for sample in opened]
    for index in (2, 0, 4, 3, 1):
        rest = opened[index]["stream"].read()
        assert parts[index] + rest == (folder / f"train-00{index}.tar").read_bytes()
        assert opened[index]["stream"].read() == b""


def test_a_stream_that_is_left(bucket: FaultyServer, folder: Path) -> None:
    """A program that leaves a shard in its midst gets the next one from its beginning."""
    heads = [
        (sample["stream"].read(600), sample["stream"].name)
        for sample in penstock.webdataset.url_opener([{"url": url} for url in (*names(), *names())])
    ]
    assert heads == [((folder / url[12:]).read_bytes()[:600], url) for url in (*names(), *names())]


def test_a_left_stream_of_a_replaced_shard(bucket: FaultyServer) -> None:
    """If the shard was replaced before the rest of it is requested, its stream raises instead of mixing two versions."""
    opened = penstock.webdataset.url_opener([{"url": names()[2]}, {"url": names()[0]}])
    first = next(opened)["stream"]
    first.read(1000)
    next(opened)
    bucket.objects["train-002.tar"] = bytes(len(bucket.objects["train-002.tar"]))
    with pytest.raises(ps.ObjectChangedError):
        first.read()
    with pytest.raises(ps.ObjectChangedError):
        first.read(10)


def test_other_schemes_are_theirs(bucket: FaultyServer, folder: Path, local: list[dict[str, Any]]) -> None:
    """In a list of ``s3://``, local files and pipes, each is opened by whoever opens it, and the order is that of the list."""
    urls = [
        names()[0],
        f"{folder}/train-001.tar",
        f"pipe:cat {folder}/train-002.tar",
        names()[3],
        f"file:{folder}/train-004.tar",
    ]
    assert read(urls) == local
    assert contents(stages(urls)) == local
    missing = [f"{folder}/none.tar", *urls]
    assert read(missing, handler=wds.ignore_and_continue) == local
    assert read([urls[0], *missing], handler=wds.ignore_and_stop) == local[:30]
    assert contents(stages(missing, handler=wds.ignore_and_stop)) == []


def test_many_local_files_before_the_next_bucket(
    bucket: FaultyServer, folder: Path, local: list[dict[str, Any]]
) -> None:
    """The read-ahead looks only so far for its next shard, and begins again when it comes to it."""
    urls = [names()[1], *([f"{folder}/train-003.tar"] * 150), names()[1]]
    got = read(urls)
    assert got == local[30:34] + local[74:75] * 150 + local[30:34]


def test_an_input_that_fails(bucket: FaultyServer, local: list[dict[str, Any]]) -> None:
    """What the iterator of URLs raises comes after the samples of all shards before it, and no handler hears of it."""

    def urls() -> Iterator[dict[str, str]]:
        yield from ({"url": url} for url in names(2))
        raise RuntimeError("no more")

    got = []
    with pytest.raises(RuntimeError, match="no more"):
        got.extend(group_by_keys(tar_file_expander(penstock.webdataset.url_opener(urls(), handler=lambda _: True))))
    assert contents(got) == local[:34]


def test_urls_are_rewritten(bucket: FaultyServer, local: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """``GOPEN_REWRITE`` holds for URLs that lead here, too."""
    monkeypatch.setenv("GOPEN_REWRITE", "data://=s3://bucket/")
    assert read("data://train-{000..004}.tar") == local


def test_an_infinite_list(bucket: FaultyServer) -> None:
    """Resampled shards, which never end, are taken only some way ahead."""
    data = wds.WebDataset(URL, resampled=True, shardshuffle=False).with_epoch(200)
    assert len(list(data)) == 200


def test_gopen(bucket: FaultyServer, folder: Path) -> None:
    """``wds.gopen`` reads one object as a stream, which is closed in its midst."""
    with wds.gopen(names()[2]) as stream:
        assert stream.read(700) == (folder / "train-002.tar").read_bytes()[:700]
        assert "train-002.tar" in str(stream)
    with pytest.raises(ValueError, match="closed"):
        stream.read(1)
    assert wds.gopen(names()[1]).read() == (folder / "train-001.tar").read_bytes()


def test_the_cache_of_the_node(bucket: FaultyServer, local: list[dict[str, Any]], tmp_path: Path) -> None:
    """With ``cache=`` the second epoch reads no object again; WebDataset's own ``cache_dir`` works beside it."""
    penstock.webdataset.register(
        endpoint_url=bucket.endpoint_url,
        anonymous=True,
        cache=ps.CacheConfig(path=tmp_path / "ours", bytes_max=1 << 30),
    )
    assert read(URL) == local
    before = sum(request.method == "GET" for request in bucket.requests)
    assert read(URL) == local
    assert sum(request.method == "GET" for request in bucket.requests) == before
    (tmp_path / "theirs").mkdir()
    assert read(URL, cache_dir=str(tmp_path / "theirs")) == local
    assert sorted(path.name for path in (tmp_path / "theirs").iterdir()) == sorted(bucket.objects)


def test_nothing_is_left(bucket: FaultyServer) -> None:
    """Data sets dropped in their midst, and streams that nobody closes, leave no thread, request or charged bytes behind."""
    read(URL)
    gc.collect()
    store = ps.connect("s3://bucket", endpoint_url=bucket.endpoint_url, anonymous=True)
    threads_before, before_bytes = threads(), charged_bytes(store)
    for _ in range(3):
        next(iter(wds.WebDataset(URL, shardshuffle=False)))
        wds.gopen(names()[2]).read(10)
    gc.collect()
    wait_until(lambda: charged_bytes(store) <= before_bytes)
    assert threads() <= threads_before
    (theirs,) = opening._stores._stores.values()  # the server may read what was sent and given up only later
    statistics = theirs.statistics()
    assert statistics.in_flight_count == 0
    store.stat("train-000.tar")
    assert theirs.statistics().operations == statistics.operations


@pytest.mark.parametrize(
    ("url", "message"),
    [("s3://bucket/", "does not name an object"), ("s3:///key.tar", "no bucket"), ("s3://a:b@bucket/k", "credentials")],
)
def test_urls_that_name_nothing(bucket: FaultyServer, url: str, message: str) -> None:
    """A URL without a key or a bucket is refused in words, by ``gopen`` and in a list of shards, and a handler hears of it."""
    with pytest.raises(ps.ConfigError, match=message):
        wds.gopen(url)
    with pytest.raises(ps.ConfigError, match=message):
        read([url])
    assert len(read([names()[1], url, names()[1]], handler=wds.ignore_and_continue)) == 8


def test_options_that_do_not_exist(bucket: FaultyServer) -> None:
    """``register`` and the stage refuse options that ``penstock.connect`` does not have, and suggest the nearest."""
    with pytest.raises(ps.ConfigError, match="did you mean endpoint_url="):
        penstock.webdataset.register(endpoint="http://127.0.0.1")
    with pytest.raises(ps.ConfigError, match="did you mean cache="):
        penstock.webdataset.url_opener([], cash="/nvme")
    with pytest.raises(ps.ConfigError, match="'rb' or 'wb'"):
        penstock.webdataset.open_url("s3://bucket/key", "ab")


def test_a_user_has_the_last_word(bucket: FaultyServer, folder: Path, local: list[dict[str, Any]]) -> None:
    """If a program registers its own handler for ``s3`` afterwards, that one is called, and ``penstock+s3`` remains."""
    schemes = penstock.webdataset.opening.gopen.gopen_schemes
    schemes["s3"] = lambda url, *_: (folder / "train-001.tar").open("rb")
    assert read(names()[:1]) == local[30:34]
    assert read(f"penstock+{names()[0]}") == local[:30]
    penstock.webdataset.register()
    assert schemes["s3"] is penstock.webdataset.open_url
