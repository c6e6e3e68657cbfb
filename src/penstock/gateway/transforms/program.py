"""The program of a worker process: one transform, or several that follow each other, with typed arguments."""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.config import SEED_MAX
from penstock.errors import ConfigError
from penstock.gateway.objects import S3Error
from penstock.gateway.transforms.arguments import (
    ArgumentSchema,
    SpelledItem,
    bind_items,
    check_arguments,
    parse_spelling,
    schema_of,
)
from penstock.gateway.transforms.authoring import (
    Declaration,
    EpochNumbers,
    Response,
    TransformRequest,
    WrongOutputError,
    declaration_of,
)
from penstock.gateway.transforms.builtin import BUILTINS
from penstock.gateway.transforms.reading import PipedReader
from penstock.pack.fingerprint import digest_of, function_digest
from penstock.system.tracebacks import function_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.gateway.transforms.authoring import SourceReader
    from penstock.types import Buffer, ObjectInfo


QUERY, HEADER = "query.", "header."
"""Prefixes of declared parameters and headers among the arguments of a request."""


class ProgramStep(NamedTuple):
    """One transform, as it is configured.

    Attributes:
        name: Name for messages, logs and metrics.
        target: ``module:function`` or ``path.py:function``; empty for a function that is not found by a name.
        items: Arguments in parentheses after the name.
        arguments: Further arguments.
    """

    name: str
    target: str
    items: tuple[SpelledItem, ...]
    arguments: Mapping[str, str]


class TransformProgram(NamedTuple):
    """Transforms that follow each other, before they are imported. It pickles.

    Attributes:
        steps: At least one transform.
        folder: Folder whose modules can be imported, and to which paths are relative.
    """

    steps: tuple[ProgramStep, ...]
    folder: str

    @property
    def name(self) -> str:
        """Name for messages, logs and metrics."""
        return "|".join(step.name for step in self.steps)


def spelled_program(text: str, *, arguments: Mapping[str, str] | None = None, folder: str = ".") -> TransformProgram:
    """Return the program of a spelling such as ``module:function``, ``gzip(level=6)`` or ``one | another``.

    Args:
        text: The spelling.
        arguments: Arguments of the transform, if it is a single one.
        folder: Folder whose modules can be imported, and to which paths are relative.

    Raises:
        ConfigError: The spelling is wrong, or names no transform.
    """
    spelled = parse_spelling(text)
    if arguments and len(spelled) > 1:
        raise ConfigError(
            f"arguments of a pipeline ({', '.join(arguments)}) belong to no step of {text!r}",
            hint="spell them behind the name of the step: resize(width=256) | recode(png)",
        )
    given = _texts(arguments)
    steps = [ProgramStep(_shown(step.name), _target(step.name), step.items, given) for step in spelled]
    return TransformProgram(tuple(steps), str(Path(folder).absolute()))


def callable_step(function: Callable[..., Any], *, arguments: Mapping[str, str] | None = None) -> ProgramStep:
    """Return the step of a function that is not found by a name."""
    return ProgramStep(function_name(function), "", (), _texts(arguments))


def _texts(arguments: Mapping[str, object] | None) -> dict[str, str]:
    """Return arguments as text; TOML has numbers and booleans of its own."""
    return {n: str(v).lower() if isinstance(v, bool) else str(v) for n, v in (arguments or {}).items()}


def _shown(name: str) -> str:
    """Return the name of a transform for clients, without the folder of a file."""
    return Path(name).name if ".py:" in name else name


def _target(name: str) -> str:
    module, colon, function = name.rpartition(":")
    if not colon:
        if name not in BUILTINS:
            near = get_close_matches(name, BUILTINS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"module:function, or one of {', '.join(BUILTINS)}"
            raise ConfigError(f"there is no built-in transform {name}", hint=hint)
        return BUILTINS[name]
    if not module or not all(part.isidentifier() for part in function.split(".")):
        raise ConfigError(f"the transform {name!r} is neither built in nor module:function")
    return name


class ProcessSetup(NamedTuple):
    """The message that a worker process receives before its first call.

    Attributes:
        program: Program to run.
        memory_bytes_max: Largest address space.
        processes_count: Number of processes that share the machine.
    """

    program: TransformProgram
    memory_bytes_max: int
    processes_count: int


# ── imported ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStep:
    """One transform with its arguments.

    Attributes:
        name: Name for messages.
        function: The author's function.
        declared: Declaration of the transform.
        schema: Arguments of the function.
        given: Arguments of the configuration, as text.
        arguments: Values of all arguments, converted; defaults for those that are not given.
    """

    name: str
    function: Callable[..., Any]
    declared: Declaration
    schema: ArgumentSchema
    given: Mapping[str, str]
    arguments: Mapping[str, Any]

    def with_query(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the arguments for a request whose query may replace some.

        Raises:
            S3Error: The query has a wrong value.
        """
        values = dict(self.arguments)
        replaced = [name for name in self.declared.query if name in query and name in self.schema.specs]
        try:
            for name in replaced:
                values[name] = self.schema.convert_one(name, query[name])
            if replaced:
                check_arguments(self.declared.check, values, self.name)
        except ConfigError as error:
            raise S3Error("InvalidArgument", error.what) from error
        return values

    def shown_arguments(self) -> str:
        """Return the arguments that are given as one text; the digest covers the defaults of the others."""
        return ",".join(f"{name}={value!r}" for name, value in sorted(self.given.items()))

    def digest(self) -> str:
        """Return what identifies the code of the transform.

        Raises:
            ConfigError: The code cannot be identified, and the transform declares no version.
        """
        declared = self.declared
        parts = [self.name.encode(), declared.version.encode(), declared.content_type.encode()]
        converters = [spec.convert for spec in self.schema.specs.values()]
        for function in (self.function, declared.ranges, *converters):
            if function is None:
                continue
            try:
                parts.append(function_digest(function, version=None).encode())
            except ConfigError as error:
                if not declared.version and declared.deterministic:
                    raise ConfigError(
                        f"results of {self.name} cannot be kept, because its code cannot be compared with later code: "
                        f"{error.what.partition(': ')[2]}",
                        hint="declare @transform(version='1'), and change it when the transform changes",
                    ) from None
        return digest_of(*parts).hex()


class ProgramDescription(NamedTuple):
    """The description of an imported program that a worker process sends. It holds only text and numbers.

    Attributes:
        identity: Text that changes whenever code, versions or arguments change.
        is_deterministic: Whether all steps are deterministic.
        uses_epoch: Whether a step uses epoch and seed.
        has_size: Whether the size of results may be known beforehand.
        maps_ranges: Whether ranges of results can be produced by themselves.
        query: Parameters of the query that results depend on.
        headers: Headers, in lower case, that results depend on.
    """

    identity: str
    is_deterministic: bool
    uses_epoch: bool
    has_size: bool
    maps_ranges: bool
    query: tuple[str, ...]
    headers: tuple[str, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ProgramDescription:
        """Return the description that a worker process sent as JSON, where lists stand for tuples.

        Raises:
            TypeError, LookupError: The JSON is not a description.
        """
        flags = {name: bool(values[name]) for name in ("is_deterministic", "uses_epoch", "has_size", "maps_ranges")}
        names = {name: tuple(map(str, values[name])) for name in ("query", "headers")}
        return cls(identity=str(values["identity"]), query=names["query"], headers=names["headers"], **flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedProgram:
    """Transforms that follow each other, imported and with typed arguments.

    Attributes:
        steps: The transforms.
    """

    steps: tuple[LoadedStep, ...]

    def description(self) -> ProgramDescription:
        """Return the facts for the gateway.

        Raises:
            ConfigError: The code of a step cannot be identified.
        """
        declared = [step.declared for step in self.steps]
        parts = [f"{step.name}:{step.digest()}:{step.shown_arguments()}" for step in self.steps]
        is_deterministic = all(each.deterministic for each in declared)
        return ProgramDescription(
            identity="|".join(parts),
            is_deterministic=is_deterministic,
            uses_epoch=not is_deterministic or any(each.uses_epoch for each in declared),
            has_size=len(self.steps) == 1 and declared[0].size is not None,
            maps_ranges=len(self.steps) == 1 and declared[0].ranges is not None,
            query=tuple(sorted({name for each in declared for name in each.query})),
            headers=tuple(sorted({name.lower() for each in declared for name in each.headers})),
        )

    def size_bytes(self, info: ObjectInfo, request_arguments: Mapping[str, str]) -> int | None:
        """Return the size of a result in bytes; None if the transform cannot compute it beforehand.

        Raises:
            WrongOutputError: The author's function returned something else.
        """
        (step,) = self.steps
        if step.declared.size is None:
            return None
        size = step.declared.size(info, step.with_query(_selected(request_arguments, QUERY)))
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
            raise WrongOutputError(f"size() of {step.name} returned {size!r}, neither a number of bytes nor None")
        return size

    def respond(
        self, reader: SourceReader, request_arguments: Mapping[str, str], *, span: tuple[int, int] | None = None
    ) -> ProgramResponse:
        """Call the transforms; the output is made while it is taken.

        Args:
            reader: The source.
            request_arguments: Arguments of the request: epoch, seed, declared parameters and headers.
            span: Range of the result that is wanted, if the transform maps ranges.

        Raises:
            S3Error: The request's query has a wrong value.
        """
        response: ProgramResponse | None = None
        bodies: list[Any] = []
        for step in self.steps:
            if response is not None:
                headers = {name.lower(): value for name, value in response.headers.items()}
                reader = PipedReader(
                    reader.key, headers=headers, size_bytes=response.size_bytes, pieces=iter(response.pieces)
                )
            request = request_of(step, reader.key, request_arguments)
            if span is not None and step.declared.ranges is not None:
                made = step.declared.ranges(reader, request, *span)
            else:
                made = step.function(reader, request, **request.arguments)
            response = _response_of(step, made)
            bodies.append(response.pieces)
        assert response is not None
        return response._replace(bodies=tuple(reversed(bodies)))


class ProgramResponse(NamedTuple):
    """The response of the last step.

    Attributes:
        headers: Headers of the result.
        size_bytes: Length of the output if it is known.
        pieces: The output.
        bodies: Outputs of all steps, the last one first, to be closed in this order.
    """

    headers: Mapping[str, str]
    size_bytes: int | None
    pieces: Iterator[Buffer]
    bodies: tuple[Any, ...] = ()

    def close(self) -> None:
        """Close the generators of all steps."""
        for body in self.bodies:
            close = getattr(body, "close", None)
            if close is not None:
                close()


def request_of(step: LoadedStep, key: str, request_arguments: Mapping[str, str]) -> TransformRequest:
    """Return the request as the transform sees it.

    Raises:
        S3Error: The request's query has a wrong value.
    """
    declared = step.declared
    query = {n: v for n, v in _selected(request_arguments, QUERY).items() if n in declared.query}
    wanted = {name.lower() for name in declared.headers}
    headers = {n: v for n, v in _selected(request_arguments, HEADER).items() if n in wanted}
    sees_epoch = declared.uses_epoch or not declared.deterministic
    epoch, seed = (int(request_arguments.get(name, "0")) for name in ("epoch", "seed"))
    is_free = not declared.deterministic and "epoch" not in request_arguments and "seed" not in request_arguments
    if is_free:  # an unnamed epoch must not repeat the same numbers
        rng_seed = int.from_bytes(os.urandom(8), "little")
    else:
        rng_seed = int.from_bytes(digest_of(str(seed).encode(), str(epoch).encode(), key.encode())[:8], "little")
    numbers = EpochNumbers(epoch=epoch, seed=seed, rng_seed=rng_seed, rng=random.Random(rng_seed))
    return TransformRequest(
        key=key,
        arguments=step.with_query(query),
        query=query,
        headers=headers,
        epoch_numbers=numbers if sees_epoch else None,
    )


def checked_number(name: str, text: str) -> str:
    """Return the normal form of an epoch or a seed.

    Raises:
        ConfigError: It is not a whole number in the bounds of epochs and seeds.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= SEED_MAX):
        raise ConfigError(f"{name}={text[:40]!r} must be a whole number in [0, {SEED_MAX}]")
    return str(int(text))


def _selected(arguments: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): value for name, value in arguments.items() if name.startswith(prefix)}


def _response_of(step: LoadedStep, made: Any) -> ProgramResponse:
    """Return the output of a function in its normal form.

    Raises:
        WrongOutputError: The function returned something that is not bytes.
    """
    response = made if isinstance(made, Response) else Response(body=made)
    body: Any = response.body
    size_bytes = response.size_bytes
    if isinstance(body, bytes | bytearray | memoryview):
        size_bytes = memoryview(body).nbytes if size_bytes is None else size_bytes
        pieces: Iterator[Any] = iter((body,))
    elif isinstance(body, str) or not hasattr(body, "__iter__"):
        raise WrongOutputError(
            f"{step.name} returned {type(body).__name__}; a transform returns bytes, an iterator of bytes or a Response"
        )
    else:
        pieces = iter(body)
    names = {name.lower() for name in response.headers}
    headers = {str(name): str(value) for name, value in response.headers.items()}
    if "content-type" not in names:
        headers["Content-Type"] = step.declared.content_type
    return ProgramResponse(headers, size_bytes, pieces)


# ── importing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def load_program(program: TransformProgram) -> LoadedProgram:
    """Import the functions of a program and convert their arguments.

    Raises:
        ConfigError: A function does not exist, or an argument is unknown, missing or ill-typed.
        Exception: Any error of importing the author's module.
    """
    steps = [load_step(step, import_function(step.target, folder=program.folder)) for step in program.steps]
    return LoadedProgram(steps=tuple(steps))


def load_step(step: ProgramStep, function: Any) -> LoadedStep:
    """Convert the arguments of a function that was imported.

    Raises:
        ConfigError: It is not a transform, or an argument is unknown, missing or ill-typed.
    """
    if not callable(function):
        raise ConfigError(f"{step.name} is {type(function).__name__}, not a function transform(reader, request)")
    declared = declaration_of(function)
    schema = schema_of(function, step.name)
    if declared.rest and declared.rest not in schema.specs:
        raise ConfigError(f"{step.name} declares rest={declared.rest!r}, which is not an argument of it")
    bound = bind_items(step.items, schema, rest=declared.rest)
    if twice := set(bound) & set(step.arguments):
        raise ConfigError(f"{step.name}: {', '.join(sorted(twice))} is given in parentheses and as an argument")
    given = bound | dict(step.arguments)
    values = schema.convert(given)
    check_arguments(declared.check, values, step.name)
    return LoadedStep(
        name=step.name, function=function, declared=declared, schema=schema, given=given, arguments=values
    )


def import_function(target: str, *, folder: str) -> Any:
    """Import ``module:function`` or ``path.py:function``.

    Args:
        target: Module or file, and name of the function.
        folder: Folder whose modules can be imported, and to which paths are relative.

    Raises:
        ConfigError: There is no such module, file or function.
    """
    name, _, attribute = target.rpartition(":")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = _import_file(Path(folder, name)) if name.endswith(".py") else _import_module(name, folder)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{name} has no function {attribute}")
        found = getattr(found, part)
    return found


def _import_module(name: str, folder: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the author's module imports something that is missing
        hint = f"modules are found in {folder}, and where Python finds them; ./{name}.py:function names a file"
        raise ConfigError(f"there is no module {name}", hint=hint) from None


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    present = sys.modules.get(path.stem)
    if present is not None and getattr(present, "__file__", None) == str(path):
        return present
    name = path.stem if present is None else f"transform_in_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # noqa: PT018 - the name ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
