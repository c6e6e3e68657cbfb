"""Handlers described by a SAM template: ``AWS::Serverless::Function`` becomes a ``LambdaConfig``.

Properties that change what a function does in AWS, and have no effect here, are reported.

Source: the specification of AWS SAM templates.
"""

from __future__ import annotations

import logging
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import MIB
from penstock.errors import ConfigError
from penstock.gateway.aws_lambda.intrinsics import Intrinsic, Resolver, read_template
from penstock.gateway.config import LambdaConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

FUNCTION = "AWS::Serverless::Function"
OBJECT_LAMBDA = "AWS::S3ObjectLambda::AccessPoint"
MEMORY_MIB_DEFAULT, TIME_S_DEFAULT = 128, 3
MEMORY_MIB_MAX, TIME_S_MAX = 10_240, 900
INTERPRETER_S_MAX = 30.0
LOG = logging.getLogger("penstock.gateway.lambda")

TAKEN = frozenset(
    {"Handler", "CodeUri", "MemorySize", "Timeout", "Environment", "Runtime", "PackageType", "InlineCode"}
)
"""Properties that become the configuration of a handler, or are refused."""

HARMLESS = frozenset(
    {
        *("AutoPublishAlias", "AutoPublishAliasAllProperties", "AutoPublishCodeSha256", "CapacityProviderConfig"),
        *("CodeSigningConfigArn", "DeadLetterQueue", "DeploymentPreference", "Description", "EventInvokeConfig"),
        *("Events", "FunctionName", "FunctionScalingConfig", "FunctionUrlConfig", "KmsKeyArn", "LoggingConfig"),
        *("PermissionsBoundary", "PropagateTags", "ProvisionedConcurrencyConfig", "PublishToLatestPublished"),
        *("RecursiveLoop", "Role", "RolePath", "AssumeRolePolicyDocument", "Policies", "RuntimeManagementConfig"),
        *("SnapStart", "SourceKMSKeyArn", "Tags", "Tracing", "VersionDeletionPolicy", "VersionDescription"),
    }
)
"""Properties about who may call the function, how it is deployed, and what AWS records of it. Roles are in the guide."""

_ADVICE = {
    "Layers": "install what they contain for the interpreter of --lambda-python, or copy it into the folder of the code",
    "VpcConfig": "the handler runs in the network of this machine",
    "FileSystemConfigs": "mount them on this machine at the same paths",
    "EphemeralStorage": "the handler writes to /tmp of this machine, which it shares",
    "ReservedConcurrentExecutions": "--processes says how many calls run at once",
}
_MACHINES = {"x86_64": {"x86_64", "amd64"}, "arm64": {"arm64", "aarch64"}}
_SHOWN_CHARACTERS_MAX = 200
_SHOWN_MAX = 40
_RUNTIME = re.compile(r"python(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamFunction:
    """One function of a template.

    Attributes:
        name: Logical ID of the resource.
        place: Template and name, for messages.
        properties: Properties of the resource, with the template's defaults, not resolved yet.
        resolver: Resolves what its properties refer to.
    """

    name: str
    place: str
    properties: Mapping[str, Any]
    resolver: Resolver

    def text(self, name: str, default: str | None = None) -> str:
        """Return a property that must be text."""
        value = self.resolver.resolve(self.properties.get(name, default), f"{self.place}: {name}")
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{self.place}: {name} must be text, not a {type(value).__name__}")
        return value

    def number(self, name: str, default: int, *, maximum: int) -> int:
        """Return a property that must be a whole number from 1 to a bound."""
        value = self.resolver.resolve(self.properties.get(name, default), f"{self.place}: {name}")
        text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
        if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= maximum:
            raise ConfigError(f"{self.place}: {name} must be a number from 1 to {maximum}, not {text[:_SHOWN_MAX]!r}")
        return int(text)

    def environment(self) -> dict[str, str]:
        """Return its environment variables."""
        environment = self.properties.get("Environment") or {}
        variables = environment.get("Variables") if isinstance(environment, dict) else None
        if not isinstance(environment, dict) or not isinstance(variables or {}, dict):
            raise ConfigError(f"{self.place}: Environment.Variables must be names with values")
        found = {}
        for name, value in (variables or {}).items():
            resolved = self.resolver.resolve(value, f"{self.place}: Environment.Variables.{name}")
            if isinstance(resolved, bool):
                resolved = str(resolved).lower()
            if not isinstance(resolved, str | int | float):
                raise ConfigError(f"{self.place}: the variable {name} must be text, not a {type(resolved).__name__}")
            found[str(name)] = str(resolved)
        return found


def lambda_config_of(template: str | Path, function: str | None = None, *, python: str | None = None) -> LambdaConfig:
    """Return the handler that a SAM template describes.

    ``Handler``, ``CodeUri``, ``MemorySize``, ``Timeout``, ``Environment`` and ``Runtime`` are taken from the function and the
    template's ``Globals``. Other properties that change what a function does in AWS are ignored with a warning. If the
    template also has an Object Lambda access point for the function, its actions and payload are taken as well. Parameters
    have their defaults.

    Args:
        template: Path of the template, in YAML or JSON; ``PATH:NAME`` also names the function.
        function: Logical ID of the function; None if the template has only one.
        python: Interpreter that has the handler's dependencies; None takes the gateway's.

    Raises:
        ConfigError: The template cannot be read, or describes no function that can be run here.

    Cost: starts the interpreter once, to ask for its version.
    """
    path, named = _split(str(template))
    document = read_template(path)
    found = _function_of(document, path, function or named)
    properties = found.properties
    if properties.get("PackageType", "Zip") != "Zip" or "InlineCode" in properties:
        raise ConfigError(
            f"{found.place}: only functions whose code is in a folder can be run, not images or inline code"
        )
    _check_runtime(found, python)
    for sentence in ignored_properties(properties):
        LOG.warning("%s: %s", found.place, sentence)
    payload, actions = _object_lambda_of(document, found)
    return LambdaConfig(
        handler=found.text("Handler"),
        code_dir=str(_code_dir(found, path)),
        python=python,
        memory_bytes_max=found.number("MemorySize", MEMORY_MIB_DEFAULT, maximum=MEMORY_MIB_MAX) * MIB,
        time_s_max=float(found.number("Timeout", TIME_S_DEFAULT, maximum=TIME_S_MAX)),
        environment=found.environment(),
        payload=payload,
        actions=actions,
    )


def _split(template: str) -> tuple[Path, str | None]:
    path, colon, name = template.rpartition(":")
    if colon and name.isalnum() and not Path(template).exists():
        return Path(path), name
    return Path(template), None


def _function_of(document: Mapping[str, Any], path: Path, name: str | None) -> SamFunction:
    """Return the function that is meant."""
    resources = document.get("Resources")
    if not isinstance(resources, dict):
        raise ConfigError(f"{path} has no Resources, so it is not a SAM template")
    functions = [key for key, item in resources.items() if isinstance(item, dict) and item.get("Type") == FUNCTION]
    if name is None and len(functions) != 1:
        hint = f"name one of them: {path}:NAME" if functions else f"only resources of the type {FUNCTION} are known"
        raise ConfigError(f"{path} has {len(functions)} functions: {', '.join(map(str, functions))}", hint=hint)
    if name is not None and name not in functions:
        raise ConfigError(f"{path} has no function {name!r}; it has {', '.join(map(str, functions)) or 'none'}")
    chosen = name or functions[0]
    defaults = document.get("Globals") or {}
    common = (defaults.get("Function") if isinstance(defaults, dict) else None) or {}
    own = resources[chosen].get("Properties") or {}
    if not isinstance(own, dict) or not isinstance(common, dict):
        raise ConfigError(f"{path}:{chosen}: Properties must be names with values")
    merged = _merged(common, own)
    return SamFunction(name=chosen, place=f"{path}:{chosen}", properties=merged, resolver=Resolver(document))


def _merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return properties with defaults: maps are merged, everything else is replaced."""
    merged = dict(common)
    for name, value in own.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if both else value
    return merged


def _code_dir(found: SamFunction, template: Path) -> Path:
    uri = found.text("CodeUri", ".")
    if "://" in uri:
        raise ConfigError(f"{found.place}: CodeUri is {uri!r}; only folders on this machine can be run")
    folder = template.parent / uri
    try:
        is_folder = folder.is_dir()
    except OSError:  # the name is too long
        is_folder = False
    if not is_folder:
        raise ConfigError(f"{found.place}: CodeUri {uri[:_SHOWN_MAX]!r} is not a folder beside the template")
    return folder


def _check_runtime(found: SamFunction, python: str | None) -> None:
    """Compare the runtime with the interpreter: an older one is refused, a newer one is worth a warning."""
    runtime = found.text("Runtime")
    wanted = _RUNTIME.fullmatch(runtime)
    if wanted is None:
        raise ConfigError(f"{found.place}: Runtime is {runtime!r}; only Python handlers can be run")
    needed, present = (int(wanted[1]), int(wanted[2])), _version_of(python or sys.executable, found.place)
    if present < needed:
        hint = f"name an interpreter of {runtime} that has the handler's dependencies"
        raise ConfigError(
            f"{found.place}: Runtime is {runtime}, but the interpreter is {present[0]}.{present[1]}", hint=hint
        )
    if present > needed:
        LOG.warning(
            "%s: Runtime is %s, and the interpreter is %d.%d; --lambda-python names another one.",
            found.place,
            runtime,
            *present,
        )


def _version_of(python: str, place: str) -> tuple[int, int]:
    command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INTERPRETER_S_MAX, check=True)
        major, minor = done.stdout.split()
        return int(major), int(minor)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{place}: the interpreter {python!r} cannot be started: {error}") from error


def _object_lambda_of(document: Mapping[str, Any], found: SamFunction) -> tuple[str, tuple[str, ...]]:
    """Return payload and actions of the Object Lambda access point that names the function; defaults if there is none."""
    for item in document["Resources"].values():
        if not (isinstance(item, dict) and item.get("Type") == OBJECT_LAMBDA):
            continue
        configuration = _map_of(_map_of(item, "Properties"), "ObjectLambdaConfiguration")
        configurations = configuration.get("TransformationConfigurations")
        for each in configurations if isinstance(configurations, list) else ():
            target = _map_of(_map_of(each, "ContentTransformation"), "AwsLambda")
            if Resolver.names(target.get("FunctionArn"), found.name):
                payload = found.resolver.resolve(target.get("FunctionPayload", ""), f"{found.place}: FunctionPayload")
                actions = each.get("Actions") or ["GetObject"]
                if not isinstance(payload, str) or not isinstance(actions, list):
                    raise ConfigError(f"{found.place}: FunctionPayload must be text, and Actions a list")
                return payload, tuple(map(str, actions))
    return "", ("GetObject",)


def _map_of(value: Any, name: str) -> dict[str, Any]:
    """Return the value of a name in a map if the value is a map, too; else an empty one."""
    inner = value.get(name) if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else {}


def ignored_properties(properties: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each property that has no effect here, and what to do about it.

    Args:
        properties: Properties of the function, which may contain references.
    """
    found = []
    for name, value in properties.items():
        if name in TAKEN or name in HARMLESS or value in (None, [], {}):
            continue
        if name == "Architectures":
            found += _architectures(value)
            continue
        advice = _ADVICE.get(name, "it is not a property that is known here")
        found.append(f"{name} is ignored ({_shown(value)}); {advice}.")
    return found


def _architectures(value: Any) -> list[str]:
    """Return a sentence if the function is for processors of another kind than this machine's."""
    present = platform.machine().lower()
    wanted = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(wanted, str) and present in _MACHINES.get(wanted, ()):
        return []
    return [
        f"Architectures is {_shown(value)}, and this machine is {present}; compiled dependencies must be for {present}."
    ]


def _shown(value: Any) -> str:
    """Return a value as one line; a reference as ``!Ref Name``."""
    if isinstance(value, Intrinsic):
        text = f"!{value.name} {_shown(value.argument)}"
    elif isinstance(value, list):
        text = ", ".join(map(_shown, value))
    elif isinstance(value, dict):
        text = ", ".join(f"{name}: {_shown(each)}" for name, each in value.items())
    else:
        text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else f"{text[:_SHOWN_CHARACTERS_MAX]}..."
