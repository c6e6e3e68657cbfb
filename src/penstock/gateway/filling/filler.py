"""``ResultFiller``: makes results in this process, with the same parts as a gateway."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, ObjectMissingError, PenstockError
from penstock.gateway.authentication.keys import AccessKey
from penstock.gateway.filling.job import Filled
from penstock.gateway.filling.keys import FillKey
from penstock.gateway.metrics import Metrics
from penstock.gateway.objects import Caller, GatewayRequest, S3Error
from penstock.gateway.results.derived import was_copied
from penstock.gateway.serving.assembly import Assembly, WorkerOrder
from penstock.index.place import DATASET_KEY, FOLDER
from penstock.store.s3_requests import encoded_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.gateway.filling.job import FillJob
    from penstock.gateway.results.record import ResultRecord
    from penstock.gateway.results.results import Results
    from penstock.gateway.results.shared_result import SharedResult
    from penstock.store.base import Store

CHECKS_PER_RESULT = 8
"""Lookups in flight for each result that is being made. A lookup waits for two round trips and uses almost no CPU."""

_ATTEMPTS_COUNT = 2
"""A result that was found in the cache, but not all of its blocks, is made once more."""


class _FailureLog(logging.Handler):
    """Keeps log records about requests, because the errors that clients get name neither code nor paths."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        request_id = getattr(record, "request_id", None)
        if request_id in self.texts:
            self.texts[request_id] = record.getMessage()


class ResultFiller:
    """Makes results. All methods run on one event loop.

    Args:
        job: The access points to fill, and where results are kept.
        together_max: Number of results that are made at the same time.
    """

    def __init__(self, job: FillJob, *, together_max: int) -> None:
        self._job = job
        order = WorkerOrder(
            config=job.config, keys=None, internal_key=AccessKey.generate(), index=0, started_s=time.time()
        )
        self._assembly = Assembly(order, metrics=Metrics())
        self._together_max = together_max
        self._turns = asyncio.Semaphore(together_max)
        self._failures = _FailureLog()
        logging.getLogger("penstock").addHandler(self._failures)

    async def start(self) -> None:
        """Open the stores, and start the transforms.

        Raises:
            ConfigError: The configuration cannot be served, or an access point keeps no results.
            StoreError: The bucket of results does not answer.
        """
        await self._assembly.start()
        for name, bucket in self._assembly.transformed.items():
            if not bucket.keeps_results(self._request(name, "")):
                raise ConfigError(
                    f"access point {name!r} keeps no results that other requests find",
                    hint="a transform with random numbers needs --query x-penstock-epoch=N; one that maps ranges keeps none",
                )
        if "results" in self._job.places:
            await self._results.check_derived()

    @property
    def _results(self) -> Results:
        assert self._assembly.results is not None
        return self._assembly.results

    def identities(self) -> dict[str, str]:
        """Return the identity of each transform by access point. Machines with equal identities make the same results."""
        return {name: transform.identity for name, transform in self._assembly.transforms.items()}

    def store(self, name: str) -> Store:
        """Return the store of an access point."""
        return self._assembly.sources[name].store

    async def fill(self, keys: Iterable[FillKey], filled: Callable[[Filled], None]) -> None:
        """Make the results of sources.

        Args:
            keys: The sources; they are taken as results are finished.
            filled: Called with the outcome of each result, failures included.
        """
        rest = iter(keys)

        async def work() -> None:
            for source in rest:
                filled(await self._fill(source))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._together_max * CHECKS_PER_RESULT):
                tasks.create_task(work())

    def check_indexes(self) -> None:
        """Make sure that every access point serves indexes.

        Raises:
            ConfigError: One does not; the message says why.
        """
        for name, bucket in self._assembly.indexed.items():
            if not bucket.serves_indexes(self._request(name, "")):
                raise ConfigError(
                    f"access point {name!r} serves no index, because its listings show the sizes of the sources",
                    hint="list_sizes = 'transform'",
                )

    async def fill_index(self, name: str) -> Filled:
        """Make the index of all results of an access point, and those of the results themselves.

        Args:
            name: Name of the access point, whose results exist.

        Returns:
            The outcome of the index of all results; left out if none of them is a shard.

        Cost: a listing, and one pass over the bytes of the results that have no index yet.
        """
        source = FillKey(name, f"{FOLDER}{DATASET_KEY}", 0)
        try:
            *shards, dataset = await self._assembly.indexed[name].shared_indexes(self._request(name, ""))
        except ObjectMissingError:
            return Filled(source, "left-out")
        try:
            await self._ensure_all(source, shards)
            return await self._ensure(source, dataset)
        except (S3Error, PenstockError, OSError) as error:
            return Filled(source, "failed", dataset.plan.name.etag, error=f"{type(error).__name__}: {error}")

    async def _fill(self, source: FillKey) -> Filled:
        bucket = self._assembly.transformed[source.point]
        key = bucket.result_key(source.key)
        if key is None:
            return Filled(source, "left-out")
        request = self._request(source.point, key)
        texts, etag = self._failures.texts, ""
        texts[request.request_id] = ""
        try:
            shared = await bucket.share(request)
            etag = shared.plan.name.etag
            return await self._ensure(source, shared)
        except S3Error as error:
            reasons = [f"{error.code}: {error.message}", texts[request.request_id]]
            return Filled(source, "failed", etag, error="\n".join(filter(None, reasons)))
        except (PenstockError, OSError) as error:
            return Filled(source, "failed", etag, error=f"{type(error).__name__}: {error}")
        finally:
            del texts[request.request_id]

    async def _ensure_all(self, source: FillKey, results: Iterable[SharedResult]) -> None:
        rest = iter(results)

        async def work() -> None:
            for shared in rest:
                await self._ensure(source, shared)

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._together_max):
                    tasks.create_task(work())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _ensure(self, source: FillKey, shared: SharedResult) -> Filled:
        """Make sure that a result is kept in every place of the job."""
        name, places = shared.plan.name, self._job.places
        is_derived = "results" in places and await self._results.has_derived(name)
        is_cached = shared.record is not None and shared.record.is_complete
        if is_derived >= ("results" in places) and is_cached >= ("cache" in places):
            return Filled(source, "present", name.etag)
        async with self._turns:
            record = await self._kept(shared)
            if "results" in places and not is_derived:
                record = await self._ensure_derived(shared, record)
        is_copied = is_cached or was_copied(shared.plan)
        return Filled(source, "copied" if is_copied else "made", name.etag, record.size_bytes or 0)

    async def _kept(self, shared: SharedResult) -> ResultRecord:
        record = await shared.wait_complete()
        if record is None:
            raise ConfigError(
                "the result does not fit into the cache", hint="--cache PATH:SIZE, more than twice as large"
            )
        return record

    async def _ensure_derived(self, shared: SharedResult, record: ResultRecord) -> ResultRecord:
        for _ in range(_ATTEMPTS_COUNT):
            kept = await self._results.ensure_derived(record)
            if kept.outcome in ("stored", "present"):
                return record
            if kept.outcome == "failed":
                raise PenstockError(f"the bucket of results did not take it: {kept.error}")
            shared.lost(record)
            record = await self._kept(shared)
        raise ConfigError("its blocks were evicted from the cache before they were stored", hint="--cache PATH:SIZE")

    def _request(self, point: str, key: str) -> GatewayRequest:
        config = self._job.config
        return GatewayRequest(
            method="GET",
            bucket=point,
            key=key,
            query=self._job.query,
            headers={},
            caller=Caller(self._job.caller, False),
            url=f"http://127.0.0.1:{config.port}/{encoded_key(f'{point}/{key}')}",
            remote="127.0.0.1",
            request_id=secrets.token_hex(8),
        )

    async def close(self) -> None:
        """End the transforms, finish what is being stored, and close everything; idempotent."""
        logging.getLogger("penstock").removeHandler(self._failures)
        await self._assembly.close()
