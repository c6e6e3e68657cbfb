"""Options of the file system: one spelling, no secret shown, and nothing ignored that would change a result."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from penstock.fsspec import PenstockFileSystem, PenstockS3FileSystem
from penstock.fsspec.options import connect_options, translated

KEYS = ps.Credentials(access_key="AK", secret_key="hidden", session_token="ticket")
SPELLINGS: list[dict[str, Any]] = [
    {"key": "AK", "secret": "hidden", "token": "ticket", "endpoint_url": "http://h", "region": "r"},
    {"credentials": KEYS, "client_kwargs": {"endpoint_url": "http://h", "region_name": "r"}},
    {
        "username": "AK",
        "password": "hidden",
        "token": "ticket",
        "endpoint_url": "http://h",
        "region": "r",
        "anon": False,
    },
    {
        "client_kwargs": {
            "endpoint_url": "http://h",
            "region_name": "r",
            "aws_access_key_id": "AK",
            "aws_secret_access_key": "hidden",
            "aws_session_token": "ticket",
        },
        "config_kwargs": {"signature_version": "s3v4", "max_pool_connections": 50},
        "default_block_size": 1 << 20,
        "version_aware": False,
        "session": None,
    },
]


@pytest.mark.parametrize("options", SPELLINGS)
def test_every_spelling_means_the_same(options: dict[str, Any]) -> None:
    """Our names, s3fs's and botocore's lead to the same arguments of ``connect`` and to the same file system."""
    made = connect_options(translated(options))
    assert made == {"credentials": KEYS, "endpoint_url": "http://h", "region": "r"}
    assert PenstockFileSystem(**options) is PenstockFileSystem(**SPELLINGS[0])
    assert translated(translated(options)) == translated(options)


def test_other_keys_are_another_file_system() -> None:
    """Two file systems that differ in the secret alone are two, although no repr shows it."""
    one = PenstockFileSystem(credentials=ps.Credentials(access_key="AK", secret_key="one"))
    two = PenstockFileSystem(credentials=ps.Credentials(access_key="AK", secret_key="two"))
    assert one is not two
    assert one != two


def test_addressing_and_tls_are_taken_from_botocores_config() -> None:
    """``addressing_style`` and ``verify`` have their place in ``connect``."""
    made = translated({"config_kwargs": {"s3": {"addressing_style": "path"}}, "client_kwargs": {"verify": False}})
    assert made == {"addressing": "path", "transport": ps.TransportConfig(verify_tls=False)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "http://h"}, "did you mean endpoint_url"),
        ({"client_kwargs": {"region": "r"}}, r"client_kwargs\(region=...\).*region_name"),
        ({"client_kwargs": "http://h"}, "client_kwargs= must be a dict"),
        ({"config_kwargs": {"s3": {"payload_signing_enabled": True}}}, "payload_signing_enabled"),
        ({"config_kwargs": {"signature_version": "s3"}}, "signs by version 4"),
        ({"key": "AK"}, "belong together"),
        ({"token": "t"}, "belongs to key="),
        ({"key": "AK", "secret": "a", "password": "b"}, "secret= is given twice"),
        ({"endpoint_url": "http://a", "client_kwargs": {"endpoint_url": "http://b"}}, "endpoint_url= is given twice"),
        ({"version_aware": True}, "current version"),
        ({"session": object()}, "sessions of its own"),
        ({"s3_additional_kwargs": {"ACL": "private"}}, "no further arguments"),
        ({"credentials": {"key": "AK"}}, "must be a Credentials"),
    ],
)
def test_what_cannot_be_followed_is_said(options: dict[str, Any], message: str) -> None:
    """An option that is unknown, contradicts another one or would change a result is an error that says what to do."""
    with pytest.raises(ps.ConfigError, match=message):
        PenstockS3FileSystem(**options)


def test_options_of_other_protocols_are_left_alone() -> None:
    """``datasets`` adds ``hf={...}`` to the options of its caller."""
    assert translated({"hf": {"token": None, "endpoint": "h"}, "anon": True}) == {"anonymous": True}


def test_anon_takes_precedence_over_keys() -> None:
    """pandas adds ``anon`` to the caller's options after a PermissionError; the second attempt must not fail by itself."""
    assert translated({"key": "k", "secret": "s", "profile": "p", "anon": True}) == {"anonymous": True}
    assert translated({"key": "k", "secret": "s", "anon": False}) == {"key": "k", "secret": "s"}


def test_options_have_names() -> None:
    """A positional argument, which s3fs would take for ``anon``, is refused."""
    with pytest.raises(ps.ConfigError, match="by name only"):
        PenstockS3FileSystem(True)


def test_no_secret_is_shown() -> None:
    """Neither the repr nor the dict without passwords holds a secret, and the complete dict does, to be read again."""
    files = PenstockS3FileSystem(key="AK", secret="hidden", token="ticket", endpoint_url="http://user:pw@h")
    shown = repr(files) + files.to_json(include_password=False) + files.fsid
    assert not any(secret in shown for secret in ("hidden", "ticket", "pw"))
    assert "http://h" in repr(files) or "@h" in repr(files)
    assert "hidden" in files.to_json()
