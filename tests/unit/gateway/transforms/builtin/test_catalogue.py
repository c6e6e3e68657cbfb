"""The page of the built-in transforms in the documentation: what their signatures and docstrings say."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.transforms.arguments import REQUIRED, ArgumentSpec, schema_of
from penstock.gateway.transforms.authoring import declaration_of
from penstock.gateway.transforms.builtin import BUILTINS
from penstock.gateway.transforms.program import import_function

PAGE = Path(__file__).parents[5] / "docs" / "reference" / "transforms.md"
ITEM = re.compile(r"^    (\w+): (.*(?:\n     .*)*)", re.MULTILINE)


def described(name: str) -> tuple[Any, str, dict[str, str]]:
    """A transform, its summary, and the help texts of its arguments."""
    function = import_function(BUILTINS[name], folder=".")
    summary, _, rest = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
    helps = {match[1]: " ".join(match[2].split()) for match in ITEM.finditer(rest.partition("\n\n")[0])}
    return function, " ".join(summary.split()), helps


def cell(spec: ArgumentSpec, text: str) -> str:
    """What the table says of an argument."""
    default = ",".join(spec.default) if isinstance(spec.default, tuple) else spec.default
    shown = "" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
    note = ", required" if default is REQUIRED else f" (default `{shown}`)" if shown else ""
    return f"`{spec.name}`{note}: {text}".replace("|", "\\|")


def test_the_page_has_the_table() -> None:
    """The documentation shows the table that the functions themselves give."""
    lines = ["| transform | source | arguments |", "|---|---|---|"]
    for name in BUILTINS:
        function, summary, helps = described(name)
        cells = "<br>".join(cell(spec, helps[spec.name]) for spec in schema_of(function, name).specs.values())
        lines.append(f"| `{name}`: {summary} | {helps['reader']} | {cells or 'none'} |")
    table = "\n".join(lines).replace("``", "`")
    assert f"\n{table}\n" in PAGE.read_text()


@pytest.mark.parametrize("name", BUILTINS)
def test_every_argument_is_described(name: str) -> None:
    """Every transform has a summary, and every argument a help text and a type."""
    function, summary, helps = described(name)
    assert summary.endswith(".")
    assert helps["reader"].endswith(".")
    specs = schema_of(function, name).specs
    for argument in specs:
        assert helps[argument].endswith("."), argument
        assert specs[argument].expected
    assert declaration_of(function).rest in {"", *specs}
    assert function.__name__ == name
