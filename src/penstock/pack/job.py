"""``PackJob``: the common part of packing and converting. A plan is made, saved and executed, each in a step of its own."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from penstock import compose
from penstock.errors import DataError
from penstock.pack.destination import Destination
from penstock.pack.recipes import Packed
from penstock.pack.verification import check_shard
from penstock.pack.workers import write_in_threads
from penstock.sources.shards import ShardFinder
from penstock.text.patterns import has_glob, split_glob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.index import ShardRow
    from penstock.pack.plan import PackPlan, ShardPlan
    from penstock.pack.recipes import PackListener, Recipe, ShardGroup
    from penstock.pack.workers import ExecutionOptions
    from penstock.pipeline import Objects, Shards
    from penstock.pipeline.factories import ConnectionOptions
    from penstock.sources.shards import Shard
    from penstock.store import Store


class PackJob:
    """One packing or conversion into one destination. A context manager that closes the job's stores.

    Attributes:
        destination: Folder of the new shards.

    Args:
        folder: URL of the destination, which ends with a slash.
        connection: Connection options of the destination.
        source_connection: Connection options of the source.
    """

    def __init__(self, folder: str, connection: ConnectionOptions, source_connection: ConnectionOptions) -> None:
        self._connection = connection
        self._source_connection = source_connection
        with ExitStack() as stack:
            self.destination = Destination(stack.enter_context(compose.connect(folder, **connection)))
            self._stack = stack.pop_all()
        self._stores: list[Store] = []
        self._plan: PackPlan | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def planned(self) -> PackPlan:
        """The plan that ``plan`` returned."""
        assert self._plan is not None, "plan() comes first"
        return self._plan

    def _find(self, source: Objects | Shards) -> list[Shard]:
        """List a source; the job holds its stores until it ends."""
        finder = ShardFinder(source, fetch=None)
        self._stack.callback(finder.close)
        return finder.find()

    def _resume(
        self, plan: PackPlan, replan: Callable[[], PackPlan], *, must_match: bool, urls: Sequence[str] | None
    ) -> PackPlan:
        """Follow the plan that an earlier run stored.

        Args:
            plan: The stored plan. Everybody who can write to the destination may have written it, so it must not name anything
                outside the source.
            replan: Returns the plan of the source as it is now.
            must_match: Whether a source that has changed is an error.
            urls: URLs of the source; None if a manifest or a table names its objects.

        Raises:
            ConfigError: The source no longer names an object of the plan.
            DataError: The source has changed, and `must_match`; or the plan reads something outside the source.
        """
        if must_match or plan.is_of_urls or urls is None:
            now = replan()
            if must_match:
                plan.check_source(now)
            plan.complete(now)
            allowed = now.roots
        else:
            listed = (split_glob(url)[0] if has_glob(url) else url for url in urls)
            allowed = [compose.split(url)[0] for url in listed]
        for root in plan.roots:
            if not any(root == url or root.startswith(f"{url.rstrip('/')}/") for url in allowed):
                raise DataError(
                    f"the stored plan reads {root}, which does not belong to the source",
                    hint="somebody else may have written it; --overwrite (overwrite=True) starts again",
                )
        connection = self._source_connection
        self._stores = [self._stack.enter_context(compose.connect(url, **connection)) for url in plan.roots]
        self._plan = plan
        return plan

    def save(self) -> None:
        """Write the plan down if it is new; before that, delete the shards that it replaces, and uploads of a killed run."""
        self.destination.save(self.planned)

    def _execute(
        self,
        recipe: Recipe,
        grouped: Callable[[list[ShardPlan]], list[ShardGroup]],
        *,
        options: ExecutionOptions,
        listener: PackListener,
    ) -> Packed:
        """Write the shards of the plan that are not finished, then the index and the manifest.

        Args:
            recipe: Format and options of the shards.
            grouped: Returns the shards in groups that are written one after the other.
            options: Options for carrying out the plan.
            listener: Receives progress.

        Raises:
            PenstockError: The first error of any shard; finished shards stay.
        """
        plan, destination = self.planned, self.destination
        known = {row.key: row for row in destination.rows([shard.name for shard in plan.shards])}
        for row in known.values():
            listener.finished(row, known=True)
            if options.verify:
                check_shard(destination.store, destination.place, row)
                listener.verified(row)
        todo = [shard for shard in plan.shards if shard.name not in known]
        samples_count = sum(len(shard.entries) for shard in todo) if plan.kind == "entries" else 0
        listener.planned(len(todo), samples_count, plan.bytes_of(todo))
        written = self._write(grouped(todo), recipe, options, listener) if todo else {}
        rows = [known.get(shard.name) or written[shard.name] for shard in plan.shards]
        if plan.kind == "entries":
            _check_counts(plan.shards, rows)
        destination.finish(plan, rows)
        classes = None if plan.classes is None else tuple(plan.classes)
        return Packed(destination.url, tuple(rows), len(written), plan.passed_over, classes)

    def _write(
        self, groups: list[ShardGroup], recipe: Recipe, options: ExecutionOptions, listener: PackListener
    ) -> dict[str, ShardRow]:
        destination = self.destination
        if options.executor == "threads":
            return write_in_threads(groups, destination, self._stores, recipe, options=options, listener=listener)
        from penstock.pack.cluster import ClusterTask, write_on_cluster

        task = ClusterTask(
            recipe,
            root_url(destination.store),
            self._connection,
            tuple(self.planned.roots),
            self._source_connection,
            destination.run,
            options,
        )
        return write_on_cluster(groups, task, listener=listener)


def root_url(store: Store) -> str:
    """Return a URL from which ``compose.connect`` makes `store` again."""
    url = store.describe("")
    if url.startswith("file://"):
        return url.removeprefix("file://")  # as a path, in which nothing is quoted
    return url


def _check_counts(shards: list[ShardPlan], rows: list[ShardRow]) -> None:
    for shard, row in zip(shards, rows, strict=True):
        if row.samples_count != len(shard.entries):
            raise DataError(
                f"it has {row.samples_count} samples, but the plan says {len(shard.entries)}",
                hint="another program replaced it; --overwrite starts again",
                shard=row.key,
            )
