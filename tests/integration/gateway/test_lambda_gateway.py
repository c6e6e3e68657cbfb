"""A Lambda handler behind a whole gateway: ranges, and answers that end halfway."""

from __future__ import annotations

import http.client
import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from servers.gateway import Gateway

pytestmark = pytest.mark.server

HANDLER = """
    import os, urllib.request, boto3
    from botocore.config import Config
    s3 = boto3.client("s3", config=Config(s3={"payload_signing_enabled": False}, retries={"total_max_attempts": 1}))

    class Pieces:
        def __init__(self, data, fails):
            self.data, self.fails = data, fails
        def read(self, size=-1):
            piece, self.data = self.data[:50_000], self.data[50_000:]
            if not self.data and self.fails:
                os._exit(3)
            return piece

    def lambda_handler(event, context):
        with open(os.environ["CALLS"], "a") as calls:
            calls.write(event["userRequest"]["url"] + "\\n")
        where = event["getObjectContext"]
        data = urllib.request.urlopen(where["inputS3Url"]).read()[::-1]
        fails = "fail" in event["userRequest"]["url"] and not os.path.exists(os.environ["CALLS"] + ".mended")
        s3.write_get_object_response(
            Body=Pieces(data, fails), RequestRoute=where["outputRoute"], RequestToken=where["outputToken"])
"""
DATA = bytes(range(256)) * 4000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the gateway, in which the handler notes its calls."""
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="module")
def gateway(folder: Path) -> Iterator[Gateway]:
    """A gateway of two processes in front of a folder, whose handler reverses objects."""
    (folder / "data").mkdir()
    for name in ("a.bin", "fail.bin"):
        (folder / "data" / name).write_bytes(DATA)
    (folder / "code").mkdir()
    (folder / "code" / "app.py").write_text(textwrap.dedent(HANDLER))
    (folder / "calls").touch()
    (folder / "gateway.toml").write_text(
        textwrap.dedent(f"""
            port = 0
            workers = 2
            cache = "{folder}/cache:100MB"
            [access_points.made]
            upstream = "{folder}/data"
            processes = 1
            [access_points.made.handler]
            handler = "app.lambda_handler"
            code_dir = "{folder}/code"
            environment = {{ CALLS = "{folder}/calls" }}
        """)
    )
    started = Gateway("--config", "gateway.toml", folder=folder)
    yield started
    if started.process.poll() is None:
        started.kill()


def get(gateway: Gateway, key: str, span: str = "") -> tuple[int, bytes]:
    """Read an object or a range of it."""
    request = urllib.request.Request(f"{gateway.url}/made/{key}", headers={"Range": span} if span else {})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.status, answer.read()


def test_many_ranges_cost_one_call(gateway: Gateway, folder: Path) -> None:
    """Twenty clients that read ranges of a cold object at once get the right bytes, and the handler is called once."""
    size, wanted = len(DATA), DATA[::-1]
    step = size // 19
    spans = [(start, min(start + step, size)) for start in range(0, size, step)]
    with ThreadPoolExecutor(len(spans)) as threads:
        answers = list(threads.map(lambda span: get(gateway, "a.bin", f"bytes={span[0]}-{span[1] - 1}"), spans))
    assert {status for status, _ in answers} == {206}
    assert b"".join(data for _, data in answers) == wanted
    assert get(gateway, "a.bin", "bytes=-7") == (206, wanted[-7:])
    assert get(gateway, "a.bin") == (200, wanted)
    assert (folder / "calls").read_text().count("a.bin") == 1


def test_an_answer_that_ends_halfway_is_never_whole(gateway: Gateway, folder: Path) -> None:
    """If the handler dies while it streams, the client's connection breaks off, and the next read calls a new handler."""
    for _ in range(2):
        with pytest.raises((http.client.IncompleteRead, ConnectionError, urllib.error.HTTPError)):
            get(gateway, "fail.bin")
    (folder / "calls.mended").touch()
    assert get(gateway, "fail.bin") == (200, DATA[::-1])
    assert (folder / "calls").read_text().count("fail.bin") == 3
