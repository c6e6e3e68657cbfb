from __future__ import annotations

import io
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import penstock as ps
from loading import formatted
from penstock.errors import CorruptShardError, UnsupportedFormatError

ROWS = 8
WHOLE = ps.FetchConfig()
RANGED = ps.FetchConfig(gap_bytes_max=0)


def picture(number: int, form: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((6, 7, 3), 20 * number, np.uint8)).save(out, form)
    return out.getvalue()


def shard_of(name: str, form: str) -> bytes:
    samples = [{"__key__": f"s{at}", "img": picture(at, form), "cls": b"%d" % at} for at in range(ROWS)]
    return formatted(name, samples)


SHARDS = {(name, form): shard_of(name, form) for name in ("zip", "parquet") for form in ("PNG", "JPEG", "WEBP", "GIF")}


def damaged(data: bytes, chance: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 4])):
        out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)
    return bytes(out[: chance.choice([len(out), len(out), len(out), chance.randrange(len(out)), chance.randrange(30)])])


def read(folder: Path, policy: Any, fetch: ps.FetchConfig, max_errors: int) -> tuple[list[str], Any]:
    """The keys, and the statistics."""
    decode = ps.Image("img", height=6, width=7)
    made = ps.shards(f"{folder}/", on_corrupt=policy).decode(decode, ps.Integer("cls"), max_errors=max_errors).batch(4)
    with ps.Loader(made, threads=1, fetch=fetch, index="stream", world_size=1, rank=0) as loader:
        keys = [key for batch in loader for key in batch["__key__"]]
        return keys, loader.statistics()


@pytest.mark.parametrize("policy", ["raise", "skip_sample", "skip_shard"])
@pytest.mark.parametrize("fetch", [WHOLE, RANGED], ids=["whole", "ranged"])
@settings(max_examples=25, deadline=None)
@given(st.sampled_from(list(SHARDS)), st.randoms(use_true_random=False))
def test_damage_is_counted_or_named(fetch: ps.FetchConfig, policy: str, which: Any, chance: random.Random) -> None:
    """A damaged shard beside a good one: our own errors; skipping gives the good shard whole and says what it left out."""
    name, _ = which
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of what it does not know in a header
        (Path(folder) / f"a.{name}").write_bytes(damaged(SHARDS[which], chance))
        (Path(folder) / f"b.{name}").write_bytes(SHARDS[which])
        try:
            keys, statistics = read(Path(folder), policy, fetch, max_errors=2 * ROWS)
        except CorruptShardError:
            assert policy == "raise"
        except UnsupportedFormatError:
            pass
        else:
            assert {f"s{at}" for at in range(ROWS)} <= set(keys)
            if len(keys) < 2 * ROWS:
                assert statistics.skipped_samples or statistics.dropped
