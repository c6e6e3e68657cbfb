"""How transforms are spelled in a configuration: ``select(jpg, cls) | tar2tfrecord(image=png:pixels)``.

Steps are separated by ``|``, and what is in parentheses by commas. Quotes and brackets keep a comma or a bar in a value:
``parquet(filter="a > 1, b")``.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import ConfigError
from penstock.gateway.transforms.arguments import TEXT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.gateway.transforms.arguments import ArgumentSchema

STEPS_MAX = 16
_NAMED_ITEM = re.compile(r"([A-Za-z_]\w*)\s*=(.*)", re.DOTALL)
_LITERAL = re.compile(r"[+-]?[0-9.]+|true|false|yes|no|on|off|none", re.IGNORECASE)
_PAIRS = {"(": ")", "[": "]", "{": "}"}


class SpelledItem(NamedTuple):
    """One item in parentheses.

    Attributes:
        name: Text before its ``=``; empty if it has none.
        value: The text after the name, or the whole item, without quotes.
        text: The item as it is spelled.
    """

    name: str
    value: str
    text: str


class SpelledStep(NamedTuple):
    """One transform of a pipeline, as it is spelled.

    Attributes:
        name: Name of a built-in transform, ``module:function`` or ``path.py:function``.
        items: Items in parentheses.
    """

    name: str
    items: tuple[SpelledItem, ...]


def parse_spelling(text: str) -> tuple[SpelledStep, ...]:
    """Parse the spelling of a transform, or of several that follow each other.

    Raises:
        ConfigError: Something is missing, or brackets or quotes are not closed.
    """
    steps = tuple(_step(part, text) for part in _split(text, "|"))
    if len(steps) > STEPS_MAX:
        raise ConfigError(f"the transform {text!r} has {len(steps)} steps, more than {STEPS_MAX}")
    return steps


def _step(part: str, whole: str) -> SpelledStep:
    part = part.strip()
    name, bracket, rest = part.partition("(")
    name = name.strip()
    if not name:
        raise ConfigError(f"the transform {whole!r} lacks a name", hint="name, name(argument=value), or one | another")
    if bracket and not rest.endswith(")"):
        raise ConfigError(f"the transform {whole!r} has text after a closing parenthesis: {part!r}")
    items = [each.strip() for each in _split(rest[:-1], ",")] if rest[:-1].strip() else []
    if not all(items):
        raise ConfigError(f"the transform {whole!r} has an empty argument")
    return SpelledStep(name, tuple(map(_item, items)))


def _item(text: str) -> SpelledItem:
    match = _NAMED_ITEM.fullmatch(text)
    return SpelledItem(match[1], _unquoted(match[2].strip()), text) if match else SpelledItem("", _unquoted(text), text)


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] in "'\"" and text.find(text[0], 1) == len(text) - 1 else text


def _split(text: str, separator: str) -> Iterator[str]:
    """Split a text at a separator that is neither in brackets nor in quotes."""
    start, open_until, quote = 0, [""], ""
    for at, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _PAIRS:
            open_until.append(_PAIRS[character])
        elif character == open_until[-1]:
            open_until.pop()
        elif character in _PAIRS.values():
            raise ConfigError(f"the transform {text!r} has a {character!r} that nothing opened")
        elif character == separator and len(open_until) == 1:
            yield text[start:at]
            start = at + 1
    if quote or len(open_until) > 1:
        raise ConfigError(f"the transform {text!r} lacks a closing {quote or open_until[-1]!r}")
    yield text[start:]


def bind_items(items: tuple[SpelledItem, ...], schema: ArgumentSchema, *, rest: str = "") -> dict[str, str]:
    """Return the arguments that the items in parentheses stand for.

    ``name=value`` is an argument. Other items are all given to the argument `rest`, with commas between them; without one
    they fill the arguments that are not named, in the order of the signature. If `rest` is text, it also takes items such as
    ``png=image:pixels``, which name no argument, unless they look like one that is misspelt.

    Raises:
        ConfigError: An argument is unknown or given twice, or there are too many.
    """
    takes_named = bool(rest) and schema.specs[rest].expected == TEXT
    given: dict[str, str] = {}
    unnamed: list[str] = []
    for item in items:
        is_argument = item.name != rest and (item.name in schema.specs or (item.name and not takes_named))
        if is_argument and item.name in given:
            raise ConfigError(f"{schema.name}: the argument {item.name} is given twice")
        if is_argument:
            given[item.name] = item.value
            continue
        if item.name not in ("", rest):
            _check_mapping(item, schema, rest)
        unnamed.append(item.value if item.name in ("", rest) else item.text)
    if rest and unnamed:
        return given | {rest: ",".join(unnamed)}
    free = [name for name in schema.specs if name not in given]
    if len(unnamed) > len(free):
        raise ConfigError(f"{schema.name} takes {len(schema.specs)} arguments, and {unnamed[len(free)]!r} is one more")
    return given | dict(zip(free, unnamed, strict=False))


def _check_mapping(item: SpelledItem, schema: ArgumentSchema, rest: str) -> None:
    """Refuse an item that was meant as an argument: it resembles the name of one, or its value is no name.

    Raises:
        ConfigError: It is such an item.
    """
    near = get_close_matches(item.name.lower(), schema.specs, n=1, cutoff=0.75)
    if near or _LITERAL.fullmatch(item.value):
        meant = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(schema.specs)}"
        raise ConfigError(
            f"{schema.name} has no argument {item.name}",
            hint=f"{meant}; if {item.text} belongs to {rest}, write {rest}='{item.text}'",
        )
