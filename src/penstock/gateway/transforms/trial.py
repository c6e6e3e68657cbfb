"""Runs a transform on one object, in this process: for authors, their tests and their debuggers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self

from penstock.compose import connect, split
from penstock.errors import ConfigError
from penstock.gateway.transforms.authoring import WrongOutputError, view_of
from penstock.gateway.transforms.program import (
    HEADER,
    QUERY,
    LoadedProgram,
    callable_step,
    checked_number,
    load_program,
    load_step,
    spelled_program,
)
from penstock.gateway.transforms.reading import SourceVersion, VersionReader
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.store import Store
    from penstock.types import Buffer, ObjectInfo


@boundary
def try_transform(
    transform: str | Callable[..., Any],
    source: str | os.PathLike[str],
    *,
    arguments: Mapping[str, str] | None = None,
    epoch: int | None = None,
    seed: int | None = None,
    query: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    source_headers: Mapping[str, str] | None = None,
    folder: str | os.PathLike[str] = ".",
) -> TransformTrial:
    """Run a transform on one object, without a gateway and without a worker process.

    Args:
        transform: A transform as an access point names it: ``module:function``, ``./my.py:function``, ``resize(width=64)``, or
            several with ``|`` between them; or the function itself.
        source: Path or URL of the object.
        arguments: Arguments of the transform, as text.
        epoch: Epoch of the request; None for a request that names none.
        seed: Seed of the request; None for a request that names none.
        query: Parameters of the query.
        headers: Headers of the request.
        source_headers: Headers of the source.
        folder: Folder whose modules can be imported, and to which paths of transforms are relative.

    Returns:
        The result: an iterator of bytes, which is made while it is taken.

    Raises:
        ConfigError: The transform does not exist, or its arguments are wrong.
        StoreError: The source cannot be read.
        Exception: Any error of the transform.

    Example::

        assert try_transform("my:upper", "words.txt", arguments={"times": "2"}).read() == b"WORDSWORDS"
    """
    if isinstance(transform, str):
        program = load_program(spelled_program(transform, arguments=arguments, folder=os.fspath(folder)))
    else:
        program = LoadedProgram(steps=(load_step(callable_step(transform, arguments=arguments), transform),))
    given = {
        name: checked_number(name, str(each)) for name, each in (("epoch", epoch), ("seed", seed)) if each is not None
    }
    given |= {f"{QUERY}{name}": value for name, value in (query or {}).items()}
    given |= {f"{HEADER}{name.lower()}": value for name, value in (headers or {}).items()}
    root, key = split(source)
    if not key:
        raise ConfigError(f"{os.fspath(source)!r} does not name an object")
    store = connect(root)
    try:
        info = store.stat(key)
        shown = {name.lower(): value for name, value in (source_headers or {}).items()}
        version = SourceVersion(key, key, info.size_bytes, info.etag, shown)
        reader = VersionReader(store, version, check=lambda: None)
        return TransformTrial(program, given, store=store, reader=reader, info=info)
    except BaseException:
        store.close()
        raise


@boundary
class TransformTrial:
    """The result of a transform that is tried: an iterator of its bytes, and a context manager.

    Args:
        program: The transform.
        arguments: Arguments of the request: epoch, seed, query and headers.
        store: Store of the source; it is closed with this object, and so is the reader.
        reader: The source.
        info: The source as a store describes it.

    Attributes:
        headers: Headers of the result.
        size_bytes: Length of the result in bytes; None if neither the transform nor its ``size`` knows it.
    """

    def __init__(
        self,
        program: LoadedProgram,
        arguments: Mapping[str, str],
        *,
        store: Store,
        reader: VersionReader,
        info: ObjectInfo,
    ) -> None:
        self._store = store
        self._reader = reader
        declared = program.size_bytes(info, arguments) if len(program.steps) == 1 else None
        self._response = program.respond(reader, arguments)
        self.headers = self._response.headers
        self.size_bytes = self._response.size_bytes if self._response.size_bytes is not None else declared
        self._pieces = self._checked(declared)

    def __iter__(self) -> Iterator[Buffer]:
        return self._pieces

    @boundary
    def _checked(self, declared_bytes: int | None) -> Iterator[Buffer]:
        made_bytes = 0
        try:
            for piece in self._response.pieces:
                length = view_of(piece).nbytes
                made_bytes += length
                yield piece
        finally:
            self.close()
        for expected, who in ((self._response.size_bytes, "Response"), (declared_bytes, "size()")):
            if expected is not None and expected != made_bytes:
                raise WrongOutputError(f"the transform made {made_bytes} bytes, and its {who} said {expected}")

    def read(self) -> bytes:
        """Return all that has not been taken."""
        return b"".join(bytes(piece) for piece in self._pieces)

    def close(self) -> None:
        """End the transform; idempotent."""
        self._response.close()
        self._reader.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
