"""``IndexRecorder``: an index as a by-product of an epoch that is read without one, for the next job.

Only the number of samples and their offsets are recorded, a few lists for each shard; keys and checksums are left to
``penstock index``. Once the process has read its share of an epoch, a thread of its own writes the index to
``index_dir``. The running job keeps its order, even if it is resumed.
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
    """The records of one shard while it is read from end to end.

    Args:
        format_name: The format of the shard, a name in ``formats``.

    Attributes:
        count: Number of samples so far.
        format: The format of the shard. Once the first record has decided what records hold, it says so; what the job says
            of their content does not matter.
    """

    def __init__(self, format_name: str) -> None:
        self.count = 0
        self.format = without_content(format_name)
        form = FORMATS[self.format]
        self._has_places = form.unit == "sample" and form.ranged is None  # ranged formats locate samples themselves
        self._has_head = form.head is not None
        self._first: int | None = None
        self._ends: list[int] = []

    def add(self, samples: Sequence[Sample]) -> None:
        """Record the next samples."""
        self.count += len(samples)
        if not samples or not self._has_places:
            return
        places = zip(*samples.columns[1:3], strict=True) if isinstance(samples, Samples) else map(_PLACE, samples)
        if self._first is None:
            self._first = samples[0].offset_bytes
        try:
            self._ends.extend(starmap(add, places))
        except TypeError:  # the format does not say how long the sample is
            self._has_places = False

    def index(self, key: str, *, size_bytes: int, etag: str) -> ShardIndex:
        """The index of the part of the shard that was read.

        Args:
            key: Key of the shard in the index.
            size_bytes: Size of the shard.
            etag: ETag of the shard.

        Raises:
            DataError: The samples do not lie one after the other.
        """
        row = ShardRow(key, size_bytes, etag, self.count, self.format, self._has_places)
        first = self._first if self._has_head and self._first is not None else 0
        offsets = np.array([first, *self._ends], np.int64) if self._has_places else None
        return ShardIndex(row, offsets=offsets)


class IndexRecorder:
    """Records the shards that one process reads, and writes their index.

    Args:
        place: Place of the index.
    """

    def __init__(self, place: IndexPlace) -> None:
        self._place = place
        self._expected: set[str] = set()  # keys of the shards that are still to be read in this epoch
        self._known: set[str] = set()
        self._indexes: list[ShardIndex] = []
        self._lock = threading.Lock()  # one thread reads all lanes, but another one may begin the epoch
        self._thread: threading.Thread | None = None
        self._in_background = True

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only the configuration. A worker process writes its index before it reports the end of the epoch."""
        return {"place": self._place}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["place"])  # type: ignore[misc]
        self._in_background = False

    def begin_epoch(self, shards: Iterable[Shard]) -> None:
        """Begin an epoch, or the rest of one.

        Args:
            shards: The shards that this process is going to read.

        Cost: one read of the records of this and other processes.
        """
        self._settle()
        listed = {shard.url[len(self._place.base_url) :]: shard for shard in shards}
        try:
            index = self._place.load()
        except PenstockError as error:
            _log.warning("no index is built from this epoch: %s", error)
            index, listed = DatasetIndex(self._place.base_url), {}
        with self._lock:
            self._known = {
                key
                for key, shard in listed.items()
                if shard.listed_etag is None  # it would need a request at the next start
                or shard.listed_size_bytes is None
                or index.row_of(key, size_bytes=shard.listed_size_bytes, etag=shard.listed_etag) is not None
            }
            self._expected = set(listed)
            self._indexes = []

    def begin_shard(self, segment: ShardSegment) -> ShardPass | None:
        """Begin to record the shard of a segment; None if it is not read from end to end, or is known already."""
        is_all = segment.is_whole and not segment.skip_count and segment.count is None
        key = self._key(segment)
        if segment.format is None or not is_all or key in self._known or key not in self._expected:
            return None
        return ShardPass(segment.format)

    def end_shard(self, segment: ShardSegment, shard_pass: ShardPass | None) -> None:
        """Note that a segment was read to its end. After the last one, write the index.

        Args:
            segment: The segment.
            shard_pass: Recorded offsets and checksums; None if nothing was, or samples were skipped.
        """
        key, shard = self._key(segment), segment.shard
        with self._lock:
            if shard_pass is not None and shard.listed_etag is not None and shard.listed_size_bytes is not None:
                try:
                    self._indexes.append(
                        shard_pass.index(key, size_bytes=shard.listed_size_bytes, etag=shard.listed_etag)
                    )
                except PenstockError as error:
                    _log.debug("no index is built for %s: %s", shard.url, error)
            self._expected.discard(key)
            if self._expected or not self._indexes:
                return
            indexes, self._indexes = self._indexes, []
        if not self._in_background:
            self._save(indexes)
            return
        self._thread = threading.Thread(target=self._save, args=(indexes,), name="penstock-index")
        self._thread.start()

    def close(self) -> None:
        """Wait until the index is written, and close its store; idempotent."""
        self._settle()
        self._place.store.close()

    def _settle(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _key(self, segment: ShardSegment) -> str:
        return segment.shard.url[len(self._place.base_url) :]

    def _save(self, indexes: list[ShardIndex]) -> None:
        try:
            self._place.save_pass(indexes)
        except (PenstockError, OSError) as error:
            # only the message: a log record that is kept would keep the traceback, and with it the store
            _log.warning(
                "the index of %d shards that this epoch recorded cannot be written: %s", len(indexes), str(error)
            )
            return
        samples_count = sum(len(index) for index in indexes)
        _log.info("indexed %d shards, %d samples, while reading them: %s", len(indexes), samples_count, self._place.url)
