"""Listing: complete and in order for any keys and pages, with few requests, and no further ahead than bounded."""

import gc
import hashlib
import random
from bisect import bisect_right
from types import SimpleNamespace

import pytest

from penstock.cache import CacheConfig, Cached
from penstock.errors import ClosedError, ConfigError, ProtocolError, StoreError, UnavailableError
from penstock.store import listing
from penstock.store.faulty import Faulty
from penstock.store.hedged import Hedged
from penstock.store.inflight import InFlight
from penstock.store.limited import Limited
from penstock.store.local import LocalStore
from penstock.store.memory import MemoryStore
from penstock.store.pages import FIRST_GUESSES
from penstock.store.retrying import Retrying
from penstock.store.traced import Traced
from penstock.types import Completion, Get, ObjectInfo, Page


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


COUNTERS = {
    "padded": lambda index: f"img_{index:08}.jpg",
    "pairs": lambda index: f"{index // 2:08}.{('cls', 'jpg')[index % 2]}",
    "strides": lambda index: f"frame-{10 * index:09}.png",
    "hashes": lambda index: hashlib.sha256(b"%d" % index).hexdigest(),
    "hexadecimal": lambda index: f"{index:06X}.bin",
    "one each": lambda index: f"{index:05}/0.npy",
}
"""Names by number that programs give."""


class Rounds:
    """A store far away that holds `keys`: whatever was asked meanwhile is answered at once when somebody waits."""

    def __init__(self, keys):
        self.keys = keys
        self.waiting = []
        self.rounds_count = self.requests_count = 0

    def submit(self, operation, sink):
        self.requests_count += 1
        self.waiting.append((operation, sink))
        return SimpleNamespace(cancel=lambda: None)

    def describe(self, key):
        return key

    def answer(self):
        self.rounds_count += 1
        waiting, self.waiting = self.waiting, []
        for operation, sink in waiting:
            begin = bisect_right(self.keys, operation.token or operation.start_after)
            found = self.keys[begin : begin + operation.keys_max]
            token = found[-1] if begin + operation.keys_max < len(self.keys) else None
            sink.done(Completion(operation, value=Page([ObjectInfo(key, 1) for key in found], [], token)))

    def listed(self, monkeypatch):
        def waits(in_flight, wait_s_max=None):
            if not in_flight.ready():
                self.answer()
            return wait(in_flight, wait_s_max)

        wait = InFlight.wait
        monkeypatch.setattr(InFlight, "wait", waits)
        return [info.key for info in listing.list_objects(self, "")]


@pytest.mark.parametrize("names", COUNTERS)
def test_flat_prefixes_of_numbers_take_few_round_trips(names, monkeypatch):
    """6 pages take two or three round trips, 40 pages five or six, and at most twice the requests."""
    for keys_count, rounds_max in ((6_000, 3), (40_000, 6)):
        keys = sorted(map(COUNTERS[names], range(keys_count)))
        far = Rounds(keys)
        assert far.listed(monkeypatch) == keys
        assert far.rounds_count <= rounds_max
        assert far.requests_count <= 2 * keys_count // 1000 + FIRST_GUESSES


def test_nothing_is_guessed_where_a_page_costs_more_than_a_request(tmp_path):
    """A directory is read for its first page and kept: one request per page, each with the token of the one before."""
    for index in range(50):
        (tmp_path / f"{index:04}").touch()
    with LocalStore(tmp_path) as store:
        core = Counting(store)
        core.pages_anywhere = store.pages_anywhere
        infos = listing.list_objects(core, "", keys_max=10)
        assert [info.key for info in infos] == [f"{index:04}" for index in range(50)]
    assert [bool(operation.token) for operation in core.operations] == [False] + 4 * [True]
    assert Retrying(store).pages_anywhere is False
    assert MemoryStore().pages_anywhere is True


class Deaf(Counting):
    """A store that begins its listings where it likes: ``start_after`` means nothing to it."""

    def submit(self, operation, sink):
        return super().submit(operation._replace(start_after=""), sink)


@pytest.mark.parametrize("names", COUNTERS)
def test_a_store_that_cannot_begin_anywhere_is_noticed(names):
    """All keys come, once, and after the first guesses nothing is guessed any more."""
    keys = sorted(map(COUNTERS[names], range(3_000)))
    with MemoryStore(dict.fromkeys(keys, b"")) as store:
        core = Deaf(store)
        assert [info.key for info in listing.list_objects(core, "", keys_max=100)] == keys
    assert len(core.operations) <= 30 + sum(range(2, FIRST_GUESSES + 2))
    assert sum(bool(operation.start_after) for operation in core.operations) <= FIRST_GUESSES


def test_guessing_ends_where_it_is_wrong():
    """Where keys lie in clusters, a listing costs at most three times as many requests as there are pages."""
    rng = random.Random(0)
    clusters = [f"{10 ** rng.randint(1, 14) + index:015}" for _ in range(40) for index in range(130)]
    keys = sorted(set(clusters))
    found, requests_count = listed(keys, keys_max=100)
    assert found == keys
    assert requests_count <= 3 * (len(keys) // 100 + 1) + FIRST_GUESSES


def test_what_nobody_wants_is_passed_over():
    """A folder of 950 keys that is to be skipped costs one page of 100, and no other key is lost."""
    wanted = ["!first", ".penstock", ".penstock0", *(f"{number:04d}" for number in range(300))]
    keys = [*(f".penstock/shards/{number:04d}" for number in range(950)), *wanted]
    found, requests_count = listed(keys, "", keys_max=100, skip=".penstock/")
    assert [key for key in found if not key.startswith(".penstock/")] == sorted(wanted)
    assert requests_count <= 1 + 4 + FIRST_GUESSES
    assert listed(keys, "", keys_max=100)[1] > 9


@pytest.mark.parametrize("before", [[], [".penstock"], [f"!{number:04d}" for number in range(250)]])
def test_what_is_likely_there_is_passed_over_at_once(before):
    """Where a folder that is to be skipped is likely, no answer is waited for before what lies behind it is asked for."""
    wanted = [*before, ".penstock0", *(f"{number:04d}" for number in range(90))]
    keys = [*wanted, *(f".penstock/shards/{number:04d}" for number in range(950))]
    with MemoryStore(dict.fromkeys(keys, b"")) as store:
        core = Counting(store)
        infos = listing.list_objects(core, "", keys_max=100, skip=".penstock/", skips_at_once=True)
        found = [info.key for info in infos]
    assert [key for key in found if not key.startswith(".penstock/")] == sorted(wanted)
    assert [operation.start_after[:10] for operation in core.operations[:2]] == ["", ".penstock/"]
    assert len(core.operations) == 2 if not before else len(core.operations) <= 4 + len(before) // 100 + FIRST_GUESSES


def test_tiny_prefixes_are_listed_flat():
    """A request per prefix is not made where prefixes hold a key or two, whatever the first page looked like."""
    tiny = [f"p{index:05}/k" for index in range(5000)]
    assert listed(tiny, keys_max=100)[1] < 50 + 50
    mixed = [f"a/{index:05}" for index in range(1000)] + tiny
    found, requests_count = listed(mixed, keys_max=100)
    assert found == mixed
    assert requests_count < 60 + 170


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


def test_keys_that_were_taken_are_not_held(monkeypatch):
    """A listing holds the pages ahead of its consumer, and none of those behind it."""
    monkeypatch.setattr(listing, "PAGES_MAX", 4)
    keys = [f"p{prefix:03}/{index:05}" for prefix in range(40) for index in range(200)]
    with MemoryStore(dict.fromkeys(keys, b"")) as store:
        infos = listing.list_objects(Counting(store), "", keys_max=100)
        for _ in range(7_500):
            next(infos)
        held = sum(len(each.objects or ()) for each in gc.get_objects() if type(each) is listing._Segment)
        assert held <= (1 + 4) * 100
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


STACKS = {
    "bare": lambda inner, _: inner,
    "Retrying": lambda inner, _: Retrying(inner),
    "waiting for permits": lambda inner, _: Limited(inner, requests_max=2),
    "default": lambda inner, _: Traced(Hedged(Retrying(Limited(inner, requests_max=2)))),
    "cached": lambda inner, path: Cached(Limited(inner, requests_max=2), CacheConfig(path, 10**9, metadata_ttl_s=60.0)),
}


@pytest.mark.parametrize("taken", [1, 25, 2000])
@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS.keys())
def test_a_store_closed_in_the_midst_ends_the_listing_with_closed_error(stack, taken, tmp_path):
    """Wherever its pages wait or fail, the error of a listing whose store was closed is ClosedError."""
    store = stack(MemoryStore({f"{number % 7}/{number:05}": b"" for number in range(5000)}), tmp_path)
    infos = listing.list_objects(store, "", keys_max=10)
    for _ in range(taken):
        next(infos)
    store.close()
    with pytest.raises(ClosedError, match="was closed"):
        list(infos)


def test_a_submit_that_both_answers_and_raises_counts_once():
    """What ``submit`` raised was told to its caller: an answer to it besides is nobody's."""

    class Both(MemoryStore):
        def submit(self, operation, sink):
            if operation == Get("both"):
                sink.done(Completion(operation))
                raise ClosedError("the store was closed")
            return super().submit(operation, sink)

    in_flight = InFlight(Both({"k": b"x"}))
    with pytest.raises(ClosedError):
        in_flight.submit(Get("both"), "both")
    in_flight.submit(Get("k"), "k")
    assert [tag for tag, _ in in_flight.drain()] == ["k"]


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


class Unordered(Counting):
    """A store that lists `keys` as they come, as S3 Express does: what begins after a key is given in no order."""

    def __init__(self, keys):
        super().__init__(None)
        self.keys = keys

    def submit(self, operation, sink):
        at = int(operation.token or 0)
        keys = [key for key in self.keys if key.startswith(operation.prefix) and key > operation.start_after]
        if operation.delimiter:
            names = [key[len(operation.prefix) :].partition("/") for key in keys]
            keys = list(dict.fromkeys(operation.prefix + name + slash for name, slash, _ in names))
        page, end = keys[at : at + operation.keys_max], at + operation.keys_max
        objects = [ObjectInfo(key, 1) for key in page if not key.endswith("/")]
        prefixes = [key for key in page if key.endswith("/")]
        sink.done(Completion(operation, value=Page(objects, prefixes, str(end) if end < len(keys) else None)))


@pytest.mark.parametrize("recursive", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_a_listing_in_no_order_is_an_error(seed, recursive):
    """Keys in no order, over any number of pages, are never listed in part or out of order."""
    keys = [f"p/{folder}/{number:03}" for folder in "abcdef" for number in range(60)]
    random.Random(seed).shuffle(keys)
    with pytest.raises(ProtocolError, match="does not list as S3 does"):
        list(
            listing.list_objects(
                Unordered(keys), "p/", recursive=recursive, keys_max=random.Random(seed).randint(4, 500)
            )
        )


PAGES = {
    "the same page again": [["a", "b"], ["a", "b"], ["c"]],
    "a page that begins too early": [["a", "c"], ["b", "d"]],
    "a key twice": [["a", "a", "b"]],
    "the last key again": [["a", "b"], ["b", "c"]],
    "another prefix": [["a", "b", "x"]],
    "the first page again after an empty one": [["a", "b"], [], ["a", "b"]],
}


@pytest.mark.parametrize("recursive", [True, False])
@pytest.mark.parametrize("pages", PAGES.values(), ids=PAGES.keys())
def test_pages_that_do_not_follow_each_other_are_an_error(pages, recursive):
    """A page that repeats, goes back, or has other keys shows that keys may be missing."""

    class Paged(Counting):
        def submit(self, operation, sink):
            at = int(operation.token or 0)
            token = str(at + 1) if at + 1 < len(pages) else None
            objects = [ObjectInfo(key if key == "x" else f"p/{key}", 1) for key in pages[at]]
            sink.done(Completion(operation, value=Page(objects, [], token)))

    with pytest.raises(ProtocolError, match="does not list as S3 does"):
        list(listing.list_objects(Paged(None), "p/", recursive=recursive))
