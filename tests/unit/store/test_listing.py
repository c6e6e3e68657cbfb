"""Listing: complete and in order for any keys and pages, with few requests, and no further ahead than bounded."""

import random

import pytest

from penstock.errors import ConfigError, ProtocolError, StoreError, UnavailableError
from penstock.store import listing
from penstock.store.faulty import Faulty
from penstock.store.memory import MemoryStore
from penstock.types import Completion, ObjectInfo, Page


class Counting:
    """A core that counts requests, and how many are in flight at once."""

    def __init__(self, inner):
        self.inner = inner
        self.operations = []

    def submit(self, operation, sink):
        self.operations.append(operation)
        return self.inner.submit(operation, sink)

    def describe(self, key):
        return key


def listed(keys, prefix="", **changes):
    """(keys listed, requests made)."""
    with MemoryStore(dict.fromkeys(keys, b"")) as store:
        core = Counting(store)
        return [info.key for info in listing.list_objects(core, prefix, **changes)], len(core.operations)


@pytest.mark.parametrize("seed", range(60))
def test_any_keys_are_listed_whole_and_in_order(seed, monkeypatch):
    """Keys of slashes and what sorts around them, pages of one to fifty keys, splits judged early: nothing is lost."""
    monkeypatch.setattr(listing, "CHILDREN_MIN", 2)
    monkeypatch.setattr(listing, "KEYS_PER_PREFIX_MIN", 2)
    monkeypatch.setattr(listing, "FLAT_PAGES", 2)
    monkeypatch.setattr(listing, "PAGES_MAX", 1 + seed % 5)
    rng = random.Random(seed)
    letters = rng.choice(["ab/", "a/", "a/.-0", "aé/\U0001f600"])
    keys = {"".join(rng.choice(letters) for _ in range(rng.randint(1, 8))) for _ in range(rng.choice([3, 30, 120]))}
    for keys_max in (1, 2, 3, 50):
        for prefix in ("", "a", "a/", "/"):
            found, _ = listed(keys, prefix, keys_max=keys_max, requests_max=1 + seed % 3)
            assert found == sorted(key for key in keys if key.startswith(prefix))


def test_many_full_prefixes_are_listed_one_request_each():
    """100 prefixes of one page each cost 102 requests: the first, one that finds them, and the rest."""
    keys = [f"p{prefix:03}/{index:05}" for prefix in range(100) for index in range(100)]
    found, requests_count = listed(keys, keys_max=100)
    assert found == keys
    assert requests_count <= 102


def test_a_flat_prefix_costs_no_request_more():
    """Without sub-prefixes there is one request per page."""
    assert listed([f"k{index:05}" for index in range(1000)], keys_max=100)[1] == 10


def test_what_nobody_wants_is_passed_over():
    """A folder of 950 keys that is to be skipped costs one page of 100, and no other key is lost."""
    wanted = ["!first", ".penstock", ".penstock0", *(f"{number:04d}" for number in range(300))]
    keys = [*(f".penstock/shards/{number:04d}" for number in range(950)), *wanted]
    found, requests_count = listed(keys, "", keys_max=100, skip=".penstock/")
    assert [key for key in found if not key.startswith(".penstock/")] == sorted(wanted)
    assert requests_count == 1 + 4
    assert listed(keys, "", keys_max=100)[1] > 8


def test_tiny_prefixes_are_listed_flat():
    """A request per prefix is not made where prefixes hold a key or two, whatever the first page looked like."""
    tiny = [f"p{index:05}/k" for index in range(5000)]
    assert listed(tiny, keys_max=100)[1] == 50
    mixed = [f"a/{index:05}" for index in range(1000)] + tiny
    found, requests_count = listed(mixed, keys_max=100)
    assert found == mixed
    assert requests_count < 60 + 110


def test_no_more_pages_are_held_than_bounded(monkeypatch):
    """A consumer that stops has at most PAGES_MAX pages ahead of it."""
    monkeypatch.setattr(listing, "PAGES_MAX", 8)
    keys = [f"p{prefix:03}/{index:05}" for prefix in range(100) for index in range(100)]
    with MemoryStore(dict.fromkeys(keys, b"")) as store:
        core = Counting(store)
        infos = listing.list_objects(core, "", keys_max=100)
        for _ in range(250):
            next(infos)
        assert len(core.operations) <= 2 + 3 + 8
        infos.close()


@pytest.mark.parametrize("call", [1, 2, 5, 40])
def test_an_error_ends_the_listing(call):
    """Whichever request fails, what came before it is in order, then its error comes."""
    keys = [f"p{prefix:03}/{index:05}" for prefix in range(40) for index in range(100)]
    with Faulty(MemoryStore(dict.fromkeys(keys, b"")), fail_at_call=call, error=UnavailableError("503")) as store:
        found = []
        with pytest.raises(StoreError, match="503"):
            found.extend(info.key for info in listing.list_objects(store, "", keys_max=100))
        assert found == keys[: len(found)]


def test_a_server_that_goes_round_is_an_error():
    """A page that goes on with the token it was asked with would be listed for ever."""

    class Round:
        def submit(self, operation, sink):
            sink.done(Completion(operation, value=Page([ObjectInfo("a", 1)], [], "token")))

        def describe(self, key):
            return f"s3://bucket/{key}"

    with pytest.raises(ProtocolError, match=r"s3://bucket/a.*'token'"):
        list(listing.list_objects(Round(), "a"))


def test_arguments_are_checked_at_the_call():
    """What cannot be is refused before anything is asked of the store."""
    core = Counting(None)
    for changes in ({"requests_max": 0}, {"keys_max": 0}, {"keys_max": 1001}):
        with pytest.raises(ConfigError):
            listing.list_objects(core, "", **changes)
    assert core.operations == []
