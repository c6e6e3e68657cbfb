"""Arguments of a transform: text from a configuration or a query, converted to the types in the function's signature."""

from __future__ import annotations

import inspect
import types
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from penstock.config import check_names
from penstock.errors import ConfigError, PenstockError
from penstock.system.tracebacks import function_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
    """Return what converts a text to the annotated type, and a description of what it takes."""
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
