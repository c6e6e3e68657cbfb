"""Contradictions, bounds, names and files are checked before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.gateway.config import (
    AccessPoint,
    GatewayConfig,
    GatewayLimits,
    LambdaConfig,
    WebhookConfig,
    WebhookServiceConfig,
)
from penstock.gateway.serving.checks import check_config, is_loopback

POINT = AccessPoint(name="train", upstream="s3://bucket/")


def config(**values: Any) -> GatewayConfig:
    return GatewayConfig(access_points=(replace(POINT, **values),))


def test_a_sound_configuration_passes() -> None:
    """A plain access point has nothing wrong with it."""
    check_config(config())


POINTS = {
    "capitals": ({"name": "Train"}, "the name is not a bucket name"),
    "short name": ({"name": "a"}, "the name is not a bucket name"),
    "hyphen": ({"name": "-ab"}, "the name is not a bucket name"),
    "path": ({"name": "../etc"}, "the name is not a bucket name"),
    "no upstream": ({"upstream": ""}, "upstream is empty"),
    "no directory": ({"upstream": "/does/not/exist"}, "is not a directory"),
    "option": ({"upstream_options": {"endpoint": "x"}}, "has no key 'endpoint'. Hint: did you mean endpoint_url"),
    "option's type": ({"upstream_options": {"anonymous": "yes"}}, "must be of type bool"),
    "two transforms": (
        {"transform": "gzip", "webhook": WebhookConfig(url="http://h/")},
        "transform and .*webhook cannot be combined",
    ),
    "a handler too": (
        {"transform": "gzip", "handler": LambdaConfig(handler="m.f")},
        "transform and .*handler cannot be combined",
    ),
    "writing": ({"transform": "gzip", "read_write": True}, "read_write cannot be combined with transform"),
    "arguments": ({"arguments": {"a": "1"}}, "arguments is for a transform"),
    "transform": ({"transform": "gzipp"}, "there is no built-in transform gzipp"),
    "transform's folder": ({"transform": "gzip", "folder": "/no/folder"}, "folder: /no/folder is not a directory"),
    "epoch": ({"transform": "gzip", "epoch": "x"}, "epoch='x' must be a whole number"),
    "calls": ({"calls_max": -1}, "calls_max=-1"),
    "a signature": (
        {"handler": LambdaConfig(handler="m.f", varies_by=("Authorization",))},
        "varies_by: 'Authorization' is nothing that is passed on",
    ),
    "a range": ({"webhook": WebhookConfig(url="http://h/", varies_by=("Range",))}, "varies_by: 'Range' is nothing"),
    "account": ({"account": "12"}, "must have 12 digits"),
    "region": ({"region": "Mars!"}, "is not a region"),
    "time": ({"time_s_max": 0}, "time_s_max=0 must be a number, more than 0"),
    "memory": ({"memory_bytes_max": 1}, "memory_bytes_max=1 must be a whole number"),
    "output": ({"output_bytes_max": 0}, "output_bytes_max=0 must be a whole number"),
    "processes": ({"processes": -1}, "processes=-1"),
    "suffixes": ({"renamed_suffixes": {".tar": "/x"}}, "renamed_suffixes"),
    "handler": ({"handler": LambdaConfig(handler="nothing")}, "is not module.function"),
    "folder": ({"handler": LambdaConfig(handler="m.f", code_dir="/no/folder")}, "is not a directory"),
    "python": ({"handler": LambdaConfig(handler="m.f", python="/no/python")}, "is not a program"),
    "action": ({"handler": LambdaConfig(handler="m.f", actions=("PutObject",))}, "there is no action 'PutObject'"),
    "webhook": ({"webhook": WebhookConfig(url="ftp://h/")}, "is not an http"),
    "token": ({"webhook": WebhookConfig(url="http://h/", token="a\r\nb: c")}, "token is not one or two words"),
}


@pytest.mark.parametrize("case", POINTS)
def test_access_points_that_are_refused(case: str) -> None:
    """Each rule about one access point has its own message."""
    values, message = POINTS[case]
    with pytest.raises(ConfigError, match=message):
        check_config(config(**values))


GATEWAYS = {
    "nothing": ({"access_points": ()}, "nothing to serve"),
    "names": ({"access_points": (POINT, POINT)}, "two access points are named 'train'"),
    "port": ({"port": 65536}, "port=65536"),
    "workers": ({"workers": 0}, "workers=0"),
    "host": ({"host": "no such host"}, "is not an address"),
    "domain": ({"domain": "Ex ample"}, "is not a host name"),
    "region": ({"region": "US EAST"}, "is not a region"),
    "origin": ({"cors_origins": ("https://example.org/page",)}, "is not an origin"),
    "key alone": ({"tls_key": "/k"}, "tls_certificate is not given"),
    "certificate alone": ({"tls_certificate": "/k"}, "tls_key is not given"),
    "no certificate": ({"tls_certificate": "/no/c", "tls_key": "/no/k"}, "tls_certificate: /no/c is not a file"),
    "keys": ({"keys_file": "/no/keys"}, "/no/keys is not a file"),
    "directory": ({"directory": "/no/folder"}, "directory: /no/folder is not a directory"),
    "writing": ({"read_write": True}, "read_write=true needs a directory"),
    "cache": ({"cache": "/nvme"}, "must be PATH:SIZE"),
    "service's token": ({"webhook_service": WebhookServiceConfig(token="a\n")}, "token is not one or two words"),
    "service's hosts": (
        {"webhook_service": WebhookServiceConfig(source_hosts=("http://h",))},
        "is not HOST or HOST:PORT",
    ),
    "service's sizes": ({"webhook_service": WebhookServiceConfig(source_bytes_max=0)}, "source_bytes_max=0"),
    "drain": ({"drain_s_max": -1}, "drain_s_max=-1"),
    "connections": ({"limits": GatewayLimits(connections_max=0)}, "limits.connections_max=0"),
    "header time": ({"limits": GatewayLimits(header_s_max=0)}, "limits.header_s_max=0"),
    "header bytes": ({"limits": GatewayLimits(header_bytes_max=10)}, "limits.header_bytes_max=10"),
}


@pytest.mark.parametrize("upstream", ["/", "file:///", "memory://data"])
def test_an_upload_has_one_process(upstream: str) -> None:
    """Several processes write only to S3, because elsewhere an upload is known to the one in which it was begun."""
    written = config(upstream=upstream, read_write=True)
    check_config(written)
    with pytest.raises(
        ConfigError, match=r"read_write=true needs workers=1, not 2: .*Hint: one process, or --upstream"
    ):
        check_config(replace(written, workers=2))
    check_config(replace(config(upstream=upstream), workers=2))
    check_config(replace(config(read_write=True), workers=2))
    check_config(GatewayConfig(directory="/", read_write=True, workers=2))


@pytest.mark.parametrize("case", GATEWAYS)
def test_gateways_that_are_refused(case: str) -> None:
    """Each rule about the whole gateway has its own message."""
    values, message = GATEWAYS[case]
    with pytest.raises(ConfigError, match=message):
        check_config(replace(config(), **values))


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """The key of the certificate is a secret, whoever the gateway listens to."""
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    certificate.touch()
    key.touch()
    key.chmod(0o644)
    sound = replace(config(), tls_certificate=str(certificate), tls_key=str(key))
    with pytest.raises(ConfigError, match=r"mode 0644: others can read or change it\. Hint: chmod 600"):
        check_config(sound)
    key.chmod(0o600)
    check_config(sound)


def test_loopback() -> None:
    """Only addresses of this machine are loopback; a host name is not, except localhost."""
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost")))
    assert not any(
        map(is_loopback, ("0.0.0.0", "::", "192.0.2.1", "localhost.example.com", "", "127.0.0.1.example.com"))
    )


REFUSED_RESULTS = {
    "inside": ({"results": "s3://b/train/derived/", "cache": "/x:1GB"}, "lies in what access point"),
    "the-same": ({"results": "s3://b/train", "cache": "/x:1GB"}, "lies in what access point"),
    "no-cache": ({"results": "s3://b/derived/"}, "results needs a cache"),
    "read-only": ({"results": "https://example.com/derived/", "cache": "/x:1GB"}, "can only be read"),
    "no-folder": ({"results": "/nowhere/derived", "cache": "/x:1GB"}, "is not a directory"),
    "options": ({"results_options": {"region": "eu"}}, "results_options.region is set, but results is empty"),
}


@pytest.mark.parametrize("case", REFUSED_RESULTS)
def test_results_that_cannot_be_kept(case: str) -> None:
    """A place for results that is served itself, cannot be written, or has no cache before it is refused at the start."""
    values, message = REFUSED_RESULTS[case]
    point = AccessPoint(name="train", upstream="s3://b/train/", transform="gzip")
    with pytest.raises(ConfigError, match=message):
        check_config(GatewayConfig(access_points=(point,), **values))
    beside = GatewayConfig(access_points=(point,), results="s3://b/train-derived/", cache="/x:1GB")
    check_config(beside)
