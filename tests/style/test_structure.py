"""The structure as a test: few files depend on each other in a circle, imports for annotations included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from style.syntax import nodes_of

PACKAGE = Path(__file__).parents[2] / "src" / "penstock"
CIRCLE_FILES_MAX = 3


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a package is the name of its ``__init__.py``."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_names(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for every ``from penstock... import name``, wherever in the file it stands."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "penstock":
            for alias in node.names:
                yield node.module, alias.name


def imports() -> dict[str, set[str]]:
    """For each module, the modules that define what it imports.

    A package's ``__init__.py`` only hands names on, so an import from it counts as one from the module behind it.
    """
    known = modules()
    faces = {name for name, path in known.items() if path.name == "__init__.py"}
    handed_on = {(face, name): module for face in faces for module, name in imported_names(known[face])}
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        if name in faces:
            continue
        targets = found[name] = set()
        for module, imported in imported_names(path):
            target = f"{module}.{imported}" if f"{module}.{imported}" in known else module
            while target in faces and (target, imported) in handed_on:
                target = handed_on[target, imported]
            if target in known and target not in faces and target != name:
                targets.add(target)
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules that all reach each other: modules that reach, and are reached by, the same one."""
    reached: dict[str, set[str]] = {}
    for name in graph:
        seen, waiting = set(), [name]
        while waiting:
            for target in graph.get(waiting.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        reached[name] = seen
    groups = {frozenset(other for other in reached[name] if name in reached.get(other, ())) for name in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def test_no_circle_of_many_files() -> None:
    """At most three files import each other in a circle, imports for type checking and inside functions included."""
    assert [circle for circle in circles(imports()) if len(circle) > CIRCLE_FILES_MAX] == []


def test_a_circle_is_found() -> None:
    """The search finds a circle through several modules, and not the modules that only lead to it."""
    graph = {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}, "e": {"e2"}, "e2": set()}
    assert circles(graph) == [["b", "c", "d"]]
