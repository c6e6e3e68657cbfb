"""The interface for authors of transforms: the reader, the request, the response, and the decorator ``transform``.

A transform is a function ``transform(reader, request)``, which returns bytes, an iterator of bytes or a ``Response``. Its
further parameters are its arguments: they are typed by their annotations, and passed by keyword::

    from penstock.gateway import transform

    @transform(version="1", content_type="text/csv")
    def head(reader, request, *, lines: int = 10):
        for _ in range(lines):
            yield reader.readline()

This module imports only the standard library, so that a module of transforms stays cheap to import.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, fields
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from penstock.types import Buffer, ObjectInfo

ATTRIBUTE = "__penstock_transform__"

F = TypeVar("F")


class SourceReader(Protocol):
    """The source of a transform: a binary file, and an iterator over its bytes. All bytes are of one version.

    If another transform of a pipeline makes the source, it can only be read in sequence: ``seekable()`` is false,
    ``size_bytes`` and ``etag`` are None, and ``seek`` and ``read_range`` raise ``io.UnsupportedOperation``.

    Every method may raise a ``StoreError``, above all ``ObjectChangedError`` if the source was replaced since the call began.
    A transform should not catch it.
    """

    @property
    def key(self) -> str:
        """Key of the source."""

    @property
    def size_bytes(self) -> int | None:
        """Size of the source in bytes."""

    @property
    def etag(self) -> str | None:
        """ETag of its version, with quotes."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the source, with names in lower case: ``content-type``, ``x-amz-meta-...``."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next `size` bytes, fewer only at the end; all the rest if `size` is negative or None."""

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer` with the next bytes, and return their number, which is smaller than the buffer only at the end."""

    def readline(self, size: int | None = -1, /) -> bytes:
        """Return the next line with its line feed, or at most `size` bytes of it; empty at the end."""

    def seekable(self) -> bool:
        """Whether ``seek`` and ``read_range`` work."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move the current offset, as in files, and return it."""

    def tell(self) -> int:
        """Return the current offset."""

    def __iter__(self) -> Iterator[memoryview]:
        """Iterate over the bytes from the current offset to the end, in pieces that are read ahead: uint8[n], read-only.

        A piece may be yielded as output without copying it, and is valid as long as something refers to it. Its memory
        counts towards what may be read ahead, so a transform that keeps many pieces should copy them.
        """

    def read_range(self, start: int, end: int) -> memoryview:
        """Return the bytes from `start` to `end`, cut at the end of the source; the current offset does not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochNumbers:
    """The epoch and the seed of a request; ``TransformRequest`` describes the fields."""

    epoch: int
    seed: int
    rng_seed: int
    rng: random.Random


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformRequest:
    """The request that a transform serves, as far as the transform may see it.

    Results are kept and shared. Therefore a transform sees only facts that are part of the result's ETag: the parameters and
    headers that it declares by ``query=`` and ``headers=``, and epoch and seed if it declares ``uses_epoch=True`` or
    ``deterministic=False``.

    Attributes:
        key: Key of the source.
        arguments: Arguments by name, typed; those that are not given have their defaults.
        query: Declared parameters of the query that the client sent.
        headers: Declared headers that the client sent, with names in lower case.
        epoch_numbers: Epoch and seed; None if the transform does not declare that it uses them.
    """

    key: str
    arguments: Mapping[str, Any]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    epoch_numbers: EpochNumbers | None

    @property
    def epoch(self) -> int:
        """Epoch number, from 0; 0 if neither the request nor the access point names one."""
        return self._declared("epoch").epoch

    @property
    def seed(self) -> int:
        """Seed, from 0; 0 if the request does not name one."""
        return self._declared("seed").seed

    @property
    def rng_seed(self) -> int:
        """Number in [0, 2**64) derived from seed, epoch and key, e.g. for ``numpy.random.default_rng``."""
        return self._declared("rng_seed").rng_seed

    @property
    def rng(self) -> random.Random:
        """Random generator that begins with ``rng_seed``: equal requests draw equal numbers."""
        return self._declared("rng").rng

    def _declared(self, name: str) -> EpochNumbers:
        if self.epoch_numbers is None:
            raise ConfigError(
                f"request.{name} is not available, because one result serves all epochs of this transform",
                hint="declare @transform(uses_epoch=True), or deterministic=False",
            )
        return self.epoch_numbers


@dataclass(frozen=True, slots=True)
class Response:
    """A result with headers. A transform that needs none returns, or yields, only the bytes.

    Attributes:
        body: Bytes, or an iterable of bytes, which is consumed while the result is sent. A piece may not be changed until the
            next one is requested.
        headers: Headers of the result: ``Content-Type``, ``Cache-Control``, ``x-amz-meta-...``.
        size_bytes: Length of the body if it is known before its end; another length is an error.
    """

    body: Buffer | Iterable[Buffer]
    _: KW_ONLY
    headers: Mapping[str, str] = field(default_factory=dict)
    size_bytes: int | None = None


Output: TypeAlias = "Buffer | Iterable[Buffer] | Response"


class WrongOutputError(PenstockError, ValueError):
    """An author's function returned something that it may not return. The message says it without a traceback."""


def view_of(piece: object) -> memoryview:
    """Return a piece of a transform's output as memory.

    Raises:
        WrongOutputError: It is not bytes.
    """
    try:
        return memoryview(piece)  # type: ignore[arg-type]
    except TypeError:
        raise WrongOutputError(
            f"the transform yielded {type(piece).__name__}; a transform yields bytes",
            hint="text.encode()" if isinstance(piece, str) else None,
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a transform declares about itself: ``@transform(...)``, which leaves the function itself as it is.

    Attributes:
        version: Becomes part of the results' ETags beside the digest of the code. Change it when something changes that the
            digest cannot see, such as a model file.
        deterministic: Whether equal sources, arguments, epochs and seeds give equal bytes. If not, results are not kept.
        uses_epoch: Whether the output depends on ``request.epoch``, ``request.seed`` or ``request.rng``.
        content_type: ``Content-Type`` of results that name none.
        size: ``size(info, arguments)`` returns the size of a result in bytes, or None if only producing it tells.
        ranges: ``ranges(reader, request, start, end)`` returns what the function itself would, but only the bytes from `start`
            to `end` of it. It needs a `size` that is always known.
        query: Parameters of the query that the output depends on. A parameter with the name of an argument replaces it.
        headers: Headers of the request that the output depends on.
        rest: Argument that takes everything in ``name(...)`` that names no other argument: ``select(jpg, cls)``. Only text
            takes items such as ``png=image:pixels`` too; of another type, ``name=value`` must be an argument.
        check: ``check(arguments)`` raises a ``ValueError`` if arguments do not go together.
    """

    version: str = ""
    deterministic: bool = True
    uses_epoch: bool = False
    content_type: str = "application/octet-stream"
    size: Callable[[ObjectInfo, Mapping[str, Any]], int | None] | None = None
    ranges: Callable[[SourceReader, TransformRequest, int, int], Output] | None = None
    query: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    rest: str = ""
    check: Callable[[Mapping[str, Any]], None] | None = None

    def __post_init__(self) -> None:
        for name in ("version", "content_type", "rest"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}={getattr(self, name)!r} of a transform must be text")
        for name in ("deterministic", "uses_epoch"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} of a transform must be True or False")
        for name in ("size", "ranges", "check"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r} of a transform must be a function")
        for name in ("query", "headers"):
            names = getattr(self, name)
            if not isinstance(names, tuple | list) or not all(isinstance(each, str) for each in names):
                raise ConfigError(f"{name}={names!r} of a transform must be a tuple of names")
        if self.ranges is not None and self.size is None:
            raise ConfigError("a transform that declares ranges= must declare size=, too")

    def __call__(self, function: F) -> F:
        """Declare it of a function."""
        setattr(function, ATTRIBUTE, self)
        return function


transform = Declaration
"""The decorator for authors; its arguments are the attributes of ``Declaration``."""


def declaration_of(function: Any) -> Declaration:
    """Return the declarations of a transform: by the decorator, or by attributes of these names that were set on the function.

    Raises:
        ConfigError: An attribute has the wrong type.
    """
    declared = getattr(function, ATTRIBUTE, None)
    if isinstance(declared, Declaration):
        return declared
    if not isinstance(function, FunctionType):
        return Declaration()
    attributes = vars(function)
    return Declaration(**{each.name: attributes[each.name] for each in fields(Declaration) if each.name in attributes})
