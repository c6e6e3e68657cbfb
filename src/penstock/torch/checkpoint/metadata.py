"""Reading ``.metadata``: a pickle, of which only the classes of distributed checkpoints are accepted.

A pickle can name any function to call, and a few bytes of it can ask for any amount of memory or time. PyTorch loads this file
without a limit, so everybody who can write to the bucket can run code in the training job. Here, any other name in the file is
an error. So are pickles that expand to more than the file holds: lengths and numbers without data, calls and states with more
than a few values. Memory stays within about 100 bytes for each byte of the file.

The unpickler is Python's own in Python, because the C version reserves as much memory as the file announces. It takes 3 s of
CPU for 80 000 chunks of tensors; the C version takes as long unless garbage collection pauses.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import pickle
from pickle import _Unpickler as PyUnpickler  # the documented one is in C
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

VALUES_MAX = 64
"""Most values in one call or state: the dimensions of a tensor, the fields of a class, the parts of a path."""

_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}
_NAMES = {
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},  # before PyTorch 2.4
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "collections": {"OrderedDict", "defaultdict", "deque"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "builtins": {"set", "frozenset", "complex", "slice", "range", "list", "dict", "tuple", "int", "float", "str"},
}  # fmt: skip
_REFUSED = {
    pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.PERSID, pickle.BINPERSID, pickle.EXT1, pickle.EXT2,
    pickle.EXT4, pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX,
}  # fmt: skip
"""Opcodes that no metadata needs: they reserve memory, or make objects in other ways than those that are checked."""


_Base: Any = PyUnpickler  # its types do not tell what it is made of


class _MetadataUnpickler(_Base):  # type: ignore[misc]
    """Accepts the classes that PyTorch's planners put into the metadata, and no more data than there is."""

    dispatch: dict[int, Callable[[Any], None]] = {  # noqa: RUF012 - as in the base class
        code: load for code, load in _Base.dispatch.items() if bytes([code]) not in _REFUSED
    }

    def find_class(self, module: str, name: str) -> Any:
        if name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and "." not in name:
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype | torch.layout | torch.memory_format):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong into this file")

    def load_reduce(self) -> None:
        _check_few(self.stack[-1], *self.stack[-1])
        super().load_reduce()

    def load_newobj(self) -> None:
        _check_few(self.stack[-1], *self.stack[-1])
        super().load_newobj()

    def load_build(self) -> None:
        state, target = self.stack[-1], self.stack[-2]
        _check_few(state)
        # A pair would set attributes, also of a class; a state is a dict, or the tuple of five of TensorProperties.
        if (
            not dataclasses.is_dataclass(target)
            or isinstance(target, type)
            or (len(state) == 2 and type(state) is tuple)
        ):
            raise pickle.UnpicklingError("it sets the state of what has none")
        super().load_build()

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.BUILD[0]] = load_build


def _check_few(*values: Any) -> None:
    """Refuse a value, such as an argument, with so many values that a few bytes could ask for many copies of it."""
    for value in values:
        if (
            value is not None
            and not isinstance(value, int | float | str | type)
            and not (isinstance(value, tuple | list | dict) and len(value) <= VALUES_MAX)
        ):
            raise pickle.UnpicklingError(f"it passes a {type(value).__name__} that is too long, or that nothing takes")


def decode_metadata(data: bytes | memoryview, url: str) -> Metadata:
    """Decode a ``.metadata`` file.

    Args:
        data: Contents of the file, uint8[n].
        url: URL of the file, for messages.

    Raises:
        CheckpointError: It is damaged, or it names anything but classes of distributed checkpoints.
    """
    collects = gc.isenabled()
    gc.disable()  # it would look at all objects again and again while they are made, for a third of the time
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        _check(metadata)
    except Exception as error:  # a damaged pickle raises anything
        what = f"{type(error).__name__}: {error}" if not isinstance(error, pickle.UnpicklingError) else str(error)
        raise CheckpointError(f"the file cannot be decoded: {what}", url=url) from None
    finally:
        if collects:
            gc.enable()
    assert isinstance(metadata, Metadata)
    return metadata


def _check(metadata: Any) -> None:
    """Check the types that readers and planners rely on."""
    _check_types((metadata, Metadata), (metadata.state_dict_metadata, dict), (metadata.storage_data, dict))
    for name, item in metadata.state_dict_metadata.items():
        _check_types((name, str), (item, TensorStorageMetadata | BytesStorageMetadata))
        if isinstance(item, TensorStorageMetadata):
            _check_types((item.size, torch.Size), (item.chunks, list), (item.properties.dtype, torch.dtype))
            for chunk in item.chunks:
                _check_types((chunk, ChunkStorageMetadata), (chunk.offsets, torch.Size), (chunk.sizes, torch.Size))
    for index, info in metadata.storage_data.items():
        _check_types((index, MetadataIndex), (info, StorageInfo), (info.relative_path, str), (info.offset, int))
        _check_types((info.length, int))
        if min(info.offset, info.length) < 0:
            raise pickle.UnpicklingError(f"{index.fqn!r} lies at {info.offset} with a length of {info.length} bytes")


def _check_types(*pairs: tuple[Any, Any]) -> None:
    for value, kind in pairs:
        if not isinstance(value, kind):
            raise pickle.UnpicklingError("the file holds no metadata of a distributed checkpoint")
