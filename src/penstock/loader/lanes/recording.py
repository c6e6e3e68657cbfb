"""An index as a by-product: what an epoch without one finds out about its shards, kept for the next job.

Only counts and the places of samples are noted, a few lists per shard: keys and checksums are for ``penstock index``. When
all that this process reads of an epoch has been read, it is written to ``index_dir``, by a thread of its own. The running
job goes on as it began, also where it is resumed.
"""

from __future__ import annotations

import logging
import threading
from itertools import starmap
from operator import add, attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import PenstockError
from penstock.formats import FORMATS, Samples, without_content
from penstock.index import DatasetIndex, ShardIndex, ShardRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.formats import Sample
    from penstock.index import IndexPlace
    from penstock.loader.lanes.segments import ShardSegment
    from penstock.sources.shards import Shard

_log = logging.getLogger("penstock.loader")
_PLACE = attrgetter("offset_bytes", "size_bytes")


class ShardPass:
    """One shard, as it is read from end to end.

    Attributes:
        count: Samples so far.
        format: The shard's; says what records hold once that is decided, by the shard and not by what the job says.
    """

    def __init__(self, format_name: str) -> None:
        self.count = 0
        self.format = without_content(format_name)
        form = FORMATS[self.format]
        self._has_places = form.unit == "sample" and form.ranged is None  # those say themselves where samples lie
        self._has_head = form.head is not None
        self._first: int | None = None
        self._ends: list[int] = []

    def add(self, samples: Sequence[Sample]) -> None:
        """The next ones."""
        self.count += len(samples)
        if not samples or not self._has_places:
            return
        places = zip(*samples.columns[1:3], strict=True) if isinstance(samples, Samples) else map(_PLACE, samples)
        if self._first is None:
            self._first = samples[0].offset_bytes
        try:
            self._ends.extend(starmap(add, places))
        except TypeError:  # a sample of which the format does not say how long it is
            self._has_places = False

    def index(self, key: str, *, size_bytes: int, etag: str) -> ShardIndex:
        """What is known of the shard now.

        Raises:
            DataError: its samples do not lie one behind the other.
        """
        row = ShardRow(key, size_bytes, etag, self.count, self.format, self._has_places)
        first = self._first if self._has_head and self._first is not None else 0
        offsets = np.array([first, *self._ends], np.int64) if self._has_places else None
        return ShardIndex(row, offsets=offsets)


class IndexRecorder:
    """What one process finds out.

    Args:
        place: Where it is kept.
    """

    def __init__(self, place: IndexPlace) -> None:
        self._place = place
        self._expected: set[str] = set()  # keys of the shards of this epoch that were not read to their end yet
        self._known: set[str] = set()
        self._found: list[ShardIndex] = []
        self._lock = threading.Lock()  # lanes are read by one thread, which need not be the one that begins
        self._thread: threading.Thread | None = None
        self._in_background = True

    def __getstate__(self) -> dict[str, Any]:
        """Of a worker process: as configuration. It keeps what it found before it says that its epoch is over."""
        return {"place": self._place}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["place"])  # type: ignore[misc]
        self._in_background = False

    def begin(self, shards: Iterable[Shard]) -> None:
        """An epoch begins, or goes on, with these shards. Cost: a read of what is known, by other processes too."""
        self._settle()
        listed = {shard.url[len(self._place.base_url) :]: shard for shard in shards}
        try:
            index = self._place.load()
        except PenstockError as error:
            _log.warning("no index is made of this epoch: %s", error)
            index, listed = DatasetIndex(self._place.base_url), {}
        with self._lock:
            self._known = {
                key
                for key, shard in listed.items()
                if shard.listed_etag is None  # what was not listed would have to be asked for at the next start
                or shard.listed_size_bytes is None
                or index.row_of(key, size_bytes=shard.listed_size_bytes, etag=shard.listed_etag) is not None
            }
            self._expected = set(listed)
            self._found = []

    def started(self, segment: ShardSegment) -> ShardPass | None:
        """A segment is read now; None: nothing is to be noted of it."""
        is_all = segment.is_whole and not segment.skip_count and segment.count is None
        key = self._key(segment)
        if segment.format is None or not is_all or key in self._known or key not in self._expected:
            return None
        return ShardPass(segment.format)

    def ended(self, segment: ShardSegment, noted: ShardPass | None) -> None:
        """A segment was read to its end; `noted` is None where nothing was, or something was left out."""
        key, shard = self._key(segment), segment.shard
        with self._lock:
            if noted is not None and shard.listed_etag is not None and shard.listed_size_bytes is not None:
                try:
                    self._found.append(noted.index(key, size_bytes=shard.listed_size_bytes, etag=shard.listed_etag))
                except PenstockError as error:
                    _log.debug("no index is made of %s: %s", shard.url, error)
            self._expected.discard(key)
            if self._expected or not self._found:
                return
            found, self._found = self._found, []
        if not self._in_background:
            self._save(found)
            return
        self._thread = threading.Thread(target=self._save, args=(found,), name="penstock-index")
        self._thread.start()

    def close(self) -> None:
        """Wait until what was found is written; idempotent."""
        self._settle()
        self._place.store.close()

    def _settle(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _key(self, segment: ShardSegment) -> str:
        return segment.shard.url[len(self._place.base_url) :]

    def _save(self, found: list[ShardIndex]) -> None:
        try:
            self._place.save_pass(found)
        except (PenstockError, OSError) as error:
            # its words alone: whoever keeps log records would keep the traceback, and with it the store
            _log.warning("the index that this epoch made of %d shards cannot be kept: %s", len(found), str(error))
            return
        samples_count = sum(len(index) for index in found)
        _log.info("indexed %d shards, %d samples, while reading them: %s", len(found), samples_count, self._place.url)
