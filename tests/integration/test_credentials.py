"""Who asks, and where: everything by the AWS conventions, against servers that say what AWS's own services say."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from exchanges import RawServer
from penstock.store import credentials
from penstock.store.base import Wrapper
from servers.faulty import FaultyServer

pytestmark = pytest.mark.server

WEB_IDENTITY = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>AKIDWEB</AccessKeyId><SecretAccessKey>s</SecretAccessKey>
<SessionToken>token</SessionToken><Expiration>{}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>"""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    for cached in (credentials._provider, credentials.botocore_session):
        cached.cache_clear()
    yield
    for cached in (credentials._provider, credentials.botocore_session):
        cached.cache_clear()


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Writes the AWS config and credentials files."""

    def write(config: str = "", keys: str = "") -> None:
        for name, variable, text in (
            ("config", "AWS_CONFIG_FILE", config),
            ("keys", "AWS_SHARED_CREDENTIALS_FILE", keys),
        ):
            (tmp_path / name).write_text(text)
            monkeypatch.setenv(variable, str(tmp_path / name))

    return write


def answer(body: str) -> bytes:
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body.encode())


def later(minutes: float = 60) -> str:
    return (datetime.now(UTC) + timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%SZ")


def who_asked(faulty: FaultyServer, **settings: Any) -> tuple[str, str, str | None, str]:
    """Access key, region and session token of a request, and where the keys were found."""
    faulty.objects["a"] = b"x"
    with ps.connect("s3://bucket", **({"endpoint_url": faulty.endpoint_url} | settings)) as store:
        assert bytes(store.read("a").data) == b"x"
        core: Any = store
        while isinstance(core, Wrapper):
            core = core.inner
    headers = faulty.requests[-1].headers
    key, _, region, *_ = headers["authorization"].partition("Credential=")[2].split("/")
    return key, region, headers.get("x-amz-security-token"), core.provider.source


def test_the_environment_wins_over_files_and_arguments_over_both(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, files: Callable[..., None]
) -> None:
    """Keys, region and endpoint, each from the nearest place that names it; ``AWS_ENDPOINT_URL_S3`` before the general."""
    files(
        f"[default]\nregion = eu-west-1\nendpoint_url = {faulty.endpoint_url}\n"
        "[profile other]\nregion = eu-west-2\nservices = mine\n"
        f"[services mine]\ns3 =\n  endpoint_url = {faulty.endpoint_url}\n",
        "[default]\naws_access_key_id = AKIDFILE\naws_secret_access_key = s\n"
        "[other]\naws_access_key_id = AKIDOTHER\naws_secret_access_key = s\naws_session_token = t\n",
    )
    assert who_asked(faulty, endpoint_url=None) == ("AKIDFILE", "eu-west-1", None, "shared-credentials-file")
    assert who_asked(faulty, endpoint_url=None, profile="other")[:3] == ("AKIDOTHER", "eu-west-2", "t")
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert who_asked(faulty, endpoint_url=None)[:3] == ("AKIDOTHER", "eu-west-2", "t")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", faulty.endpoint_url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "ap-south-1")
    assert who_asked(faulty, endpoint_url=None)[1] == "ap-south-1"
    monkeypatch.setenv("AWS_REGION", "ap-south-2")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    assert who_asked(faulty, endpoint_url=None) == ("AKIDENV", "ap-south-2", None, "environment")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    mine = ps.Credentials(access_key="AKIDARG", secret_key="s", session_token="mine")
    assert who_asked(faulty, credentials=mine, region="sa-east-1")[:3] == ("AKIDARG", "sa-east-1", "mine")


def test_a_container_role_is_asked(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """ECS and EKS: the keys that the endpoint in ``AWS_CONTAINER_CREDENTIALS_FULL_URI`` gives."""
    role = {"AccessKeyId": "AKIDBOX", "SecretAccessKey": "s", "Token": "token", "Expiration": later()}
    with RawServer(answer(json.dumps(role))) as server:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{server.url}/keys")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "let-me-in")
        assert who_asked(faulty) == ("AKIDBOX", "us-east-1", "token", "container-role")
        assert b"let-me-in" in server.heads[0]


def test_a_web_identity_becomes_a_role(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kubernetes: the token in a file is exchanged at STS."""
    (tmp_path / "token").write_text("web-token")
    with RawServer(answer(WEB_IDENTITY.format(later()))) as server:
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/reader")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", server.url)
        monkeypatch.setenv("AWS_REGION", "eu-west-1")
        assert who_asked(faulty) == ("AKIDWEB", "eu-west-1", "token", "assume-role-with-web-identity")


def test_an_instance_role_is_asked(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """EC2: the metadata service's token, then the role's name, then its keys."""
    role = {"Code": "Success", "AccessKeyId": "AKIDEC2", "SecretAccessKey": "s", "Token": "token",
            "Expiration": later(), "LastUpdated": later(-60)}  # fmt: skip

    def metadata(head: bytes) -> bytes:
        path = head.split(b" ")[1]
        if path.endswith(b"/api/token"):
            return answer("session")
        return answer("reader" if path.endswith(b"/security-credentials/") else json.dumps(role))

    with RawServer(metadata) as server:
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url)
        assert who_asked(faulty) == ("AKIDEC2", "us-east-1", "token", "iam-role")


def test_keys_are_renewed_before_they_expire(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys with minutes to live are renewed in the background while reading goes on, and no request waits or fails."""
    issued = iter(range(1000))
    renewed = threading.Event()

    def role(_head: bytes) -> bytes:
        number = next(issued)
        if number == 2:
            renewed.set()
        keys = {"AccessKeyId": f"AKID{number}", "SecretAccessKey": "s", "Token": "t"}
        return answer(json.dumps(keys | {"Expiration": later(12 if number < 2 else 60)}))

    faulty.objects["a"] = b"x"
    monkeypatch.setattr(credentials, "REFRESH_CHECK_S", 0.0)
    with RawServer(role) as server:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{server.url}/keys")
        with ps.connect("s3://bucket", endpoint_url=faulty.endpoint_url) as store:
            for blob in store.read_many("a" for _ in iter(renewed.is_set, True)):
                assert bytes(blob.data) == b"x"
            while "AKID2/" not in faulty.requests[-1].headers["authorization"]:
                assert bytes(store.read("a").data) == b"x"
    assert "AKID1/" in faulty.requests[0].headers["authorization"]  # AKID0 had minutes to live, and was never used
