"""``gateway.toml`` becomes a configuration, and everything that is wrong in it is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.config import GIB, KIB
from penstock.errors import ConfigError
from penstock.gateway.config import (
    AccessPoint,
    GatewayConfig,
    GatewayLimits,
    LambdaConfig,
    WebhookConfig,
    WebhookServiceConfig,
    types_of,
)
from penstock.gateway.serving.checks import check_config
from penstock.gateway.serving.toml_file import FILE_BYTES_MAX, read_toml

WHOLE = """
port = 9001
workers = 4
cache = "/nvme/penstock:200GB"
metadata_ttl_s = "5min"
keys_file = "keys.txt"
log_format = "json"
drain_s_max = 10
[limits]
header_bytes_max = "8KiB"
stall_s_max = "90s"
[access_points.train]
upstream = "s3://bucket/train/"
upstream_options = { endpoint_url = "http://127.0.0.1:9100", anonymous = true }
transform = "tar2tfrecord"
arguments = { fields = "image=png:pixels", limit = 3, strict = true }
cache = "never"
keys = ["READER"]
memory_bytes_max = "2GiB"
renamed_suffixes = { ".tar" = ".tfrecord" }
[access_points.old]
upstream = "s3://bucket/"
[access_points.old.handler]
handler = "app.lambda_handler"
code_dir = "app"
time_s_max = "1min"
[access_points.hook]
upstream = "s3://bucket/"
webhook = { url = "http://127.0.0.1:8000/", token = "t" }
"""


def written(folder: Path, text: str) -> str:
    path = folder / "gateway.toml"
    path.write_text(text)
    return str(path)


def test_a_whole_file(tmp_path: Path) -> None:
    """Each key becomes the field of its name; sizes and durations may be texts; paths are relative to the file."""
    config = read_toml(written(tmp_path, WHOLE))
    assert config == GatewayConfig(
        port=9001,
        workers=4,
        cache="/nvme/penstock:200GB",
        metadata_ttl_s=300.0,
        keys_file=str(tmp_path / "keys.txt"),
        log_format="json",
        drain_s_max=10.0,
        limits=GatewayLimits(header_bytes_max=8 * KIB, stall_s_max=90.0),
        access_points=(
            AccessPoint(
                name="train",
                folder=str(tmp_path),
                upstream="s3://bucket/train/",
                upstream_options={"endpoint_url": "http://127.0.0.1:9100", "anonymous": True},
                transform="tar2tfrecord",
                arguments={"fields": "image=png:pixels", "limit": "3", "strict": "true"},
                deterministic=False,
                keys=("READER",),
                memory_bytes_max=2 * GIB,
                renamed_suffixes={".tar": ".tfrecord"},
            ),
            AccessPoint(
                name="old",
                folder=str(tmp_path),
                upstream="s3://bucket/",
                handler=LambdaConfig(handler="app.lambda_handler", code_dir=str(tmp_path / "app"), time_s_max=60.0),
            ),
            AccessPoint(
                name="hook",
                folder=str(tmp_path),
                upstream="s3://bucket/",
                webhook=WebhookConfig(url="http://127.0.0.1:8000/", token="t"),
            ),
        ),
    )


POINT = "[access_points.a]\nupstream = 's3://b'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", r"gateway.toml: prot is not a key that exists. Hint: did you mean port\?"),
        ("port = '9000'", "port = '9000' must be a whole number"),
        ("port = true", "port = True must be a whole number"),
        ("host = 1", "host = 1 must be text"),
        ("drain_s_max = 'soon'", "drain_s_max 'soon' is not a duration"),
        ("[limits]\nheader_bytes_max = 'big'", "limits.header_bytes_max 'big' is not a size"),
        ("[limits]\nstall = 1", r"limits.stall is not a key that exists. Hint: did you mean stall_s_max\?"),
        ("limits = 3", "limits = 3 must be a table"),
        ("log_format = 'xml'", "log_format = 'xml' must be one of 'lines', 'json'"),
        ("access_points = 3", "access_points must be tables by name"),
        ("[access_points.a]", "access_points.a.upstream is missing"),
        (POINT + "name = 'c'", "the table's header already names it"),
        (POINT + "keys = 'K'", "access_points.a.keys = 'K' must be a list"),
        (POINT + "keys = [1]", "access_points.a.keys = 1 must be text"),
        (POINT + "arguments = [1]", r"access_points.a.arguments = \[1\] must be a table"),
        (POINT + "arguments = { a = [] }", "arguments.a = .* must be text, a number"),
        (POINT + "cache = 'always'", "cache = 'always' must be \"never\""),
        (POINT + "cache = 'never'\ndeterministic = true", "contradicts"),
        (POINT + "[access_points.a.handler]\nhandle = 'x'", "handler.handle is not a key"),
        (POINT + "[access_points.a]\n", "two access points are named 'a'"),
        ("port = ", "is not TOML"),
        ('host = "a\\u0000b"', "contains NUL"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    """An unknown key, a wrong type or a broken file is refused by its name, with a suggestion where one is near."""
    with pytest.raises(ConfigError, match=message):
        read_toml(written(tmp_path, text))


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    """A file that is missing, binary or huge is refused."""
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_toml(str(tmp_path / "nothing.toml"))
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_toml(str(path))
    path.write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="larger than"):
        read_toml(str(path))


TABLES: dict[type, tuple[str, str]] = {  # the table with the settings of each config, and a value that it must have
    GatewayConfig: ("", ""),
    GatewayLimits: ("[limits]", ""),
    WebhookServiceConfig: ("[webhook_service]", ""),
    AccessPoint: ("[access_points.abc]", "upstream = 's3://b'"),
    LambdaConfig: ("[access_points.abc.handler]", "handler = 'a.b'"),
    WebhookConfig: ("[access_points.abc.webhook]", "url = 'http://h/'"),
}
SETTINGS = {f"{kind.__name__}.{name}": (kind, name) for kind in TABLES for name in types_of(kind)}
WRONG = ["-1", "true", "1.5", "nan", "[1]", "['x y']", "'10XB'", "{ a = 1 }", "{ a = [] }", "1979-05-27"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_wrong_value_is_named_with_its_file(setting: str, tmp_path: Path) -> None:
    """Whatever is wrong with a setting, the message names the file and the setting, and each refuses some of the values."""
    kind, name = SETTINGS[setting]
    header, required = TABLES[kind]
    own = "" if required.startswith(f"{name} =") else required
    refused = 0
    for value in WRONG:
        text = f"{header}\n{own}\n{name} = {value}\n"
        if "access_points" not in text:
            text += "[access_points.abc]\nupstream = 's3://b'\n"
        elif kind is not AccessPoint:
            text = f"[access_points.abc]\nupstream = 's3://b'\n{text}"
        message = refusal(written(tmp_path, text))
        if message:
            refused += 1
            assert "gateway.toml: " in message, text
            assert re.search(rf"\b({name}|access_points|tls_\w+)\b", message), text
    assert refused >= len(WRONG) - 4


def refusal(path: str) -> str:
    """Return what is wrong with a file; empty if nothing is."""
    try:
        check_config(read_toml(path))
    except ConfigError as error:
        return str(error)
    return ""
