"""A whole gateway in processes of its own, against clients that mean harm and files that change under way."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import textwrap
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from fronts import s3_client
from servers.gateway import Gateway

pytestmark = pytest.mark.server

SECRET = "a-secret-of-the-usual-length"
Start = Callable[..., Gateway]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts gateways that end with the test."""
    started: list[Gateway] = []

    def make(*arguments: str, **environment: str) -> Gateway:
        folder = tmp_path / f"gateway{len(started)}"
        folder.mkdir()
        started.append(Gateway(*arguments, "--port", "0", folder=folder, environment=environment))
        return started[-1]

    yield make
    for each in started:
        if each.process.poll() is None:
            each.kill()


def client_of(gateway: Gateway, access_key: str, secret_key: str = SECRET, **options: Any) -> Any:
    return s3_client(gateway.url, aws_access_key_id=access_key, aws_secret_access_key=secret_key, **options)


def code_of(call: Callable[..., Any], **arguments: Any) -> str:
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    return str(caught.value.response["Error"]["Code"])


SCOPES = """
directory = "{root}"
read_write = true

[access_points.secret]
upstream = "{root}/secret-files"
keys = ["owner"]
"""


WAYS = [
    "secret/k", "/secret/k", "//secret/k", "%73ecret/k", "secret%2Fk", "secret/k?versionId=null",
    "arn:aws:s3:us-east-1:000000000000:accesspoint/secret/object/k",
    "arn%3Aaws%3As3%3Aus-east-1%3A000000000000%3Aaccesspoint%2Fsecret%2Fobject%2Fk",
    "arn:aws:s3-object-lambda:us-east-1:000000000000:accesspoint/secret/object/k",
]  # fmt: skip


def test_no_copy_reads_what_its_caller_may_not(start: Start, tmp_path: Path) -> None:
    """Whatever way a copy names the source's bucket, the caller's key must be good for it."""
    root, outside = tmp_path / "root", tmp_path / "secret-files"
    (root / "open").mkdir(parents=True)
    outside.mkdir()
    (outside / "k").write_bytes(b"the secret")
    (tmp_path / "gateway.toml").write_text(SCOPES.format(root=root).replace(f"{root}/secret-files", str(outside)))
    keys = f"owner:{SECRET}:rw,other:{SECRET}:rw,narrow:{SECRET}:rw:open"
    gateway = start("--config", str(tmp_path / "gateway.toml"), PENSTOCK_GATEWAY_KEYS=keys)
    assert client_of(gateway, "owner").get_object(Bucket="secret", Key="k")["Body"].read() == b"the secret"
    for name in ("other", "narrow"):
        client = client_of(gateway, name)
        assert code_of(client.get_object, Bucket="secret", Key="k") == "AccessDenied"
        upload = client.create_multipart_upload(Bucket="open", Key="stolen")["UploadId"]
        for source in WAYS:
            code = code_of(client.copy_object, Bucket="open", Key="stolen", CopySource=source)
            assert code in ("AccessDenied", "InvalidArgument", "NoSuchBucket"), source
            where = {"Bucket": "open", "Key": "stolen", "UploadId": upload, "PartNumber": 1, "CopySource": source}
            assert code_of(client.upload_part_copy, **where) == code, source
    assert not (root / "open" / "stolen").exists()


class Telling(BaseHTTPRequestHandler):
    """A webhook that answers with what it was told about the client."""

    def do_POST(self) -> None:
        event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps([event["userIdentity"], event["userRequest"]]).encode()
        self.send_response(200)
        self.send_header("x-amz-request-route", event["getObjectContext"]["outputRoute"])
        self.send_header("x-amz-request-token", event["getObjectContext"]["outputToken"])
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def serve() -> Iterator[Callable[[type[BaseHTTPRequestHandler]], str]]:
    """Starts servers of a class of answers, each on a thread, and returns their URLs."""
    with ExitStack() as stack:

        def begin(answers: type[BaseHTTPRequestHandler]) -> str:
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), answers))
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}"

        yield begin


TELLING = """
    import json, boto3
    s3 = boto3.client("s3")
    def handler(event, context):
        where = event["getObjectContext"]
        body = json.dumps([event["userIdentity"], event["userRequest"]]).encode()
        s3.write_get_object_response(Body=body, RequestRoute=where["outputRoute"], RequestToken=where["outputToken"])
"""
TENANTS = """
    [access_points.plain]
    upstream = "{root}"
    [access_points.closed]
    upstream = "{root}"
    webhook = {{ url = "{telling}" }}
    keys = ["alice"]
    [access_points.hook]
    upstream = "{root}"
    webhook = {{ url = "{telling}" }}
    [access_points.shared]
    upstream = "{root}"
    webhook = {{ url = "{telling}", varies_by = ["Accept-Language"] }}
    [access_points.handler]
    upstream = "{root}"
    handler = {{ handler = "app:handler", code_dir = "{root}" }}
    processes = 1
"""
ARN = "arn:minio:s3-object-lambda::{}:webhook"


@pytest.fixture
def tenants(start: Start, tmp_path: Path, serve: Any) -> Callable[..., tuple[int, str]]:
    """Reads an object of a gateway with two tenants: status and body for a key, an access point and headers."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_bytes(b"x")
    (root / "app.py").write_text(textwrap.dedent(TELLING))
    (tmp_path / "gateway.toml").write_text(textwrap.dedent(TENANTS).format(root=root, telling=serve(Telling)))
    keys = f"alice:{SECRET}:rw,bob:{SECRET}:rw,narrow:{SECRET}:ro:plain"
    gateway = start("--config", str(tmp_path / "gateway.toml"), PENSTOCK_GATEWAY_KEYS=keys)

    def read(who: str, where: str, *, method: str = "GET", arn: str = "", **headers: str) -> tuple[int, str]:
        client = client_of(gateway, who)
        if arn:
            client.meta.events.register("before-sign.s3", lambda request, **_: request.params.update(lambdaArn=arn))
        url = client.generate_presigned_url(f"{method.lower()}_object", {"Bucket": where, "Key": "a"})
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=sent, method=method), timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return read


@pytest.mark.parametrize("where", ["hook", "handler"])
def test_no_answer_for_one_client_reaches_another(tenants: Callable[..., tuple[int, str]], where: str) -> None:
    """What clients with one key send, and who they are, is in no answer for another client."""
    headers = ("Cookie", "Accept_Language", "X_Forwarded_For", "Referer", "Origin", "User_Agent", "X_Own", "Forwarded")
    for name in headers:
        for value in ("of-one", "of-two"):
            status, body = tenants("alice", where, **{name: value})
            other = {"of-one": "of-two", "of-two": "of-one"}[value]
            assert status == 200, body
            assert other not in body, (name, body)
    assert "bob" in tenants("bob", where)[1]
    assert "bob" not in tenants("alice", where)[1]


def test_what_varies_by_names_reaches_a_webhook(tenants: Callable[..., tuple[int, str]]) -> None:
    """With `varies_by`, callers share answers, which show the headers that it names and no caller."""
    german, french = (tenants("alice", "shared", Accept_Language=value, Cookie="mine") for value in ("de", "fr"))
    assert (german, french) == tuple(tenants("bob", "shared", Accept_Language=value) for value in ("de", "fr"))
    assert german != french
    for _, body in (german, french):
        assert "mine" not in body
        assert "alice" not in body


def test_no_webhook_runs_for_a_key_that_may_not_use_it(tenants: Callable[..., tuple[int, str]]) -> None:
    """A key that may use a bucket runs no webhook on it by ``lambdaArn`` that it may not use by name."""
    assert tenants("alice", "plain", arn=ARN.format("closed"))[0] == 200
    assert tenants("bob", "plain", arn=ARN.format("hook"))[0] == 200
    for who, hook in (("bob", "closed"), ("narrow", "closed"), ("narrow", "hook")):
        for method in ("GET", "HEAD"):
            assert tenants(who, hook, method=method)[0] == 403
            assert tenants(who, "plain", method=method, arn=ARN.format(hook))[0] == 403


class Stored(BaseHTTPRequestHandler):
    """An S3 endpoint with one object; its ETag says nothing about its bytes, which the server has as ``body``."""

    protocol_version = "HTTP/1.1"
    body = b""

    def do_GET(self) -> None:
        listing = (
            '<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>a</Key>'
            f"<Size>{len(self.body)}</Size><ETag>&quot;1-1&quot;</ETag>"
            "<LastModified>2026-01-01T00:00:00Z</LastModified></Contents></ListBucketResult>"
        )
        body = listing.encode() if "list-type" in self.path else self.body
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        for name, value in (("ETag", '"1-1"'), ("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        return


ENDPOINTS = """
    cache = "{cache}:100MB,free_ratio_min=0"
    {results}
    [access_points.made]
    upstream = "s3://bucket"
    upstream_options = {{ endpoint_url = "{first}", anonymous = true }}
    transform = "gzip"
    processes = 1
    [access_points.plain]
    upstream = "s3://bucket"
    upstream_options = {{ endpoint_url = "{first}", anonymous = true }}
    [access_points.other]
    upstream = "s3://bucket"
    upstream_options = {{ endpoint_url = "{second}", anonymous = true }}
    transform = "gzip"
    processes = 1
"""


@pytest.mark.parametrize("results", ["", 'results = "{root}"'])
def test_results_of_two_endpoints_are_not_mixed(start: Start, tmp_path: Path, serve: Any, results: str) -> None:
    """One key and one ETag at two endpoints are two sources, in one gateway and in two that share a cache or a bucket."""
    (tmp_path / "results").mkdir()
    first, second = (serve(type("Server", (Stored,), {"body": body})) for body in (b"of the first", b"of the second"))
    gateways = []
    for number, urls in enumerate([(first, second), (second, first)]):
        text = textwrap.dedent(ENDPOINTS).format(
            cache=tmp_path / f"cache{number if results else ''}",
            results=results.format(root=tmp_path / "results"),
            first=urls[0],
            second=urls[1],
        )
        (tmp_path / "gateway.toml").write_text(text)
        gateways.append(start("--config", str(tmp_path / "gateway.toml")))
    for one, two in (("made", "other"), ("other", "made")):
        assert gzip.decompress(gateways[0].get(f"/{one}/a")) == (b"of the first" if one == "made" else b"of the second")
        assert gzip.decompress(gateways[1].get(f"/{two}/a")) == (
            b"of the first" if two == "other" else b"of the second"
        )
    assert [gateways[index].get("/plain/a") for index in (0, 1)] == [b"of the first", b"of the second"]


class Guarded(Stored):
    """The same, only for signed requests."""

    body = b"for those who sign"

    def do_GET(self) -> None:
        if "Authorization" in self.headers:
            super().do_GET()
        else:
            self.send_error(403)

    do_HEAD = do_GET


GUARDED = """
    cache = "cache:100MB,free_ratio_min=0"
    metadata_ttl_s = "1h"
    [access_points.signing]
    upstream = "s3://bucket"
    upstream_options = {{ endpoint_url = "{url}" }}
    [access_points.anonymous]
    upstream = "s3://bucket"
    upstream_options = {{ endpoint_url = "{url}", anonymous = true }}
"""


def test_what_one_identity_read_is_not_known_to_another(start: Start, tmp_path: Path, serve: Any) -> None:
    """Even if versions are believed for an hour, an access point reads nothing that its upstream refuses to it."""
    (tmp_path / "gateway.toml").write_text(textwrap.dedent(GUARDED).format(url=serve(Guarded)))
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    gateway = start("--config", str(tmp_path / "gateway.toml"), **keys)
    for _ in range(2):
        assert gateway.get("/signing/a") == Guarded.body
        with pytest.raises(urllib.error.HTTPError, match="403"):
            gateway.get("/anonymous/a")


class Cut(Stored):
    """The same, but a GET sends a well-formed answer that is shorter than the object, until ``is_mended``."""

    body = bytes(range(256)) * 6250
    is_mended = False
    is_chunked = False

    def do_GET(self) -> None:
        if self.command == "HEAD" or "list-type" in self.path:
            super().do_GET()
            return
        data = self.body if self.is_mended else self.body[:-1000]
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        self.send_response(200 if span is None else 206)
        if span is not None:
            first, last = int(span[1]), min(int(span[2] or len(data)), len(data) - 1)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            data = data[first : last + 1]
        self.send_header("ETag", '"1-1"')
        if self.is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
        else:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_HEAD = do_GET


CUT = """
    cache = {cache}
    [access_points.plain]
    upstream = "s3://bucket"
    upstream_options = {{ endpoint_url = "{url}", anonymous = true }}
    [access_points.gzip]
    upstream = "s3://bucket"
    upstream_options = {{ endpoint_url = "{url}", anonymous = true }}
    transform = "gzip"
    processes = 1
    [access_points.reading]
    upstream = "s3://bucket"
    upstream_options = {{ endpoint_url = "{url}", anonymous = true }}
    transform = "copy.py:{how}"
    folder = "{folder}"
    processes = 1
    [access_points.handler]
    upstream = "s3://bucket"
    upstream_options = {{ endpoint_url = "{url}", anonymous = true }}
    handler = {{ handler = "copy:handler", code_dir = "{folder}" }}
    processes = 1
"""
COPY = """
    import urllib.request
    def read(reader, request):
        return reader.read()
    def pieces(reader, request):
        while data := reader.read(100_000):
            yield data
    def handler(event, context):
        import boto3
        where = event["getObjectContext"]
        data = urllib.request.urlopen(where["inputS3Url"]).read()
        boto3.client("s3").write_get_object_response(
            Body=data, RequestRoute=where["outputRoute"], RequestToken=where["outputToken"])
"""


@pytest.mark.parametrize("how", ["read", "pieces"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunks"])
@pytest.mark.parametrize("cache", ['"none"', '"cache:100MB,free_ratio_min=0"'], ids=["none", "cache"])
def test_nothing_is_made_of_a_source_that_is_cut(
    start: Start, tmp_path: Path, serve: Any, how: str, is_chunked: bool, cache: str
) -> None:
    """If GET and HEAD state two sizes for one ETag, reading fails and nothing is kept; later the whole object is read."""
    (tmp_path / "copied.py").write_text(textwrap.dedent(COPY))
    answers = type("Answers", (Cut,), {"is_chunked": is_chunked})
    text = textwrap.dedent(CUT.replace("copy.py", "copied.py").replace("copy:", "copied:"))
    (tmp_path / "gateway.toml").write_text(text.format(url=serve(answers), folder=tmp_path, how=how, cache=cache))
    gateway = start("--config", str(tmp_path / "gateway.toml"))
    for name in ("gzip", "reading", "handler", "plain"):
        if name == "plain":  # which has heard of no size yet
            gateway.get("/plain/a", method="HEAD")
        with pytest.raises((urllib.error.HTTPError, http.client.IncompleteRead, ConnectionError)):
            gateway.get(f"/{name}/a")
    answers.is_mended = True
    found = {name: gateway.get(f"/{name}/a") for name in ("gzip", "reading", "handler", "plain")}
    found["gzip"] = gzip.decompress(found["gzip"])
    assert {name: len(data) for name, data in found.items()} == dict.fromkeys(found, len(Cut.body))
    assert set(found.values()) == {Cut.body}
