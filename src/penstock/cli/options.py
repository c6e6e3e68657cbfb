"""Options that several commands take, declared once, and the stores that the connection options name.

A command takes related options as one parameter, a *group*. Its type is a frozen dataclass, or its default an ``OptionGroup``.
``expand_groups`` gives typer one option for each field or name of a group, and the command an instance of the class, or a dict.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass, replace
from functools import partial, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias, cast, get_type_hints
from urllib.parse import unquote

import typer

from penstock.cli.completing import completed_url, completed_value, profiles
from penstock.config import RetryConfig
from penstock.errors import ConfigError
from penstock.redaction import public_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from penstock.pipeline import Pipeline
    from penstock.pipeline.factories import ConnectionOptions
    from penstock.store.base import Store
    from penstock.types import Key, ObjectInfo


def argument(metavar: str, help: str, *, default: Any = MISSING) -> Any:  # noqa: A002 - typer's word
    """Declare an argument of a command, as the default of its parameter; without a `default` it is required."""
    offered = completed_url if metavar in ("URL", "SRC", "DST") else None
    declared = partial(typer.Argument, metavar=metavar, help=help, autocompletion=offered)
    return field(default=default, metadata={"declared": declared})


def option(
    metavar: str | None,
    help: str,  # noqa: A002 - typer's word
    *,
    names: tuple[str, ...] = (),
    default: Any = None,
    required: bool = False,
    values: Callable[[], Iterable[str]] | None = None,
    **settings: Any,
) -> Any:
    """Declare an option of a command, as the default of its parameter or of a group's field.

    Args:
        metavar: Placeholder of the value in the help text; None if the option takes none.
        help: The help text.
        names: Names of the option; by default that of the parameter, or what follows its last dot, with dashes.
        default: The value if the option is not given.
        required: Whether it must be given.
        values: Returns values that shells offer; None offers none.
        settings: Other arguments of ``typer.Option``.
    """
    if values is not None:
        settings["autocompletion"] = completed_value(values)
    declared = partial(typer.Option, metavar=metavar, help=help, **settings)
    return field(default=MISSING if required else default, metadata={"declared": declared, "names": names})


def flag(help: str, **settings: Any) -> Any:  # noqa: A002 - typer's word
    """Declare an option that takes no value, see ``option``."""
    return option(None, help, **{"default": False, **settings})


OptionGroup: TypeAlias = dict[str, tuple[Any, Any]]
"""Options by name, each with its type and declaration; a group that is no class. A command gets those that were given."""

Given: TypeAlias = dict[str, Any]
"""Values of the options of an ``OptionGroup`` that were given, by their names."""

RETRY_S = 60.0
"""How long commands wait for a store that does not answer, but for those that serve a program: ``mount`` and ``run``."""

AS_JSON = flag("Print JSON, one object per line.", names=("--json",))
CACHE = option("PATH:SIZE", "Cache what is read on this node's disk, e.g. /nvme/penstock:200GB.")


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give typer the declarations of `command` as it reads them, and one parameter for each field of a group."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        options: OptionGroup
        group: Any = parameter.annotation
        if isinstance(parameter.default, dict):
            group, options = _given, parameter.default
        elif is_dataclass(group):
            hints = get_type_hints(group, include_extras=True)
            options = {each.name: (hints[each.name], each) for each in fields(group)}
        else:
            parameters.append(_expanded(parameter, parameter.default))
            continue
        names = {name.replace(".", "__"): name for name in options}
        groups[parameter.name] = group, names
        parameters += [
            _expanded(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint), declared)
            for name, (hint, declared) in zip(names, options.values(), strict=True)
        ]

    @wraps(command)
    def expanded(**values: Any) -> None:
        for parameter, (group, names) in groups.items():
            values[parameter] = group(**{name: values.pop(own) for own, name in names.items()})
        command(**values)

    del expanded.__wrapped__  # typer would read the signature of what it wraps
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def _given(**values: Any) -> Given:
    return {name: value for name, value in values.items() if value not in (None, []) and value is not False}


def _expanded(parameter: inspect.Parameter, declared: Any) -> inspect.Parameter:
    """Return a parameter as typer reads it: its type annotated with the option, and the default."""
    if not isinstance(declared, Field):
        return parameter
    default = inspect.Parameter.empty if declared.default is MISSING else declared.default
    if "declared" not in declared.metadata:
        return parameter.replace(default=default)
    names = declared.metadata.get("names", ("",))  # an argument has no name
    names = [name for name in names or (f"--{parameter.name.rpartition('__')[2].replace('_', '-')}",) if name]
    info = declared.metadata["declared"](*names)
    return parameter.replace(default=default, annotation=Annotated[parameter.annotation, info])


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionGroup:
    """The options of a connection."""

    endpoint_url: str | None = option(
        "URL", "URL of the S3 endpoint; default: AWS_ENDPOINT_URL_S3, the profile, Amazon."
    )
    region: str | None = option("NAME", "Region of the bucket; default: AWS_REGION, the profile.")
    profile: str | None = option("NAME", "Profile in ~/.aws/config; default: AWS_PROFILE.", values=profiles)
    anonymous: bool = flag("Do not sign requests, for public data.")
    retry_s: float | None = option(
        "SECONDS", "Time to wait for a store that stops answering; default: 60, for mount and run 120.", min=0
    )

    def options(self, *, retry_s: float = RETRY_S) -> ConnectionOptions:
        """Return the keyword arguments that ``penstock.connect`` and ``penstock.shards`` take.

        Args:
            retry_s: Time to wait for a store that stops answering, in seconds, if the user gives none.
        """
        options = asdict(self)
        given_s = options.pop("retry_s")
        options["retry"] = RetryConfig(total_s_max=retry_s if given_s is None else given_s)
        return cast("ConnectionOptions", options)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConnectionGroup:
    """The options of a connection to SRC alone."""

    source_endpoint_url: str | None = option("URL", "URL of the S3 endpoint of SRC, if it differs from that of DST.")
    source_profile: str | None = option("NAME", "Profile that may read SRC, if it differs from that of DST.")
    source_anonymous: bool = flag("Do not sign requests for SRC, for public data.")

    def applied_to(self, connection: ConnectionGroup) -> ConnectionGroup:
        """Return the connection to SRC: `connection`, with the options of this group in place of its own."""
        endpoint_url, profile, anonymous = self.source_endpoint_url, self.source_profile, self.source_anonymous
        return replace(
            connection,
            endpoint_url=endpoint_url or connection.endpoint_url,
            region=None if endpoint_url or profile else connection.region,
            profile=None if anonymous else profile or connection.profile,
            anonymous=anonymous or (connection.anonymous and not profile),
        )


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """A URL as a store, and a key or prefix in it.

    Attributes:
        url: The URL for people: without a query, which may be a signature.
        root_url: URL of the store.
        key: Key or prefix in the store.
        store: The store.
        path: Path of the same file or directory; None if it is not on this machine.
    """

    url: str
    root_url: str
    key: Key
    store: Store
    path: Path | None

    @property
    def is_folder(self) -> bool:
        """Whether the URL means everything below it: it ends with a slash, or is a directory of this machine."""
        return self.key.endswith("/") or not self.key

    def is_in_store_of(self, other: StoreLocation) -> bool:
        """Return whether both are in one store, even if they are reached with different credentials."""
        from penstock.compose import endpoint_of

        return self.root_url == other.root_url and endpoint_of(self.store) == endpoint_of(other.store)

    @property
    def root_path(self) -> Path:
        """Path of the directory that is the store, if ``path`` is not None."""
        from penstock.compose import local_path

        return local_path(self.root_url)

    @property
    def name(self) -> str:
        """Name of a copy of the object in a folder; for a signed URL, without its signature."""
        if not self.url.startswith(("http://", "https://")):
            return self.key.rpartition("/")[2]
        return unquote(self.store.describe(self.key).rpartition("/")[2])


class Stores:
    """The stores that a command uses, one per root URL. A context manager that closes them.

    Args:
        connection: Connection options of all stores.
        cache: Cache of what is read, as ``PATH:SIZE``; None for no cache.
    """

    def __init__(self, connection: ConnectionGroup, *, cache: str | None = None) -> None:
        from penstock.compose import StoreTable

        self.connection = connection
        self._cache = cache
        self._stores = StoreTable({**connection.options(), "cache": cache})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stores.close()

    def for_source(self, group: SourceConnectionGroup) -> Stores:
        """Return the stores of SRC: these, unless an option of `group` is given."""
        if not (group.source_endpoint_url or group.source_profile or group.source_anonymous):
            return self
        return Stores(group.applied_to(self.connection), cache=self._cache)

    def buckets(self) -> Iterator[ObjectInfo]:
        """Iterate over the buckets at the endpoint, see ``penstock.compose.list_buckets``."""
        from penstock.compose import list_buckets

        return list_buckets(**self.connection.options())  # type: ignore[misc]  # of the options, a group sets four

    def locate(self, url: str) -> StoreLocation:
        """Return the store and the key that `url` names.

        Raises:
            ConfigError: `url` is not a URL that penstock knows.
        """
        from penstock.compose import local_path, split

        if not url or "\0" in url:
            raise ConfigError(f"{url!r} is neither a URL nor a path", hint="s3://bucket/key, or a path")
        root_url, key = split(url)
        path = local_path(url) if "://" not in url or url.startswith("file:") else None
        return StoreLocation(public_url(url), root_url, key, self._stores.get(root_url), path)


def pipeline_of(text: str, option: str) -> Pipeline:
    """Return the pipeline that ``module:name`` names, or that a function of this name returns.

    Raises:
        ConfigError: The module or the name does not exist, or it is not a pipeline.
    """
    from penstock.pipeline import Pipeline

    found: Any = function_of(text, option)
    found = found if isinstance(found, Pipeline) or not callable(found) else found()
    if not isinstance(found, Pipeline):
        hint = "ps.shards(url), or a function that returns one"
        raise ConfigError(f"{option} {text} is {type(found).__name__}, not a pipeline", hint=hint)
    return found


def function_of(text: str, option: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` names; the module may be in the working directory.

    Raises:
        ConfigError: The module or the function does not exist.
    """
    module, _, name = text.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function: Callable[..., Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{option} {text!r} does not name a function ({error})", hint="MODULE:FUNCTION") from error
    return function
