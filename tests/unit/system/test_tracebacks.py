"""What ``tracebacks`` keeps of an error, and how it names a user's function."""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock as ps
from penstock.errors import DecodeError
from penstock.system.tracebacks import boundary, failed, shorten, users_text

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_TRACEBACK", raising=False)


def broken(*_: Any) -> Any:
    raise KeyError("labl")


class Broken:
    def __call__(self, sample: Any) -> Any:
        raise KeyError("labl")


def failure_of(function: Any) -> Any:
    try:
        function(1)
    except KeyError as error:
        return failed(function, error, stage="map[0]")
    raise AssertionError("it did not fail")


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (broken, "broken"),
        (functools.partial(broken, 2), "broken"),
        (Broken(), "Broken"),
        (lambda _: broken(), "<lambda>"),
    ],
)
def test_a_failure_names_function_file_and_line(function: Any, name: str) -> None:
    """The message names a function, partial, callable object or lambda, and the innermost line of the user's code."""
    text = str(failure_of(function))
    assert f"{name} failed at " in text
    assert "test_tracebacks.py:" in text
    assert "KeyError: 'labl'" in text


def test_a_failure_in_a_library_names_the_users_line() -> None:
    """If the standard library raises, the message names the line in the user's file that called it."""

    def parses(_: Any) -> Any:
        import json

        return json.loads("{")

    try:
        parses(1)
    except ValueError as error:
        said = failed(parses, error)
    assert f"test_tracebacks.py:{parses.__code__.co_firstlineno + 3}:" in str(said)


def test_a_function_without_a_file_is_named_alone() -> None:
    """A function that is not written in Python is named without a line."""
    try:
        len(1)  # type: ignore[arg-type]
    except TypeError as error:
        said = failed(len, error.with_traceback(None))
    assert str(said).startswith("len failed: TypeError: object of type 'int' has no len()")


def test_a_removed_working_directory_is_no_second_error(tmp_path: Path) -> None:
    """Reporting where a function failed works without a working directory."""
    before = Path.cwd()
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        assert "test_tracebacks.py:" in str(failure_of(broken))
    finally:
        os.chdir(before)


def test_pickling_keeps_the_users_frames() -> None:
    """An error from another process tells once where the user's function failed."""
    error = pickle.loads(pickle.dumps(failure_of(broken)))
    shorten(error)
    shorten(error)
    assert "in broken" in error.user_traceback
    assert len(error.__notes__) == 1
    assert "in broken" in error.__notes__[0]


def test_secrets_in_a_users_error_are_not_shown() -> None:
    """The text of users' frames and errors is redacted, as all text of errors is."""

    def signed(_: Any) -> Any:
        raise KeyError("https://host/x?X-Amz-Signature=abcdef0123")

    assert "abcdef0123" not in failure_of(signed).user_traceback
    assert "abcdef0123" not in str(failure_of(signed))


def test_a_users_own_exception_keeps_its_frames_and_loses_ours() -> None:
    """A user's exception that passes through a boundary shows only the user's frames."""
    with pytest.raises(KeyError) as raised:
        list(ps.connect("memory://tracebacks").read_many(broken() for _ in range(2)))
    files = [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert set(files) == {__file__}


def test_a_mistake_of_ours_keeps_every_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is neither the package's nor raised by the user's code keeps all frames, so that it can be found."""
    store = ps.connect("memory://tracebacks")
    monkeypatch.setattr("penstock.store.reading.as_item", None)
    with pytest.raises(TypeError) as raised:
        store.read("key")
    assert any("reading.py" in frame.filename for frame in traceback.extract_tb(raised.value.__traceback__))


def test_a_generator_is_a_boundary_as_well() -> None:
    """An error that a generator raises while it is iterated is shortened, and what it yields is unchanged."""

    @boundary
    def numbers() -> Iterator[int]:
        yield 1
        raise DecodeError("two") from ValueError("inner")

    found = numbers()
    assert next(found) == 1
    with pytest.raises(DecodeError) as raised:
        next(found)
    assert raised.value.__cause__ is None
    assert isinstance(raised.value.__context__, ValueError)


def raised(function: Any) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def test_the_text_of_an_error_has_the_users_frames_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames before the user's code and those of penstock are left out, and a module with a wrong syntax is shown."""
    file = tmp_path / "broken_module.py"
    file.write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = users_text(raised(lambda: importlib.import_module("broken_module")))
    assert text.endswith("ModuleNotFoundError: No module named 'no_such_module_anywhere'")
    file.with_name("no_syntax.py").write_text("def f(:\n")
    text = users_text(raised(lambda: importlib.import_module("no_syntax")))
    assert text.endswith("SyntaxError: invalid syntax")
    assert "no_syntax.py" in text
    monkeypatch.setenv("PENSTOCK_TRACEBACK", "full")
    assert not users_text(raised(broken))


def test_an_error_without_a_users_frame_has_no_such_text() -> None:
    """An error of a library that this package called is a defect of penstock: its report needs every frame."""
    error = raised(lambda: int("x"))
    error.__traceback__ = None
    assert not users_text(error)


def test_compiled_code_of_a_package_is_not_the_users() -> None:
    """Cython's frames have relative paths, such as uvloop's, through which an error of the system passes."""
    code = compile("int('x')", "uvloop/loop.pyx", "exec")
    error = raised(lambda: exec(code, {}))
    assert error.__traceback__ is not None
    frames = error.__traceback__.tb_next.tb_next  # type: ignore[union-attr]
    error.__traceback__ = frames
    assert frames is not None
    assert frames.tb_frame.f_code.co_filename == "uvloop/loop.pyx"
    assert not users_text(error)


def test_an_error_that_a_library_caught_before_it_tried_again_is_shown(tmp_path: Path) -> None:
    """pandas tries once more without keys after a PermissionError: the error about the keys must not be hidden."""
    library = tmp_path / "site-packages" / "retrying.py"
    library.parent.mkdir()
    library.write_text(
        "def retry(first, second):\n    try:\n        first()\n    except ValueError:\n        second()\n"
    )
    spec = importlib.util.spec_from_file_location("retrying", library)
    assert spec is not None
    assert spec.loader is not None
    retrying = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(retrying)

    with pytest.raises(ps.ConfigError, match="s3:second") as caught:
        retrying.retry(functools.partial(ps.connect, "s3:first"), functools.partial(ps.connect, "s3:second"))
    first, _, second = "".join(traceback.format_exception(caught.value)).partition("During handling")
    assert "ConfigError: 's3:first'" in first
    assert "ConfigError: 's3:second'" in second


def test_only_a_call_of_the_boundary_itself_is_about_its_arguments() -> None:
    """A TypeError from inside, here of the user's own function, stays one; one of the call says what was meant."""

    @boundary
    def read(size_max: int, *, fn: Any = dict) -> Any:
        return fn(size_max=size_max)

    with pytest.raises(TypeError, match="unexpected keyword argument 'size_max'"):
        read(1, fn=lambda: 0)
    with pytest.raises(
        ps.ConfigError, match=r"read\(sizemax=...\) is not an option of read\(\). Hint: did you mean size_max"
    ):
        read(sizemax=1)
