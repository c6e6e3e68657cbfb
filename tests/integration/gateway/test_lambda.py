"""Unchanged Lambda handlers in their own interpreters, which answer by boto3."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.gateway.config import LambdaConfig
from penstock.gateway.objects import S3Error
from servers.lambda_endpoint import endpoint
from servers.leaks import has_ended

pytestmark = pytest.mark.server

UPPER = """
    import urllib.request, boto3
    s3 = boto3.client("s3")
    def lambda_handler(event, context):
        where = event["getObjectContext"]
        data = urllib.request.urlopen(where["inputS3Url"]).read()
        s3.write_get_object_response(
            Body=data.upper(), RequestRoute=where["outputRoute"], RequestToken=where["outputToken"],
            ContentType="text/plain", Metadata={"made": "here"})
        return {"status_code": 200}
"""


@pytest.fixture
def handler(tmp_path: Path) -> Callable[..., LambdaConfig]:
    """``handler(source, **settings)`` writes a module and describes its function ``lambda_handler``."""

    def write(source: str, **settings: Any) -> LambdaConfig:
        (tmp_path / "app.py").write_text(textwrap.dedent(source))
        settings = {"memory_bytes_max": 0, "time_s_max": 30.0} | settings
        return LambdaConfig(handler="app.lambda_handler", code_dir=str(tmp_path), **settings)

    return write


def test_an_unchanged_handler_answers(handler: Callable[..., LambdaConfig]) -> None:
    """A handler that uses boto3 as on AWS produces the result, with its headers."""

    async def run() -> None:
        async with endpoint() as server:
            transform = server.transform(handler(UPPER))
            await transform.start()
            result = await server.run(transform)
            assert bytes(result.data) == b"HELLO WORLD"
            assert result.size_bytes == 11
            assert result.headers == {"Content-Type": "text/plain", "x-amz-meta-made": "here"}
            assert len(server.internal.responses) == 0

    asyncio.run(run())


STREAMING = """
    import boto3
    from botocore.config import Config
    s3 = boto3.client("s3", config=Config(s3={"payload_signing_enabled": False}))

    class Pieces:
        def __init__(self, pieces):
            self.pieces = pieces
        def read(self, size=-1):
            return next(self.pieces, b"")

    def lambda_handler(event, context):
        where = event["getObjectContext"]
        def pieces():
            for number in range(3):
                if number == 2 and event["configuration"]["payload"] == "fail":
                    raise KeyError("the third piece")
                yield b"%d" % number * 100_000
        s3.write_get_object_response(
            Body=Pieces(pieces()), RequestRoute=where["outputRoute"], RequestToken=where["outputToken"])
"""


def test_a_handler_streams_a_body_of_unknown_length(handler: Callable[..., LambdaConfig]) -> None:
    """A body without a length arrives in pieces, chunked and unsigned."""

    async def run() -> None:
        async with endpoint() as server:
            result = await server.run(server.transform(handler(STREAMING)))
            assert bytes(result.data) == b"0" * 100_000 + b"1" * 100_000 + b"2" * 100_000
            assert result.size_bytes is None
            assert server.posts[0]["Transfer-Encoding"] == "chunked"

    asyncio.run(run())


def test_a_body_that_ends_early_is_no_result(handler: Callable[..., LambdaConfig]) -> None:
    """If the handler fails while it streams, the run fails."""

    async def run() -> None:
        async with endpoint() as server:
            with pytest.raises(S3Error) as caught:
                await server.run(server.transform(handler(STREAMING, payload="fail")))
            assert caught.value.code in ("ConnectionClosedByRequester", "LambdaRuntimeError")
            assert len(server.internal.responses) == 0

    asyncio.run(run())


FAILURES = {
    "raises": ("raise KeyError('x')", "LambdaRuntimeError", "The handler failed: KeyError."),
    "exits": ("import sys; sys.exit(3)", "LambdaRuntimeError", "The handler failed: SystemExit."),
    "crashes": ("import os; os._exit(3)", "LambdaRuntimeError", "The handler's process ended: 3."),
    "is_killed": (
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "LambdaRuntimeError",
        "The handler's process was killed.",
    ),
    "takes_memory": ("x = bytearray(2 << 30)", "LambdaRuntimeError", "The handler failed: MemoryError."),
    "hangs": ("import threading; threading.Event().wait()", "LambdaTimeout", "The handler took longer than 1 s."),
    "floods": (
        "import sys\nwhile True: sys.stdout.write('x' * 1_000_000)",
        "LambdaRuntimeError",
        "The handler printed more than 67108864 bytes.",
    ),
    "does_not_answer": ("return {}", "LambdaResponseNotReceived", "The handler returned without calling"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_handler_that_fails_is_a_clear_error(name: str, handler: Callable[..., LambdaConfig]) -> None:
    """Each way to fail has AWS's code and a sentence, and the next call finds a worker that works."""
    line, code, message = FAILURES[name]
    body = textwrap.indent(line, " " * 8)
    source = f"def lambda_handler(event, context):\n    if 'fail' in event['userRequest']['url']:\n{body}\n    return 1"
    memory = 1 << 30 if name == "takes_memory" else 0

    async def run() -> None:
        async with endpoint() as server:
            config = handler(source, time_s_max=30.0 if name == "floods" else 1.0, memory_bytes_max=memory)
            transform = server.transform(config)
            await transform.start()
            for _ in range(2):
                with pytest.raises(S3Error) as caught:
                    await server.run(transform, query={"fail": ""})
                assert caught.value.code == code
                assert caught.value.message.startswith(message)
            with pytest.raises(S3Error, match="LambdaResponseNotReceived"):
                await server.run(transform)

    asyncio.run(run())


IMPORTS = {
    "fails": ("import urllib.does_not_exist", "ModuleNotFoundError"),
    "has_no_function": ("x = 1", "has no function 'lambda_handler'"),
    "is_no_function": ("lambda_handler = 1", "is not a function"),
    "exits": ("import sys; sys.exit('no')", "SystemExit"),
    "crashes": ("import os; os._exit(1)", "ended: 1"),
}


@pytest.mark.parametrize("name", IMPORTS)
def test_a_handler_that_cannot_be_imported_is_refused_at_the_start(
    name: str, handler: Callable[..., LambdaConfig]
) -> None:
    """The gateway's start fails with the handler's traceback, and so does each call."""
    source, expected = IMPORTS[name]

    async def run() -> None:
        async with endpoint() as server:
            transform = server.transform(handler(source))
            with pytest.raises(ConfigError, match="cannot be used") as caught:
                await transform.start()
            assert expected in str(caught.value)
            assert "bootstrap.py" not in str(caught.value)
            with pytest.raises(S3Error, match="LambdaRuntimeError"):
                await server.run(transform)

    asyncio.run(run())


def test_an_interpreter_that_does_not_exist_is_refused(handler: Callable[..., LambdaConfig]) -> None:
    """A wrong path of the interpreter is an error at the start that names it."""

    async def run() -> None:
        async with endpoint() as server:
            with pytest.raises(ConfigError, match="nowhere/python"):
                await server.transform(handler(UPPER, python="nowhere/python")).start()

    asyncio.run(run())


ECHO = """
    import os, logging, sys
    calls = 0
    def lambda_handler(event, context):
        global calls
        calls += 1
        print("first line")
        logging.getLogger().warning("second line")
        print("http://h/k?X-Amz-Signature=5ec4e7", file=sys.stderr)
        c = context
        return {
            "event": event, "calls": calls, "environment": dict(os.environ),
            "remaining": c.get_remaining_time_in_millis(),
            "context": [c.aws_request_id, c.function_name, c.memory_limit_in_mb, c.invoked_function_arn],
        }
"""


def test_events_context_and_environment(handler: Callable[..., LambdaConfig], caplog: pytest.LogCaptureFixture) -> None:
    """A handler sees what AWS would show it, nothing of the upstream's credentials, and its output is in the log."""
    caplog.set_level("INFO", logger="penstock.gateway.lambda")

    async def run() -> None:
        async with endpoint() as server:
            config = handler(ECHO, payload='{"k": 1}', environment={"MODE": "x"}, memory_bytes_max=4 << 30)
            transform = server.transform(config, name="my-ap", account="111122223333", region="eu-west-1")
            headers = {
                "Host": "gateway",
                "Accept-Encoding": "identity",
                "Range": "bytes=0-1",
                "If-Match": '"1"',
                "Authorization": "AWS4-HMAC-SHA256 ...",
                "X-Amz-Date": "20261122T000000Z",
                "X-Amz-Expected-Bucket-Owner": "111122223333",
            }
            query = {"width": "10", "partNumber": "2", "response-content-type": "a/b"}
            for calls in (1, 2):
                answer = await transform.invoke(
                    "HeadObject", server.request(headers=headers, query=query), lambda: "http://127.0.0.1/x"
                )
                assert answer["calls"] == calls
            arn = "arn:aws:lambda:eu-west-1:111122223333:function:my-ap"
            assert answer["context"] == ["REQ1", "my-ap", "4096", arn]
            assert 0 < answer["remaining"] <= 30_000
            event = answer["event"]
            assert event["userRequest"] == {
                "url": "https://my-ap-111122223333.s3-object-lambda.eu-west-1.amazonaws.com/folder/a b.tar?width=10",
                "headers": {
                    "Host": "my-ap-111122223333.s3-object-lambda.eu-west-1.amazonaws.com",
                    "X-Amz-Expected-Bucket-Owner": "111122223333",
                },
            }
            place = "eu-west-1:111122223333:accesspoint/my-ap"
            assert event["configuration"] == {
                "accessPointArn": f"arn:aws:s3-object-lambda:{place}",
                "supportingAccessPointArn": f"arn:aws:s3:{place}",
                "payload": '{"k": 1}',
            }
            assert event["headObjectContext"] == {"inputS3Url": "http://127.0.0.1/x"}
            assert event["xAmzRequestId"] == "REQ1"
            assert event["protocolVersion"] == "1.00"
            assert event["userIdentity"]["accessKeyId"] == "AKUSER"
            environment = answer["environment"]
            assert environment["AWS_SECRET_ACCESS_KEY"] == server.internal.key.secret_key
            assert environment["MODE"] == "x"
            assert environment["LAMBDA_TASK_ROOT"] == config.code_dir
            assert environment["_HANDLER"] == "app.lambda_handler"
            assert environment["AWS_REGION"] == "eu-west-1"
            assert "upstream-secret" not in environment.values()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "upstream-secret")
        patch.setenv("AWS_PROFILE", "upstream-secret")
        asyncio.run(run())
    messages = [record.getMessage() for record in caplog.records]
    assert "my-ap REQ1 first line" in messages
    assert "5ec4e7" not in str(messages)
    assert any(message.endswith("REQ1\\tsecond line") for message in messages)


def test_output_is_logged_up_to_a_bound(handler: Callable[..., LambdaConfig], caplog: pytest.LogCaptureFixture) -> None:
    """A call that prints a hundred thousand lines fills no log, and the next call's output is there again."""
    caplog.set_level("INFO", logger="penstock.gateway.lambda")
    source = """
        import sys
        def lambda_handler(event, context):
            if "many" in event["userRequest"]["url"]:
                sys.stdout.write("x\\n" * 100_000)
                sys.stdout.write("y" * 2_000_000)
            print("last")
            return 1
    """

    async def run() -> None:
        async with endpoint() as server:
            transform = server.transform(handler(source))
            for query in ({"many": ""}, {}):
                request = server.request(query=query)
                assert await transform.invoke("HeadObject", request, lambda: "http://127.0.0.1/") == 1

    asyncio.run(run())
    messages = [record.getMessage() for record in caplog.records]
    assert 100 < len(messages) < 10_200
    assert sum("the rest of this call's output is dropped" in message for message in messages) == 1
    assert messages[-1] == "ap REQ1 last"
    assert max(map(len, messages)) < 20_000


def test_a_cancelled_run_leaves_nothing(
    handler: Callable[..., LambdaConfig], nothing_left: Callable[[], Any], tmp_path: Path
) -> None:
    """Cancelling a run and closing the transform ends processes, descriptors, tasks and temporary folders."""
    source = "import threading, subprocess\ndef lambda_handler(e, c):\n    subprocess.run(['sleep', '1000'])"

    async def run() -> None:
        async with endpoint() as server:
            transform = server.transform(handler(source), processes=2)
            await transform.start()
            runs = [asyncio.create_task(server.run(transform)) for _ in range(4)]
            while len(server.internal.responses) < 2:
                await asyncio.wait(runs, timeout=0.01)
            for task in runs:
                task.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
            assert all(task.cancelled() for task in runs)
            assert len(server.internal.responses) == 0
            await transform.close()
            await transform.close()
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(asyncio.sleep(0))
    with pytest.MonkeyPatch.context() as patch, nothing_left():
        patch.setattr("tempfile.tempdir", str(tmp_path / "t"))
        (tmp_path / "t").mkdir()
        asyncio.run(run())
    assert list((tmp_path / "t").iterdir()) == []


def test_a_process_that_ends_is_noticed_with_all_that_it_started(
    handler: Callable[..., LambdaConfig], tmp_path: Path
) -> None:
    """A child that holds the handler's socket neither delays the error nor outlives the handler."""
    source = """
        import os, time
        from pathlib import Path
        def lambda_handler(event, context):
            child = os.fork()
            if child == 0:
                time.sleep(1000)
            Path(event["configuration"]["payload"]).write_text(str(child))
            os._exit(7)
    """

    async def run() -> None:
        async with endpoint() as server:
            note = tmp_path / "child"
            transform = server.transform(handler(source, payload=str(note), time_s_max=600.0))
            await transform.start()
            with pytest.raises(S3Error, match="process ended: 7"):
                async with asyncio.timeout(30):
                    await server.run(transform)
            await transform.close()
            assert has_ended(int(note.read_text()))

    asyncio.run(run())


def test_calls_share_the_workers(handler: Callable[..., LambdaConfig]) -> None:
    """Twenty calls at once are answered by two processes, each of which imports the handler once."""
    source = """
        import os
        def lambda_handler(event, context):
            return os.getpid()
    """

    async def run() -> None:
        async with endpoint() as server:
            transform = server.transform(handler(source), processes=2)
            request = server.request()
            calls = [transform.invoke("HeadObject", request, lambda: "http://127.0.0.1/") for _ in range(20)]
            assert len(set(await asyncio.gather(*calls))) <= 2

    asyncio.run(run())


def test_code_and_settings_are_part_of_the_identity(handler: Callable[..., LambdaConfig]) -> None:
    """Results of changed code, payload, environment or version are other results; equal ones are the same."""

    async def run() -> None:
        async with endpoint() as server:
            same = {server.transform(handler(UPPER)).identity for _ in range(2)}
            assert len(same) == 1
            others = {
                server.transform(handler(UPPER + "    # changed")).identity,
                server.transform(handler(UPPER, payload="1")).identity,
                server.transform(handler(UPPER, environment={"A": "1"})).identity,
                server.transform(handler(UPPER), version="2").identity,
            }
            assert len(others | same) == 5

    asyncio.run(run())
