"""A save in the background: a thread of its own, whose failure is not lost even if the process ends.

The thread is not a daemon, so a process that ends normally first finishes its upload. If the save failed and the error has
not been raised by then, it is printed and the exit code becomes 1.

The state is copied first (``SnapshotMemory``), so that the training loop may change it while it is uploaded.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from typing import TYPE_CHECKING

import torch

from penstock.config import check_whole
from penstock.errors import ConfigError
from penstock.text.sizes import format_bytes
from penstock.torch.checkpoint.saved_items import local

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_unheard: list[BackgroundSave] = []
"""Saves that are under way, or that failed without anybody having been told."""


class BackgroundSave:
    """Calls a function in a thread.

    Args:
        call: The function.
        what: Description of the save, for the message at exit.
    """

    def __init__(self, call: Callable[[], None], what: str) -> None:
        self._call = call
        self.what = what
        self.failure: BaseException | None = None
        _unheard.append(self)
        self._thread = threading.Thread(target=self._run, name="penstock-checkpoint", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.failure = error
        else:
            _unheard.remove(self)

    @property
    def is_running(self) -> bool:
        """Whether it is still under way."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it has ended.

        Raises:
            BaseException: It failed; only the first call raises it.
        """
        self._thread.join()
        failure, self.failure = self.failure, None
        if failure is not None:
            _unheard.remove(self)
            raise failure


def _tell_at_exit() -> None:
    failed = [save for save in _unheard if save.failure is not None]
    for save in failed:
        assert save.failure is not None
        print(f"penstock: {save.what} failed, and the process ends without having heard of it:", file=sys.stderr)
        traceback.print_exception(save.failure, file=sys.stderr)
    if failed:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)  # an exception here would be printed, and the exit code would remain 0


atexit.register(_tell_at_exit)


class SnapshotMemory:
    """Memory for one snapshot, which every save uses again; pinned for what comes from a GPU.

    Args:
        bytes_max: The most bytes that a snapshot may take on this rank; None means no limit.

    Raises:
        ConfigError: `bytes_max` is not a positive number of bytes.
    """

    def __init__(self, *, bytes_max: int | None) -> None:
        if bytes_max is not None:
            check_whole("snapshot_bytes_max", bytes_max, 1)
        self._bytes_max = bytes_max
        self._held: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def take(self, items: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy what this rank holds of `items`, and return the copies by name. The snapshot before is overwritten.

        Raises:
            ConfigError: They take more bytes than the limit; nothing is copied.

        Cost: one copy of the state; memory is allocated at the first call.
        """
        shards = {name: local(value) for name, value in items.items()}
        size_bytes = sum(each.nbytes for each in shards.values())
        if self._bytes_max is not None and size_bytes > self._bytes_max:
            raise ConfigError(
                f"a snapshot takes {format_bytes(size_bytes)}, more than snapshot_bytes_max={self._bytes_max}",
                hint="save(wait=True) needs no snapshot",
            )
        self._held = {name: self._memory(name, shard) for name, shard in shards.items()}
        is_on_gpu = False
        for name, shard in shards.items():
            is_on_gpu = is_on_gpu or shard.is_cuda
            self._held[name].copy_(shard, non_blocking=shard.is_cuda)
        if is_on_gpu:
            torch.cuda.current_stream().synchronize()
        return self._held

    def release(self) -> None:
        """Free the memory."""
        self._held = {}

    def _memory(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        held = self._held.get(name)
        if held is not None and held.shape == shard.shape and held.dtype == shard.dtype:
            return held
        return torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
