"""Names of a package that are imported when they are first used, so that importing the package stays cheap."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def names_of(package: str, origins: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for `package` (PEP 562). The value is then kept in the package.

    No name may also be the name of a module of the package: importing that module would set the attribute.

    Args:
        package: The package's ``__name__``.
        origins: For each name, the module of the package that has it.
    """

    def named(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{origins[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return named
