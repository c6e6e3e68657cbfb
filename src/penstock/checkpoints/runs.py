"""``Checkpoints``: the checkpoints of a training run, which are directories below one URL."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Self

from penstock import compose
from penstock.checkpoints import debris, layout
from penstock.checkpoints import directory as directories
from penstock.config import check_whole
from penstock.errors import CheckpointError, ConfigError, DirectoryMissingError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from penstock.checkpoints.debris import SaveMarker
    from penstock.checkpoints.directory import CheckpointInfo, Verification
    from penstock.store import Store
    from penstock.types import ObjectInfo


_log = logging.getLogger("penstock.checkpoints")


class Checkpoints:
    """The checkpoints below the URL of a run. A context manager; all methods block.

    Args:
        url: URL of the run, with any scheme that ``penstock.connect`` supports.
        **options: The options of ``penstock.connect``.

    Attributes:
        store: The store of the run; the keys are relative to its URL.

    Raises:
        ConfigError: The URL or an option is invalid.
    """

    def __init__(self, url: str | os.PathLike[str], **options: Any) -> None:
        self.store: Store = compose.connect(url, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoints {self.store.describe('')!r}>"

    def close(self) -> None:
        """Close the store. Idempotent."""
        self.store.close()

    def url(self, step: int) -> str:
        """Return the URL of the directory of a step, for messages."""
        return self.store.describe(layout.step_directory(step))

    # ── finding ────────────────────────────────────────────────────────────────────────────────────────────────────

    def steps(self) -> list[int]:
        """Return the steps that have a directory, in ascending order, whether they are whole or not.

        Cost: one request per 1 000 names directly below the URL.
        """
        return sorted(
            step for info in self._listed() if info.is_prefix and (step := layout.step_of(info.key)) is not None
        )

    def _listed(self) -> list[ObjectInfo]:
        """Return the directories and objects directly below the URL."""
        try:
            return list(self.store.list("", recursive=False))
        except DirectoryMissingError:  # of a store on paths, which has no directory before the first write
            return []

    def all(self) -> list[CheckpointInfo]:
        """Return the facts about each checkpoint: the steps in ascending order, then other directories with a checkpoint.

        If the URL itself is a checkpoint, it comes first.

        Cost: for each directory below the URL a listing, and a request for the manifest.
        """
        listed = self._listed()
        if any(info.key == layout.COMMIT_MARKER and not info.is_prefix for info in listed):
            return [directories.inspect(self.store)]
        infos = [directories.inspect(self.store, info.key) for info in listed if info.is_prefix]
        infos = [info for info in infos if info.step is not None or info.status not in ("missing", "unfinished")]
        infos.sort(key=lambda info: (layout.step_of(info.name) is None, layout.step_of(info.name) or 0, info.name))
        return infos

    def inspect(self, step: int) -> CheckpointInfo:
        """Return the state of the directory of a step. Cost: a listing of it, and a request for the manifest."""
        return directories.inspect(self.store, layout.step_directory(step))

    def newest(self) -> CheckpointInfo | None:
        """Return the newest checkpoint that is whole, or was committed by a writer without manifests; None if there is none.

        A warning in the log names each damaged one that is passed over.

        Cost: a listing of the run, and a listing and a request for each step from the newest to the one returned.
        """
        for step in reversed(self.steps()):
            if (info := self.inspect(step)).usable:
                return info
            if info.status == "damaged":
                _log.warning(
                    "The checkpoint of step %d is damaged, so an earlier one is looked for: %s", step, info.problem
                )
        return None

    def find(self, step: int | None = None) -> CheckpointInfo:
        """Return the checkpoint of `step`, or with None the newest one that is whole.

        Raises:
            CheckpointError: There is none, or that of `step` is not whole; the error names the file that is wrong.
        """
        if step is None:
            if (newest := self.newest()) is None:
                raise CheckpointError("there is no checkpoint that is whole", url=self.store.describe(""))
            return newest
        info = self.inspect(step)
        if not info.usable:
            what = f"the checkpoint of step {step} is {info.status}: {info.problem}"
            if info.status == "missing":
                what = f"there is no checkpoint of step {step}"
            # a problem may have a hint of its own
            hint = None if "Hint: " in what else "`penstock checkpoint ls` lists the checkpoints that are whole"
            raise CheckpointError(what, url=self.url(step), hint=hint)
        return info

    def verify(
        self, step: int, *, checksums: bool = True, progress: Callable[[int, int], None] | None = None
    ) -> Verification:
        """Verify the sizes, and with `checksums` every byte, of a step's files; see ``directory.verify``."""
        return directories.verify(self.store, layout.step_directory(step), checksums=checksums, progress=progress)

    # ── removing ───────────────────────────────────────────────────────────────────────────────────────────────────

    def remove(self, step: int) -> int:
        """Remove the checkpoint of a step, the commit marker first; return the number of objects removed."""
        return directories.remove(self.store, layout.step_directory(step))

    def retain(self, *, keep_last: int | None = None, keep_every: int | None = None) -> list[int]:
        """Remove old checkpoints; return the steps that were removed, in ascending order.

        The newest checkpoint that is whole is never removed, nor anything newer than it, nor the directory of a running save.
        If no checkpoint is whole, nothing is removed.

        Args:
            keep_last: Number of the newest whole checkpoints to keep, at least 1; None keeps all.
            keep_every: Keep the steps that are multiples of this, at least 1; None keeps no more than `keep_last` says.

        Raises:
            ConfigError: A number is out of its bounds, or `keep_every` is given without `keep_last`.

        Cost: one listing; for each checkpoint kept by `keep_last` a listing and a request, for each removed one a listing and
        two or more requests.
        """
        if keep_every is not None:
            check_whole("keep_every", keep_every, 1)
        if keep_last is None:
            if keep_every is not None:
                raise ConfigError("keep_every= needs keep_last=", hint="keep_last=3, keep_every=1000")
            return []
        check_whole("keep_last", keep_last, 1)
        steps = self.steps()
        kept: list[int] = []
        for step in reversed(steps):
            if len(kept) == keep_last:
                break
            if self.inspect(step).usable:
                kept.append(step)
        if not kept:
            return []
        busy = {marker.directory for marker in debris.find_markers(self.store) if not marker.over}
        removed = [
            step
            for step in steps
            if step < kept[0]
            and step not in kept
            and not (keep_every is not None and step % keep_every == 0)
            and layout.step_directory(step) not in busy
        ]
        for step in removed:
            self.remove(step)
        return removed

    def debris(self) -> list[SaveMarker]:
        """Return the saves that were killed, and those that were replaced and left files; see ``debris.py``."""
        return debris.find_debris(self.store) + debris.find_replaced(self.store)

    def remove_debris(self) -> list[SaveMarker]:
        """Remove the files of the saves that ``debris`` returns, and return those."""
        return debris.remove_debris(self.store, self.debris())
