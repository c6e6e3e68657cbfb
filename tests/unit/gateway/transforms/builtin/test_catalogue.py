"""The listing of built-in transforms, and its page in the documentation."""

from __future__ import annotations

from pathlib import Path

from penstock.gateway.transforms.builtin import BUILTINS
from penstock.gateway.transforms.builtin.catalogue import builtin_function, builtin_table, describe_builtins

_PAGE = Path(__file__).parents[5] / "docs" / "reference" / "transforms.md"


def test_the_page_has_the_table() -> None:
    """The documentation shows the table that the functions themselves give."""
    assert f"\n{builtin_table()}\n" in _PAGE.read_text()


def test_every_argument_is_described() -> None:
    """Every transform has a summary and every argument help text and a type."""
    found = describe_builtins()
    assert [each.name for each in found] == list(BUILTINS)
    for each in found:
        assert each.summary.endswith(".")
        assert each.source.endswith(".")
        for argument in each.arguments:
            assert argument.help.endswith("."), (each.name, argument)
            assert argument.expected
        assert not each.rest or each.rest in {argument.name for argument in each.arguments}
        assert builtin_function(each.name).__name__ == each.name
