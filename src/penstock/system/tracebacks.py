"""Short tracebacks: they show the user's code and omit the frames of this package.

Every public class, function and iterator that calls users' functions, or from which an error reaches the user, is a
``@boundary``. An error that passes through one keeps the frames of the user's code and loses those of penstock, so that
a script prints only a few lines. ``PENSTOCK_TRACEBACK=full`` in the environment keeps all frames.

A boundary that is called with an argument that does not exist raises a ``ConfigError``, which says what was meant.

``failed`` makes the error for a user's function that failed; its message names the function, its file and line, and the sample.
"""

from __future__ import annotations

import functools
import io
import os
from collections import ChainMap
from pathlib import Path
from types import CodeType, FunctionType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import DataError, DecodeError, PenstockError
from penstock.redaction import printable
from penstock.system.argument_names import check_call

if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "PENSTOCK_TRACEBACK"

T = TypeVar("T")

_PACKAGE = f"{Path(__file__).parents[1]}/"
_INSTALLED = (f"{Path(os.__file__).parent}/", "<frozen ")
_IS_GENERATOR = 0x20  # inspect.CO_GENERATOR, without importing inspect
_SPECIAL = frozenset(
    {
        "__init__",
        "__iter__",
        "__next__",
        "__getitem__",
        "__getitems__",
        "__len__",
        "__contains__",
        "__enter__",
        "__exit__",
    }
)


def is_full() -> bool:
    """Whether the environment asks for complete tracebacks."""
    return os.environ.get(VARIABLE) == "full"


def boundary(target: T) -> T:
    """Shorten the tracebacks of errors that leave a function, a generator function, or the public methods of a class.

    Cost: one more Python call, about 0.1 µs. The environment is read only after a failure.
    """
    if isinstance(target, FunctionType):
        guarded: T = _guarded(target)
        return guarded
    for name, member in list(vars(target).items()):
        is_public = not name.startswith("_") or name in _SPECIAL
        if is_public and isinstance(member, FunctionType) and not hasattr(member, "__isabstractmethod__"):
            setattr(target, name, _guarded(member))
    return target


def _guarded(function: Any) -> Any:
    # A bare `raise` adds no frame of its own, so that no frame of this package remains.
    if function.__code__.co_flags & _IS_GENERATOR:

        @functools.wraps(function)
        def iterated(*args: Any, **kwargs: Any) -> Any:
            try:
                return (yield from function(*args, **kwargs))
            except Exception as error:
                shorten(error)
                raise

        return iterated

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                check_call(function, error)
                raise
        except Exception as error:
            shorten(error)
            raise

    return called


def shorten(error: BaseException) -> None:
    """Remove this package's frames from the traceback of an error, and causes that mean nothing to the user.

    Another library's error is changed only if the user's code raised it. If this package raised it, it is a defect of
    penstock, and a report of it needs every frame.
    """
    if is_full():
        return
    if not isinstance(error, PenstockError):
        if _users_frames(error.__traceback__):
            _hide_package(error)
        return
    error.__traceback__ = _chained(_users_frames(error.__traceback__))
    failure = error.user_traceback if isinstance(error, DataError) else None
    cause = error.__cause__
    shown = cause if error.__suppress_context__ else error.__context__
    if shown is not None and (failure or _is_users(shown) or _was_reported(shown)):
        _hide_package(shown)
    elif shown is not None:
        error.__context__, error.__cause__ = shown, None  # setting the cause also hides the context
    if failure and (cause is None or cause.__traceback__ is None):  # it was raised in another process
        note = printable(f"Raised from:\n{failure}", lines=True)
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def failed(function: object, error: BaseException, *, kind: type[DataError] = DecodeError, **fields: Any) -> DataError:
    """Return the error to raise after a user's function failed; the caller raises it from `error`.

    Args:
        function: The user's function.
        error: The exception that it raised, or that describes what is wrong with its result.
        kind: Class of the returned error.
        **fields: Fields of the returned error: ``stage``, ``sample_key``, ``shard``.
    """
    frames = [entry for entry in _entries(error.__traceback__) if not _is_ours(entry)]
    where = _place(function, frames)
    text = f"{function_name(function)} failed{f' at {where}' if where else ''}: {type(error).__name__}: {error}"
    return kind(text, user_traceback=_formatted(error, frames) if frames else None, **fields)


def users_text(error: BaseException) -> str:
    """Return an error as Python prints it, with the frames of the user's code and of what that calls.

    It is empty if no frame is the user's, because the error is then one of penstock, and a report of it needs every frame; and
    if the environment asks for all frames.
    """
    if is_full() or not (_is_users(error) or isinstance(error, SyntaxError)):
        return ""
    following: BaseException | None = error
    while following is not None:
        entries = [entry for entry in _entries(following.__traceback__) if not _is_ours(entry)]
        first = next((at for at, entry in enumerate(entries) if not _is_installed(entry)), len(entries))
        following.__traceback__ = _chained(entries[first:])
        following = following.__cause__ or following.__context__
    import traceback

    return "".join(traceback.format_exception(error)).rstrip()


def function_name(function: object) -> str:
    """Return the qualified name of a function, or of the class of a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _formatted(error: BaseException, frames: list[TracebackType]) -> str:
    import traceback

    return "".join(traceback.format_exception(type(error), error, _chained(frames), chain=False)).rstrip()


def _place(function: object, frames: list[TracebackType]) -> str | None:
    """Return file and line of the innermost frame in the user's files, else of the function; None if it has no file."""
    chosen = [entry for entry in frames if not _is_installed(entry)][-1:] or frames[:1]
    if chosen:
        return f"{_shown(chosen[0].tb_frame.f_code.co_filename)}:{chosen[0].tb_lineno}"
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__"):
        function = vars(type(function)).get("__call__")
    code = getattr(function, "__code__", None)
    return f"{_shown(code.co_filename)}:{code.co_firstlineno}" if code is not None else None


def _shown(path: str) -> str:
    """Return a path relative to the working directory if it lies below it."""
    try:
        return path.removeprefix(f"{Path.cwd()}/")
    except OSError:  # the working directory was removed
        return path


def _is_users(error: BaseException) -> bool:
    """Whether the user's code is in the traceback of an error or of one of its causes."""
    following: BaseException | None = error
    while following is not None:
        if _users_frames(following.__traceback__):
            return True
        following = following.__cause__
    return False


def _was_reported(error: BaseException) -> bool:
    """Whether an error of this package has left it before, to a library that caught it and then tried something else."""
    entries = _entries(error.__traceback__)  # the first frame is the one that caught it
    return isinstance(error, PenstockError) and bool(entries) and not _is_ours(entries[0])


def _hide_package(error: BaseException) -> None:
    """Remove this package's frames from the traceback of an error and from those of its causes."""
    following: BaseException | None = error
    while following is not None:
        entries = _entries(following.__traceback__)
        following.__traceback__ = _chained([entry for entry in entries if not _is_ours(entry)])
        following = following.__cause__ or following.__context__


def _users_frames(trace: TracebackType | None) -> list[TracebackType]:
    return [entry for entry in _entries(trace) if not _is_ours(entry) and not _is_installed(entry)]


def _entries(trace: TracebackType | None) -> list[TracebackType]:
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    return entries


def _chained(entries: list[TracebackType]) -> TracebackType | None:
    chain: TracebackType | None = None
    for entry in reversed(entries):
        chain = TracebackType(chain, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return chain


def _is_ours(entry: TracebackType) -> bool:
    """Whether a frame belongs to this package; methods that ``dataclass`` generates have no file, only a module name."""
    frame = entry.tb_frame
    return frame.f_code.co_filename.startswith(_PACKAGE) or frame.f_globals.get("__name__", "").startswith("penstock.")


def _is_installed(entry: TracebackType) -> bool:
    """Whether a frame is in the standard library or in an installed package; Cython names its sources without a folder."""
    path = entry.tb_frame.f_code.co_filename
    is_package = "/site-packages/" in path or "/dist-packages/" in path
    return is_package or path.startswith(_INSTALLED) or path.endswith((".pyx", ".pxi"))


def pickled_with_files(cloudpickle: Any, value: object) -> bytes:
    """Pickle functions by value, with the names of their files, which cloudpickle leaves out since version 3.1.3.

    Args:
        cloudpickle: The module.
        value: Object to pickle, which may hold functions of any module.
    """
    reduced = cloudpickle.Pickler.dispatch_table[CodeType]
    own = {CodeType: lambda code: (_code_of, (code.co_filename, *reduced(code)))}
    table = {"dispatch_table": ChainMap(own, cloudpickle.Pickler.dispatch_table)}
    with io.BytesIO() as file:
        type("_Pickler", (cloudpickle.Pickler,), table)(file).dump(value)
        return file.getvalue()


def _code_of(filename: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    return make(*arguments).replace(co_filename=filename)
