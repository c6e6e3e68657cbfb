"""Writes safetensors: one file, or the files of a directory and then the index that makes them visible together.

A reader takes ``model.safetensors`` of a directory if there is one, and otherwise follows the index. So one write or one
removal replaces an earlier checkpoint by a new one, whichever of the two forms they have, and files of different saves are
never mixed:

* The files of a new save get names that the directory does not have yet.
* The index is written when all of them are stored; then ``model.safetensors``, if there is one, is removed.
* Files of earlier saves, also of killed ones, are removed after that.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from penstock import compose
from penstock.errors import ConfigError, DirectoryMissingError, StoreError
from penstock.formats.safetensors import METADATA_KEY, SafetensorsIndex, encode_header, encode_index
from penstock.system.tracebacks import boundary
from penstock.torch.checkpoint.items import tensor_bytes
from penstock.torch.checkpoint.safetensors_reading import FILE_NAME, FORMAT_DTYPES, INDEX_NAME, SAVE_ID

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.store.base import Store
    from penstock.types import Key

SHARD_BYTES = 5_000_000_000
"""Largest file of a directory unless the caller says otherwise."""

_SHARD_NAME = re.compile(r"model(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors")


@boundary
def save_safetensors(
    tensors: Mapping[str, torch.Tensor],
    url: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    shard_bytes_max: int | None = None,
    **options: Any,
) -> None:
    """Save tensors as a safetensors file, or as a directory of files with an index.

    The checkpoint becomes visible as a whole. If saving fails or the process is killed, an earlier checkpoint at the URL
    remains. Two processes must not save to the same URL at the same time.

    Args:
        tensors: The tensors by name, such as ``model.state_dict()``, on any device.
        url: URL of a file; or of a directory, with a slash at its end: tensors of at most `shard_bytes_max` go to its
            ``model.safetensors``, and more to several files with ``model.safetensors.index.json``. A save removes files of
            these names that an earlier save left there.
        metadata: Strings by name to save with them. ``{"format": "pt"}``, which Hugging Face's libraries require, is added.
        shard_bytes_max: Largest file of a directory in bytes, apart from its header; None is 5 GB. A larger tensor has a
            file of its own.
        **options: Options of ``penstock.connect``.

    Raises:
        ConfigError: An argument is not valid, or a tensor cannot be saved: it is on ``meta``, is sparse or distributed, has a
            dtype that the format lacks, or shares memory with another one.
        StoreError: Writing failed.

    Cost: One upload per file, and for a directory a listing and removals; holds a few parts of 8 MiB, and a copy of one tensor
    if it is not on the CPU or not contiguous.
    """
    if shard_bytes_max is not None and (type(shard_bytes_max) is not int or shard_bytes_max < 1):
        raise ConfigError(f"shard_bytes_max={shard_bytes_max!r} must be a whole number of bytes, at least 1")
    _check_tensors(tensors)
    texts = _checked_metadata(metadata)
    root, key = compose.split(url)
    is_directory = not key or key.endswith("/")
    if not is_directory and shard_bytes_max is not None:
        hint = "end the URL with a slash to save several files with an index"
        raise ConfigError(f"shard_bytes_max= does not apply to one file, {os.fspath(url)!r}", hint=hint)
    with compose.connect(root, **options) as store:
        if is_directory:
            _save_directory(store, key, tensors, texts, shard_bytes_max or SHARD_BYTES)
        else:
            _write_file(store, key, tensors, texts)


def _save_directory(
    store: Store, folder: Key, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], shard_bytes_max: int
) -> None:
    earlier = _saved_before(store, folder)
    shards = _cut(tensors, shard_bytes_max)
    if len(shards) == 1:
        _write_file(store, folder + FILE_NAME, tensors, metadata)
        _remove(store, folder, earlier - {FILE_NAME})
        return
    files = _shard_names(len(shards), earlier)
    save_id = secrets.token_hex(8)
    texts = {**metadata, SAVE_ID: save_id}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = SafetensorsIndex(
        files={name: file for file, shard in zip(files, shards, strict=True) for name in shard},
        metadata={"total_size": total, **texts},
    )
    text = encode_index(index)
    try:
        for file, shard in zip(files, shards, strict=True):
            _write_file(store, folder + file, shard, texts)
        store.write(folder + INDEX_NAME, text)
    except BaseException:
        with suppress(StoreError):
            store.delete(folder + file for file in files)
        raise
    _remove(store, folder, earlier - {INDEX_NAME, *files})


def _saved_before(store: Store, folder: Key) -> set[str]:
    """Return the names of files that a save may have left in a directory."""
    try:
        names = {info.key[len(folder) :] for info in store.list(f"{folder}model", recursive=False)}
    except DirectoryMissingError:
        return set()
    return {name for name in names if name in (FILE_NAME, INDEX_NAME) or _SHARD_NAME.fullmatch(name)}


def _shard_names(count: int, taken: set[str]) -> list[str]:
    """Return the usual names, or others with a random number if one of these is taken."""
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    if taken.isdisjoint(names):
        return names
    salt = secrets.token_hex(4)
    return [name.replace("model-", f"model-{salt}-") for name in names]


def _remove(store: Store, folder: Key, names: set[str]) -> None:
    """Remove files of earlier saves: first those through which a reader finds the others."""
    for name in (FILE_NAME, INDEX_NAME):
        if name in names:
            store.delete(folder + name)
    rest = names - {FILE_NAME, INDEX_NAME}
    if rest:
        store.delete([folder + name for name in sorted(rest)])


def _cut(tensors: Mapping[str, torch.Tensor], shard_bytes_max: int) -> list[dict[str, torch.Tensor]]:
    """Cut the tensors, in their order, into files; there is at least one."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled_bytes = 0
    for name, tensor in tensors.items():
        size = tensor.nbytes
        if shards[-1] and filled_bytes + size > shard_bytes_max:
            shards.append({})
            filled_bytes = 0
        shards[-1][name] = tensor
        filled_bytes += size
    return shards


def _write_file(store: Store, key: Key, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write one file. Wide dtypes come first, so that each tensor is aligned to its elements."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header = encode_header(
        [(name, FORMAT_DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in ordered], metadata
    )
    with store.writer(key) as file:
        file.write(header)
        for _, tensor in ordered:
            if tensor.numel():
                file.write(tensor_bytes(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()))


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    texts = {"format": "pt", **(metadata or {})}
    for name, value in texts.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(f"metadata={{{name!r}: {value!r}}} must map names to texts", hint="json.dumps(value)")
    return texts


def _check_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that each tensor can be saved.

    Raises:
        ConfigError: One cannot; the message names it.
    """
    if not hasattr(tensors, "items"):
        hint = "pass model.state_dict()" if isinstance(tensors, torch.nn.Module) else None
        raise ConfigError(f"tensors= must map names to tensors, not be {type(tensors).__name__}", hint=hint)
    named: Iterable[tuple[Any, Any]] = tensors.items()
    for name, tensor in named:
        if not isinstance(name, str) or name == METADATA_KEY or not _is_utf8(name):
            raise ConfigError(f"{name!r} cannot be the name of a tensor")
        if not isinstance(tensor, torch.Tensor):
            hint = "save other values with ps.torch.save, or as metadata="
            raise ConfigError(f"{name!r} is {type(tensor).__name__}, not a tensor", hint=hint)
        if hasattr(tensor, "full_tensor"):
            hint = "save distributed tensors with torch.distributed.checkpoint, or pass tensor.full_tensor()"
            raise ConfigError(f"{name!r} is distributed over several processes", hint=hint)
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ConfigError(f"{name!r} is sparse or quantized; safetensors holds dense tensors only")
        if tensor.is_meta:
            raise ConfigError(f"{name!r} is on 'meta' and has no values", hint="materialize the model before saving it")
        if tensor.dtype not in FORMAT_DTYPES:
            raise ConfigError(f"{name!r} is {tensor.dtype}, which safetensors does not have")
    _refuse_shared(tensors.items())


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_shared(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse tensors that lie in the same memory: they would be saved twice, and no longer be tied after loading."""
    extents = []
    for name, tensor in tensors:
        if tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            elements = 1 + sum((size - 1) * stride for size, stride in steps)
            start = tensor.data_ptr()
            extents.append((str(tensor.device), start, start + elements * tensor.element_size(), name))
    end, before, place = -math.inf, "", ""
    for device, start, stop, name in sorted(extents):
        if device == place and start < end:
            hint = f"leave one of them out and tie them again after loading, or pass {name!r} as a .clone()"
            raise ConfigError(f"{before!r} and {name!r} share memory", hint=hint)
        if device != place or stop > end:
            end, before, place = stop, name, device
