"""Transforms and their arguments as text, from a configuration or a query: ``select(jpg, cls) | tar2tfrecord(image=png)``.

Steps are separated by ``|``, and what is in parentheses by commas. Quotes and brackets keep a comma or a bar in a value:
``parquet(filter="a > 1, b")``. Arguments are converted to the types in the function's signature.
"""

from __future__ import annotations

import inspect
import re
import types
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from penstock.config import check_names
from penstock.errors import ConfigError, PenstockError
from penstock.system.tracebacks import function_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
REQUIRED = inspect.Parameter.empty
TEXT = "text"
"""``ArgumentSpec.expected`` of an argument that takes any text."""


class ArgumentSpec(NamedTuple):
    """One argument of a transform.

    Attributes:
        name: Name of the argument.
        convert: Converts its text; raises a ``ValueError`` if the text is wrong.
        expected: Values that its text may have, for messages.
        default: Default value; ``REQUIRED`` if it has none.
    """

    name: str
    convert: Callable[[str], Any]
    expected: str
    default: Any


class ArgumentSchema(NamedTuple):
    """All arguments of a transform.

    Attributes:
        name: Name of the transform, for messages.
        specs: Arguments by name, in the order of the signature.
        takes_more: Whether it also takes arguments of any other name, as text (``**more``).
    """

    name: str
    specs: Mapping[str, ArgumentSpec]
    takes_more: bool

    def convert(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Return typed arguments, with defaults for those that are not given.

        Raises:
            ConfigError: An argument is unknown, missing or ill-typed; the message names it.
        """
        if not self.takes_more:
            if given and not self.specs:
                raise ConfigError(f"{self.name} takes no arguments, but {', '.join(given)} is given")
            check_names(self.name, given, self.specs)
        values: dict[str, Any] = {}
        for name, spec in self.specs.items():
            if name in given:
                values[name] = self.convert_one(name, given[name])
            elif spec.default is REQUIRED:
                raise ConfigError(f"{self.name} needs the argument {name}", hint=f"{name}={spec.expected}")
            else:
                values[name] = spec.default
        return values | {name: text for name, text in given.items() if name not in self.specs}

    def convert_one(self, name: str, text: str) -> Any:
        """Return one argument, converted.

        Raises:
            ConfigError: The text is wrong; the message says what is expected.
        """
        spec = self.specs[name]
        try:
            return spec.convert(text)
        except PenstockError as error:
            raise ConfigError(f"{self.name}: {name}={text!r}: {error.what}", hint=error.hint) from error
        except ValueError as error:
            reason = f" ({error})" if spec.expected == _ANNOTATED and str(error) else ""
            raise ConfigError(f"{self.name}: {name}={text!r} must be {spec.expected}{reason}") from error


def schema_of(function: Callable[..., Any], name: str) -> ArgumentSchema:
    """Return the arguments of a transform: the parameters of its signature after the first two.

    Args:
        function: A function ``transform(reader, request, ...)``.
        name: Name of the transform, for messages.

    Raises:
        ConfigError: It does not take a reader and a request, or an annotation cannot be used.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise ConfigError(f"{name} is not a function transform(reader, request)") from None
    first = [each for each in parameters if each.kind in (*_NAMED[:1], inspect.Parameter.POSITIONAL_ONLY)][:2]
    if len(first) < 2:
        raise ConfigError(f"{name} must take a reader and a request by position: transform(reader, request)")
    specs, takes_more = {}, False
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            takes_more = True
        elif parameter.kind in _NAMED and parameter not in first:
            specs[parameter.name] = _spec_of(function, parameter, name)
        elif parameter not in first:
            raise ConfigError(f"{name}: the argument {parameter.name} can only be passed by position")
    return ArgumentSchema(name, specs, takes_more)


def _spec_of(function: Callable[..., Any], parameter: inspect.Parameter, name: str) -> ArgumentSpec:
    annotation = parameter.annotation
    if isinstance(annotation, str):
        scope = getattr(inspect.unwrap(function), "__globals__", {})
        try:
            annotation = eval(annotation, scope)  # the author's own code, which was imported
        except Exception as error:
            raise ConfigError(
                f"{name}: the type of {parameter.name}, {parameter.annotation!r}, cannot be evaluated: {error}",
                hint="import it outside of `if TYPE_CHECKING:`",
            ) from error
    convert, expected = _converter(annotation, f"{name}: {parameter.name}")
    return ArgumentSpec(parameter.name, convert, expected, parameter.default)


_ANNOTATED = "different"


def _converter(annotation: Any, where: str) -> tuple[Callable[[str], Any], str]:
    """Return the converter from text to the annotated type, and a description of valid text."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    if origin is Annotated:
        for each in inner[1:]:
            if callable(each):
                return each, _ANNOTATED
        return _converter(inner[0], where)
    if origin is Literal:
        return _choice(inner)
    if origin in (Union, types.UnionType):
        chosen = [each for each in inner if each is not type(None)]
        if len(chosen) == 1:
            convert, expected = _converter(chosen[0], where)
            if chosen[0] is str or type(None) not in inner:
                return convert, expected
            return (lambda text: None if text in ("", "none") else convert(text)), f"{expected}, or none"
    if origin in (tuple, list) and inner and (origin is list or inner[1:] == (...,)):
        convert, expected = _converter(inner[0], where)
        return (lambda text: origin(convert(item.strip()) for item in text.split(",") if item.strip())), (
            f"a list with commas, where each item is {expected}"
        )
    raise ConfigError(
        f"{where} has the type {annotation!r}, to which text cannot be converted",
        hint="str, int, float, bool, Literal[...], tuple[T, ...], T | None, or Annotated[T, function_of_text]",
    )


def _choice(values: tuple[Any, ...]) -> tuple[Callable[[str], Any], str]:
    by_text = {str(value): value for value in values}

    def convert(text: str) -> Any:
        if text not in by_text:
            raise ValueError(text)
        return by_text[text]

    return convert, f"one of {', '.join(by_text)}"


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(text)


_SCALARS: dict[Any, tuple[Callable[[str], Any], str]] = {
    REQUIRED: (str, TEXT),
    Any: (str, TEXT),
    str: (str, TEXT),
    int: (int, "a whole number"),
    float: (float, "a number"),
    bool: (_boolean, "true or false"),
}


def check_arguments(check: Callable[[Mapping[str, Any]], None] | None, values: Mapping[str, Any], name: str) -> None:
    """Have a transform's own function check its arguments together.

    Raises:
        ConfigError: It refuses them.
    """
    if check is None:
        return
    try:
        check(values)
    except PenstockError:
        raise
    except ValueError as error:
        raise ConfigError(f"{name} refuses its arguments ({function_name(check)}): {error}") from error


# ── spelling ────────────────────────────────────────────────────────────────────────────────────────────────────────

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
