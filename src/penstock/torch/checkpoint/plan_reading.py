"""Reads the items of a load plan: exactly their ranges, many in parallel, into the tensors' memory where that is possible.

Each item of a plan is a box of a saved tensor, which goes into a box of a tensor of the state dict. If the saved bytes of the
box have the form of the destination's memory, they are read directly into it. Otherwise they are read into a buffer of
at most ``STAGED_BYTES_MAX``, and copied with strides, dtype and device changed. Ranges are extended to the limits of the
blocks that have checksums, so that everything is verified.
"""

from __future__ import annotations

import io
import pickle
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType

from penstock.checksums.crc32c import crc32c
from penstock.config import MIB
from penstock.errors import CheckpointError, ConfigError, UnsupportedFormatError
from penstock.fetch import PlanItem
from penstock.torch.checkpoint.archive import load_guarded
from penstock.torch.checkpoint.items import is_plain, tensor_bytes
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

    from penstock.checkpoints import CheckpointItem, CheckpointManifest
    from penstock.store import Store
    from penstock.types import ObjectInfo

STAGED_BYTES_MAX = 256 * MIB
"""Bytes read into memory of ours before they are copied to where they belong."""

PIECE_BYTES = 64 * MIB
"""A longer box of a tensor that is not read in place is cut into pieces of about this length."""

_HINT = "load an earlier checkpoint; `penstock checkpoint ls` lists them"


class _Read(NamedTuple):
    """One range to read.

    Attributes:
        file: Name of the file.
        span: The range.
        memory: uint8[n] for the bytes; None for new memory.
        block_crcs: Checksums of the blocks of the range; empty if there are none.
        block_bytes: Length of a block.
        name: Name of the tensor or object in the state dict.
        take: Called with the bytes when they have arrived and are verified: copies them to where they belong.
    """

    file: str
    span: ByteRange
    memory: memoryview | None
    block_crcs: Sequence[int]
    name: str
    take: Callable[[memoryview], None]


class PlanReader:
    """Reads items of load plans of one checkpoint.

    Args:
        store: The store.
        directory: Prefix of the checkpoint's directory in it.
        metadata: Metadata of the checkpoint.
        manifest: Manifest of the checkpoint; None if its writer left none.
        planner: The planner, which has the tensors to load into.
        versions: Versions of the files to read, by name; a file that is not among them is read as it is.
        weights_only: Whether objects may hold only tensors and plain data; False runs code from the checkpoint.
    """

    def __init__(
        self,
        store: Store,
        directory: str,
        metadata: Metadata,
        manifest: CheckpointManifest | None,
        planner: LoadPlanner,
        *,
        versions: Mapping[str, ObjectInfo],
        weights_only: bool,
    ) -> None:
        self._store = store
        self._directory = directory
        self._metadata = metadata
        self._planner = planner
        self._versions = versions
        self._weights_only = weights_only
        self._block_bytes = manifest.block_bytes if manifest is not None else 0
        files = manifest.files if manifest is not None else ()
        self._items = {(file.name, item.offset_bytes): item for file in files for item in file.items}
        self._has_manifest = manifest is not None

    def read(self, items: Sequence[ReadItem]) -> None:
        """Read all `items`; those that go straight into tensors first.

        Raises:
            CheckpointError: The bytes are damaged, or do not fit.
            StoreError: The store failed.
        """
        place = self._metadata.storage_data
        ordered = sorted(
            items, key=lambda item: (place[item.storage_index].relative_path, place[item.storage_index].offset)
        )
        staged: list[_Read] = []
        self._perform(read for item in ordered for read in self._reads(item, staged))
        for batch in _batches(staged):
            self._perform(batch)

    def _perform(self, reads: Iterable[_Read]) -> None:
        """Read ranges in any order, verify each, and hand it on."""
        sent: dict[int, tuple[_Read, memoryview]] = {}

        def requests() -> Iterator[tuple[PlanItem, memoryview]]:
            for number, read in enumerate(reads):
                memory = read.memory
                if memory is None:
                    memory = tensor_bytes(torch.empty(read.span.length_bytes, dtype=torch.uint8))
                sent[number] = read, memory
                yield self._item(read), memory

        with self._store.read_into(requests()) as arrived:
            for number in arrived:
                read, memory = sent.pop(number)
                self._verify(read, memory)
                read.take(memory)

    def _item(self, read: _Read) -> PlanItem:
        key = self._directory + read.file
        info = self._versions.get(read.file)
        if info is None:
            return PlanItem(key, read.span)
        return PlanItem(key, read.span, info.etag, info.size_bytes, last_modified_s=info.last_modified_s)

    def _url(self, file: str) -> str:
        return self._store.describe(self._directory + file)

    def _verify(self, read: _Read, memory: memoryview) -> None:
        for index, crc in enumerate(read.block_crcs):
            start = index * self._block_bytes
            if crc32c(memory[start : start + self._block_bytes]) != crc:
                raise CheckpointError(
                    f"the file is damaged: the bytes of {read.name!r} do not match their checksum in the manifest",
                    url=self._url(read.file),
                    offset_bytes=read.span.start + start,
                    hint=_HINT,
                )

    # ── from items to ranges ───────────────────────────────────────────────────────────────────────────────────────

    def _reads(self, item: ReadItem, staged: list[_Read]) -> Iterator[_Read]:
        """Yield what is read in place, and add the rest to `staged`."""
        info = self._metadata.storage_data[item.storage_index]
        stored = self._items.get((info.relative_path, info.offset))
        name = item.storage_index.fqn
        if self._has_manifest and (stored is None or stored.length_bytes != info.length):
            url = self._url(info.relative_path)
            raise CheckpointError(
                f"the manifest has no {name!r} at this place", url=url, offset_bytes=info.offset, hint=_HINT
            )
        if getattr(info, "transform_descriptors", None):
            raise UnsupportedFormatError(
                f"{name!r} was written through the extensions {info.transform_descriptors}, which are not supported",
                shard=self._url(info.relative_path),
                hint="load it with PyTorch's own reader, and save it without extensions",
            )
        if item.type == LoadItemType.TENSOR and stored is not None and stored.data_length_bytes < stored.length_bytes:
            yield from self._tensor_reads(item, info.relative_path, stored, staged)
            return
        load = self._load_object if item.type == LoadItemType.BYTE_IO else self._load_saved_tensor
        span = ByteRange(info.offset, info.offset + info.length)
        crcs = stored.block_crcs if stored is not None else ()
        staged.append(_Read(info.relative_path, span, None, crcs, name, partial(load, item)))

    def _load_object(self, item: ReadItem, memory: memoryview) -> None:
        try:
            self._planner.load_bytes(item, self._resaved(memory) if self._weights_only else io.BytesIO(memory))
        except Exception as error:
            raise self._not_loaded(item, error) from error

    def _load_saved_tensor(self, item: ReadItem, memory: memoryview) -> None:
        try:
            saved = load_guarded(memory, map_location="cpu")
            box = narrow_tensor_by_index(saved, item.storage_offsets, item.lengths)
        except Exception as error:
            raise self._not_loaded(item, error) from error
        target = self._planner.resolve_tensor(item).detach()
        self._check_target(item, target, box.size())
        target.copy_(box)
        self._planner.commit_tensor(item, target)

    @staticmethod
    def _resaved(memory: memoryview) -> io.BytesIO:
        """Save again what the guarded loader makes of an object, because PyTorch's planners unpickle objects without a limit.

        Giving them the same bytes after a check would rely on both unpicklers reading them alike.
        """
        torch.save(load_guarded(memory), data := io.BytesIO())
        data.seek(0)
        return data

    def _not_loaded(self, item: ReadItem, error: Exception) -> CheckpointError:
        info = self._metadata.storage_data[item.storage_index]
        what = f"{item.storage_index.fqn!r} cannot be loaded: {type(error).__name__}: {error}"
        hint = None
        if isinstance(error, pickle.UnpicklingError) and self._weights_only:
            what = f"{item.storage_index.fqn!r} holds more than tensors and plain data"
            hint = (
                "torch.serialization.add_safe_globals allows a class; if you trust whoever can write to the bucket, "
                "StorageReader(url, weights_only=False) loads everything, and runs code from it"
            )
        return CheckpointError(what, url=self._url(info.relative_path), offset_bytes=info.offset, hint=hint)

    def _check_target(self, item: ReadItem, target: torch.Tensor, size: Sequence[int]) -> None:
        if target.is_meta:
            raise ConfigError(
                f"{item.storage_index.fqn!r} is a tensor on the meta device, which nothing can be loaded into",
                hint="materialise the model first, for example by model.to_empty(device=...)",
            )
        if tuple(target.size()) != tuple(size):
            name = item.storage_index.fqn
            raise CheckpointError(
                f"{name!r} has the size {tuple(size)} in the checkpoint, and {tuple(target.size())} in the model",
                url=self._url(""),
            )

    def _tensor_reads(self, item: ReadItem, file: str, stored: CheckpointItem, staged: list[_Read]) -> Iterator[_Read]:
        """Divide a box of a saved tensor into ranges."""
        dtype, sizes = self._saved(item.storage_index, file, stored)
        target = self._planner.resolve_tensor(item).detach()
        self._check_target(item, target, item.lengths)
        if not target.numel():
            self._planner.commit_tensor(item, target)
            return
        box = _Box(sizes, tuple(item.storage_offsets), tuple(item.lengths), dtype.itemsize)
        span = box.span
        aligned = self._to_blocks(span, stored)
        if (
            aligned == span
            and box.is_dense
            and target.device.type == "cpu"
            and target.dtype == dtype
            and target.is_contiguous()
            and is_plain(target)
        ):
            commit = self._planner.commit_tensor
            yield self._read(file, stored, aligned, item, tensor_bytes(target), lambda _: commit(item, target))
            return
        pieces = box.pieces(PIECE_BYTES) if box.span.length_bytes > PIECE_BYTES else [(0, box)]
        left = [len(pieces)]
        for start, piece in pieces:
            into = target if len(pieces) == 1 else target.narrow(0, start, piece.lengths[0])
            aligned = self._to_blocks(piece.span, stored)
            staged.append(
                self._read(
                    file,
                    stored,
                    aligned,
                    item,
                    None,
                    partial(self._copy_piece, item, target, into, piece, aligned.start, dtype, left),
                )
            )

    def _copy_piece(
        self,
        item: ReadItem,
        target: torch.Tensor,
        into: torch.Tensor,
        piece: _Box,
        read_start: int,
        dtype: torch.dtype,
        left: list[int],
        memory: memoryview,
    ) -> None:
        start = piece.span.start - read_start
        raw = torch.frombuffer(memory, dtype=torch.uint8)[start : start + piece.span.length_bytes]
        if raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()
        into.copy_(torch.as_strided(raw.view(dtype), piece.lengths, piece.strides))
        left[0] -= 1
        if not left[0]:
            self._planner.commit_tensor(item, target)

    def _to_blocks(self, span: ByteRange, stored: CheckpointItem) -> ByteRange:
        """Extend a range of a tensor's bytes to whole blocks."""
        start = span.start // self._block_bytes * self._block_bytes
        end = min(-(-span.end // self._block_bytes) * self._block_bytes, stored.data_length_bytes)
        return ByteRange(start, end)

    def _read(
        self,
        file: str,
        stored: CheckpointItem,
        span: ByteRange,
        item: ReadItem,
        memory: memoryview | None,
        take: Callable[[memoryview], None],
    ) -> _Read:
        crcs = stored.block_crcs[span.start // self._block_bytes : -(-span.end // self._block_bytes)]
        at = stored.data_offset_bytes
        place = ByteRange(at + span.start, at + span.end)
        return _Read(file, place, memory, crcs, item.storage_index.fqn, take)

    def _saved(self, index: MetadataIndex, file: str, stored: CheckpointItem) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and size of a saved tensor, as far as it lies in one item."""
        found: Any = self._metadata.state_dict_metadata.get(index.fqn)
        if isinstance(found, TensorStorageMetadata):
            chunks = found.chunks
            hinted = chunks[index.index : index.index + 1] if index.index is not None else []
            for chunk in (*hinted, *chunks):
                if index.offset is None or chunk.offsets == index.offset:
                    dtype = found.properties.dtype
                    if chunk.sizes.numel() * dtype.itemsize == stored.data_length_bytes:
                        return dtype, tuple(chunk.sizes)
                    break
        raise CheckpointError(
            f"the metadata and the manifest disagree about {index.fqn!r}",
            url=self._url(file),
            offset_bytes=stored.offset_bytes,
            hint=_HINT,
        )


class _Box:
    """A box of a saved tensor in row-major order.

    Attributes:
        lengths: Size in each dimension.
        strides: Distance of neighbours in each dimension, in elements.
        span: The bytes of the tensor from the box's first element to its last.
        is_dense: Whether all bytes of the span belong to the box.
    """

    __slots__ = ("_item_bytes", "_offsets", "_sizes", "is_dense", "lengths", "span", "strides")

    def __init__(
        self, sizes: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...], item_bytes: int
    ) -> None:
        self._sizes, self._offsets, self._item_bytes = sizes, offsets, item_bytes
        self.lengths = lengths
        strides, stride, count = [], 1, 1
        for size, length in zip(reversed(sizes), reversed(lengths), strict=True):
            strides.append(stride)
            stride *= size
            count *= length
        self.strides = tuple(reversed(strides))
        first = sum(offset * stride for offset, stride in zip(offsets, self.strides, strict=True))
        last = first + sum((length - 1) * stride for length, stride in zip(lengths, self.strides, strict=True))
        self.span = ByteRange(first * item_bytes, (last + 1) * item_bytes)
        self.is_dense = last + 1 - first == count

    def pieces(self, length_bytes: int) -> list[tuple[int, _Box]]:
        """Cut the box along its first dimension into pieces of about `length_bytes`: where each begins, and its box."""
        rows = max(1, length_bytes // (self.strides[0] * self._item_bytes))
        return [
            (start, _Box(self._sizes, (self._offsets[0] + start, *self._offsets[1:]), lengths, self._item_bytes))
            for start in range(0, self.lengths[0], rows)
            for lengths in [(min(rows, self.lengths[0] - start), *self.lengths[1:])]
        ]


def _batches(reads: list[_Read]) -> Iterator[list[_Read]]:
    batch: list[_Read] = []
    total_bytes = 0
    for read in reads:
        if batch and total_bytes + read.span.length_bytes > STAGED_BYTES_MAX:
            yield batch
            batch, total_bytes = [], 0
        batch.append(read)
        total_bytes += read.span.length_bytes
    if batch:
        yield batch
