"""Digests of Python values, above all of transforms, that are equal in every process.

A digest covers the content of a value, never its ``repr``, which may be shortened or hold an address.

The digest of a transform covers everything that can be found to decide what it returns: bytecode with
constants and names, defaults, closures, the state of objects, classes, and the functions, classes and values that it
uses by global name. The standard library and installed packages are covered by name and version. File names, line
numbers, and the order of sets and dicts are not covered. Some things cannot be followed: an attribute found by a
computed name, a file that the function opens, a relative import inside it. ``transform_version`` is for these. Another
version of Python compiles other bytecode, so it gives another digest.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_SHORT_BYTES = 64  # shorter values are not hashed separately: a list may have millions of them
_METHODS = (MethodType, BuiltinFunctionType, staticmethod, classmethod, property, functools.cached_property)
_DESCRIPTORS = (FunctionType, staticmethod, classmethod, property)
_UNSTABLE_ATTRIBUTES = ("_abc_impl", "__annotate_func__")  # attributes of classes that Python uses internally


class _UnstableError(Exception):
    """A value has no content that is the same in every process."""


class _Global(NamedTuple):
    """A global name that the transform uses, and its module."""

    module: str
    name: str


def digest_of(*parts: bytes) -> bytes:
    """Return a digest of 16 bytes; different `parts` have different digests."""
    pieces = [piece for part in parts for piece in (len(part).to_bytes(8, "little"), part)]
    return hashlib.blake2b(b"".join(pieces), digest_size=16).digest()


def function_digest(function: Callable[..., Any], *, version: str | None) -> str:
    """Return 32 hexadecimal digits that two transforms share only if they do the same, as far as can be determined.

    Args:
        function: A function, a ``functools.partial``, a bound method, a class, or another callable object.
        version: Version given by the caller; the digest then covers nothing else.

    Raises:
        ConfigError: The transform uses a value that cannot be compared across processes, and there is no `version`.
    """
    if version is not None:
        return digest_of(b"version", version.encode()).hex()
    walk = _Fingerprinter()
    try:
        return walk.digest(function).hex()
    except _UnstableError as error:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise ConfigError(
            f"the transform {name} cannot be compared with the one that began a packing: {error}",
            hint="transform_version='1' (--transform-version 1) identifies it; change it when the transform changes",
        ) from None


def value_digest(value: object) -> str | None:
    """Return 32 hexadecimal digits for a value; None if it, or a value in it, has no content to compare."""
    try:
        return _Fingerprinter().digest(value).hex()
    except _UnstableError:
        return None


def modules_of(function: Callable[..., Any]) -> list[ModuleType]:
    """Return those of the user's own modules that `function` is found to use."""
    walk = _Fingerprinter()
    with suppress(_UnstableError):  # the modules found before the error are returned
        walk.digest(function)
    return [sys.modules[name] for name in sorted(walk.modules) if name in sys.modules]


class _Fingerprinter:
    """Follows one value and the globals that it uses.

    Attributes:
        modules: Names of the user's modules that were found.
    """

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self._open: list[int] = []  # ids of the enclosing values; a value inside itself is named by its depth
        self._at = "itself"  # name of the current variable, for the error
        self._globals: dict[_Global, Any] = {}  # globals that were found, with their values
        self._waiting: list[_Global] = []
        self._classes: dict[type, str] = {}
        self._waiting_classes: list[type] = []

    def digest(self, value: object) -> bytes:
        """Return the digest of `value` and of all globals and classes that can be reached from it."""
        parts = [self._of(value)]
        reached = []
        while self._waiting or self._waiting_classes:
            if self._waiting_classes:
                kind = self._waiting_classes.pop()
                self._at = self._classes[kind]
                reached.append(digest_of(b"class", self._at.encode(), self._body(kind)))
            else:
                place = self._waiting.pop()
                self._at = f"{place.module}.{place.name}"
                reached.append(digest_of(b"global", self._at.encode(), self._of(self._globals[place])))
        return digest_of(*parts, *sorted(reached))

    def _of(self, value: Any) -> bytes:
        kind = type(value)
        if kind in _SCALARS:
            data = value if kind is bytes else repr(value).encode("utf-8", "surrogatepass")
            short = kind.__name__.encode() + b" " + data if len(data) <= _SHORT_BYTES else None
            return short or digest_of(kind.__name__.encode(), data)
        if id(value) in self._open:
            return digest_of(b"inside", str(len(self._open) - self._open.index(id(value))).encode())
        self._open.append(id(value))
        try:
            return self._apart(value)
        except RecursionError:
            raise self._unstable(value) from None
        finally:
            self._open.pop()

    def _apart(self, value: Any) -> bytes:
        """Return the digest of a value that consists of other values."""
        if isinstance(value, CodeType):
            return self._code(value)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, ModuleType):
            return self._module(value)
        if isinstance(value, _METHODS):
            return self._method(value)
        if type(value) in (tuple, list):
            return digest_of(type(value).__name__.encode(), *map(self._of, value))
        if isinstance(value, set | frozenset):
            return digest_of(b"set", self._of(type(value)), *sorted(map(self._of, value)))
        if type(value) is dict or isinstance(value, MappingProxyType):
            return digest_of(b"dict", *self._pairs(value.items()))
        if isinstance(value, bytearray | memoryview):
            return digest_of(b"bytes", bytes(value))
        return self._object(value)

    def _pairs(self, items: Iterable[tuple[Any, Any]]) -> list[bytes]:
        return sorted(digest_of(self._of(key), self._of(value)) for key, value in items)

    def _method(self, value: Any) -> bytes:
        """Return the digest of a function that is bound to an object or a class, or is an attribute of one."""
        if isinstance(value, MethodType):
            return digest_of(b"method", self._of(value.__self__), self._of(value.__func__))
        if isinstance(value, staticmethod | classmethod):
            return digest_of(type(value).__name__.encode(), self._of(value.__func__))
        if isinstance(value, property):
            return digest_of(b"property", *map(self._of, (value.fget, value.fset, value.fdel)))
        if isinstance(value, functools.cached_property):
            return digest_of(b"property", self._of(value.func))
        owner = value.__self__  # a function written in C
        if owner is None or isinstance(owner, ModuleType):
            return self._library(value.__module__ or "builtins", value.__qualname__)
        return digest_of(b"method", self._of(owner), value.__name__.encode())

    # ── functions ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _function(self, function: FunctionType) -> bytes:
        module = str(function.__globals__.get("__name__", ""))
        parts = [self._code(function.__code__)]
        closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in closure:
            try:
                value = cell.cell_contents
            except ValueError:  # the variable is not bound yet
                continue
            parts += [name.encode(), self._named(name, value)]
        parts += [self._named("a default", value) for value in function.__defaults__ or ()]
        parts += [b"|", self._of(function.__kwdefaults__ or {})]
        if is_library(module):
            return digest_of(b"function", self._library(module, function.__code__.co_qualname), *parts)
        self.modules.add(module)
        names = _names(function.__code__)
        for name in sorted(names.globals):
            self._use(function.__globals__, name, names.attributes)
        for name in sorted(names.imported):
            self._import(name, names.attributes)
        return digest_of(b"function", *parts)

    def _named(self, name: str, value: Any) -> bytes:
        before, self._at = self._at, name
        try:
            return self._of(value)
        finally:
            self._at = before

    def _code(self, code: CodeType) -> bytes:
        parts = [
            code.co_code,
            code.co_exceptiontable,
            repr((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)).encode(),
            "\n".join([*code.co_names, "", *code.co_varnames, "", *code.co_freevars, "", *code.co_cellvars]).encode(),
        ]
        return digest_of(b"code", *parts, *map(self._of, code.co_consts))

    def _use(self, scope: dict[str, Any], name: str, attributes: set[str]) -> None:
        """Follow a global name of a function; in a module of the user's, follow those of `attributes` that it has."""
        if name not in scope:
            return  # a builtin, or not defined yet
        value = scope[name]
        place = _Global(str(scope.get("__name__", "")), name)
        if isinstance(value, ModuleType) and not is_library(value.__name__):
            self._use_module(value, attributes)
        elif place not in self._globals:
            self._globals[place] = value
            self._waiting.append(place)

    def _use_module(self, module: ModuleType, attributes: set[str], seen: frozenset[str] = frozenset()) -> None:
        self.modules.add(module.__name__)
        if module.__name__ in seen:
            return
        for name in sorted(attributes & vars(module).keys()):
            value = vars(module)[name]
            if isinstance(value, ModuleType) and not is_library(value.__name__):
                self._use_module(value, attributes, seen | {module.__name__})
            else:
                self._use(vars(module), name, attributes)

    def _import(self, name: str, attributes: set[str]) -> None:
        """Follow a module that a function imports when it is called; a module of the user's is imported now."""
        if is_library(name):
            return
        try:
            self._use_module(import_module(name), attributes)
        except ImportError:
            return  # the function will fail in the same way, or handle it

    def _module(self, module: ModuleType) -> bytes:
        if is_library(module.__name__):
            return self._library(module.__name__, "")
        self.modules.add(module.__name__)
        return digest_of(b"module", module.__name__.encode())

    def _library(self, module: str, name: str) -> bytes:
        top = sys.modules.get(module.partition(".")[0])
        version = getattr(top, "__version__", "")
        return digest_of(b"library", module.encode(), name.encode(), str(version).encode())

    # ── classes and objects ─────────────────────────────────────────────────────────────────────────────────────────

    def _class(self, kind: type) -> bytes:
        if is_library(kind.__module__):
            return self._library(kind.__module__, kind.__qualname__)
        if kind not in self._classes:
            self.modules.add(kind.__module__)
            self._classes[kind] = f"{kind.__module__}.{kind.__qualname__}"
            self._waiting_classes.append(kind)
        return digest_of(b"class", self._classes[kind].encode())

    def _body(self, kind: type) -> bytes:
        parts = [self._of(type(kind)), *map(self._of, kind.__bases__)]
        for name, value in sorted(vars(kind).items()):
            is_own = not (name.startswith("__") and name.endswith("__")) or isinstance(value, _DESCRIPTORS)
            if is_own and name not in _UNSTABLE_ATTRIBUTES and not hasattr(value, "__objclass__"):  # a slot
                parts += [name.encode(), self._named(f"{self._classes[kind]}.{name}", value)]
        return digest_of(*parts)

    def _object(self, value: Any) -> bytes:
        """Return the digest of an object: of the values from which pickle would restore it."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            made: Any = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        except Exception:  # an object that does not pickle may raise anything
            raise self._unstable(value) from None
        if isinstance(made, str):  # the name of a global
            module = str(getattr(value, "__module__", None))
            return digest_of(b"global", module.encode(), made.encode(), self._of(getattr(value, "__wrapped__", None)))
        function, arguments, state, items, pairs = (list(made) + [None] * 4)[:5]
        parts = [self._of(function), self._of(arguments), self._of(state), self._of(list(items or ()))]
        return digest_of(b"object", *parts, *self._pairs(pairs or ()))

    def _unstable(self, value: object) -> _UnstableError:
        kind = type(value)
        return _UnstableError(
            f"{self._at} holds an object of {kind.__module__}.{kind.__qualname__}, which has no content to compare"
        )


class _CodeNames(NamedTuple):
    """Names that a function's code uses.

    Attributes:
        globals: Names of globals.
        attributes: All other names.
        imported: Names of modules that it imports when it runs.
    """

    globals: set[str]
    attributes: set[str]
    imported: set[str]


def _names(code: CodeType) -> _CodeNames:
    found, assigned = _CodeNames(set(), set(), set()), set()
    for each in _codes(code):
        found.attributes.update(each.co_names)
        for instruction in dis.get_instructions(each):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                found.globals.add(instruction.argval)
            elif instruction.opname == "STORE_GLOBAL":
                assigned.add(instruction.argval)
            elif instruction.opname == "IMPORT_NAME" and instruction.argval:
                found.imported.add(instruction.argval)
    # What it assigns itself is not its input, for example a model that it loads once.
    found.globals.difference_update(assigned)
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def is_library(module: str) -> bool:
    """Return whether a module belongs to the standard library, an installed package or penstock, not to the user."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("builtins", "penstock"):
        return True
    file = getattr(sys.modules.get(module) or sys.modules.get(top), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
