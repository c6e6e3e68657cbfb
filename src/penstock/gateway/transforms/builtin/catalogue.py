"""Descriptions of the built-in transforms and their arguments, for the command line and the documentation.

It is read from their signatures and docstrings.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.gateway.transforms.arguments import REQUIRED, schema_of
from penstock.gateway.transforms.authoring import declaration_of
from penstock.gateway.transforms.builtin import BUILTINS

if TYPE_CHECKING:
    from collections.abc import Callable

_ITEM = re.compile(r"^    (\w+): (.*(?:\n     .*)*)", re.MULTILINE)


class BuiltinArgument(NamedTuple):
    """One argument of a built-in transform.

    Attributes:
        name: Name of the argument.
        expected: Values that its text may have.
        default: Default value as text; None if it must be given.
        help: One or more sentences that say what the argument does.
    """

    name: str
    expected: str
    default: str | None
    help: str


class BuiltinDescription(NamedTuple):
    """One built-in transform.

    Attributes:
        name: Name of the transform.
        summary: One or more sentences that say what the transform does.
        source: Sources that it takes.
        rest: Argument that takes the items without a name; empty for none.
        content_type: Type of its results; the common one if it depends on the source.
        arguments: Arguments of the transform.
    """

    name: str
    summary: str
    source: str
    rest: str
    content_type: str
    arguments: tuple[BuiltinArgument, ...]


def builtin_function(name: str) -> Callable[..., Any]:
    """Import the function of a built-in transform."""
    module, _, function_name = BUILTINS[name].partition(":")
    function: Callable[..., Any] = getattr(import_module(module), function_name)
    return function


def describe_builtins() -> tuple[BuiltinDescription, ...]:
    """Describe all built-in transforms. Cost: imports their modules."""
    return tuple(_described(name) for name in BUILTINS)


def builtin_table() -> str:
    """Return a Markdown table of the built-in transforms and their arguments."""
    lines = ["| transform | source | arguments |", "|---|---|---|"]
    for each in describe_builtins():
        arguments = "<br>".join(_argument_cell(argument) for argument in each.arguments)
        lines.append(f"| `{each.name}`: {each.summary} | {each.source} | {arguments or 'none'} |")
    return "\n".join(lines).replace("``", "`")


def _described(name: str) -> BuiltinDescription:
    function = builtin_function(name)
    declared = declaration_of(function)
    text = inspect.getdoc(function) or ""
    summary, _, rest = text.partition("\n\nArgs:\n")
    helps = {match[1]: " ".join(match[2].split()) for match in _ITEM.finditer(rest.partition("\n\n")[0])}
    arguments = tuple(
        BuiltinArgument(
            spec.name,
            spec.expected,
            None if spec.default is REQUIRED else _default_text(spec.default),
            helps[spec.name],
        )
        for spec in schema_of(function, name).specs.values()
    )
    return BuiltinDescription(
        name, " ".join(summary.split()), helps["reader"], declared.rest, declared.content_type, arguments
    )


def _default_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def _argument_cell(argument: BuiltinArgument) -> str:
    default = "" if not argument.default else f" (default `{argument.default}`)"
    needed = ", required" if argument.default is None else default
    return f"`{argument.name}`{needed}: {argument.help}".replace("|", "\\|")
