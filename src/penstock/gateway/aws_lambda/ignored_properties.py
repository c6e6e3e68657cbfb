"""Properties of a function in a SAM template that change what it does in AWS, and have no effect here.

Source: the specification of ``AWS::Serverless::Function`` in AWS SAM.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from penstock.gateway.aws_lambda.intrinsics import Intrinsic

if TYPE_CHECKING:
    from collections.abc import Mapping

TAKEN = frozenset(
    {"Handler", "CodeUri", "MemorySize", "Timeout", "Environment", "Runtime", "PackageType", "InlineCode"}
)
"""Properties that become the configuration of a handler, or are refused."""

HARMLESS = frozenset(
    {
        *("AutoPublishAlias", "AutoPublishAliasAllProperties", "AutoPublishCodeSha256", "CapacityProviderConfig"),
        *(
            "CodeSigningConfigArn",
            "DeadLetterQueue",
            "DeploymentPreference",
            "Description",
            "EventInvokeConfig",
            "Events",
        ),
        *(
            "FunctionName",
            "FunctionScalingConfig",
            "FunctionUrlConfig",
            "KmsKeyArn",
            "LoggingConfig",
            "PermissionsBoundary",
        ),
        *(
            "PropagateTags",
            "ProvisionedConcurrencyConfig",
            "PublishToLatestPublished",
            "RecursiveLoop",
            "Role",
            "RolePath",
        ),
        *("AssumeRolePolicyDocument", "Policies", "RuntimeManagementConfig", "SnapStart", "SourceKMSKeyArn", "Tags"),
        *("Tracing", "VersionDeletionPolicy", "VersionDescription"),
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
