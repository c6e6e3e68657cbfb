"""Options of the file system: those of ``penstock.connect``, those of every fsspec file system, and s3fs's names for both.

Options are translated to one form before fsspec compares file systems, so two spellings of the same options give the same
file system. The form holds the keys themselves: a ``Credentials`` does not show its secret, so two of them that differ only
in the secret would look alike.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from fsspec.registry import available_protocols

from penstock.compose import connect
from penstock.config import TransportConfig, check_names
from penstock.errors import ConfigError
from penstock.store.credentials import Credentials

if TYPE_CHECKING:
    from collections.abc import Mapping

CONNECT_NAMES = tuple(name for name in inspect.signature(connect).parameters if name != "url")

FSSPEC_NAMES = (
    "asynchronous",
    "loop",
    "batch_size",
    "skip_instance_cache",
    "use_listings_cache",
    "listings_expiry_time",
    "max_paths",
)
"""Options that every fsspec file system has."""

OPEN_NAMES = ("cache_type", "fill_cache", "size", "version_id", "acl", "max_concurrency", "requester_pays", "chunksize")
"""Options of ``open`` and of the calls that read or write, in s3fs and fsspec, which change no result here."""

LISTING_NAMES = ("refresh", "detail", "withdirs", "prefix", "maxdepth", "versions", "on_error", "topdown")
"""Options of the methods that list."""

KEY_NAMES = ("key", "secret", "token")

_SAME_AS = {"anon": "anonymous", "username": "key", "password": "secret"}
"""s3fs's names for options of ours, and its other names for its own."""

_WITHOUT_EFFECT = (
    "default_block_size",
    "default_fill_cache",
    "default_cache_type",
    "max_concurrency",
    "cache_regions",
    "fixed_upload_size",
    "local_expiry_check",
    "use_ssl",
)
"""Options of s3fs that tune what penstock decides by itself; they change no result."""

_CLIENT_NAMES = {
    "endpoint_url": "endpoint_url",
    "region_name": "region",
    "aws_access_key_id": "key",
    "aws_secret_access_key": "secret",
    "aws_session_token": "token",
}
"""Arguments of botocore's client, in ``client_kwargs``."""

_CLIENT_WITHOUT_EFFECT = ("use_ssl", "requote_redirect_url", "trust_env")
"""What else ``client_kwargs`` may hold. Hugging Face's ``datasets`` adds the last two, aiohttp's, whatever the protocol."""

_REFUSED = {
    "version_aware": "penstock reads the current version of an object, and pins it while it reads",
    "session": "penstock has sessions of its own: pass key=, secret=, token= or profile=",
    "s3_additional_kwargs": "penstock passes no further arguments: connect() has sse_customer_key= and requester_pays=",
}
"""Options of s3fs that would change a result, and what to do instead."""


def translated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in one form: the names of ``connect`` and of fsspec, and ``key``, ``secret`` and ``token`` for the keys.

    Args:
        options: Options of the file system. None, and an empty mapping, mean the same as leaving an option out.

    Raises:
        ConfigError: An option is unknown, cannot be followed, or is given twice with different values.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        if value is None or value == {} or name in _WITHOUT_EFFECT or _is_for_another(name, value):
            continue
        if name == "client_kwargs":
            _take_client(found, value)
        elif name == "config_kwargs":
            _take_config(found, value)
        elif name == "credentials":
            _take_credentials(found, value)
        elif name in _REFUSED:
            if value:
                raise ConfigError(f"the option {name}= of s3fs cannot be followed", hint=_REFUSED[name])
        else:
            _set(found, _SAME_AS.get(name, name), value)
    if options.get(
        "anon"
    ):  # pandas adds it to the caller's options for a second attempt; in s3fs it takes precedence, too
        for name in (*KEY_NAMES, "profile"):
            found.pop(name, None)
    check_names("PenstockFileSystem", found, [*CONNECT_NAMES, *FSSPEC_NAMES, *KEY_NAMES])
    if "anonymous" in found and not found["anonymous"]:
        del found["anonymous"]
    if ("key" in found) != ("secret" in found):
        raise ConfigError("key= and secret= belong together, and one of them is missing")
    if "token" in found and "key" not in found:
        raise ConfigError("token= belongs to key= and secret=, which are missing")
    return {name: found[name] for name in sorted(found)}  # fsspec compares options in their order


def connect_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``connect`` for options that ``translated`` returned."""
    arguments = {name: value for name, value in options.items() if name in CONNECT_NAMES}
    if "key" in options:
        arguments["credentials"] = Credentials(
            access_key=options["key"], secret_key=options["secret"], session_token=options.get("token")
        )
    return arguments


def fsspec_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the options that ``translated`` returned that fsspec's own classes take."""
    return {name: value for name, value in options.items() if name in FSSPEC_NAMES}


def is_create(mode: str) -> bool:
    """Return whether a mode of fsspec's is ``"create"``, which never replaces an object.

    Raises:
        ConfigError: It is neither that nor ``"overwrite"``.
    """
    if mode not in ("overwrite", "create"):
        raise ConfigError(f"mode={mode!r} must be 'overwrite' or 'create'")
    return mode == "create"


def type_to_write(what: str, options: Mapping[str, Any], *names: str) -> str:
    """Return the media type that an object is to be written with; empty for the store's default.

    Args:
        what: Name of the call, for the error.
        options: Options of the call, in s3fs's names.
        names: Options that it takes besides those of ``open`` and ``ContentType``.

    Raises:
        ConfigError: An option is unknown, the type is not one line of text, or the object is to be anybody's to read.
    """
    check_names(what, options, [*OPEN_NAMES, "ContentType", *names])
    if options.get("acl") not in (None, "", "private"):
        raise ConfigError(f"acl={options['acl']!r} cannot be followed", hint="a bucket policy says who may read")
    content_type = options.get("ContentType") or ""
    if not isinstance(content_type, str) or not (content_type.isascii() and content_type.isprintable()):
        raise ConfigError(f"ContentType={content_type!r} must be a media type", hint='"text/plain"')
    return content_type


def _is_for_another(name: str, value: object) -> bool:
    """Whether an option holds those of another protocol, as Hugging Face's ``datasets`` adds to the caller's own."""
    return isinstance(value, dict) and name in available_protocols()


def _set(found: dict[str, Any], name: str, value: Any) -> None:
    if name in found and found[name] != value:
        raise ConfigError(f"the option {name}= is given twice, with different values")
    found[name] = value


def _take_credentials(found: dict[str, Any], credentials: object) -> None:
    if not isinstance(credentials, Credentials):
        raise ConfigError(
            f"credentials= must be a Credentials, not {type(credentials).__name__}",
            hint="ps.Credentials(access_key=..., secret_key=...), or key= and secret=",
        )
    _set(found, "key", credentials.access_key)
    _set(found, "secret", credentials.secret_key)
    if credentials.session_token is not None:
        _set(found, "token", credentials.session_token)


def _take_client(found: dict[str, Any], arguments: Any) -> None:
    """Take ``client_kwargs``: arguments of botocore's client."""
    _check_mapping("client_kwargs", arguments)
    for name, value in arguments.items():
        if value is None or name in _CLIENT_WITHOUT_EFFECT:
            continue
        if name == "verify":
            transport = TransportConfig(verify_tls=bool(value), ca_bundle=value if isinstance(value, str) else None)
            _set(found, "transport", transport)
        else:
            check_names("client_kwargs", [name], [*_CLIENT_NAMES, "verify", *_CLIENT_WITHOUT_EFFECT])
            _set(found, _CLIENT_NAMES[name], value)


def _take_config(found: dict[str, Any], arguments: Any) -> None:
    """Take ``config_kwargs``: arguments of botocore's ``Config``. Those that tune its connections have no effect."""
    _check_mapping("config_kwargs", arguments)
    tuning = ("max_pool_connections", "connect_timeout", "read_timeout", "retries", "tcp_keepalive", "user_agent_extra")
    for name, value in arguments.items():
        if name == "s3":
            _check_mapping("config_kwargs['s3']", value)
            check_names("config_kwargs['s3']", value, ["addressing_style"])
            if style := value.get("addressing_style"):
                _set(found, "addressing", style)
        elif name == "region_name":
            _set(found, "region", value)
        elif name == "signature_version":
            if value not in ("s3v4", "v4"):
                raise ConfigError(f"signature_version={value!r} is not supported", hint="penstock signs by version 4")
        else:
            check_names("config_kwargs", [name], [*tuning, "s3", "region_name", "signature_version"])


def _check_mapping(name: str, value: object) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{name}= must be a dict, not {type(value).__name__}")
