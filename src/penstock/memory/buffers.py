"""Buffers whose memory is reused as soon as nothing refers to it.

A body in fresh memory costs one page fault per 4 KiB, because glibc maps and trims large blocks each time: 10 to 20 µs for
100 KB, as much as all of penstock's Python code for that body. Therefore memory stays with an owner, and callers get a lease: a
ctypes array over the owner's memory. Every memoryview, slice and ``np.frombuffer`` of a lease keeps it alive. When the last
one is dropped, the lease's finaliser gives the owner back. Creating a lease takes 1.5 µs.

Python runs signal handlers between instructions of its own, and an exception within a finaliser is only printed. So a Ctrl-C
that arrived in a finaliser written in Python would be lost. Leases end often, in the thread that trains, and therefore their
finaliser consists of functions written in C: the handler runs after it.

A subclass of ``bytearray`` that resurrects itself in ``__del__`` would be shorter, but CPython finalises an object only once.

The body of a whole object lands inside a ``bytes`` object that no other code has seen yet, which CPython's C API allows. If
the caller finally wants ``bytes``, it takes this object; a copy of 100 KB would take 20 µs with the GIL held.
"""

from __future__ import annotations

import ctypes
from collections import deque
from functools import lru_cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.config import KIB, MIB
from penstock.errors import ConfigError

if TYPE_CHECKING:
    import mmap

    from penstock.types import Buffer

T = TypeVar("T")

_POOLED_BYTES_MIN = 16 * KIB
"""Below this size ``malloc`` itself reuses memory."""
_POOLED_BYTES_MAX = 2 * MIB
_KEPT_BYTES_MAX = 16 * MIB
"""Bytes of free memory kept in each size class; a process usually uses one or two classes."""
GIVE_BACK_BYTES = 1024 * MIB
"""Bytes that epochs read before free memory is given back again. With a window of 109 MiB this leaves some 130 MiB unused."""
_read_bytes = 0


@lru_cache(maxsize=1024)
def _lease_type(capacity_bytes: int) -> Any:
    class Lease(ctypes.c_ubyte * capacity_bytes):  # type: ignore[misc]
        __slots__ = ("give_back",)
        __del__ = property(attrgetter("give_back"))  # a method would run as Python code

    return Lease


def lease(owner: bytearray | mmap.mmap, returned: deque[T], token: T) -> memoryview:
    """Return the memory of `owner` as uint8[len(owner)], writable.

    Args:
        owner: The memory.
        returned: Gets `token` when the last reference to the result is dropped, in any thread.
        token: Names the memory to the reader of `returned`.
    """
    leased = _lease_type(len(owner)).from_buffer(owner)
    leased.give_back = partial(returned.append, token)
    return memoryview(leased).cast("B")


class _SizeClass:
    """Free memory of one size."""

    __slots__ = ("capacity_bytes", "free")

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.free: deque[bytearray] = deque(maxlen=_KEPT_BYTES_MAX // capacity_bytes)

    def take(self) -> memoryview:
        try:
            owner = self.free.pop()
        except IndexError:
            owner = bytearray(self.capacity_bytes)
        return lease(owner, self.free, owner)


_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.argtypes, _address_of.restype = (ctypes.py_object,), ctypes.c_void_p


class _Inside(ctypes.c_ubyte * (1 << 40)):  # type: ignore[misc]
    """The memory of a ``bytes`` object, which it keeps alive. Views are cut to its length, so one such type suffices."""

    __slots__ = ("value",)


def bytes_buffer(size_bytes: int) -> memoryview:
    """Return the memory of a new ``bytes`` object as uint8[size_bytes], writable, with undefined contents.

    ``as_bytes`` and ``whole_bytes`` return the object itself; nobody may write to the memory while it is in use. libcurl only
    reads a body and releases it when its request ends, so buffers for parts of uploads can be filled again.

    Cost: 1.5 µs.
    """
    value = _new_bytes(None, size_bytes)
    inside = _Inside.from_address(_address_of(value))
    inside.value = value
    return memoryview(inside).cast("B")[:size_bytes]


def byte_view(data: Buffer) -> memoryview:
    """Return a view, uint8[n], of any contiguous buffer.

    Raises:
        ConfigError: `data` is not a contiguous buffer.
    """
    try:
        view = memoryview(data)
        if view.nbytes == 0:  # cast refuses zeros in shapes
            return memoryview(b"")
        return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"data must be contiguous bytes, not {type(data).__name__}: {error}") from error


def writable_byte_view(buffer: Any) -> memoryview:
    """Return a view, uint8[n], of any contiguous buffer that may be written to.

    Raises:
        ConfigError: `buffer` is not contiguous, or read-only, or no buffer at all.
    """
    view = byte_view(buffer)
    if not view.nbytes:
        return memoryview(bytearray())  # what `byte_view` returns for it is read-only
    if view.readonly:
        raise ConfigError(
            f"{type(buffer).__name__} cannot be read into: it is read-only", hint="copy it to a bytearray"
        )
    return view


def is_typed(value: Buffer) -> bool:
    """Whether a member of a sample holds numbers of a type that its format defines, instead of bytes (uint8[n])."""
    return isinstance(value, memoryview) and (value.format != "B" or value.ndim != 1)


def as_bytes(view: Buffer) -> bytes:
    """Return the contents of a view: the underlying ``bytes`` object if the view covers all of it, else a copy."""
    whole = whole_bytes(view)
    return bytes(view) if whole is None else whole


def whole_bytes(view: Buffer) -> bytes | None:
    """Return the ``bytes`` object that a view covers completely, or None if there is none."""
    owner = view.obj if type(view) is memoryview else view
    if type(owner) is _Inside:
        owner = owner.value
    if type(owner) is not bytes or (owner is not view and (len(owner) != view.nbytes or not view.c_contiguous)):  # type: ignore[union-attr]
        return None
    return owner


_classes: dict[int, _SizeClass] = {}


def give_back_free_memory(read_bytes: int = GIVE_BACK_BYTES) -> None:
    """Return freed memory that ``malloc`` keeps to the system, if the C library can do that (glibc).

    Samples are created in one thread and dropped in others, in any order. So the heap of each thread keeps holes, and the
    threads of the next epoch may use other heaps.

    Args:
        read_bytes: Bytes read since the last call. The memory is given back only when the calls together have reached
            ``GIVE_BACK_BYTES``.

    Cost: 0.14 s of CPU for each GB that is given back, 0.3 ms if there is nothing to give back, and page faults when the memory
        is used again.
    """
    global _read_bytes  # since memory was last given back; a lost update only delays the next time
    _read_bytes += read_bytes
    if _read_bytes >= GIVE_BACK_BYTES:
        _read_bytes = 0
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def small_buffer(size_bytes: int) -> memoryview:
    """Return a buffer uint8[at least size_bytes], writable, with undefined contents.

    It belongs to the caller until nothing refers to it. There are eight size classes per doubling, so at most an eighth of the
    memory is unused.
    """
    if not _POOLED_BYTES_MIN <= size_bytes <= _POOLED_BYTES_MAX:
        return memoryview(bytearray(size_bytes))
    grain = 1 << (size_bytes.bit_length() - 4)
    capacity_bytes = -(-size_bytes // grain) * grain
    found = _classes.get(capacity_bytes)
    if found is None:
        found = _classes.setdefault(capacity_bytes, _SizeClass(capacity_bytes))
    return found.take()
