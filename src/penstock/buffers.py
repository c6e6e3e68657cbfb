"""Memory that is used again once nothing refers to it: leases over long-lived owners.

A body in fresh memory costs a page fault per 4 KiB (glibc maps and trims large blocks each time): 10 to 20 µs for 100 KB,
as much as all of our Python for it. So memory stays with an owner, and what is handed out is a lease: a ctypes array over
the owner's memory. Every memoryview, slice and ``np.frombuffer`` of a lease keeps it alive; when the last goes, its
finaliser gives the owner back, never earlier. Making a lease costs 1.5 µs.

A subclass of ``bytearray`` that resurrects itself in ``__del__`` would be shorter, but CPython finalises an object once.

A body of its own lands inside a ``bytes`` object that nobody has seen yet (CPython's C API allows that, and only that):
whoever wants ``bytes`` in the end takes this one, where a copy of 100 KB would cost 20 µs with the GIL held.
"""

from __future__ import annotations

import ctypes
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from penstock.config import KIB, MIB

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

    from penstock.types import Buffer

_POOLED_BYTES_MIN = 16 * KIB
"""Below, ``malloc`` reuses by itself."""
_POOLED_BYTES_MAX = 2 * MIB
_KEPT_BYTES_MAX = 16 * MIB
"""Of free owners, per size class; a process usually uses one or two classes."""
GIVE_BACK_BYTES = 1024 * MIB
"""Read by epochs between two times that free memory is given back: it leaves some 130 MiB in a window of 109 MiB."""
_read_bytes = 0


@lru_cache(maxsize=1024)
def _lease_type(capacity_bytes: int) -> Any:
    class Lease(ctypes.c_ubyte * capacity_bytes):  # type: ignore[misc]
        __slots__ = ("home", "owner")

        def __del__(self) -> None:
            self.home(self.owner)

    return Lease


def lease(owner: bytearray | mmap.mmap, home: Callable[[Any], None]) -> memoryview:
    """uint8[len(owner)], writable: `owner`'s memory; ``home(owner)`` runs when the last reference to it goes.

    `home` runs in any thread, inside any other code: it must take no lock.
    """
    leased = _lease_type(len(owner)).from_buffer(owner)
    leased.owner = owner
    leased.home = home
    return memoryview(leased).cast("B")


class _Class:
    """Free owners of one size."""

    __slots__ = ("capacity_bytes", "count_max", "free")

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.count_max = _KEPT_BYTES_MAX // capacity_bytes
        self.free: deque[bytearray] = deque()

    def give_back(self, owner: bytearray) -> None:
        if len(self.free) < self.count_max:
            self.free.append(owner)

    def take(self) -> memoryview:
        try:
            owner = self.free.pop()
        except IndexError:
            owner = bytearray(self.capacity_bytes)
        return lease(owner, self.give_back)


_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.argtypes, _address_of.restype = (ctypes.py_object,), ctypes.c_void_p


class _Inside(ctypes.c_ubyte * (1 << 40)):  # type: ignore[misc]
    """The memory of a ``bytes`` object, which it keeps; views are cut to its length, so that there is one such type."""

    __slots__ = ("value",)


def bytes_buffer(size_bytes: int) -> memoryview:
    """uint8[size_bytes], writable, contents undefined: the memory of a new ``bytes`` object.

    ``as_bytes`` and ``whole_bytes`` take the object out; from then on nobody may write as long as anybody has it. libcurl,
    which only reads a body, lets go of it with its request: so parts of uploads are filled again. Cost: 1.5 µs.
    """
    value = _new_bytes(None, size_bytes)
    inside = _Inside.from_address(_address_of(value))
    inside.value = value
    return memoryview(inside).cast("B")[:size_bytes]


def is_typed(value: Buffer) -> bool:
    """Whether a member of a sample is numbers, because its format says so, and not bytes: uint8 of one dimension."""
    return isinstance(value, memoryview) and (value.format != "B" or value.ndim != 1)


def as_bytes(view: Buffer) -> bytes:
    """The bytes of a view: the object that it is of, where there is one and it is all of it, else a copy."""
    whole = whole_bytes(view)
    return bytes(view) if whole is None else whole


def whole_bytes(view: Buffer) -> bytes | None:
    """The ``bytes`` object whose memory this is, all of it; None where there is none."""
    owner = view.obj if type(view) is memoryview else view
    if type(owner) is _Inside:
        owner = owner.value
    if type(owner) is not bytes or (owner is not view and (len(owner) != view.nbytes or not view.c_contiguous)):  # type: ignore[union-attr]
        return None
    return owner


_classes: dict[int, _Class] = {}


def give_back_free_memory(read_bytes: int = GIVE_BACK_BYTES) -> None:
    """Return to the system what ``malloc`` keeps of freed memory, where the C library can (glibc).

    Samples are made in one thread and dropped in others, in any order: each thread's heap keeps the holes, and every epoch's
    threads may take another heap. Cost: 0.14 s of CPU for each GB that is given back, 0.3 ms where there is nothing, and the
    page faults of whoever takes it again; so only when the `read_bytes` of several calls have come to ``GIVE_BACK_BYTES``.
    """
    global _read_bytes  # of calls since the last time; a thread that loses an update makes it a little later
    _read_bytes += read_bytes
    if _read_bytes >= GIVE_BACK_BYTES:
        _read_bytes = 0
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def small_buffer(size_bytes: int) -> memoryview:
    """uint8[at least size_bytes], writable, contents undefined; the caller's until nothing refers to it.

    Eight size classes per doubling: at most an eighth is unused.
    """
    if not _POOLED_BYTES_MIN <= size_bytes <= _POOLED_BYTES_MAX:
        return memoryview(bytearray(size_bytes))
    grain = 1 << (size_bytes.bit_length() - 4)
    capacity_bytes = -(-size_bytes // grain) * grain
    found = _classes.get(capacity_bytes)
    if found is None:
        found = _classes.setdefault(capacity_bytes, _Class(capacity_bytes))
    return found.take()
