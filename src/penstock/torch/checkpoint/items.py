"""Items: the form in which a file of a distributed checkpoint holds one tensor, or one other object.

An item is a file of ``torch.save`` of its own, as ``torch.distributed.checkpoint`` reads it: for a tensor, a zip archive in
which its bytes lie uncompressed. It is put together from the archive's *frame*, which depends on shape and dtype only, and from
the tensor's own memory, so that the bytes are not copied. The archive's own CRC-32 of the tensor is left out, because PyTorch
does not look at it and computes it at 1.5 GB/s; the manifest has a CRC-32C, computed at 10 GB/s.
"""

from __future__ import annotations

import io
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.checkpoints import CheckpointItem
from penstock.checksums.combining import combined_crc
from penstock.checksums.crc32c import crc32c
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

_FRAMES_MAX = 4096  # frames of 1.3 KB: optimisers repeat the shapes of the parameters

_SKIP_DATA = getattr(torch.serialization, "skip_data", None)  # PyTorch 2.6 and later


class _Frame(NamedTuple):
    head: bytes
    tail: bytes


class _FrameFile:
    """A file that ``torch.save`` writes to, in which the tensor's bytes are a hole."""

    def __init__(self) -> None:
        self.pieces: list[bytearray] = [bytearray()]
        self.hole_bytes = 0

    def write(self, data: Any) -> int:
        self.pieces[-1] += data
        return len(data)

    def seek(self, length_bytes: int, whence: int = 0) -> None:
        assert whence == io.SEEK_CUR
        self.hole_bytes += length_bytes
        self.pieces.append(bytearray())

    def flush(self) -> None:
        pass


@lru_cache(_FRAMES_MAX)
def _frame(shape: torch.Size, dtype: torch.dtype) -> _Frame | None:
    """Return the frame of a tensor; None if this version of PyTorch, or this dtype, needs the tensor for it."""
    if _SKIP_DATA is None:
        return None
    file: Any = _FrameFile()
    with _SKIP_DATA():
        torch.save(torch.empty(shape, dtype=dtype), file)
    if len(file.pieces) > 2 or file.hole_bytes != math.prod(shape) * dtype.itemsize:
        return None
    return _Frame(bytes(file.pieces[0]), b"".join(file.pieces[1:]))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but its elements in memory, so that they can be written and read as bytes."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
    )


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU: uint8[n]."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # reshape() keeps the stride of a dimension of length 1
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def write_tensor(
    write: Callable[[Any], object], offset_bytes: int, tensor: torch.Tensor, name: str, *, block_bytes: int
) -> WrittenItem:
    """Write a tensor as an item.

    Args:
        write: Called with each piece; the pieces of the tensor's own memory stay valid as long as the tensor.
        offset_bytes: Position of the item in the file.
        tensor: The tensor, on any device.
        name: Name of the tensor in the state dict, for messages.
        block_bytes: Length of the blocks that get a checksum each.

    Raises:
        ConfigError: The tensor has no data.
    """
    tensor = tensor.detach()
    if tensor.is_meta:
        raise ConfigError(
            f"{name!r} is a tensor on the meta device, which has no data to save",
            hint="materialise the model first, for example by model.to_empty(device=...)",
        )
    frame = _frame(tensor.shape, tensor.dtype) if is_plain(tensor) else None
    if frame is None:
        file = io.BytesIO()
        torch.save(tensor.cpu().clone() if is_plain(tensor) else tensor.cpu(), file)
        return write_object(write, offset_bytes, file, block_bytes=block_bytes)
    tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return _write_framed(write, offset_bytes, frame, tensor_bytes(tensor), block_bytes)


def write_object(
    write: Callable[[Any], object], offset_bytes: int, data: io.BytesIO, *, block_bytes: int
) -> WrittenItem:
    """Write what ``torch.save`` made of an object as an item; see ``write_tensor``."""
    buffer = data.getbuffer()
    return _write_framed(write, offset_bytes, _Frame(b"", b""), buffer, block_bytes)


def _write_framed(
    write: Callable[[Any], object], offset_bytes: int, frame: _Frame, data: memoryview, block_bytes: int
) -> WrittenItem:
    """Write an item: bytes, and the frame around them."""
    if frame.head:
        write(frame.head)
    crc = crc32c(frame.head)
    crcs = []
    for start in range(0, len(data), block_bytes):
        block = data[start : start + block_bytes]
        crcs.append(block_crc := crc32c(block))
        crc = combined_crc(crc, block_crc, len(block))
        write(block)
    if frame.tail:
        write(frame.tail)
    item = CheckpointItem(
        offset_bytes=offset_bytes,
        length_bytes=len(frame.head) + len(data) + len(frame.tail),
        data_offset_bytes=offset_bytes + len(frame.head),
        data_length_bytes=len(data),
        block_crcs=tuple(crcs),
    )
    return WrittenItem(item, crc32c(frame.tail, crc))


class WrittenItem(NamedTuple):
    """An item that was written.

    Attributes:
        item: Place of the tensor in the file.
        crc: CRC-32C of all its bytes.
    """

    item: CheckpointItem
    crc: int
