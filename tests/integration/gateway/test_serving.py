"""``penstock gateway`` as a program: it starts, serves, reloads, drains and ends, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import trustme
from botocore.config import Config
from botocore.exceptions import ClientError

from penstock.compose import connect
from penstock.errors import UnavailableError
from penstock.testing.ministack import Ministack
from servers.gateway import WAIT_S, Gateway, wait_until
from servers.leaks import is_alive

pytestmark = [pytest.mark.server, pytest.mark.heavy]

DATA = bytes(range(256)) * 40_000  # 10 MB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    (data / "deep").mkdir(parents=True)
    (data / "deep" / "a.bin").write_bytes(DATA)
    return tmp_path


Start = Callable[..., Gateway]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts gateways in front of one directory, and ends what the test did not end."""
    started: list[Gateway] = []

    def begin(*arguments: str, environment: dict[str, str] | None = None) -> Gateway:
        base = ("--upstream", "data", "--name", "data", "--port", "0", "--cache", "cache:100MB")
        gateway = Gateway(*base, *arguments, folder=folder, environment=environment)
        started.append(gateway)
        return gateway

    yield begin
    for gateway in started:
        if gateway.process.poll() is None:
            gateway.kill()


def test_pages_of_configured_origins_may_read(folder: Path) -> None:
    """A browser is told that a page of a configured origin may read, and nothing about another one."""
    text = 'port = 0\ncache = "none"\nworkers = 2\ncors_origins = ["https://example.org"]\n'
    text += '[access_points.data]\nupstream = "data"\n'
    (folder / "gateway.toml").write_text(text)
    gateway = Gateway("--config", "gateway.toml", folder=folder)
    try:
        allowed = []
        for origin in ("https://example.org", "https://example.com"):
            request = urllib.request.Request(
                f"{gateway.url}/data/deep/a.bin", headers={"Origin": origin}, method="HEAD"
            )
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                allowed.append(answer.headers["Access-Control-Allow-Origin"])
        assert allowed == ["https://example.org", None]
        assert gateway.stop() == 0
    finally:
        if gateway.process.poll() is None:
            gateway.kill()


@pytest.mark.parametrize("workers", [1, 2])
def test_boto3_reads_from_it(start: Start, workers: int) -> None:
    """A client reads an object, a range and a listing; SIGTERM ends the gateway with code 0 and no process left."""
    gateway = start("--workers", str(workers))
    client = client_of(gateway)
    assert client.get_object(Bucket="data", Key="deep/a.bin")["Body"].read() == DATA
    assert client.get_object(Bucket="data", Key="deep/a.bin", Range="bytes=5-9")["Body"].read() == DATA[5:10]
    assert [each["Key"] for each in client.list_objects_v2(Bucket="data")["Contents"]] == ["deep/a.bin"]
    assert [each["Name"] for each in client.list_buckets()["Buckets"]] == ["data"]
    with pytest.raises(ClientError, match="NoSuchKey"):
        client.get_object(Bucket="data", Key="nothing")
    client.close()
    processes = gateway.workers()
    assert len(processes) >= (workers if workers > 1 else 0)
    assert gateway.stop() == 0
    assert not any(map(is_alive, processes))
    assert 'GET "/data/deep/a.bin" 206 5 ' in re.sub(r"\?x-id=GetObject", "", gateway.text)


def test_a_write_is_visible_in_all_processes(folder: Path, ministack: Ministack) -> None:
    """With a TTL, what a client has written through one process is read through every other one at once."""
    place = (
        "--upstream",
        f"s3://{ministack.create_bucket()}/",
        "--name",
        "data",
        "--port",
        "0",
        "--cache",
        "cache:100MB",
    )
    settings = ("--workers", "2", "--read-write", "--metadata-ttl", "1h")
    gateway = Gateway(*place, *settings, folder=folder, environment=ministack.environment)
    try:
        for number in range(5):
            value = b"value %d" % number
            client = client_of(gateway)
            client.put_object(Bucket="data", Key="k", Body=value)
            client.close()
            # Each request has a connection of its own, so that both processes answer some of them.
            assert {gateway.get("/data/k") for _ in range(12)} == {value}
    finally:
        gateway.kill()


def test_each_process_stays_on_a_processor_of_its_own(start: Start) -> None:
    """Processes stay on one processor each, on different ones if there are several; with `all`, they use all of them."""
    allowed = os.sched_getaffinity(0)
    gateway = start("--workers", "2")
    used = [os.sched_getaffinity(process_id) for process_id in gateway.workers()]
    assert [len(each) for each in used] == [1, 1]
    assert len(set.union(*used)) == min(2, len(allowed))
    unbound = start("--cpu-affinity", "all")
    assert os.sched_getaffinity(unbound.process.pid) == allowed


def test_metrics_of_all_processes_are_added_up(start: Start) -> None:
    """Each request is counted once, whichever process answered it and whichever is asked; a killed worker's counts remain."""
    gateway = start("--workers", "2")
    for _ in range(20):
        gateway.get("/data/deep/a.bin")
    wait_until(lambda: gateway.metric("penstock_gateway_requests_total") == 20)
    gateway.assert_metrics(
        {
            "penstock_gateway_processes": 2,
            "penstock_gateway_sent_bytes_total": 20 * len(DATA),
            "penstock_gateway_request_seconds_count": 20,
        }
    )
    assert gateway.metric("penstock_cache_hit_bytes_total") >= 10 * len(DATA)
    victim = gateway.workers()[0]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: len(gateway.workers()) == 2 and victim not in gateway.workers())
    wait_until(lambda: gateway.metric("penstock_gateway_processes") == 2)
    gateway.assert_metrics({"penstock_gateway_requests_total": 20})
    assert "worker" in gateway.text
    assert "ended with code -9" in gateway.text
    assert gateway.get("/data/deep/a.bin") == DATA
    assert gateway.stop() == 0


def slow_read(gateway: Gateway) -> socket.socket:
    """A connection on which an object is requested, of which only the beginning was taken."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(WAIT_S)
    client.connect(("127.0.0.1", gateway.port))
    client.sendall(b"GET /data/deep/a.bin HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert client.recv(100).startswith(b"HTTP/1.1 200")
    return client


def read_rest(client: socket.socket) -> int:
    count = 100
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(1 << 20):
            count += len(piece)
    client.close()
    return count


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"])
def test_transfers_are_finished(start: Start, workers: int, number: int, code: int) -> None:
    """A stop accepts no connection any more, and a transfer under way goes on to its last byte."""
    gateway = start("--workers", str(workers))
    client = slow_read(gateway)
    gateway.process.send_signal(number)

    def is_closed() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", gateway.port)) != 0

    wait_until(is_closed)
    assert gateway.process.poll() is None
    assert read_rest(client) > len(DATA)
    assert gateway.process.wait(WAIT_S) == code


@pytest.mark.parametrize("workers", [1, 2])
def test_the_drain_is_bounded(start: Start, workers: int) -> None:
    """A client that takes nothing holds the gateway for the drain's time only, and its transfer visibly fails."""
    gateway = start("--workers", str(workers), "--drain-timeout", "200ms")
    client = slow_read(gateway)
    assert gateway.stop() == 1
    assert read_rest(client) < len(DATA)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_interrupt_ends_at_once(start: Start, workers: int) -> None:
    """Ctrl-C twice waits for no transfer."""
    gateway = start("--workers", str(workers), "--drain-timeout", "10min")
    client = slow_read(gateway)
    processes = gateway.workers()
    gateway.process.send_signal(signal.SIGINT)

    def is_closed() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", gateway.port)) != 0

    wait_until(is_closed)
    assert gateway.stop(signal.SIGINT) == 130
    wait_until(lambda: not any(map(is_alive, processes)))
    assert read_rest(client) < len(DATA)


def test_nothing_survives_a_killed_supervisor(start: Start) -> None:
    """Workers end by themselves when their supervisor is killed, and the port is free."""
    gateway = start("--workers", "2", "--drain-timeout", "1s")
    processes = gateway.workers()
    assert len(processes) >= 2
    gateway.kill()
    wait_until(lambda: not any(map(is_alive, processes)))
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", gateway.port)) != 0


def test_a_port_in_use_is_refused(start: Start, folder: Path) -> None:
    """A second gateway at the same address is told, even though processes of one gateway share the port."""
    gateway = start("--workers", "2")
    command = [sys.executable, "-m", "penstock", "gateway", "--upstream", "data", "--port", str(gateway.port)]
    done = subprocess.run(
        [*command, "--workers", "2"], cwd=folder, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {gateway.port}: Address already in use" in done.stderr


KEYS = "READER:a-long-secret:ro\n"


def client_of(gateway: Gateway, access_key: str = "READER", secret_key: str = "a-long-secret", **more: Any) -> Any:
    config = Config(signature_version="s3v4", s3={"addressing_style": "path"}, retries={"max_attempts": 1})
    return boto3.client(
        "s3", endpoint_url=gateway.url, region_name="us-east-1", aws_access_key_id=access_key, aws_secret_access_key=secret_key,
        config=config, **more,
    )  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
def test_keys_are_reloaded(start: Start, folder: Path, workers: int) -> None:
    """SIGHUP takes new keys; a file that is not valid leaves the old ones in force, and the log says so."""
    keys = folder / "keys.txt"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    gateway = start("--workers", str(workers), "--keys", "keys.txt")
    old, new = client_of(gateway), client_of(gateway, "SECOND", "another-secret")
    assert old.list_buckets()["Buckets"]
    keys.write_text("nonsense")
    gateway.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "the old access keys remain in force" in gateway.text)
    wait_until(lambda: "reloaded nothing; access points, limits" in gateway.text)
    assert old.list_buckets()["Buckets"]
    keys.write_text("SECOND:another-secret:ro\n")
    gateway.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "reloaded 1 access key; access points, limits" in gateway.text)

    def is_new() -> bool:
        try:
            return bool(new.list_buckets()["Buckets"])
        except ClientError:
            return False

    wait_until(is_new)
    assert "a-long-secret" not in gateway.text
    assert "another-secret" not in gateway.text
    old.close()
    new.close()


def test_keys_are_not_inherited(start: Start) -> None:
    """Keys of the environment reach no worker's environment and no argument."""
    gateway = start("--workers", "2", environment={"PENSTOCK_GATEWAY_KEYS": KEYS.strip()})
    client = client_of(gateway)
    assert client.list_buckets()["Buckets"]
    client.close()
    for pid in gateway.workers():
        assert b"a-long-secret" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert b"a-long-secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_tls_is_reloaded(start: Start, folder: Path) -> None:
    """HTTPS with the given certificate; after SIGHUP new connections get the new one, and a wrong one changes nothing."""
    certificates = []
    for name in ("first", "second"):
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(folder / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
        context = ssl.create_default_context()
        authority.configure_trust(context)
        certificates.append(context)
    first, second = certificates

    def install(name: str) -> None:
        (folder / "key.pem").write_bytes((folder / f"{name}.key").read_bytes())
        (folder / "key.pem").chmod(0o600)
        (folder / "chain.pem").write_bytes((folder / f"{name}.pem").read_bytes())

    install("first")
    gateway = start("--tls-certificate", "chain.pem", "--tls-key", "key.pem", "--workers", "2")
    assert gateway.url.startswith("https://")
    assert gateway.get("/data/deep/a.bin", context=first) == DATA
    (folder / "chain.pem").write_bytes((folder / "second.pem").read_bytes())
    gateway.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "the old TLS certificate remains in force" in gateway.text)
    assert gateway.get("/-/health", context=first) == b"ok\n"
    install("second")
    gateway.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "reloaded the TLS certificate" in gateway.text)

    def is_second() -> bool:
        try:
            return gateway.get("/-/health", context=second) == b"ok\n"
        except urllib.error.URLError:
            return False

    wait_until(is_second)
    with socket.create_connection(("127.0.0.1", gateway.port), WAIT_S) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert plain.recv(100) == b""


def test_who_may_see_the_status(start: Start) -> None:
    """The page and the metrics are for this machine: not for requests that were forwarded or that name a foreign host."""
    gateway = start()
    assert b"<h1>penstock gateway</h1>" in gateway.get("/-/")
    assert json.loads(gateway.get("/-/status.json"))["values"]["state"] == "serving"
    assert gateway.get("/-/ready") == b"serving\n"
    for headers in ({"X-Forwarded-For": "127.0.0.1"}, {"Forwarded": "for=1.2.3.4"}, {"Host": "evil.example.com"}):
        for path in ("/-/", "/-/status.json", "/-/metrics"):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                gateway.get(path, headers=headers)
        assert gateway.get("/-/health", headers=headers) == b"ok\n"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        gateway.get("/-/nothing")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(urllib.request.Request(gateway.url + "/-/", method="POST"), timeout=WAIT_S)


def test_an_upstream_that_cannot_be_used_is_seen(folder: Path, ministack: Ministack) -> None:
    """``/-/ready`` and the log say which upstream is wrong, and no client is told that its own request is to blame."""
    bucket = ministack.create_bucket()
    ministack.client().put_object(Bucket=bucket, Key="k", Body=b"sound")
    config = folder / "gateway.toml"
    config.write_text(
        'port = 0\ncache = "none"\n[access_points.data]\nupstream = "data"\n'
        f'[access_points.missing]\nupstream = "s3://{bucket}-missing/"\n'
        f'[access_points.train]\nupstream = "s3://{bucket}/"\nread_write = true\n'
        'upstream_options = {profile = "wrong"}\n'
    )
    keys = folder / "credentials"
    keys.write_text(f"[wrong]\naws_access_key_id = {ministack.access_key}\naws_secret_access_key = {'wrong' * 8}\n")
    environment = ministack.environment | {"AWS_SHARED_CREDENTIALS_FILE": str(keys)}
    gateway = Gateway("--config", "gateway.toml", folder=folder, environment=environment)
    try:
        wait_until(lambda: gateway.text.count("cannot be used") == 2)
        assert "SignatureDoesNotMatch" in gateway.text
        assert "NoSuchBucket" in gateway.text
        with pytest.raises(urllib.error.HTTPError, match="503") as caught:
            gateway.get("/-/ready", headers={"X-Forwarded-For": "1.2.3.4"})
        lines = caught.value.read().decode()
        assert lines == (
            "missing: the upstream's bucket does not exist\ntrain: the upstream refuses the gateway's credentials\n"
        )
        client = client_of(gateway)
        for call in (
            lambda: client.get_object(Bucket="train", Key="k"),
            lambda: client.list_objects_v2(Bucket="train"),
            lambda: client.put_object(Bucket="train", Key="k", Body=b"x"),
        ):
            with pytest.raises(ClientError) as refused:
                call()
            answer = refused.value.response
            assert answer["ResponseMetadata"]["HTTPStatusCode"] == 502
            assert "The gateway could not use its upstream" in answer["Error"]["Message"]
        began_s = time.monotonic()
        with (
            connect("s3://train", endpoint_url=gateway.url, anonymous=True) as store,
            pytest.raises(UnavailableError, match="the gateway's own credentials"),
        ):
            store.read("k")
        assert time.monotonic() - began_s < WAIT_S / 4  # what waiting does not mend is not tried again
        assert client.get_object(Bucket="data", Key="deep/a.bin")["Body"].read() == DATA
    finally:
        gateway.kill()


def test_the_metrics_can_be_opened(start: Start) -> None:
    """With ``--status metrics`` everybody sees the metrics, and still not the page."""
    gateway = start("--status", "metrics")
    headers = {"X-Forwarded-For": "1.2.3.4"}
    assert b"penstock_gateway_processes 1" in gateway.get("/-/metrics", headers=headers)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        gateway.get("/-/", headers=headers)


def test_many_readers_of_the_status(start: Start) -> None:
    """Readers of the metrics that ask at once all get an answer."""
    gateway = start("--workers", "2")
    failures: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(10):
                gateway.get("/-/metrics")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_json_log(start: Start) -> None:
    """Every line of a JSON log is an object, about requests and about the gateway itself."""
    gateway = start("--log-format", "json", "--workers", "2")
    gateway.get("/data/deep/a.bin")
    assert gateway.stop() == 0
    rows = [json.loads(line) for line in gateway.text.splitlines()]
    assert any(row.get("message", "").startswith("serving data") for row in rows)
    assert any(row.get("key") == "deep/a.bin" and row["status"] == 200 for row in rows)


REFUSED = {
    "keys": (["--host", "0.0.0.0"], "without access keys, and everybody could read"),
    "key file": (["--host", "0.0.0.0", "--keys", "open.txt"], "other users can read the file of access keys"),
    "nothing": (["--upstream", "nowhere"], "nowhere is not a directory"),
    "workers": (["--workers", "0"], "workers=0 must be a whole number"),
    "certificate": (["--tls-certificate", "a"], "--tls-key is not given"),
    "choice": (["--log-format", "xml"], "must be one of lines, json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_at_the_start(folder: Path, case: str) -> None:
    """A configuration that cannot or must not be served ends with code 2 and one line that says why."""
    (folder / "open.txt").write_text(KEYS)
    (folder / "open.txt").chmod(0o644)
    more, message = REFUSED[case]
    command = [sys.executable, "-m", "penstock", "gateway", "--upstream", "data", "--port", "0", *more]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
