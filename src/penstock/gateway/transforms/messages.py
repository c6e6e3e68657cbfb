"""Frames between the gateway and its worker processes, over a Unix stream socket.

A frame is a head of eight bytes, kind and length, and a payload. The gateway first sends a pickle that says what to run, and
then only JSON. A worker sends only JSON and bytes: it runs code that need not be trusted with the gateway's secrets, so the
gateway unpickles nothing from it.
"""

from __future__ import annotations

import enum
import json
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.config import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.gateway.transforms.reading import SourceVersion

HEAD = struct.Struct("<II")
CONTROL_BYTES_MAX = 1 * MIB
"""Largest payload of a frame that is not data."""
DATA_BYTES_MAX = 1 << 30
"""Largest payload of a frame of data; longer pieces are sent in several."""
MESSAGE_CHARACTERS_MAX = 4 * KIB
TRACEBACK_CHARACTERS_MAX = 16 * KIB


class FrameKind(enum.IntEnum):
    """The kind of a frame."""

    SETUP = 1
    """To a worker: ``WorkerSetup`` as a pickle. Answered by READY or ERROR."""
    CALL = 2
    """To a worker: ``TransformCall``. Answered by HEAD, any number of DATA, and END, or at any time by ERROR."""
    SIZES = 3
    """To a worker: objects whose results' sizes are wanted. Answered by SIZES or ERROR."""
    READY = 4
    """From a worker: the ``ProgramDescription``."""
    HEAD = 5
    """From a worker: headers and size of the result."""
    DATA = 6
    """From a worker: bytes of the result."""
    END = 7
    """From a worker: the result is complete."""
    ERROR = 8
    """From a worker: ``WorkerFailure``. It is ready for another call."""


class TransformCall(NamedTuple):
    """One call.

    Attributes:
        url: URL of the source's store.
        source: The version to read; in JSON a list of its fields.
        arguments: Arguments by which results of the source differ, as ``Transform.arguments`` returned them.
        span: Range of the result that is wanted; None for all of it.
    """

    url: str
    source: SourceVersion
    arguments: Mapping[str, str]
    span: tuple[int, int] | None


class WorkerFailure(NamedTuple):
    """Why a call failed, in a worker.

    Attributes:
        kind: Name of the exception's class.
        message: Message of the error.
        traceback: Traceback of the error, for the log.
        store_error: Whether it is an error of penstock's about the source, which the gateway raises again.
        refusal: Code, message and status if the author raised an ``S3Error``.
    """

    kind: str
    message: str
    traceback: str
    store_error: bool = False
    refusal: tuple[str, str, int] | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> WorkerFailure:
        """Return the failure that a worker process has sent.

        Raises:
            TypeError, ValueError, LookupError: The values are not a failure.
        """
        kind, message, trace = (_text(values[name]) for name in ("kind", "message", "traceback"))
        refusal = values["refusal"]
        if refusal is not None:
            code, message, status = refusal
            refusal = (_text(code), _text(message), _size(status))
        return cls(kind, message, trace, bool(values["store_error"]), refusal)


def checked_head(values: Any) -> tuple[dict[str, str], int | None]:
    """Return headers and size of a result that a worker has sent; raises the same as ``WorkerFailure.of``."""
    headers = {_text(name): _text(value) for name, value in values["headers"].items()}
    size = values["size_bytes"]
    return headers, None if size is None else _size(size)


def checked_sizes(values: Any, *, count: int) -> list[int | None]:
    """Return the sizes that a worker has sent; raises the same as ``WorkerFailure.of``."""
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"these are not {count} sizes")
    return [None if value is None else _size(value) for value in values]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} is not text")
    return value


def _size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a number of bytes")
    return value


def frame(kind: FrameKind, payload: bytes = b"") -> bytes:
    """Return a whole frame."""
    return HEAD.pack(kind, len(payload)) + payload


def json_frame(kind: FrameKind, value: Any) -> bytes:
    """Return a frame whose payload is JSON."""
    return frame(kind, json.dumps(value, separators=(",", ":")).encode())
