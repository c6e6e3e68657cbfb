"""Reads safetensors: the headers first, then exactly the bytes of the wanted tensors.

A checkpoint is one file, or a directory with files and an index, as ``save_pretrained`` of Hugging Face's libraries writes it.
Only the headers of files that hold wanted tensors are read, each by one request (``HEAD_BYTES``), in parallel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from penstock import compose
from penstock.checksums.crc32c import sample_crc
from penstock.config import KIB
from penstock.errors import (
    CheckpointError,
    ClosedError,
    ConfigError,
    ObjectChangedError,
    ObjectMissingError,
    SpanError,
    UnsupportedFormatError,
)
from penstock.fetch import PlanItem
from penstock.formats.safetensors import HEADER_BYTES_MAX, SafetensorsHeader, header_end, parse_header, parse_index
from penstock.store.inflight import InFlight
from penstock.system.tracebacks import boundary
from penstock.torch.checkpoint.verification import FileChecks
from penstock.types import ByteRange, Get, Head, same_version

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.formats.safetensors import SafetensorsIndex, TensorEntry
    from penstock.store.base import Store
    from penstock.types import Completion, Key, ObjectInfo

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in _TORCH_NAMES.items() if hasattr(torch, torch_name)
}
"""PyTorch's dtype for each dtype of the format that this version of PyTorch has."""

FORMAT_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""The name in the format for each dtype of PyTorch that the format has."""


def torch_dtype(dtype: str, *, shard: str, name: str) -> torch.dtype:
    """Return PyTorch's dtype for a dtype of the format.

    Args:
        dtype: Name of the dtype in the format.
        shard: URL of the file, for the message.
        name: Name of the tensor, for the message.

    Raises:
        UnsupportedFormatError: This version of PyTorch has no such dtype.
    """
    if dtype not in TORCH_DTYPES:
        what = f"PyTorch {torch.__version__} has no dtype for {dtype}"
        raise UnsupportedFormatError(what, shard=shard, field=name)
    return TORCH_DTYPES[dtype]


FILE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SAVE_ID = "save_id"
"""Metadata that the files and the index of one save have in common, if they have it."""

HEAD_BYTES = 256 * KIB
"""What the first request of a file asks for: headers of up to 2 000 tensors arrive with it, and it costs 3 ms at 90 MB/s."""

HEADS_MAX = 32
"""Files whose headers are read at once."""


class _OpenFile(NamedTuple):
    """A file whose header was read: its version, what it holds, and the CRC-32C of everything before the tensors."""

    info: ObjectInfo
    url: str
    header: SafetensorsHeader
    head_crc: int


class _Wanted(NamedTuple):
    """Bytes of a file that become a tensor: all of a tensor, or consecutive rows of it."""

    file: _OpenFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@boundary
def open_safetensors(url: str | os.PathLike[str], **options: Any) -> SafetensorsReader:
    """Open a safetensors checkpoint, to read tensors and slices of them one by one.

    Args:
        url: URL of a file; of a directory, with a slash at its end, that holds ``model.safetensors``, or files and
            ``model.safetensors.index.json``; or of such an index, under any name that ends with ``.index.json``.
        **options: Options of ``penstock.connect``.

    Raises:
        ConfigError: The URL or an option is not valid.
        ObjectMissingError: There is no such checkpoint.
        CheckpointError: A header or the index is not valid; the message names the file.

    Cost: One request for the first 256 KiB of a file, or one for an index; a second one if a header is longer.
    """
    root, key = compose.split(url)
    store = compose.connect(root, **options)
    try:
        return SafetensorsReader(store, key)
    except BaseException:
        store.close()
        raise


@boundary
def load_safetensors(
    url: str | os.PathLike[str],
    *,
    names: Iterable[str] | Callable[[str], bool] | None = None,
    device: str | torch.device = "cpu",
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Load the tensors of a safetensors checkpoint, or some of them, by parallel ranges straight into their memory.

    Args:
        url: URL of a file, of a directory, or of an index; see ``open_safetensors``.
        names: Names of the tensors to load; or a function that takes a name and returns whether to load it, such as
            ``lambda name: name.startswith("encoder.")``; None loads all.
        device: Device of the tensors. With ``"meta"``, only headers are read, and the tensors have no memory.
        **options: Options of ``penstock.connect``.

    Returns:
        The tensors by name, in the order of `names` or else of the files. Each tensor has memory of its own.

    Raises:
        ConfigError: The URL or an option is not valid.
        ObjectMissingError: There is no such checkpoint, or a file that its index names is missing.
        CheckpointError: A header or the index is not valid, or one of the `names` does not exist; the message names the file.
            No tensor is returned.
        ObjectChangedError: A file was replaced while it was read.

    Cost: One request per file for its header, then one per 8 MiB, in parallel; neighbouring small tensors are read by one
        request. If another program saved them, several files cost one more request each at the end, to see that none was
        replaced. On the CPU nothing is held beside the tensors, and on another device those in flight as well.
    """
    with open_safetensors(url, **options) as reader:
        return reader.load(names, device=device)


@boundary
class SafetensorsReader:
    """A safetensors checkpoint that is open for reading; ``open_safetensors`` returns it.

    ``keys``, ``metadata``, ``get_tensor`` and ``get_slice`` work as in ``safetensors.safe_open``. A file is read in the version
    of which the header was read. For one thread at a time.

    Args:
        store: The store, which ``close`` closes.
        key: Key of a file, of an index, or a prefix that ends with a slash or is empty.
    """

    def __init__(self, store: Store, key: Key) -> None:
        self._store = store
        self._closed = False
        self._folder = key[: key.rfind("/") + 1]
        self._files: dict[Key, _OpenFile] = {}
        self._index: SafetensorsIndex | None = None
        self._index_info: ObjectInfo | None = None  # of an index whose files do not name their save
        self.url = store.describe(key)
        if key.endswith(".index.json"):
            self._read_index(key, self._get({key: _INDEX_SPAN})[key])
        elif key == self._folder:
            self._open_directory()
        else:
            self._open_files([key])

    # ── what it consists of ─────────────────────────────────────────────────────────────────────────────────────────

    def _open_directory(self) -> None:
        """Open the one file of the directory if there is one, otherwise its index: the order of Hugging Face's libraries."""
        file, index = self._folder + FILE_NAME, self._folder + INDEX_NAME
        answers = self._get({file: _HEAD_SPAN, index: _INDEX_SPAN})
        if not isinstance(answers[file].error, ObjectMissingError):
            self._add_file(file, answers[file])
        elif not isinstance(answers[index].error, ObjectMissingError):
            self._read_index(index, answers[index])
        else:
            what = f"there is neither {FILE_NAME} nor {INDEX_NAME}"
            raise ObjectMissingError(what, hint="name the file, or its directory", operation="GET", url=self.url)

    def _read_index(self, key: Key, completion: Completion) -> None:
        self.url = self._store.describe(key)
        text, info = _body_of(completion, self.url)
        self._index = parse_index(text, url=self.url)
        if SAVE_ID not in self._index.metadata:
            self._index_info = info._replace(key=key)

    def _open_files(self, keys: Iterable[Key]) -> None:
        """Read the headers of those files that were not opened yet."""
        new = [key for key in dict.fromkeys(keys) if key not in self._files]
        for first in range(0, len(new), HEADS_MAX):
            answers = self._get(dict.fromkeys(new[first : first + HEADS_MAX], _HEAD_SPAN))
            for key, completion in answers.items():
                self._add_file(key, completion)

    def _add_file(self, key: Key, completion: Completion) -> None:
        url = self._store.describe(key)
        head, info = _body_of(completion, url)
        end = header_end(head, size_bytes=info.size_bytes, url=url)
        if len(head) < end:
            rest = self._get({key: ByteRange(len(head), end)}, if_match=info.etag)[key]
            head = memoryview(b"".join((head, _body_of(rest, url)[0])))
        header = parse_header(head, size_bytes=info.size_bytes, url=url)
        save_id = self._index.metadata.get(SAVE_ID) if self._index is not None else None
        if save_id is not None and header.metadata.get(SAVE_ID) != save_id:
            raise CheckpointError("the file and the index beside it were not saved together", url=url)
        self._files[key] = _OpenFile(info._replace(key=key), url, header, sample_crc(memoryview(head)[:end]))

    def _get(self, spans: Mapping[Key, ByteRange], *, if_match: str | None = None) -> dict[Key, Completion]:
        """Read spans of several files at once; errors are in the completions."""
        if self._closed:
            raise ClosedError("the checkpoint was closed")
        return self._perform([Get(key, span, if_match) for key, span in spans.items()])

    def _perform(self, operations: Sequence[Get | Head]) -> dict[Key, Completion]:
        """Perform operations at once, each of another key; errors are in the completions."""
        in_flight: InFlight[Key] = InFlight(self._store)
        try:
            for operation in operations:
                in_flight.submit(operation, operation.key)
            ended = dict(in_flight.drain())
        finally:
            in_flight.cancel()
        return {operation.key: ended[operation.key] for operation in operations}

    def keys(self) -> list[str]:
        """Return the names of all tensors. Cost: no request."""
        if self._index is not None:
            return list(self._index.files)
        return [name for file in self._files.values() for name in file.header.tensors]

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of the file or of the index. Cost: no request."""
        if self._index is not None:
            return dict(self._index.metadata)
        return {name: value for file in self._files.values() for name, value in file.header.metadata.items()}

    def _find(self, names: Iterable[str]) -> dict[str, tuple[_OpenFile, TensorEntry]]:
        """Return the file and the entry of each tensor; opens the files that hold them."""
        keys: dict[str, Key] = {}
        for name in names:
            if self._index is None:
                keys[name] = next(iter(self._files))
            elif name in self._index.files:
                keys[name] = self._folder + self._index.files[name]
            else:
                raise CheckpointError("there is no such tensor", url=self.url, field=name)
        self._open_files(keys.values())
        found = {}
        for name, key in keys.items():
            file = self._files[key]
            if name not in file.header.tensors:
                named = "" if self._index is None else f", although {self.url} says so"
                raise CheckpointError(f"there is no such tensor in the file{named}", url=file.url, field=name)
            found[name] = file, file.header.tensors[name]
        return found

    # ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def load(
        self,
        names: Iterable[str] | Callable[[str], bool] | None = None,
        *,
        device: str | torch.device = "cpu",
    ) -> dict[str, torch.Tensor]:
        """Load all tensors, or some of them.

        Args:
            names: Names of the tensors; or a function that says of each name whether to load it; None loads all.
            device: Device of the tensors.

        Raises:
            ConfigError: `names` is one text, or `device` is not a device.
            CheckpointError: The header of a file is not valid, or there is no tensor of one of the `names`.
            StoreError: Reading failed; no tensor is returned.

        Cost: As ``load_safetensors``; headers that were read before are not read again.
        """
        if isinstance(names, str):
            raise ConfigError(f"names={names!r} must be a collection of names", hint=f"names=[{names!r}]")
        if names is None:
            chosen = self.keys()
        else:
            chosen = [name for name in self.keys() if names(name)] if callable(names) else list(dict.fromkeys(names))
        wanted = {
            name: _Wanted(file, torch_dtype(entry.dtype, shard=file.url, name=name), *entry[1:])
            for name, (file, entry) in self._find(chosen).items()
        }
        return self._read(wanted, device)

    def get_tensor(self, name: str, *, device: str | torch.device = "cpu") -> torch.Tensor:
        """Read one tensor; ``load`` reads many at once.

        Raises:
            CheckpointError: There is no tensor of this name.
            StoreError: Reading failed.

        Cost: One request per 8 MiB, in parallel.
        """
        return self.load([name], device=device)[name]

    def get_slice(self, name: str) -> TensorSlice:
        """Return a tensor of which only a part is to be read: ``reader.get_slice("weight")[2:4, :8]``.

        Raises:
            CheckpointError: There is no tensor of this name.

        Cost: No request if the file's header was read before.
        """
        file, entry = self._find([name])[name]
        dtype = torch_dtype(entry.dtype, shard=file.url, name=name)

        def read_rows(first: int, stop: int) -> torch.Tensor:
            row_bytes = (entry.end - entry.start) // entry.shape[0] if entry.shape[0] else 0
            start = entry.start + first * row_bytes
            shape = (stop - first, *entry.shape[1:])
            rows = _Wanted(file, dtype, shape, start, start + (stop - first) * row_bytes)
            return self._read({name: rows}, "cpu")[name]

        return TensorSlice(entry, lambda: self.get_tensor(name), read_rows)

    def _read(self, wanted: Mapping[str, _Wanted], device: str | torch.device) -> dict[str, torch.Tensor]:
        try:
            place = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"device={device!r} is not a device: {error}") from None
        if self._closed:
            raise ClosedError("the checkpoint was closed")
        if place.type == "meta":
            return {name: torch.empty(each.shape, dtype=each.dtype, device=place) for name, each in wanted.items()}
        tensors: dict[str, torch.Tensor] = {
            name: torch.empty(each.shape, dtype=each.dtype, device=place)
            for name, each in wanted.items()
            if each.start == each.end
        }
        waiting: dict[int, tuple[str, torch.Tensor]] = {}
        requests = _requests([item for item in wanted.items() if item[0] not in tensors], waiting)
        with FileChecks(self._store) as checks, self._store.read_into(requests) as filled:
            for file in _whole_files(wanted):
                pieces = [(entry.start, entry.end) for entry in file.header.tensors.values() if entry.start < entry.end]
                checks.expect(file.info, head_crc=file.head_crc, pieces=pieces)
            for index in filled:
                name, memory = waiting.pop(index)
                each = wanted[name]
                checks.add(each.file.info.key, each.start, memory.numpy().data)
                tensors[name] = memory.view(each.dtype).view(each.shape).to(place)
            checks.check()
        self._check_versions({each.file.info.key: each.file.info for each in wanted.values()})
        return {name: tensors[name] for name in wanted}

    def _check_versions(self, files: dict[Key, ObjectInfo]) -> None:
        """Check that several files, and their index, were not replaced while they were read: they might be of two models.

        Files that name their save need no check.

        Raises:
            ObjectChangedError: One was replaced or removed.
        """
        if self._index_info is None or len(files) < 2:
            return
        expected = {**files, self._index_info.key: self._index_info}
        for first in range(0, len(expected), HEADS_MAX):
            ended = self._perform([Head(key) for key in list(expected)[first : first + HEADS_MAX]])
            for key, completion in ended.items():
                _check_version(expected[key], completion, self._store.describe(key))

    def close(self) -> None:
        """Close the store; idempotent."""
        self._closed = True
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SafetensorsReader {self.url!r}, {len(self.keys())} tensors>"


class TensorSlice:
    """A tensor of which a part is read by indexing it; ``SafetensorsReader.get_slice`` returns it.

    Only the requested rows of the first dimension are read. What the other dimensions leave out is read and dropped.

    Args:
        entry: The tensor.
        read: Reads all of it.
        read_rows: Reads a range of its first dimension.
    """

    def __init__(
        self, entry: TensorEntry, read: Callable[[], torch.Tensor], read_rows: Callable[[int, int], torch.Tensor]
    ) -> None:
        self._entry = entry
        self._read = read
        self._read_rows = read_rows

    def get_shape(self) -> list[int]:
        """Return the size of each dimension of the whole tensor."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """Return the name of the dtype in the format, such as ``"BF16"``."""
        return self._entry.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read ``tensor[index]``.

        Raises:
            IndexError: An index is out of range, or there are more indices than dimensions.
            ValueError: A slice has a step below 1.
            StoreError: Reading failed.

        Cost: The rows that the first index selects, in parallel requests of 8 MiB.
        """
        indices = index if isinstance(index, tuple) else (index,)
        first = indices[0] if indices else ...
        if not self._entry.shape or isinstance(first, bool) or not isinstance(first, int | slice):
            return self._read()[index].contiguous()
        rows = self._entry.shape[0]
        if isinstance(first, int):
            if not -rows <= first < rows:
                raise IndexError(f"index {first} is out of range for a dimension of size {rows}")
            start = first % rows
            return self._read_rows(start, start + 1)[(0, *indices[1:])].contiguous()
        start, stop, step = first.indices(rows)
        if step < 1:
            raise ValueError(f"step {step} of a slice must be at least 1")
        rest = (slice(None, None, step), *indices[1:])
        return self._read_rows(start, max(start, stop))[rest].contiguous()


def _whole_files(wanted: Mapping[str, _Wanted]) -> list[_OpenFile]:
    """Return the files of which every byte is wanted."""
    files = {each.file.info.key: each.file for each in wanted.values()}
    spans = {(each.file.info.key, each.start, each.end) for each in wanted.values()}
    return [
        file
        for key, file in files.items()
        if all((key, entry.start, entry.end) in spans for entry in file.header.tensors.values())
    ]


def _requests(
    wanted: Sequence[tuple[str, _Wanted]], waiting: dict[int, tuple[str, torch.Tensor]]
) -> Iterator[tuple[PlanItem, memoryview]]:
    """Yield what is to be read, and the memory for it, uint8[n], which is allocated when its request is due, not before.

    Args:
        wanted: Names, and what to read of each.
        waiting: Receives the name and the memory of each request, by its index.
    """
    for index, (name, each) in enumerate(wanted):
        memory = torch.empty(each.end - each.start, dtype=torch.uint8)
        waiting[index] = name, memory
        info, span = each.file.info, ByteRange(each.start, each.end)
        item = PlanItem(info.key, span, info.etag, info.size_bytes, last_modified_s=info.last_modified_s)
        yield item, memory.numpy().data


_HEAD_SPAN = ByteRange(0, HEAD_BYTES)
_INDEX_SPAN = ByteRange(0, HEADER_BYTES_MAX + 1)


def _check_version(info: ObjectInfo, completion: Completion, url: str) -> None:
    if completion.error is not None and not isinstance(completion.error, ObjectMissingError):
        raise completion.error
    if completion.info is None or not same_version(completion.info, info):
        raise ObjectChangedError("the file was replaced while the others of its checkpoint were read", url=url)


def _body_of(completion: Completion, url: str) -> tuple[memoryview, ObjectInfo]:
    """Return the bytes and the description of an object whose first bytes were read.

    Raises:
        StoreError: Reading failed.
        CheckpointError: The object is empty.
    """
    if isinstance(completion.error, SpanError):
        raise CheckpointError("the file is empty", url=url)
    if completion.error is not None:
        raise completion.error
    assert completion.info is not None  # every successful Get has one
    return completion.body, completion.info
