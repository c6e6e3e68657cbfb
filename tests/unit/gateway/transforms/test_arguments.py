"""Transforms and their arguments as text: the spelling of steps, and what becomes the types of the signature."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.gateway.transforms.arguments import bind_items, parse_spelling, schema_of


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


def shown(text: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Names and items."""
    return [(step.name, [(item.name, item.value) for item in step.items]) for step in parse_spelling(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gzip", [("gzip", [])]),
        ("gzip()", [("gzip", [])]),
        (" my.module:function ", [("my.module:function", [])]),
        ("./my.py:f(a=1)", [("./my.py:f", [("a", "1")])]),
        ("select(jpg, cls)", [("select", [("", "jpg"), ("", "cls")])]),
        ("t(image=png:pixels,label=cls:int)", [("t", [("image", "png:pixels"), ("label", "cls:int")])]),
        ("a(x=1) | b | c(y)", [("a", [("x", "1")]), ("b", []), ("c", [("", "y")])]),
        ("p(filter='a > 1, b | c', x=[1, 2])", [("p", [("filter", "a > 1, b | c"), ("x", "[1, 2]")])]),
        ('p("(")', [("p", [("", "(")])]),
        ("p(a = b=c)", [("p", [("a", "b=c")])]),
        ("p('a' 'b')", [("p", [("", "'a' 'b'")])]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_spellings(text: str, expected: list[tuple[str, list[tuple[str, str]]]]) -> None:
    """Steps, names and items are found; quotes and brackets keep what is in them together."""
    assert shown(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "|", "a |", "(x)", "a(", "a(b", "a)", "a(b))", "a(b) c", "a('b)", "a(,)", "a(b,)", "a([)", "|".join("a" * 17)],
)
def test_wrong_spellings(text: str) -> None:
    """What is not closed, empty or too long is a ``ConfigError``."""
    with pytest.raises(ConfigError, match="transform"):
        parse_spelling(text)


@given(st.text(alphabet="ab=,|()[]'\" :", max_size=30))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    """No text makes the parser fail in another way, and every step has a name."""
    try:
        steps = parse_spelling(text)
    except ConfigError:
        return
    assert steps
    assert all(step.name and step.name == step.name.strip() for step in steps)


def resize(reader: object, request: object, *, width: int, height: int = 0) -> bytes:
    return b""


def pack(reader: object, request: object, *, fields: str, level: int = 1) -> bytes:
    return b""


def choose(reader: object, request: object, *, names: tuple[str, ...], level: int = 1) -> bytes:
    return b""


FUNCTIONS = {"resize": (resize, ""), "pack": (pack, "fields"), "choose": (choose, "names")}


def bound(text: str) -> dict[str, str]:
    (step,) = parse_spelling(text)
    function, rest = FUNCTIONS[step.name]
    return bind_items(step.items, schema_of(function, step.name), rest=rest)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("resize(64)", {"width": "64"}),
        ("resize(64, 32)", {"width": "64", "height": "32"}),
        ("resize(height=32, 64)", {"width": "64", "height": "32"}),
        ("resize(other=1)", {"other": "1"}),
        ("pack(a, b=c:d)", {"fields": "a,b=c:d"}),
        ("pack(fields=a, b, level=2)", {"fields": "a,b", "level": "2"}),
        ("pack(level=2)", {"level": "2"}),
        ("pack(fields='levels=2')", {"fields": "levels=2"}),
        ("choose(a, b, level=2)", {"names": "a,b", "level": "2"}),
        ("choose(leevl=2)", {"leevl": "2"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_items_become_arguments(text: str, expected: dict[str, str]) -> None:
    """Names are arguments; other items fill them in order, or all go to the one that takes the rest."""
    assert bound(text) == expected


@pytest.mark.parametrize("text", ["resize(1, 2, 3)", "resize(width=1, width=2)"])
def test_too_many_items(text: str) -> None:
    """An argument that is given twice, or one too many, is refused."""
    with pytest.raises(ConfigError, match="resize"):
        bound(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pack(levle=2)", r"pack has no argument levle. Hint: did you mean level=\?.*fields='levle=2'"),
        ("pack(field=cls)", r"pack has no argument field. Hint: did you mean fields=\?"),
        ("pack(Level=cls)", r"pack has no argument Level. Hint: did you mean level=\?"),
        ("pack(cls, foo=1)", r"pack has no argument foo. Hint: it takes fields, level; if foo=1 belongs"),
        ("pack(verbose=True)", "pack has no argument verbose"),
    ],
)
def test_a_misspelt_argument_is_not_taken_for_a_field(text: str, message: str) -> None:
    """What resembles an argument, or has a number or truth value, is refused where other names would be fields."""
    with pytest.raises(ConfigError, match=message):
        bound(text)
