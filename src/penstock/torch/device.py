"""Moves batches to the device: copies them ahead on a stream of their own, and normalizes images on the device."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from penstock.errors import ConfigError
from penstock.system.tracebacks import boundary
from penstock.torch.batches import Stateful, as_tensors, converted, stateful

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

AHEAD_MAX = 64
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@boundary
class Prefetch:
    """Iterates batches of tensors on a device, copied there ahead of the training loop.

    With CUDA, batches are copied through pinned memory on a stream of their own while the previous step computes. The stream
    of the training loop waits for a copy to arrive; the host never waits. On the CPU, tensors are passed on unchanged, so the
    same loop runs everywhere. The state is that of the batch returned last, not of the batches copied ahead.

    Args:
        batches: An iterable of batches of arrays or tensors by name: a ``Loader`` or a ``DataLoader``. Lists remain lists. Each
            iteration iterates it once.
        device: The target device. The default is the current CUDA device, or the CPU if CUDA is not available.
        ahead: Number of batches that are copied ahead, in [1, 64].

    Raises:
        ConfigError: `ahead` is out of bounds, or torch does not know the device.

    Cost: ``ahead`` + 1 batches of device memory, and as much pinned memory unless the batches are pinned already.
    """

    def __init__(self, batches: Iterable[Any], *, device: str | torch.device | None = None, ahead: int = 2) -> None:
        if not 1 <= ahead <= AHEAD_MAX:
            raise ConfigError(f"ahead={ahead!r} must lie in [1, {AHEAD_MAX}] batches")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.device = torch.device(device)
        except RuntimeError as error:
            raise ConfigError(f"device={device!r}: {error}") from None
        self.batches = batches
        self.ahead = ahead
        self._running: _CudaIterator | None = None

    def __repr__(self) -> str:
        return f"Prefetch({self.batches!r}, device={str(self.device)!r}, ahead={self.ahead})"

    def __iter__(self) -> Iterator[Any]:
        if self.device.type == "cuda":
            self._running = _CudaIterator(self.batches, self.device, self.ahead)
            return self._running
        return map(self._moved, self.batches)

    def _moved(self, batch: Any) -> Any:
        """Return a batch of tensors on the CPU, or on a device without streams."""
        return converted(as_tensors(batch), lambda value: value.to(self.device) if _is_tensor(value) else value)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]  # TypeError if the length is not known, as for any iterable

    def __bool__(self) -> bool:
        return True  # even if the length is not known

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the batch that was returned last.

        Raises:
            ConfigError: The iterable has no state.
        """
        if self._running is not None and self._running.state is not None:
            return self._running.state
        return stateful(self.batches).state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved.

        Raises:
            ConfigError: The iterable has no state.
        """
        self._running = None
        stateful(self.batches).load_state_dict(state)


class _Copy(NamedTuple):
    """A batch that is being copied: an event for its arrival, its tensors on the device, and the source of their data."""

    batch: Any
    arrived: torch.cuda.Event
    tensors: list[torch.Tensor]
    sources: list[torch.Tensor]
    state: dict[str, Any] | None


@boundary
class _CudaIterator:
    def __init__(self, batches: Iterable[Any], device: torch.device, ahead: int) -> None:
        self._stateful = batches if isinstance(batches, Stateful) else None
        self.state = None if self._stateful is None else self._stateful.state_dict()
        self._batches: Iterator[Any] | None = iter(batches)
        self._device = device
        self._ahead = ahead
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        self._copies: deque[_Copy] = deque()
        # torch's allocator does not know memory that a loader pinned itself, so it must be kept until the copy has arrived.
        self._sources: deque[_Copy] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        while len(self._copies) <= self._ahead and self._begin_copy():
            pass
        if not self._copies:
            self._release(wait=True)
            self.state = None  # the epoch is over for the loader too
            raise StopIteration
        copy = self._copies.popleft()
        self.state = copy.state
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copy.arrived)
        # The side stream allocated their memory, which must not be freed while this stream uses it.
        for value in copy.tensors:
            value.record_stream(stream)
        self._sources.append(copy._replace(batch=None, tensors=[]))
        self._release(wait=False)
        return copy.batch

    def __del__(self) -> None:
        """Wait for the copies under way, since the loader may then reuse the memory that they read."""
        for copy in (*getattr(self, "_sources", ()), *getattr(self, "_copies", ())):
            copy.arrived.synchronize()

    def _begin_copy(self) -> bool:
        if self._batches is None:
            return False
        try:
            found = next(self._batches)
        except StopIteration:
            self._batches = None
            return False
        state = None if self._stateful is None else self._stateful.state_dict()
        there: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []

        def copied(value: Any) -> Any:
            if not _is_tensor(value):
                return value
            sources.append(value if value.is_pinned() or value.is_cuda else value.pin_memory())
            there.append(sources[-1].to(self._device, non_blocking=True))
            return there[-1]

        with torch.cuda.stream(self._stream):
            batch = converted(as_tensors(found), copied)
            arrived = self._stream.record_event()
        self._copies.append(_Copy(batch, arrived, there, sources, state))
        return True

    def _release(self, *, wait: bool) -> None:
        while self._sources and (wait or self._sources[0].arrived.query()):  # type: ignore[no-untyped-call]  # torch's
            copy = self._sources.popleft()
            if wait:
                copy.arrived.synchronize()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class Normalize(torch.nn.Module):
    """Converts images from ``uint8[B, H, W, C]``, as loaders return them, to ``float[B, C, H, W]``, as models take them.

    It computes ``(x / 255 - mean) / std`` on the device, in two passes over the batch. So only a quarter of the bytes cross the
    bus, and the CPU does none of the work. In memory the result has the channels of a pixel next to each other
    (``torch.channels_last``), which suits convolutions, and nothing is transposed.

    Args:
        mean: Mean of each channel, in [0, 1]; the default is ImageNet's.
        std: Standard deviation of each channel; the default is ImageNet's.
        dtype: Dtype of the result.

    Raises:
        ConfigError: `mean` and `std` differ in length, or a `std` is 0.
    """

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(
        self,
        *,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if len(mean) != len(std) or not all(std):
            raise ConfigError(f"mean={mean!r} and std={std!r} must have one entry per channel, and no std of 0")
        scale = torch.tensor([1 / (255 * each) for each in std])
        shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)])
        self.dtype = dtype
        self.register_buffer("scale", scale[:, None, None], persistent=False)
        self.register_buffer("shift", shift[:, None, None], persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return normalized images.

        Args:
            images: uint8[B, H, W, C], or uint8[B, H, W] for one channel.

        Returns:
            dtype[B, C, H, W] on the device of `images`.
        """
        if images.dim() == 3:
            images = images.unsqueeze(-1)
        scale, shift = self.scale.to(images.device), self.shift.to(images.device)
        return torch.addcmul(shift, images.permute(0, 3, 1, 2).float(), scale).to(self.dtype)
