"""The error tree is complete and mapped to errno and HTTP; errors can be pickled and show no secrets."""

from __future__ import annotations

import builtins
import copy
import errno
import pickle

import pytest

import penstock as ps
from penstock import errors
from penstock.errors import WIRE, CancelledOperationError, ClosedStoreError, DataError, PenstockError, StoreError


def tree(kind: type[PenstockError] = PenstockError) -> list[type[PenstockError]]:
    """Return a class and all its subclasses that the package defines."""
    found = [kind] if kind.__module__ == "penstock.errors" else []
    return found + [each for below in kind.__subclasses__() for each in tree(below)]


TREE = sorted(set(tree()), key=lambda kind: kind.__name__)


def test_every_class_has_a_row_on_the_wire() -> None:
    """Every class of the tree, and nothing else, has an errno and an HTTP status."""
    assert set(WIRE) == set(TREE)
    assert all(number > 0 and 400 <= status < 600 for number, status in WIRE.values())


def test_every_class_is_exported() -> None:
    """Every class is a top-level name, except the two that no user needs."""
    exported = {name for name in ps.__all__ if name.endswith("Error")}
    assert exported == {kind.__name__ for kind in TREE} - {CancelledOperationError.__name__, ClosedStoreError.__name__}
    assert all(getattr(ps, name) is getattr(errors, name) for name in exported)


def test_what_a_store_says_has_a_hint() -> None:
    """Every store error has a hint, except those whose remedy depends on the case."""
    silent = {kind.__name__ for kind in TREE if issubclass(kind, StoreError) and kind("what").hint is None}
    assert silent == {"StoreError", "ProtocolError", "CancelledOperationError", "ClosedStoreError"}
    assert ps.SpanError("what", hint="other").hint == "other"


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_errors_pickle_with_their_fields(kind: type[PenstockError]) -> None:
    """An error keeps class, message, hint and fields through pickle."""
    fields = {name: f"value of {name}" for name in kind.FIELDS}
    if "span" in fields:
        fields |= {"span": (1, 2), "elapsed_s": 1.5, "attempts_count": 3, "status": 503, "retryable": False}  # type: ignore[dict-item]
    error = kind("what happened", hint="what to do", **fields)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.__dict__ == error.__dict__
    assert str(error).endswith("Hint: what to do")
    assert "what happened" in str(error)


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigError", "ValueError"),
        ("ClosedError", "RuntimeError"),
        ("StoreError", "OSError"),
        ("ObjectMissingError", "FileNotFoundError"),
        ("AccessDeniedError", "PermissionError"),
        ("ObjectExistsError", "FileExistsError"),
        ("SpanError", "ValueError"),
        ("UnavailableError", "ConnectionError"),
        ("DeadlineError", "TimeoutError"),
        ("DataError", "ValueError"),
        ("FieldMissingError", "KeyError"),
    ],
)
def test_errors_inherit_what_people_already_catch(name: str, builtin: str) -> None:
    """Each class is also the builtin that its documentation names."""
    assert issubclass(getattr(errors, name), getattr(builtins, builtin))


def test_store_errors_carry_their_errno() -> None:
    """A store error's errno is that of the table, so that ``OSError`` handlers work."""
    for kind in TREE:
        if issubclass(kind, StoreError):
            assert kind("x").errno == WIRE[kind][0]


def test_unknown_fields_are_refused() -> None:
    """A misspelt field raises ``TypeError`` at once."""
    with pytest.raises(TypeError, match="sahrd"):
        DataError("x", sahrd="a")


def test_the_message_names_everything_known() -> None:
    """The message contains operation, URL, range, status, code, attempts, seconds, request id and hint."""
    error = StoreError(
        "it broke", hint="mend it", operation="GET", url="s3://b/k", span=(5, 9), status=503, code="SlowDown",
        request_id="R1", attempts_count=3, elapsed_s=1.234,
    )  # fmt: skip
    assert str(error) == (
        "GET s3://b/k bytes [5, 9): it broke (503 SlowDown, 3 attempts in 1.23 s, request id R1). Hint: mend it"
    )


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_the_repr_tells_what_the_message_tells(kind: type[PenstockError]) -> None:
    """The repr is the class and the message on one line, with the URL and without its secrets, also of a copy."""
    signed = "s3://user:secret@b/shard.tar?X-Amz-Signature=0123456789abcdef"
    fields = {name: signed for name in ("url", "shard") if name in kind.FIELDS}
    error = kind(f"it broke\nat {signed}", hint=f"mend {signed}", **fields)
    for each in (error, pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert repr(each) == f"{kind.__name__}({str(error)!r})"
        assert "b/shard.tar" in repr(each)
        assert "\n" not in repr(each)
        assert not any(hidden in repr(each) for hidden in ("secret", "0123456789abcdef", "user"))
        assert each.args == error.args


def test_errno_of_any_exception() -> None:
    """Each error has the errno of its row, a subclass that of its parent, and anything else ``EIO``."""

    class OwnMissingError(errors.ObjectMissingError):
        pass

    assert {kind: errors.errno_of(kind("what")) for kind in WIRE} == {
        kind: number for kind, (number, _) in WIRE.items()
    }
    assert errors.errno_of(OwnMissingError("what")) == errno.ENOENT
    assert errors.errno_of(PermissionError(13, "of the system")) == errors.errno_of(KeyError()) == errno.EIO
