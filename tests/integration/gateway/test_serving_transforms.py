"""``penstock gateway`` with transforms: built-in ones, authors' functions, Lambda handlers; in front of files and S3."""

from __future__ import annotations

import gzip
import io
import re
import ssl
import subprocess
import sys
import tarfile
import textwrap
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pytest
import trustme
from botocore.config import Config
from botocore.exceptions import ClientError

import penstock as ps
from penstock.fetch import PlanItem
from servers.gateway import WAIT_S, Gateway, wait_until

if TYPE_CHECKING:
    from penstock.testing.ministack import Ministack

pytestmark = [pytest.mark.server, pytest.mark.heavy]

SAMPLES = 50
Start = Callable[..., Gateway]


def shard() -> bytes:
    """A WebDataset tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(SAMPLES):
            for suffix, data in (("cls", b"%d" % (number % 10)), ("bin", bytes([number]) * 1000)):
                info = tarfile.TarInfo(f"{number:06d}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.tar").write_bytes(shard())
    (tmp_path / "data" / "words.txt").write_text("some words")
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    started: list[Gateway] = []

    def begin(*arguments: str, upstream: str = "data", environment: dict[str, str] | None = None) -> Gateway:
        base = ("--upstream", upstream, "--name", "made", "--port", "0", "--cache", "cache:100MB", "--processes", "1")
        gateway = Gateway(*base, *arguments, folder=folder, environment=environment)
        started.append(gateway)
        return gateway

    yield begin
    for gateway in started:
        if gateway.process.poll() is None:
            gateway.kill()


@pytest.fixture
def client_of() -> Iterator[Callable[[Gateway], Any]]:
    clients = []

    def make(gateway: Gateway) -> Any:
        config = Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1})
        client = boto3.client(
            "s3", endpoint_url=gateway.url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b",
            config=config,
        )  # fmt: skip
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_tar_becomes_tfrecord(start: Start, client_of: Callable[[Gateway], Any], workers: str) -> None:
    """A whole read, a HEAD, attributes and ranges agree, and cost one run of the transform for all processes together."""
    gateway = start("--transform", "tar2tfrecord", "--workers", workers)
    client = client_of(gateway)
    whole = client.get_object(Bucket="made", Key="a.tar")
    data = whole["Body"].read()
    assert data.count(b"__key__") in (0, SAMPLES)
    assert len(data) > SAMPLES * 1000
    head = client.head_object(Bucket="made", Key="a.tar")
    assert (head["ContentLength"], head["ETag"]) == (len(data), whole["ETag"])
    told = client.get_object_attributes(Bucket="made", Key="a.tar", ObjectAttributes=["ETag", "ObjectSize"])
    assert (told["ObjectSize"], told["ETag"]) == (len(data), whole["ETag"].strip('"'))
    for first, last in ((0, 9), (1000, 30_000), (len(data) - 5, len(data) - 1)):
        part = client.get_object(Bucket="made", Key="a.tar", Range=f"bytes={first}-{last}", IfMatch=whole["ETag"])
        assert part["Body"].read() == data[first : last + 1]
    gateway.assert_metrics({"penstock_gateway_result_runs_total": 1})
    assert gateway.stop() == 0


UPPER = """
    import urllib.request, boto3, os
    s3 = boto3.client("s3")
    def lambda_handler(event, context):
        where = event["getObjectContext"]
        assert "AWS_SECRET" not in where["inputS3Url"]
        data = urllib.request.urlopen(where["inputS3Url"]).read()
        s3.write_get_object_response(
            Body=data.upper(), RequestRoute=where["outputRoute"], RequestToken=where["outputToken"], ContentType="text/plain")
        return {"status_code": 200}
"""


def test_in_front_of_s3(start: Start, folder: Path, client_of: Callable[[Gateway], Any], ministack: Ministack) -> None:
    """Sources in S3 are read by URLs that the upstream's keys signed, or at the internal endpoint; the keys reach nobody."""
    ministack.create_bucket("serving-source")
    keys = ps.Credentials(
        access_key=ministack.environment["AWS_ACCESS_KEY_ID"], secret_key=ministack.environment["AWS_SECRET_ACCESS_KEY"]
    )
    with ps.connect("s3://serving-source/", endpoint_url=ministack.endpoint_url, credentials=keys) as store:
        store.write("deep/ä b.tar", shard())
        store.write("words.txt", b"some words")
    (folder / "app.py").write_text(textwrap.dedent(UPPER))
    environment = {**ministack.environment}
    builtin = start("--transform", "tar2tfrecord", upstream="s3://serving-source/deep/", environment=environment)
    client = client_of(builtin)
    assert [each["Key"] for each in client.list_objects_v2(Bucket="made")["Contents"]] == ["ä b.tar"]
    assert len(client.get_object(Bucket="made", Key="ä b.tar")["Body"].read()) > SAMPLES * 1000
    handler = start("--lambda", "app:lambda_handler", upstream="s3://serving-source", environment=environment)
    assert client_of(handler).get_object(Bucket="made", Key="words.txt")["Body"].read() == b"SOME WORDS"
    for secret in (environment["AWS_SECRET_ACCESS_KEY"], "X-Amz-Signature"):
        assert secret not in builtin.text + handler.text


def test_a_new_gateway_starts_warm(start: Start, folder: Path, client_of: Callable[[Gateway], Any]) -> None:
    """With ``--results``, what one gateway has produced is not produced again by another one, whose cache is empty."""
    (folder / "derived").mkdir()
    runs = 'penstock_gateway_result_runs_total{access_point="made",outcome="ok"}'
    first = start("--transform", "gzip", "--results", "derived")
    data = client_of(first).get_object(Bucket="made", Key="a.tar")["Body"].read()
    wait_until(lambda: first.metric(runs) == 1)  # it is counted after the last byte was sent
    assert first.stop() == 0
    assert list((folder / "derived").rglob("*.json"))
    second = start("--transform", "gzip", "--results", "derived", "--cache", "empty:100MB")
    answer = client_of(second).get_object(Bucket="made", Key="a.tar")
    assert answer["Body"].read() == data
    wait_until(lambda: second.metric("penstock_gateway_derived_read_bytes_total") == len(data))


def test_an_authors_function_by_a_file(start: Start, folder: Path, client_of: Callable[[Gateway], Any]) -> None:
    """A TOML file names a function in a module beside it, with arguments; a plain access point stands next to it."""
    (folder / "apart").mkdir()
    (folder / "apart" / "mine.py").write_text(
        "def times(reader, request, count: int = 1):\n    return reader.read() * count\n"
    )
    (folder / "apart" / "gateway.toml").write_text(
        "port = 0\ncache = 'none'\n"
        "[access_points.plain]\nupstream = '../data'\n"
        "[access_points.twice]\nupstream = '../data'\ntransform = 'mine:times'\nprocesses = 1\narguments = { count = 2 }\n"
    )
    gateway = Gateway("--config", "apart/gateway.toml", folder=folder)
    try:
        client = client_of(gateway)
        assert client.get_object(Bucket="plain", Key="words.txt")["Body"].read() == b"some words"
        assert client.get_object(Bucket="twice", Key="words.txt")["Body"].read() == b"some wordssome words"
        assert [each["Name"] for each in client.list_buckets()["Buckets"]] == ["plain", "twice"]
        assert gateway.stop() == 0
    finally:
        if gateway.process.poll() is None:
            gateway.kill()


@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_a_result_is_streamed_by_tls(start: Start, folder: Path, pieces: int) -> None:
    """A result in several pieces arrives by HTTPS while it is produced, however many writes it takes."""
    (folder / "mine.py").write_text(
        "def repeat(reader, request, count: int = 1):\n    data = reader.read()\n    yield from [data] * count\n"
    )
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "key.pem").chmod(0o600)
    issued.cert_chain_pems[0].write_to_path(folder / "chain.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    gateway = start(
        "--tls-certificate", "chain.pem", "--tls-key", "key.pem", "--transform", "./mine.py:repeat", "--argument",
        f"count={pieces}", "--name", "repeated", "--length", "stream", "--processes", "1",
    )  # fmt: skip
    for name in ("words.txt", "a.tar"):
        source = (folder / "data" / name).read_bytes()
        assert gateway.get(f"/repeated/{name}", context=context) == source * pieces


HOOKS = """
    port = 0
    cache = "cache:100MB"
    [access_points.made]
    upstream = "data/"
    [access_points.hook]
    upstream = "data/"
    webhook = {{ url = "{url}/-/webhook/packed", token = "long-token" }}
    [access_points.packed]
    upstream = "data/"
    transform = "gzip"
    [webhook_service]
    token = "long-token"
    source_hosts = ["127.0.0.1"]
"""


def test_a_gateway_is_the_webhook_of_another_one(folder: Path, client_of: Callable[[Gateway], Any]) -> None:
    """MinIO's dialect on both sides: one gateway calls the other's transform, for a bucket that has none of its own."""
    gateways = []
    try:
        for url in ("http://127.0.0.1:9", ""):
            (folder / "gateway.toml").write_text(textwrap.dedent(HOOKS).format(url=url or gateways[0].url))
            gateways.append(Gateway("--config", "gateway.toml", folder=folder))
        client = client_of(gateways[1])
        arn = "arn:minio:s3-object-lambda::hook:webhook"
        client.meta.events.register(
            "before-sign.s3.GetObject", lambda request, **_: request.params.update(lambdaArn=arn)
        )
        data = client.get_object(Bucket="made", Key="words.txt")["Body"].read()
        assert gzip.decompress(data) == b"some words"
        assert gateways[0].get("/-/webhook/packed", method="HEAD") == b""
        with pytest.raises(urllib.error.HTTPError, match="403"):
            gateways[0].get("/-/webhook/packed", method="POST")
        assert [gateway.stop() for gateway in gateways] == [0, 0]
    finally:
        for gateway in gateways:
            if gateway.process.poll() is None:
                gateway.kill()


SLOW = """
    import time
    def slow(reader, request):
        time.sleep(30)
        return b""
"""


@pytest.mark.parametrize(("option", "code"), [("--lambda", "LambdaTimeout"), ("--transform", "TransformTimeout")])
def test_one_limit_of_time(
    start: Start, folder: Path, client_of: Callable[[Gateway], Any], option: str, code: str
) -> None:
    """What takes too long is a 400, which clients do not try again: the limit of the transform is the first to be reached."""
    (folder / "late.py").write_text(textwrap.dedent(SLOW))
    gateway = start(option, "late:slow", "--timeout", "500ms")
    with pytest.raises(ClientError, match=code):
        client_of(gateway).get_object(Bucket="made", Key="words.txt")
    assert gateway.stop() == 0


def test_the_internal_endpoint_is_closed(start: Start, folder: Path) -> None:
    """Nobody reads there without a URL that was signed, for the time limit and a minute, and nobody sends an answer unasked."""
    reveal = UPPER.replace("data.upper()", 'where["inputS3Url"].encode()')
    (folder / "app.py").write_text(textwrap.dedent(reveal))
    gateway = start("--lambda", "app:lambda_handler", "--timeout", "30s")
    url = gateway.get("/made/words.txt").decode()
    assert "X-Amz-Expires=90&" in url
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        assert answer.read() == b"some words"
    bare = url.partition("?")[0]
    assert bare.startswith("http://127.0.0.1:")
    endpoint = bare.removesuffix("/made/words.txt")
    refused = [
        bare,
        url.replace("words.txt", "a.tar"),
        re.sub(r"X-Amz-Signature=.", "X-Amz-Signature=x", url),
        f"{endpoint}/",
        f"{endpoint}/-/metrics",
        f"{endpoint}/WriteGetObjectResponse",
    ]
    for each in refused:
        with pytest.raises(urllib.error.HTTPError, match=r"40[035]"):
            urllib.request.urlopen(each, timeout=WAIT_S)


def test_the_example(tmp_path: Path) -> None:
    """The example starts a gateway, reads TFRecords from a tar through it, and ends."""
    command = [sys.executable, "-W", "error", str(Path(__file__).parents[3] / "examples/gateway_tfrecord.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3200 bytes of TFRecord from a tar of ")


BROKEN = {
    "unknown": (["--transform", "tar2tfrecrod"], "tar2tfrecrod"),
    "argument": (["--transform", "gzip", "--argument", "levle=3"], "levle"),
    "module": (["--transform", "nowhere:function"], "nowhere"),
    "handler": (["--lambda", "nowhere:handler", "--lambda-dir", "."], "nowhere"),
    "both": (["--transform", "gzip", "--lambda", "a:b"], "--transform and --lambda cannot be combined"),
    "writing": (["--transform", "gzip", "--read-write"], "--read-write cannot be combined with transform"),
}


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("case", BROKEN)
def test_a_transform_that_cannot_start(folder: Path, case: str, workers: str) -> None:
    """The gateway ends with code 2 and says why before it has announced itself; it does not start the worker for ever."""
    more, message = BROKEN[case]
    base = ["--upstream", "data", "--name", "made", "--port", "0", "--cache", "none", "--processes", "1"]
    command = [sys.executable, "-W", "default", "-m", "penstock", "gateway", *base, "--workers", workers, *more]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "ResourceWarning" not in done.stderr
    assert "serving" not in done.stderr


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "new"])
def test_results_that_are_listed_with_sizes_of_sources(start: Start, folder: Path, is_kept: bool) -> None:
    """Whoever reads all that is listed gets whole results, although ETag and size in the listing belong to two objects."""
    data = {f"{number}.txt": b"%d" % number * 9000 for number in range(5)}
    for key, text in data.items():
        (folder / "data" / key).write_bytes(text)
    gateway = start("--transform", "gzip", "--list-sizes", "source")
    if is_kept:
        for key in data:
            gateway.get(f"/made/{key}")
    with ps.connect("s3://made", endpoint_url=gateway.url, anonymous=True) as store:
        plan = [
            PlanItem(each.key, etag=each.etag, size_bytes=each.size_bytes) for each in store.list() if each.key in data
        ]
        assert {blob.key: gzip.decompress(blob.data) for blob in store.read_many(plan)} == data
