"""The filter of ``parquet``: ``split == "train" and width >= 256``, in a small part of Python's grammar.

=============================== ====================================================================
``a == 1``, ``!= < <= > >=``    a column compared with a constant, in either order; ``1 < a <= 5`` too
``a in ("x", "y")``, ``not in``  one of several constants
``a is None``, ``is not None``  whether there is a value
``and``, ``or``, ``not``, ``()`` combinations
``user.age``                    a child of a struct
``column("a b")``               a column whose name is not an identifier
=============================== ====================================================================

Constants are texts, numbers, ``True`` and ``False``. As in SQL, a row for which the filter is neither true nor false, because a
value is missing, is left out.
"""

from __future__ import annotations

import ast
from importlib import import_module
from operator import eq, ge, gt, le, lt, ne
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

FILTER_CHARACTERS_MAX = 4096
"""Longest filter."""

DEPTH_MAX = 32
"""Deepest nesting of a filter."""

_OPERATORS: dict[type[ast.cmpop], Operator] = {
    ast.Eq: eq, ast.NotEq: ne, ast.Lt: lt, ast.LtE: le, ast.Gt: gt, ast.GtE: ge,
}  # fmt: skip
_MIRRORED: dict[Operator, Operator] = {eq: eq, ne: ne, lt: gt, le: ge, gt: lt, ge: le}

Path: TypeAlias = "tuple[str, ...]"
Operator: TypeAlias = "Callable[[Any, Any], Any]"
Statistics: TypeAlias = "Callable[[Path], tuple[Any, Any] | None]"


class RowFilter:
    """A filter of rows.

    Args:
        text: The filter.

    Attributes:
        columns: Names of the top-level columns that it reads.

    Raises:
        ConfigError: The text is not a filter.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        if len(text) > FILTER_CHARACTERS_MAX:
            raise ConfigError(f"a filter of {len(text)} characters is longer than {FILTER_CHARACTERS_MAX}")
        try:
            self._node = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self._wrong(f"{getattr(error, 'msg', error)}") from None
        self._paths: list[Path] = []
        self._check(self._node, 0)
        self.columns = tuple(dict.fromkeys(path[0] for path in self._paths))

    def expression(self) -> Any:
        """Return the filter as an expression of pyarrow."""
        return self._expression(self._node)

    def may_match(self, statistics: Statistics) -> bool:
        """Whether some row of a row group may match.

        Args:
            statistics: Returns the smallest and the largest value of a column in the row group, or None if unknown.
        """
        return self._may_match(self._node, statistics)

    # ── checking ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check(self, node: ast.expr, depth: int) -> None:
        if depth > DEPTH_MAX:
            raise self._wrong(f"it is nested deeper than {DEPTH_MAX}")
        if isinstance(node, ast.BoolOp):
            for each in node.values:
                self._check(each, depth + 1)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._check(node.operand, depth + 1)
        elif isinstance(node, ast.Compare):
            for left, operator, right in _links(node):
                self._check_link(left, operator, right)
        else:
            raise self._wrong(f"{ast.unparse(node)!r} is not a comparison")

    def _check_link(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> None:
        if isinstance(operator, ast.Is | ast.IsNot):
            if not (isinstance(right, ast.Constant) and right.value is None):
                raise self._wrong("after `is` comes None")
            self._paths.append(self._path(left))
        elif isinstance(operator, ast.In | ast.NotIn):
            if not isinstance(right, ast.Tuple | ast.List) or not right.elts:
                raise self._wrong('after `in` comes a list of constants: ("a", "b")')
            self._paths.append(self._path(left))
            for each in right.elts:
                self._constant(each)
        else:
            column, constant = (right, left) if _is_constant(left) else (left, right)
            self._paths.append(self._path(column))
            self._constant(constant)

    def _path(self, node: ast.expr) -> Path:
        if isinstance(node, ast.Name):
            return (node.id,)
        if isinstance(node, ast.Attribute):
            return (*self._path(node.value), node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "column" and len(node.args) == 1:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and not node.keywords:
                return (name.value,)
        raise self._wrong(f"{ast.unparse(node)!r} is not a column; texts have quotes")

    def _constant(self, node: ast.expr) -> Any:
        negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
        inner = node.operand if isinstance(node, ast.UnaryOp) and negative else node
        if not isinstance(inner, ast.Constant) or not isinstance(inner.value, str | int | float):
            raise self._wrong(f"{ast.unparse(node)!r} is not a constant")
        if negative and isinstance(inner.value, str | bool):
            raise self._wrong(f"{ast.unparse(node)!r} is not a number")
        return -inner.value if negative and not isinstance(inner.value, str) else inner.value

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"filter={self._text!r}: {what}", hint='split == "train" and width >= 256')

    # ── as pyarrow's expression ─────────────────────────────────────────────────────────────────────────────────────

    def _expression(self, node: ast.expr) -> Any:
        if isinstance(node, ast.UnaryOp):
            return ~self._expression(node.operand)
        if isinstance(node, ast.BoolOp):
            parts = [self._expression(each) for each in node.values]
            whole = parts[0]
            for part in parts[1:]:
                whole = whole & part if isinstance(node.op, ast.And) else whole | part
            return whole
        assert isinstance(node, ast.Compare)
        links = [self._link_expression(*link) for link in _links(node)]
        whole = links[0]
        for link in links[1:]:
            whole &= link
        return whole

    def _link_expression(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Any:
        pc = import_module("pyarrow.compute")
        if isinstance(operator, ast.Is | ast.IsNot):
            found = pc.field(*self._path(left)).is_null()
            return ~found if isinstance(operator, ast.IsNot) else found
        if isinstance(operator, ast.In | ast.NotIn):
            assert isinstance(right, ast.Tuple | ast.List)
            column = pc.field(*self._path(left))
            found = column == self._constant(right.elts[0])  # by equality, so that a missing value stays unknown
            for each in right.elts[1:]:
                found |= column == self._constant(each)
            return ~found if isinstance(operator, ast.NotIn) else found
        path, compare, constant = self._comparison(left, operator, right)
        return compare(pc.field(*path), constant)

    def _comparison(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> tuple[Path, Operator, Any]:
        compare = _OPERATORS[type(operator)]
        if _is_constant(left):
            return self._path(right), _MIRRORED[compare], self._constant(left)
        return self._path(left), compare, self._constant(right)

    # ── by statistics ───────────────────────────────────────────────────────────────────────────────────────────────

    def _may_match(self, node: ast.expr, statistics: Statistics) -> bool:
        if isinstance(node, ast.BoolOp):
            parts = (self._may_match(each, statistics) for each in node.values)
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        if not isinstance(node, ast.Compare):
            return True
        return all(self._link_may_match(*link, statistics) for link in _links(node))

    def _link_may_match(self, left: ast.expr, operator: ast.cmpop, right: ast.expr, statistics: Statistics) -> bool:
        if isinstance(operator, ast.In):
            assert isinstance(right, ast.Tuple | ast.List)
            return any(_may_match(statistics(self._path(left)), self._constant(each), eq) for each in right.elts)
        if type(operator) not in _OPERATORS:
            return True
        path, compare, constant = self._comparison(left, operator, right)
        return _may_match(statistics(path), constant, compare)


def _may_match(bounds: tuple[Any, Any] | None, constant: Any, compare: Operator) -> bool:
    """Whether a value between bounds may compare so with a constant."""
    if bounds is None or compare is ne:
        return True
    low, high = bounds
    try:
        if compare is eq:
            return bool(low <= constant <= high)
        return bool(compare(low if compare in (lt, le) else high, constant))
    except TypeError:  # a type that Python compares in another way than pyarrow
        return True


def _links(node: ast.Compare) -> list[tuple[ast.expr, ast.cmpop, ast.expr]]:
    operands = [node.left, *node.comparators]
    return list(zip(operands[:-1], node.ops, operands[1:], strict=True))


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub))
