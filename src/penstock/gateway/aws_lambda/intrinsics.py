"""CloudFormation templates: YAML with tags such as ``!Ref``, which are resolved here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.config import MIB
from penstock.errors import ConfigError
from penstock.version import install_hint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TEMPLATE_BYTES_MAX = 1 * MIB  # CloudFormation's own limit
DEPTH_MAX = 20
NESTING_MAX = 100
"""Lists and maps within each other in a template; 10 are usual."""
STEPS_MAX = 10_000
"""References that are followed in one template. Each may contain several others, so they could multiply without end."""
CHARACTERS_MAX = 1 * MIB
"""Characters that references in text are replaced by. The environment of a function in AWS has at most 4 KB."""
_NUMBER_CHARACTERS_MAX = 40
_NAME_CHARACTERS_MAX = 255
PSEUDO_PARAMETERS = {
    "AWS::Region": "us-east-1",
    "AWS::AccountId": "000000000000",
    "AWS::Partition": "aws",
    "AWS::StackName": "penstock",
    "AWS::URLSuffix": "amazonaws.com",
    "AWS::StackId": "penstock",
}
_VARIABLE = re.compile(r"\$\{(!?)([^{}]+)\}")
_DYNAMIC = "{{resolve:"


class Intrinsic(NamedTuple):
    """A function of CloudFormation in a template, e.g. ``Ref`` of a parameter."""

    name: str
    argument: Any


def read_template(path: Path) -> dict[str, Any]:
    """Read a template, in YAML or JSON.

    Raises:
        ConfigError: The file cannot be read or is not a template, or PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("reading SAM templates needs PyYAML", hint=install_hint("gateway")) from error

    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class TemplateLoader(base):  # type: ignore[misc, valid-type, unused-ignore]
        """Makes an ``Intrinsic`` of each tag that begins with an exclamation mark."""

    def intrinsic(loader: Any, name: str, node: Any) -> Intrinsic:
        if isinstance(node, yaml.ScalarNode):
            return Intrinsic(name, loader.construct_scalar(node))
        if isinstance(node, yaml.SequenceNode):
            return Intrinsic(name, loader.construct_sequence(node, deep=True))
        return Intrinsic(name, loader.construct_mapping(node, deep=True))

    def integer(loader: Any, node: Any) -> Any:
        if len(node.value) > _NUMBER_CHARACTERS_MAX:
            raise ValueError("a number is too long")
        return loader.construct_yaml_int(node)

    TemplateLoader.add_multi_constructor("!", intrinsic)
    TemplateLoader.add_constructor("tag:yaml.org,2002:int", integer)
    try:
        data = _content(path)
        nesting = 0
        for event in yaml.parse(data, TemplateLoader):
            if isinstance(event, yaml.AliasEvent):
                line = event.start_mark.line + 1
                raise ConfigError(f"{path}:{line} uses an alias, which CloudFormation does not support, either")
            starts = isinstance(event, yaml.CollectionStartEvent)
            nesting += starts - isinstance(event, yaml.CollectionEndEvent)
            if nesting > NESTING_MAX:
                raise ConfigError(f"{path} has more than {NESTING_MAX} lists and maps within each other")
        document = yaml.load(data, TemplateLoader)
    except ConfigError:  # is a ValueError, too
        raise
    except OSError as error:
        raise ConfigError(f"the template {str(path)!r} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)  # the error's text quotes the line, which may hold a secret
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "a value has a form that it cannot have"
        raise ConfigError(f"{path} is not valid YAML: {problem}{line}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is not a template")
    return document


def _content(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file")
    with path.open("rb") as file:
        data = file.read(TEMPLATE_BYTES_MAX + 1)
    if len(data) > TEMPLATE_BYTES_MAX:
        raise ConfigError(f"{path} has more than {TEMPLATE_BYTES_MAX} bytes")
    return data


class Resolver:
    """Replaces references by values that are known without CloudFormation.

    Args:
        document: The template.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        parameters = document.get("Parameters")
        self._parameters: dict[str, Any] = dict(PSEUDO_PARAMETERS)
        for name, item in (parameters if isinstance(parameters, dict) else {}).items():
            if isinstance(item, dict) and "Default" in item:
                self._parameters[str(name)] = item["Default"]
        mappings = document.get("Mappings")
        self._mappings: dict[str, Any] = mappings if isinstance(mappings, dict) else {}
        self._steps_count = self._characters_count = 0

    @staticmethod
    def names(value: Any, resource: str) -> bool:
        """Whether a value is the ARN of a resource of the template: ``!GetAtt NAME.Arn`` in any of its forms."""
        function = _intrinsic_of(value)
        if function is None or function.name not in ("GetAtt", "Ref", "Sub"):
            return False
        argument = function.argument
        text = ".".join(map(str, argument)) if isinstance(argument, list) else str(argument)
        return text.strip("${}") in (resource, f"{resource}.Arn", f"{resource}.Alias")

    def resolve(self, value: Any, place: str, depth: int = 0) -> Any:
        """Return a value without references.

        Args:
            value: A value of the template.
            place: The place of the value in the template, for messages.
            depth: Number of references that led to it, from 0.

        Raises:
            ConfigError: It refers to something that only CloudFormation knows.
        """
        function = _intrinsic_of(value)
        if function is None:
            if isinstance(value, str) and _DYNAMIC in value:
                hint = "give the value itself, or have the handler ask for it"
                raise ConfigError(f"{place} is a dynamic reference, whose value only CloudFormation knows", hint=hint)
            return value
        if depth > DEPTH_MAX:
            raise ConfigError(f"{place} refers to itself")
        self._steps_count += 1
        if self._steps_count > STEPS_MAX:
            raise ConfigError(f"{place}: the template follows more than {STEPS_MAX} references")
        resolved = self._apply(function, place, depth + 1)
        return self.resolve(resolved, place, depth + 1)

    def _apply(self, function: Intrinsic, place: str, depth: int) -> Any:
        name, argument = function
        if name == "Ref":
            return self._parameter(argument, place)
        if name == "Sub":
            return self._substituted(argument, place, depth)
        if name == "Join" and isinstance(argument, list) and len(argument) == 2 and isinstance(argument[1], list):
            separator, parts = str(argument[0]), [self._text(part, place, depth) for part in argument[1]]
            self._charge(len(separator) * len(parts), place)
            return separator.join(parts)
        if name == "FindInMap" and isinstance(argument, list) and len(argument) == 3:
            found: Any = self._mappings
            for key in (self.resolve(each, place, depth) for each in argument):
                found = found.get(key) if isinstance(found, dict) and isinstance(key, str | int) else None
            if found is not None:
                return found
        raise ConfigError(f"{place} uses !{name}, whose value only CloudFormation knows", hint="write the value itself")

    def _parameter(self, name: Any, place: str) -> Any:
        if not isinstance(name, str) or name not in self._parameters:
            shown = repr(name[:_NAME_CHARACTERS_MAX]) if isinstance(name, str) else "something"
            hint = "give the parameter a Default, or write the value itself"
            raise ConfigError(f"{place} refers to {shown}, which is not a parameter with a default", hint=hint)
        return self._parameters[name]

    def _text(self, value: Any, place: str, depth: int) -> str:
        """Return a value that stands in other text."""
        resolved = self.resolve(value, place, depth)
        if not isinstance(resolved, str | int | float):
            raise ConfigError(f"{place}: text cannot contain a {type(resolved).__name__}")
        text = str(resolved)
        self._charge(len(text), place)
        return text

    def _charge(self, characters_count: int, place: str) -> None:
        self._characters_count += characters_count
        if self._characters_count > CHARACTERS_MAX:
            raise ConfigError(f"{place}: references are replaced by more than {CHARACTERS_MAX} characters")

    def _substituted(self, argument: Any, place: str, depth: int) -> str:
        text, local = argument if isinstance(argument, list) and len(argument) == 2 else (argument, {})
        if not isinstance(text, str) or not isinstance(local, dict):
            raise ConfigError(f"{place}: !Sub needs text")

        def value_of(match: re.Match[str]) -> str:
            if match[1]:
                return f"${{{match[2]}}}"
            name = match[2].strip()
            return self._text(local[name] if name in local else self._parameter(name, place), place, depth)

        return _VARIABLE.sub(value_of, text)


def _intrinsic_of(value: Any) -> Intrinsic | None:
    """Return a value as a function, from its short form (``!Ref X``) or its long one (``{"Ref": "X"}``)."""
    if isinstance(value, Intrinsic):
        return value
    if isinstance(value, dict) and len(value) == 1:
        name, argument = next(iter(value.items()))
        if name == "Ref" or (isinstance(name, str) and name.startswith("Fn::")):
            return Intrinsic(name.removeprefix("Fn::"), argument)
    return None
