"""Checkpoints: a file that ``torch.save`` writes to, which becomes an object when it is closed, and not before."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from penstock import compose
from penstock.errors import ConfigError
from penstock.store.writing import Writer

if TYPE_CHECKING:
    from penstock.types import Core, Key


class CheckpointWriter(Writer):
    """A ``Writer`` that complains when it is dropped: a checkpoint that was not stored must not pass unnoticed.

    ``torch.save`` never closes the file it is given, so ``torch.save(model, checkpoint_writer(url))`` alone stores nothing.
    """

    def __init__(self, core: Core, key: Key, *, part_bytes: int | None = None, if_absent: bool = False) -> None:
        super().__init__(core, key, part_bytes=part_bytes, if_absent=if_absent)
        self._process_id = os.getpid()

    def __del__(self) -> None:
        """Warn where bytes were written and never committed; they are dropped as with every writer."""
        if not self.closed and self.tell() and self._process_id == os.getpid():
            warnings.warn(
                f"{self.name}: {self.tell()} bytes were written and dropped, because the file was never closed. "
                "Hint: with ps.torch.checkpoint_writer(url) as file: torch.save(obj, file)",
                RuntimeWarning,
                stacklevel=2,
            )


def checkpoint_writer(
    url: str | os.PathLike[str], *, part_bytes: int | None = None, if_absent: bool = False, **options: Any
) -> CheckpointWriter:
    """A file for ``torch.save``: ``with ps.torch.checkpoint_writer(url) as file: torch.save(state, file)``.

    The object becomes visible, whole, when the ``with`` ends in good order. After an exception inside it, and when the
    process ends before, nothing is visible and an object of the same key stays what it was.
    ``torch.load(ps.open(url))`` reads it back.

    Args:
        url: Of the object, in any scheme that ``penstock.connect`` takes.
        part_bytes: Size of the first parts, at least 5 MiB on S3.
        if_absent: Never replace an object: ``ObjectExistsError`` at the end of the ``with``.
        **options: As for ``penstock.connect``.

    Raises:
        ConfigError: the URL names no object, or an option cannot be.

    Cost: at most 5 parts in memory; up to 4 go up at a time while ``torch.save`` writes.
    """
    root, key = compose.split(url)
    if not key:
        raise ConfigError(f"{os.fspath(url)!r} names no object", hint="s3://bucket/checkpoints/0001.pt")
    return CheckpointWriter(compose.connect(root, **options), key, part_bytes=part_bytes, if_absent=if_absent)
