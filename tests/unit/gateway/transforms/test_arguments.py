"""Arguments of transforms: text becomes the types of the signature."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional

import pytest

from penstock.errors import ConfigError
from penstock.gateway.transforms.arguments import schema_of


def pairs(text: str) -> dict[str, str]:
    """``a=b,c=d`` as a dict."""
    if "=" not in text:
        raise ValueError("no equals sign")
    return dict(pair.split("=") for pair in text.split(","))


def everything(
    reader: object,
    request: object,
    whole: int,
    number: float = 0.5,
    *,
    text: str = "",
    flag: bool = False,
    choice: Literal["a", "b", 3] = "a",
    names: tuple[str, ...] = (),
    numbers: list[int] = [],  # noqa: B006
    maybe: int | None = None,
    old: Optional[float] = None,  # noqa: UP045
    mapped: Annotated[dict[str, str], pairs] = {},  # noqa: B006
    free: Any = None,
    bare=None,  # type: ignore[no-untyped-def]
) -> bytes:
    return b""


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("whole", "-3", -3),
        ("number", "1e3", 1000.0),
        ("text", "x", "x"),
        ("flag", "Yes", True),
        ("flag", "0", False),
        ("choice", "b", "b"),
        ("choice", "3", 3),
        ("names", "a, b,", ("a", "b")),
        ("names", "", ()),
        ("numbers", "1,2", [1, 2]),
        ("maybe", "4", 4),
        ("maybe", "none", None),
        ("old", "0.25", 0.25),
        ("mapped", "a=b,c=d", {"a": "b", "c": "d"}),
        ("free", "x", "x"),
        ("bare", "x", "x"),
    ],
    ids=lambda value: str(value),
)
def test_text_is_converted(name: str, text: str, value: object) -> None:
    """Each type of annotation has its conversion, and what is not given has its default."""
    values = schema_of(everything, "everything").convert({"whole": "1"} | {name: text})
    assert values[name] == value
    assert values["maybe"] is None or name == "maybe"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs the argument whole"),
        ({"whole": "x"}, "whole='x' must be a whole number"),
        ({"whole": "1", "number": "x"}, "must be a number"),
        ({"whole": "1", "flag": "maybe"}, "must be true or false"),
        ({"whole": "1", "choice": "c"}, "one of a, b, 3"),
        ({"whole": "1", "numbers": "1,x"}, "each item is a whole number"),
        ({"whole": "1", "maybe": "x"}, "a whole number, or none"),
        ({"whole": "1", "mapped": "x"}, "no equals sign"),
        ({"whole": "1", "hole": "x"}, "did you mean whole="),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_wrong_arguments(given: dict[str, str], message: str) -> None:
    """The message names the argument, its text and what is expected."""
    with pytest.raises(ConfigError, match=message):
        schema_of(everything, "everything").convert(given)


def test_functions_that_are_no_transforms() -> None:
    """A function without reader and request, or with arguments that text cannot give, is refused."""

    def one(reader: object) -> bytes:
        return b""

    def typed(reader: object, request: object, *, when: complex) -> bytes:
        return b""

    def variadic(reader: object, request: object, *others: str) -> bytes:
        return b""

    def hidden(reader: object, request: object, *, when: Missing) -> bytes:  # type: ignore[name-defined]  # noqa: F821
        return b""

    for function, message in (
        (one, "by position"),
        (typed, "cannot be converted"),
        (variadic, "others"),
        (hidden, "when"),
    ):
        with pytest.raises(ConfigError, match=message):
            schema_of(function, "mine")
    with pytest.raises(ConfigError, match="not a function"):
        schema_of(3, "mine")  # type: ignore[arg-type]


def test_more_arguments() -> None:
    """A function with ``**more`` takes any argument, as text."""

    def more(reader: object, request: object, **more: str) -> bytes:
        return b""

    assert schema_of(more, "more").convert({"a": "1"}) == {"a": "1"}
