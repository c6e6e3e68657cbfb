"""The embedded server: it checks signatures, and it never outlives its owner."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import botocore.exceptions
import pytest

from penstock.errors import ConfigError, UnavailableError
from penstock.testing.ministack import Ministack

pytestmark = pytest.mark.server


def test_signatures_are_checked(ministack: Ministack) -> None:
    """The user's keys work; a wrong secret and an unknown key are refused."""
    bucket = ministack.create_bucket()
    client = ministack.client()
    client.put_object(Bucket=bucket, Key="a", Body=b"x")
    assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 1
    for access_key, secret_key in ((ministack.access_key, "wrong"), ("AKIAUNKNOWN", ministack.secret_key)):
        other = ministack._client("s3", access_key, secret_key)
        with pytest.raises(botocore.exceptions.ClientError, match=r"SignatureDoesNotMatch|InvalidAccessKeyId"):
            other.list_buckets()
        other.close()
    client.close()


def test_close_leaves_nothing(nothing_left: Callable[[], AbstractContextManager[None]]) -> None:
    """After close there is no process, no descriptor and no file."""
    with nothing_left():
        with Ministack() as server:
            folder, pid = server._folder, server.pid
            assert folder.exists()
        server.close()
        assert not folder.exists()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert "closed" in repr(server)


def test_it_ends_when_its_owner_is_killed() -> None:
    """An owner that dies by SIGKILL leaves no server and no files behind."""
    code = (
        "from penstock.testing.ministack import Ministack\n"
        "server = Ministack()\n"
        "print(server.pid, server._folder, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid, folder = owner.stdout.readline().decode().split()
        watched = os.pidfd_open(int(pid))
        owner.kill()
    try:
        assert select.select([watched], [], [], 20)[0], "the server lives on"
    finally:
        os.close(watched)
    assert not os.path.exists(folder)


def test_failure_shows_the_log() -> None:
    """A server that does not start is an error with the end of its log."""
    with pytest.raises(UnavailableError, match="its log ends"):
        Ministack(settings={"GATEWAY_PORT": "no port"}, ready_s_max=5)


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ministack is missing the error says what to install."""
    monkeypatch.setattr("penstock.testing.ministack.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install"):
        Ministack()


def test_one_that_checks_nothing_is_refused() -> None:
    """A server without signature checks, as old versions are, would make every test of credentials hollow."""
    with pytest.raises(ConfigError, match="does not verify signatures"):
        Ministack(settings={"AUTH": "false"})


def test_the_environment_is_enough_for_a_child(ministack: Ministack) -> None:
    """A child with the AWS variables finds the server and may use it."""
    bucket = ministack.create_bucket()
    code = (
        "import sys, penstock as ps\n"
        "store = ps.connect(f's3://{sys.argv[1]}')\n"
        "store.write('a', b'x')\n"
        "print([info.key for info in store.list()])"
    )
    environment: dict[str, Any] = {**os.environ, **ministack.environment}
    done = subprocess.run(
        [sys.executable, "-c", code, bucket], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['a']"
