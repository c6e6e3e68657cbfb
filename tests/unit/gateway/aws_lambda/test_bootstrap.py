"""The file that runs in the handler's interpreter."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from penstock.gateway.aws_lambda import bootstrap

SOURCE = Path(bootstrap.__file__).read_text()


def test_it_is_written_for_python_3_7() -> None:
    """Its syntax is that of Python 3.7."""
    ast.parse(SOURCE, feature_version=(3, 7))


def test_it_imports_only_the_standard_library() -> None:
    """The handler's interpreter has none of penstock's dependencies, and not penstock itself."""
    imported = set()
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported - set(sys.stdlib_module_names) == set()
