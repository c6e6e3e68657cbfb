"""Lazy imports: names of a package whose modules are imported at first use, and packages that may not be installed."""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable, Iterator, Mapping


def lazy_getattr(package: str, origins: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package (PEP 562), which imports a name at first use and sets it in the package.

    A name must not equal the name of a module of the package, since importing that module would set the attribute.

    Args:
        package: ``__name__`` of the package.
        origins: For each name, the module of the package that defines it.
    """

    def load(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{origins[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load


@contextmanager
def needing(package: str, text: str) -> Iterator[None]:
    """Say what to install if an import in the block fails because a package is not installed.

    Args:
        package: The package.
        text: Message of the error.

    Raises:
        ModuleNotFoundError: `package` is not installed. No ``ConfigError``: code that tries imports catches ``ImportError``.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(text, name=package) from error


def make_callable(package: str, name: str) -> None:
    """Let calls of a package go to one of its functions: users expect both ``ps.pack(...)`` and ``ps.pack.writer(...)``.

    Args:
        package: ``__name__`` of the package.
        name: The function's name in the package. It is imported at the first call.
    """

    class CallableModule(ModuleType):
        @boundary
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            """Call the function."""
            return getattr(self, name)(*arguments, **options)

        @property
        def __signature__(self) -> inspect.Signature:
            """The signature of the function."""
            import inspect

            return inspect.signature(getattr(self, name))

    sys.modules[package].__class__ = CallableModule
