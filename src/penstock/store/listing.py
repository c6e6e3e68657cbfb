"""Listing in key order, in parallel if that pays.

A store returns 1 000 keys per request, and with them the token for the next page, so one round trip would follow another.
Sub-prefixes help: a page that ends inside a sub-prefix shows that there are some, a page with delimiter
``/`` finds up to 1 000 of them, and each is listed like the whole, 64 requests at a time. In flat prefixes, the key
space is cut where the next pages probably begin (``pages``), and its parts are listed in parallel.

Splitting pays only if sub-prefixes hold many keys: with one key in each, it would cost 1 000 requests where one is enough. So
a prefix is split only if its page shows at least ``KEYS_PER_PREFIX_MIN`` keys per sub-prefix. If the sub-prefixes turn out to
be smaller, the rest is listed flat again.

A listing is a sequence of segments in key order. A segment holds keys that have arrived, or is a part of the key space that
is still to be listed; an answer replaces its segment by finer ones. The consumer takes keys from the front. Segments near the
front are requested first, and at most ``PAGES_MAX`` pages are held ahead of the consumer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, ProtocolError
from penstock.store.inflight import InFlight
from penstock.store.pages import FIRST_GUESSES, GuessBudget, check_order, dense_sub_prefix, next_pages
from penstock.system import forks
from penstock.system.tracebacks import boundary
from penstock.types import ListPage, ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.types import Core, Page

REQUESTS_MAX = 64
"""Pages requested at the same time: 64 000 keys per round trip."""

PAGES_MAX = 192
"""Pages held or requested ahead of the consumer: 192 000 keys."""

KEYS_PER_PREFIX_MIN = 50
"""Keys per sub-prefix from which a request for each pays: at most 20 requests instead of one, 64 at a time."""

CHILDREN_MIN = 32
"""Sub-prefixes to list before their size is judged."""

FLAT_PAGES = 64
"""Pages to list flat after a split that did not pay, before another one is considered: splits at most double the requests."""


def list_objects(
    core: Core,
    prefix: str,
    *,
    recursive: bool = True,
    requests_max: int = REQUESTS_MAX,
    keys_max: int = 1000,
    skip: str = "",
    skips_at_once: bool = False,
) -> Iterator[ObjectInfo]:
    """List the objects whose key begins with `prefix`, in key order; ``Store.list`` is this function.

    Args:
        core: The store.
        prefix: Any string.
        recursive: False stops at the next ``/`` and yields prefixes too.
        requests_max: The most pages in flight; at least 1.
        keys_max: Keys to request per page, from 1 to 1 000.
        skip: Keys that begin with this string, which ends with a slash, are not wanted. They are passed over if that saves
            requests, and may be listed if it does not. Empty wants all keys.
        skips_at_once: Whether keys to skip are likely. Then what follows them is requested together with one key, which shows
            what comes before them.

    Raises:
        ConfigError: At once, if an argument is not valid.
        StoreError: While iterating; the iterator then ends and cancels the rest, as it does when it is dropped. Among others,
            a ``ProtocolError`` if the store's pages are not in key order, repeat keys, or have keys of another prefix.

    Cost: One request per page of a flat prefix, and up to twice as many if its keys are no numbers. For a prefix that is
        split, one per page of each sub-prefix and one per 1 000 sub-prefixes. Holds at most ``PAGES_MAX`` pages.
    """
    if not isinstance(prefix, str):
        raise ConfigError(f"prefix must be a str, not {type(prefix).__name__}: {prefix!r}")
    try:
        prefix.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"prefix {prefix!r} is not encodable as UTF-8 at character {error.start}") from error
    if requests_max < 1:
        raise ConfigError(f"requests_max={requests_max!r} must be at least 1")
    if not 1 <= keys_max <= 1000:
        raise ConfigError(f"keys_max={keys_max!r} must lie in [1, 1000]")
    guesses = GuessBudget(FIRST_GUESSES if getattr(core, "pages_anywhere", True) else 0)
    listing = _ParallelListing(
        core, prefix, recursive=recursive, requests_max=requests_max, keys_max=keys_max, skip=skip, guesses=guesses
    )
    if skips_at_once and skip and skip.startswith(prefix) and recursive and getattr(core, "pages_anywhere", True):
        listing.begin_behind()
    return listing.iterate()


class _Split:
    """A prefix whose sub-prefixes are listed one by one, and how many keys they have so far."""

    __slots__ = ("children_count", "keys_count", "prefix")

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.children_count = 0
        self.keys_count = 0

    def pays(self) -> bool:
        """Whether its sub-prefixes are worth a request each, judging by what is known so far."""
        return self.children_count < CHILDREN_MIN or self.keys_count >= KEYS_PER_PREFIX_MIN * self.children_count


class _Segment:
    """Keys in order (``objects``), or a part of the key space that is still to be listed.

    A part of the key space holds the keys that begin with ``prefix`` and are greater than ``low`` (or equal to it, with
    ``from_low``), and if there is a ``high``, not greater than that. The store is told to begin after ``after``, which is
    `low`, or a little less if grouping by delimiter needs it.
    """

    __slots__ = (
        "after",
        "child_of",
        "dropped",
        "finds",
        "flat_count",
        "from_low",
        "guessed_count",
        "high",
        "keys_max",
        "low",
        "next",
        "objects",
        "prefix",
        "seen",
        "token",
    )

    def __init__(
        self,
        prefix: str,
        *,
        low: str = "",
        after: str = "",
        token: str | None = None,
        objects: list[ObjectInfo] | None = None,
    ) -> None:
        self.prefix = prefix
        self.low = low
        self.from_low = False
        self.high = ""
        self.keys_max = 1000  # keys to request with the next page
        self.after = after
        self.token = token
        self.objects = objects
        self.seen = ""  # the last key or sub-prefix of the pages before, whether wanted or not
        self.finds: _Split | None = None  # the prefix whose sub-prefixes it is listed for, with a delimiter
        self.child_of: _Split | None = None  # the prefix that it was found as a sub-prefix of
        self.flat_count = 0  # pages to list flat before a split is considered again
        self.guessed_count = 0  # number of keys that it was guessed to hold when it was cut off; 0 if it was not
        self.dropped = False  # whether another segment lists its keys
        self.next: _Segment | None = None

    def position(self) -> str:
        """Return its position in key order."""
        return max(self.prefix, self.low, self.seen)

    def operation(self, keys_max: int) -> ListPage:
        """Return the request for its next page."""
        keys_max = min(keys_max, self.keys_max)
        return ListPage(self.prefix, "/" if self.finds else "", self.token, "" if self.token else self.after, keys_max)

    def own(self, objects: list[ObjectInfo]) -> list[ObjectInfo]:
        """Return those of `objects` that belong to it; nearly always all."""
        if objects and objects[0].key <= self.low:
            first_past = bisect_left if self.from_low else bisect_right
            objects = objects[first_past(objects, self.low, key=_key) :]
        if self.high and objects and objects[-1].key > self.high:
            objects = objects[: bisect_right(objects, self.high, key=_key)]
        return objects


class _ParallelListing:
    """One listing: the segments, and the pages in flight. Used by one thread at a time."""

    def __init__(
        self,
        core: Core,
        prefix: str,
        *,
        recursive: bool,
        requests_max: int,
        keys_max: int,
        skip: str,
        guesses: GuessBudget,
    ) -> None:
        self._recursive = recursive
        self._skip = skip
        self._behind = skip + "\U0010ffff" if skip else ""
        self._requests_max = requests_max
        self._keys_max = keys_max
        self._url = core.describe(prefix)
        self._in_flight: InFlight[_Segment] = InFlight(core)
        self._wanted: list[tuple[str, int, _Segment]] = []  # a heap: nearest to the front first
        self._numbers = count()
        self._guesses = guesses
        self._held_count = 0  # segments whose keys were not taken yet
        self._made_in = forks.generation()
        self._front = _Segment(prefix)
        if not recursive:
            self._front.finds = _Split(prefix)
        self._want(self._front)

    def begin_behind(self) -> None:
        """Request what follows the keys to skip together with what comes before them, which is mostly nothing."""
        self._front.high, self._front.keys_max = self._behind, 1
        self._front.next = _Segment(self._front.prefix, low=self._behind, after=self._behind)
        self._want(self._front.next)

    @boundary
    def iterate(self) -> Iterator[ObjectInfo]:
        """Iterate the keys in order."""
        segment: _Segment | None = self._front
        del self._front  # each segment refers to the next: the first one would keep all keys that were ever listed
        try:
            while segment is not None:
                forks.check(self._made_in, "the listing")
                while segment.objects is None:
                    self._launch(must=True)
                    self._take()
                while self._in_flight and self._in_flight.ready():
                    self._take()
                self._launch()
                if segment.objects:
                    self._held_count -= 1
                    yield from segment.objects
                segment = segment.next
        finally:
            if self._made_in == forks.generation():
                self._in_flight.cancel()

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _want(self, segment: _Segment) -> None:
        heappush(self._wanted, (segment.position(), next(self._numbers), segment))

    def _launch(self, *, must: bool = False) -> None:
        """Request the wanted pages, within the bounds; with `must`, at least one page is then in flight."""
        while self._wanted and len(self._in_flight) < self._requests_max:
            full = self._held_count + len(self._in_flight) >= PAGES_MAX
            if full and (self._in_flight or not must):
                return
            segment = heappop(self._wanted)[2]
            if segment.dropped:
                continue
            split = segment.child_of
            if split is not None and segment.token is None and not split.pays():
                self._join(segment, split)
            self._in_flight.submit(segment.operation(self._keys_max), segment)

    def _join(self, segment: _Segment, split: _Split) -> None:
        """List the rest of `split` flat, from its sub-prefix `segment` on, because they are too small for a request each."""
        following = segment.next
        while following is not None and following.position().startswith(split.prefix):
            following.dropped = True
            if following.objects:
                self._held_count -= 1
            following = following.next
        segment.next = following
        if not segment.low:
            # Past the prefix without its slash, so that a key equal to the prefix is listed; ``own`` drops the rest.
            segment.low, segment.from_low, segment.after = segment.prefix, True, segment.prefix[:-1]
        segment.prefix = split.prefix
        segment.child_of = None
        segment.flat_count = FLAT_PAGES

    # ── answers ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self) -> None:
        """Wait for a page, and replace its segment by the contents of the page."""
        segment, completion = self._in_flight.wait()
        if completion.error is not None:
            raise completion.error
        if segment.dropped:
            return
        page: Page = completion.value
        if page.next_token is not None and page.next_token == segment.token:  # the listing would never end
            raise ProtocolError(
                f"the next page of the listing has the same token as this one, {page.next_token[:40]!r}",
                operation="LIST",
                url=self._url,
                hint="this server does not page its listings as S3 does",
            )
        seen = check_order(page, segment.prefix, after=segment.seen, url=self._url)
        rest = self._rest_found(segment, page) if segment.finds else self._rest(segment, page)
        if rest is not None and rest.token is not None:
            rest.seen = seen
        parts = [] if rest is None else [rest, *self._cut(segment, rest, page)]
        if segment.finds is not None and self._recursive:
            segment.objects = []
            last = self._insert_found(segment, page)
        else:
            segment.objects = _merged(page) if page.prefixes else segment.own(page.objects)
            self._held_count += bool(segment.objects)
            last = segment
        for part in parts:
            part.next, last.next = last.next, part
            self._want(part)
            last = part

    def _rest(self, segment: _Segment, page: Page) -> _Segment | None:
        """Return the segments left to list after a flat page: more of the same, or a prefix to split; None if nothing is."""
        split = segment.child_of
        if split is not None:
            split.keys_count += len(page.objects)
            split.children_count += segment.token is None
        last, high = page.objects[-1].key if page.objects else "", segment.high
        if segment.guessed_count:
            self._guesses.judge(len(segment.own(page.objects)), segment.guessed_count)
        if page.next_token is None or (high and last >= high):
            return None
        if self._skip and last.startswith(self._skip) and segment.low < self._behind:
            if high == self._behind:  # the rest is requested already
                return None
            if not high:
                return _Segment(segment.prefix, low=self._behind, after=self._behind)
        splits = segment.flat_count == 0 and last > segment.low and not high
        inside = dense_sub_prefix(page.objects, segment.prefix, keys_min=KEYS_PER_PREFIX_MIN) if splits else None
        if inside is None:
            rest = _Segment(segment.prefix, low=max(last, segment.low), token=page.next_token)
            rest.from_low = segment.from_low and rest.low == segment.low
            rest.child_of = split
            rest.flat_count = max(0, segment.flat_count - 1)
            rest.high = high
            return rest
        # After `inside` without its slash: the store then groups all of `inside`, however it treats a start within a group.
        rest = _Segment(segment.prefix, low=last, after=inside[:-1])
        rest.finds = _Split(segment.prefix)
        return rest

    def _cut(self, segment: _Segment, rest: _Segment, page: Page) -> list[_Segment]:
        """Cut `rest` down to about a page, as far as this page lets us guess, and return the segments that follow it.

        A store that does not begin its pages where it was told to returns keys that are not greater than `low`, which do not
        count. Then nothing is guessed any more, and each segment finds its own keys from page to page.
        """
        allowed = self._guesses.allowed()
        if not allowed or rest.finds or rest.token is None or not page.objects or page.objects[0].key <= segment.low:
            return []
        keys = [info.key for info in page.objects]
        parts, before = [], rest
        for edge in next_pages(keys, start=len(segment.prefix), high=segment.high, count=allowed):
            part = _Segment(segment.prefix, low=edge, after=edge)
            part.guessed_count = len(keys)
            part.flat_count = rest.flat_count
            part.high, before.high = before.high, edge
            parts.append(part)
            before = part
        self._guesses.spend(len(parts))
        return parts

    def _rest_found(self, segment: _Segment, page: Page) -> _Segment | None:
        """Return the segment of the next page with a delimiter; None if this was the last."""
        if page.next_token is None:
            return None
        rest = _Segment(segment.prefix, low=segment.low, token=page.next_token)
        rest.finds = segment.finds
        return rest

    def _insert_found(self, segment: _Segment, page: Page) -> _Segment:
        """Insert a page of objects and sub-prefixes after `segment`, as segments of their own, and return the last one."""
        last, low = segment, segment.low
        for info in _merged(page):
            inside = info.is_prefix and low.startswith(info.key)  # `low` is one of its keys
            if info.key <= low and not inside:
                continue
            if info.is_prefix:
                child = _Segment(info.key, low=low if inside else "", after=low if inside else "")
                child.child_of = segment.finds
                self._want(child)
            elif last.objects and last is not segment:
                last.objects.append(info)
                continue
            else:
                child = _Segment(info.key, objects=[info])
                self._held_count += 1
            child.next, last.next = last.next, child
            last = child
        return last


_key = attrgetter("key")


def _merged(page: Page) -> list[ObjectInfo]:
    """Return objects and prefixes of a page as one list in key order."""
    infos = page.objects + [ObjectInfo(prefix, 0, is_prefix=True) for prefix in page.prefixes]
    infos.sort(key=_key)  # two sorted runs, which Python merges
    return infos
