"""What records hold is decided once for each shard, by its first record, wherever reading begins."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from loading import Record, as_one_field, fields_of, forget_content, index, shard
from penstock.errors import CorruptShardError
from penstock.formats import RecordIOWriter, TFRecordWriter, narrowed, parser_of
from penstock.formats.writers import encode_example

JPEG = b"\xff\xd8\xff" + bytes(20)
FEATURES = encode_example({"x": b"abc", "n": [1, 2]})
RECORDS = {
    "tfrecord": {
        "junk": b"\x01\x02\x03",
        "nothing": b"",
        "example without features": b"\x0a\x00",
        "example": FEATURES,
        "sequence without lists": FEATURES,
        "sequence": FEATURES + b"\x12\x02\x0a\x00",
    },
    "rec": {
        "header": b"key=value;rows=17",
        "nothing": b"",
        "text": struct.pack("<IfQQ", 0, 1.0, 7, 0) + b"no image",
        "image": struct.pack("<IfQQ", 0, 2.0, 8, 0) + JPEG,
        "image with labels": struct.pack("<IfQQ2f", 2, 0.0, 9, 0, 1.0, 2.0) + JPEG,
        "short": bytes(30),
    },
}
KINDS = {suffix: list(records) for suffix, records in RECORDS.items()}


def shard_of(suffix: str, kinds: list[str]) -> bytes:
    """A shard of these records."""
    writer_type = {"tfrecord": TFRecordWriter, "rec": RecordIOWriter}[suffix]
    return shard([{"record": RECORDS[suffix][kind]} for kind in kinds], writer_type)


def in_order(folder: Path) -> dict[tuple[str, str], Record]:
    """By shard and key, what reading each shard from its first byte gives; corrupt ones left out."""
    found = {}
    for path in sorted(folder.iterdir()):
        name = {".tfrecord": "tfrecord", ".rec": "recordio"}[path.suffix]
        parser = parser_of(name, shard="s", on_corrupt="skip_sample")
        for sample in [*parser.feed(path.read_bytes()), *parser.finish()]:
            found[path.name, sample.key] = fields_of(sample.fields)
    return found


def read(loader: ps.Loader) -> list[list[tuple[tuple[str, str], bytes]]]:
    """By batch, what each sample is called, and its fields."""
    return [rows(batch) for batch in loader]


def rows(batch: Any) -> list[tuple[tuple[str, str], bytes]]:
    """Those of a batch that are there."""
    valid = batch.get("__valid__", [True] * len(batch["__key__"]))
    called = zip(batch["__shard__"], batch["__key__"], batch["all"], valid, strict=True)
    return [((shard.rpartition("/")[2], key), value) for shard, key, value, is_there in called if is_there]


@pytest.mark.parametrize("suffix", ["tfrecord", "rec"])
@pytest.mark.parametrize("known", ["index", "old index", "nothing"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_entry_gives_what_reading_in_order_gives(suffix: str, known: str, data: st.DataObject) -> None:
    """Whatever the first record is: a resumed run, at every batch, and every ``dataset[i]`` give the same fields."""
    shards = data.draw(st.lists(st.lists(st.sampled_from(KINDS[suffix]), max_size=9), min_size=1, max_size=3))
    batch, window = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([None, 4]))
    with tempfile.TemporaryDirectory() as name:
        folder, place = Path(name, "data"), Path(name, "index")
        folder.mkdir()
        for number, kinds in enumerate(shards):
            (folder / f"s{number}.{suffix}").write_bytes(shard_of(suffix, kinds))
        want = {called: repr(fields).encode() for called, fields in in_order(folder).items()}
        source = ps.shards(f"{folder}/", on_corrupt="skip_sample")
        made = (source if window is None else source.shuffle(window=window, seed=1)).map(as_one_field).batch(batch)
        options: dict[str, Any] = {"lanes": 2, "threads": 1, "index_dir": place, "index": "stream"}
        if known != "nothing":
            index(made, place)
            options["index"] = "require"
        if known == "old index":
            forget_content(made, place)
        if not any(shards):
            return
        states, whole = [], []
        with ps.Loader(made, **options) as loader:
            for each in loader:
                whole.append(rows(each))
                states.append(json.loads(json.dumps(loader.state_dict())))
        assert dict(pair for each in whole for pair in each) == want
        for number, state in enumerate(states):
            with ps.Loader(made, **options) as loader:
                loader.load_state_dict(state)
                if number + 1 < len(whole):
                    assert read(loader) == whole[number + 1 :]
        if known != "nothing":
            check_random_access(source, place, want)


def check_random_access(source: ps.Pipeline, place: Path, want: dict[tuple[str, str], bytes]) -> None:
    """Every sample by number, in reverse order, is the one read in order, or corrupt there as well."""
    with source.open(index_dir=place) as dataset:
        found = {}
        for number in reversed(range(len(dataset))):
            try:
                sample = dataset[number]
            except CorruptShardError:
                continue
            found[sample["__shard__"].rpartition("/")[2], sample["__key__"]] = repr(fields_of(sample)).encode()
    assert found == want


@pytest.mark.parametrize("how", ["processes", "said"])
@pytest.mark.parametrize("suffix", ["tfrecord", "rec"])
def test_worker_processes_and_what_the_job_says(tmp_path: Path, suffix: str, how: str) -> None:
    """Worker processes decide as one process does; a job that says what records hold is obeyed at every entry."""
    folder = tmp_path / "data"
    folder.mkdir()
    kinds = KINDS[suffix]
    for number in range(3):
        (folder / f"s{number}.{suffix}").write_bytes(shard_of(suffix, kinds[number:] + kinds * 3))
    raw = "tfrecord-raw" if suffix == "tfrecord" else "recordio-raw"
    source = ps.shards(f"{folder}/", on_corrupt="skip_sample", format=raw if how == "said" else None)
    want = {called: repr(fields).encode() for called, fields in in_order(folder).items()}
    made = source.shuffle(window=8, seed=1).map(as_one_field).batch(3)
    place = index(made, tmp_path / "index")
    options: dict[str, Any] = {"lanes": 3, "index_dir": place, "index": "require"}
    with ps.Loader(made, processes=2 if how == "processes" else 0, **options) as loader:
        iterator = iter(loader)
        first = [rows(next(iterator)) for _ in range(7)]
        state = loader.state_dict()
    with ps.Loader(made, **options) as loader:
        loader.load_state_dict(state)
        whole = dict(pair for each in first + read(loader) for pair in each)
    if how == "said":
        assert all(value.startswith(b"(('record', ") for value in whole.values())
        assert len(whole) == 3 * 3 * len(kinds) + sum(len(kinds) - number for number in range(3))
        check_random_access(source, place, whole)
    else:
        assert whole == want


def test_what_is_said_and_what_is_known() -> None:
    """A job's word counts, but where it leaves the content open, what is known of the shard fills it in."""
    assert narrowed(None, "tfrecord-example") == "tfrecord-example"
    assert narrowed("tfrecord", "tfrecord-example") == "tfrecord-example"
    assert narrowed("tfrecord-raw", "tfrecord-example") == "tfrecord-raw"
    assert narrowed("tar", "tfrecord-example") == "tar"
    assert narrowed("tfrecord", None) == "tfrecord"
