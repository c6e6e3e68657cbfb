"""The reference is complete: a name that users can use is on its page."""

from __future__ import annotations

import re
import runpy
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import PenstockError
from penstock.fetch import BudgetStatistics, FetchStatistics
from penstock.loader import LoaderStatistics
from penstock.loader.plan import ranks
from penstock.pipeline import Pipeline
from penstock.store.hedged import HedgeStatistics
from penstock.store.limited import LimitStatistics
from penstock.store.retrying import RetryStatistics
from penstock.store.traced import StoreStatistics

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def words_of(page: str) -> set[str]:
    """Identifiers that a page shows as code."""
    code = " ".join(re.findall(r"`([^`\n]+)`", (DOCS / page).read_text()))
    return set(re.findall(r"[A-Za-z_]\w*", code))


def public(kind: type) -> set[str]:
    """Names of a class without underscore."""
    return {name for name in dir(kind) if not name.startswith("_")}


def test_every_public_name_is_in_the_reference() -> None:
    """``penstock``'s names, its subpackages and the methods of its main classes are on docs/reference/api.md."""
    names = {*ps.__all__, "torch", "testing"}
    names |= public(ps.Store) | public(ps.Loader) | (public(Pipeline) - {"source", "stages"})
    assert names - words_of("reference/api.md") == set()


def test_every_public_name_has_an_api_page() -> None:
    """Each public name is shown by one of the pages that the site makes of docstrings; errors by their module."""
    shown = re.findall(
        r"^::: (\S+)$", "\n".join(page.read_text() for page in (DOCS / "reference/api").glob("*.md")), re.MULTILINE
    )
    wanted = {f"penstock.{name}" for name in ps.__all__ if not name.endswith("Error")} - {"penstock.__version__"}
    assert "penstock.errors" in shown
    assert wanted - set(shown) == set()


def test_the_plots_show_the_numbers() -> None:
    """docs/performance.svg is what docs/tools/plots.py draws of docs/tools/plots.json."""
    drawn = runpy.run_path(str(DOCS / "tools/plots.py"))["performance"]()
    assert (DOCS / "performance.svg").read_text() == drawn


def test_every_config_field_is_in_the_reference() -> None:
    """So are the fields of the configs."""
    names = {
        field.name
        for config in (ps.TransportConfig, ps.RetryConfig, ps.HedgeConfig, ps.FetchConfig)
        for field in fields(config)
    }
    assert names - words_of("reference/api.md") == set()


@pytest.mark.torch
def test_every_torch_name_is_in_the_reference() -> None:
    """So is the PyTorch door."""
    pytest.importorskip("torch")
    assert set(ps.torch.__all__) - words_of("reference/api.md") == set()


@pytest.mark.parametrize(
    "record",
    [
        BudgetStatistics,
        FetchStatistics,
        HedgeStatistics,
        LimitStatistics,
        LoaderStatistics,
        RetryStatistics,
        StoreStatistics,
    ],
    ids=lambda record: record.__name__,
)
def test_the_tuning_guide_explains_every_statistic(record: type) -> None:
    """Each field and property of each record is on docs/guides/tuning.md, in the section of that record."""
    assert is_dataclass(record)
    text = (DOCS / "guides/tuning.md").read_text()
    section = text.partition(f"### `{record.__name__}`")[2].partition("\n##")[0]
    assert public(record) - {"inner"} - set(re.findall(r"\w+", section)) == set()


def test_every_command_is_in_the_reference() -> None:
    """Each command has its section on docs/reference/cli.md; each option that all commands have is in the page's head."""
    from penstock.cli.app import commands

    head, *sections = (DOCS / "reference/cli.md").read_text().split("\n## ")
    by_command = commands().commands
    assert {section.split()[1] for section in sections} == set(by_command)
    common = {option for parameter in by_command["cat"].params for option in parameter.opts if option.startswith("-")}
    assert common - set(re.findall(r"-[\w-]+", head)) == set()


def test_every_option_says_what_it_does() -> None:
    """Each option of each command has a help text: the site shows these texts as the reference of options."""
    from penstock.cli.app import commands

    def options_of(command: Any) -> list[Any]:
        inner = [option for part in getattr(command, "commands", {}).values() for option in options_of(part)]
        return [*command.params, *inner]

    by_command = commands().commands
    silent = [
        (name, option.opts) for name, command in by_command.items() for option in options_of(command) if not option.help
    ]
    assert silent == []


def test_every_environment_variable_is_in_the_reference() -> None:
    """Each variable that the package reads is on docs/reference/environment.md."""
    pattern = re.compile(r"""environ(?:\.get)?[\[(]\s*["'](\w+)["']""")
    sources = [
        path for path in (ROOT / "src").rglob("*.py") if not {"testing", "clients"} & set(path.relative_to(ROOT).parts)
    ]
    read = {name for path in sources for name in pattern.findall(path.read_text())}
    read |= {name for pair in ranks.LAUNCHERS for name in pair}
    assert {"AWS_REGION", "AWS_CA_BUNDLE", "RANK"} <= read
    assert read - words_of("reference/environment.md") == set()


def test_every_error_is_drawn() -> None:
    """Each public error is in the tree of docs/reference/errors.md."""
    text = (DOCS / "reference/errors.md").read_text()
    errors = [getattr(ps, name) for name in ps.__all__ if name.endswith("Error")]
    assert all(issubclass(error, PenstockError) for error in errors)
    assert [error.__name__ for error in errors if not re.search(rf"\b{error.__name__}\b", text)] == []


def test_every_decision_is_listed_and_has_a_status() -> None:
    """Each page of docs/decisions says its status and what supersedes it, and is in the list."""
    listed = (DOCS / "decisions/README.md").read_text()
    for page in sorted((DOCS / "decisions").glob("0*.md")):
        text = page.read_text()
        assert f"({page.name})" in listed
        assert "**Status:**" in text, page.name
        assert "**Superseded by:**" in text, page.name
        for heading in ("Context", "Decision", "Evidence", "Consequences"):
            assert f"## {heading}" in text, f"{page.name} lacks {heading}"
