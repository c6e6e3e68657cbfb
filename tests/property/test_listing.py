"""A listing is what a naive one gives, whatever the keys, wherever it is cut, and whoever answers first."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.store import listing, pages
from penstock.store.inflight import InFlight
from penstock.types import Completion, ObjectInfo, Page

ALPHABETS = ["01", "0123456789", "0123456789abcdef", "0A9aZz_-", "ab/", "é/\U0001f600z", "09:T-", "a\x7f\U0010ffff0"]


class Store:
    """Holds `keys`, and answers in the order that `rng` says; `is_deaf`: ``start_after`` means nothing to it."""

    def __init__(self, keys, rng, *, is_deaf=False):
        self.keys = sorted(keys)
        self.rng = rng
        self.is_deaf = is_deaf
        self.waiting = []
        self.requests_count = 0

    def submit(self, operation, sink):
        self.requests_count += 1
        self.waiting.append((operation, sink))
        for _ in range(self.rng.randint(0, 2)):
            self.answer_one()
        return SimpleNamespace(cancel=lambda: None)

    def describe(self, key):
        return key

    def answer_one(self):
        if self.waiting:
            operation, sink = self.waiting.pop(self.rng.randrange(len(self.waiting)))
            sink.done(Completion(operation, value=self.page(operation)))

    def waited(self, wait):
        """``InFlight.wait`` of somebody who waits until there is an answer."""

        def waits(in_flight, wait_s_max=None):
            while not in_flight.ready():
                self.answer_one()
            return wait(in_flight, wait_s_max)

        return waits

    def page(self, operation):
        """By looking at all keys, one after the other."""
        start = operation.start_after if operation.token is None and not self.is_deaf else operation.token or ""
        entries = {}
        for key in self.keys:
            cut = key.find("/", len(operation.prefix)) if operation.delimiter else -1
            entry = key if cut < 0 else key[: cut + 1]
            if key.startswith(operation.prefix) and key > start and not (entry == start and entry != key):
                entries.setdefault(entry, cut >= 0)
        found = list(entries.items())[: operation.keys_max]
        token = found[-1][0] if len(entries) > len(found) else None
        if token is not None and entries[token]:
            token += "\U0010ffff"
        return Page(
            [ObjectInfo(key, 1) for key, below in found if not below], [k for k, below in found if below], token
        )


def names(rng):
    """Keys such as programs give them, and some that none would give."""
    alphabet = rng.choice(ALPHABETS)
    count = rng.choice([1, 7, 40, 150])
    kind = rng.randrange(4)
    if kind == 0:
        step, width = rng.randint(1, 12), rng.randint(1, 6)
        return {f"k{index * step:0{width}}{rng.choice(['', '.jpg', '/x'])}" for index in range(count)}
    if kind == 1:
        return {"".join(rng.choice(alphabet) for _ in range(6)) for _ in range(count)}
    found = {"".join(rng.choice(alphabet) for _ in range(rng.randint(1, 7))) for _ in range(count)}
    if kind == 2:  # prefixes of one another
        found |= {key[: rng.randint(1, len(key))] for key in found}
    return found | {f"{key}/" for key in rng.sample(sorted(found), len(found) // 3)}


@settings(deadline=None)
@given(st.integers(0, 2**32))
@example(11091)  # a store that ignores start-after, and a skip below where a part begins
def test_any_listing_is_the_naive_one(seed):
    """No key is lost, none comes twice, all are in order; and the requests are bounded."""
    rng = random.Random(seed)
    keys = names(rng)
    store = Store(keys, rng, is_deaf=rng.random() < 0.2)
    some = rng.choice(sorted(keys))
    prefix = rng.choice(["", some[: rng.randint(0, len(some))]])
    keys_max, recursive = rng.choice([1, 2, 3, 10, 1000]), rng.random() < 0.8
    folder = some[: some.find("/") + 1]
    skip = folder if folder.startswith(prefix) and recursive and rng.random() < 0.3 else ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InFlight, "wait", store.waited(InFlight.wait))
        infos = listing.list_objects(
            store,
            prefix,
            recursive=recursive,
            requests_max=rng.choice([1, 2, 64]),
            keys_max=keys_max,
            skip=skip,
            skips_at_once=rng.random() < 0.5,
        )
        found = [info.key for info in infos]
    wanted = [key for key in sorted(keys) if key.startswith(prefix)]
    if not recursive:
        cut = [key.find("/", len(prefix)) for key in wanted]
        wanted = sorted({key if at < 0 else key[: at + 1] for key, at in zip(wanted, cut, strict=True)})
    if skip:
        found, wanted = ([key for key in each if not key.startswith(skip)] for each in (found, wanted))
    assert found == wanted


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_guesses_lie_past_the_page_and_in_order(seed):
    """Each guess is a string past the page's last key and past the guess before it, below the bound, and sendable."""
    rng = random.Random(seed)
    keys = sorted(names(rng))
    high = rng.choice(["", keys[-1] + "0", keys[-1] + "\U0010ffff"])
    found = pages.next_pages(keys, start=0, high=high, count=rng.randint(0, 70))
    assert [keys[-1], *found] == sorted({keys[-1], *found})
    assert all(not high or guess < high for guess in found)
    "".join(found).encode()
