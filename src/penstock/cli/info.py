"""``penstock info``: shows versions, connection settings and measured speed."""

from __future__ import annotations

import json
import os
import platform
from typing import TYPE_CHECKING, Any

import penstock
from penstock.advise.probes import CONNECTIONS, StoreProbe, first_bytes, largest, p50_p99
from penstock.cli.options import AS_JSON, ConnectionGroup, StoreLocation, Stores, argument, expand_groups, option
from penstock.cli.output import print_result, shortened
from penstock.config import default_budget_bytes
from penstock.errors import CredentialsError
from penstock.store.base import innermost
from penstock.store.s3 import S3Store
from penstock.text.sizes import format_bytes

if TYPE_CHECKING:
    from penstock.store.base import Store


@expand_groups
def info(
    url: str | None = argument("URL", "Object or prefix to measure.", default=None),
    *,
    seconds: float = option("NUMBER", "Seconds that each measurement takes at most.", default=3.0, min=0.01),
    as_json: bool = AS_JSON,
    connection: ConnectionGroup,
) -> None:
    """Show versions and limits; with a URL also endpoint, region, the source of the credentials, and measured speed.

    Three things are measured: the time to the first byte, the bandwidth of one connection, and that of many. The last two
    read the object, or the largest of the first 1 000 below a prefix, repeatedly, until 256 MiB have arrived or --seconds
    have passed. Secrets are never shown.

    For example:

        penstock info
        penstock info s3://bucket/train/ --json
    """
    machine = {"cores_count": len(os.sched_getaffinity(0)), "budget_bytes": default_budget_bytes()}
    facts: dict[str, Any] = {"versions": _versions(), "machine": machine}
    if url is not None:
        from penstock.pipeline import shards
        from penstock.sources.shards import read_classes

        with Stores(connection) as stores:
            location = stores.locate(url)
            facts["store"] = _store(location.store)
            if (classes := read_classes(shards([url], **connection.options()))) is not None:
                facts["data"] = {"classes": classes}
            facts["probe"] = _probe(location, seconds)
    if as_json:
        print(json.dumps(facts))
    else:
        print_facts(facts)


def _versions() -> dict[str, str]:
    from penstock.system.libcurl import pycurl

    libraries = dict(part.split("/", 1) for part in str(pycurl.version).split() if "/" in part)
    return {
        "penstock": penstock.__version__,
        "python": platform.python_version(),
        "pycurl": libraries.get("PycURL", "?"),
        "libcurl": libraries.get("libcurl", "?"),
        "tls": str(pycurl.version_info()[5]),
        "platform": platform.platform(),
    }


def _store(store: Store) -> dict[str, Any]:
    core = innermost(store)
    facts: dict[str, Any] = {"url": store.describe(""), "kind": type(core).__name__}
    if isinstance(core, S3Store):
        facts |= {"endpoint": core.endpoint.base_url, "region": core.endpoint.region}
        try:
            facts["credentials"] = credentials_text(core)
        except CredentialsError as error:
            facts["credentials"] = f"none: {error.what}"
    return facts


def credentials_text(core: S3Store) -> str:
    """Return where a store's keys come from and of which kind they are, without a secret; waits until they are found.

    Raises:
        CredentialsError: No keys were found.
    """
    if core.provider is None:
        return "anonymous"
    found = core.provider.resolve()
    kind = "temporary" if found.session_token else "permanent"
    return f"{core.provider.source} ({kind}, access key {_masked(found.access_key)})"


def _masked(access_key: str) -> str:
    return f"{access_key[:4]}...{access_key[-2:]}" if len(access_key) >= 12 else "..."


def _probe(location: StoreLocation, seconds: float) -> dict[str, Any]:
    found = largest(location.store, location.key, url=location.url)
    facts: dict[str, Any] = {"object": location.store.describe(found.key), "size_bytes": found.size_bytes}
    if found.size_bytes:
        first_byte_s = first_bytes(location.store, found, seconds)
        facts["first_byte_count"] = len(first_byte_s)
        facts["first_byte_p50_s"], facts["first_byte_p99_s"] = p50_p99(first_byte_s)
        probe = StoreProbe(location.store, [found], seconds=seconds)
        facts["one_connection_bytes_per_s"] = probe.measure(1).bytes_per_s
        facts["many_connections_bytes_per_s"] = probe.measure(CONNECTIONS[-1]).bytes_per_s
    return facts


def print_facts(facts: dict[str, Any]) -> None:
    """Print values in groups, each with the unit that its name ends with."""
    for group, values in facts.items():
        for name, value in values.items():
            label = name.removesuffix("_bytes_per_s").removesuffix("_per_s")  # the printed value shows its unit
            label = label.removesuffix("_s")
            print_result(f"{group:>8}  {label:28}  {_shown(name, value)}")


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if name.endswith("_per_s"):
        return f"{value:,.0f}/s"
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_s"):
        return f"{value * 1000:.2f} ms"
    return shortened(value) if name == "classes" else str(value)
