"""``WriteGetObjectResponse`` over real connections: by boto3, and by clients that break its rules."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import botocore.session
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from penstock.gateway.aws_lambda.responses import PendingResponse
from penstock.gateway.objects import S3Error
from servers.lambda_endpoint import Endpoint, MemoryResult, endpoint

pytestmark = pytest.mark.server

REFUSED = "The body of the request was not taken"


class Handler:
    """Stands in the place of a handler: it knows one event's route and token."""

    def __init__(self, server: Endpoint, pending: PendingResponse, result: MemoryResult) -> None:
        self.server, self.pending, self.result = server, pending, result
        session = botocore.session.Session()
        self._client = session.create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=f"http://127.0.0.1:{server.port}",
            aws_access_key_id=server.internal.key.access_key,
            aws_secret_access_key=server.internal.key.secret_key,
            config=Config(
                inject_host_prefix=False, retries={"total_max_attempts": 1}, s3={"payload_signing_enabled": False}
            ),
        )

    async def write(self, **arguments: Any) -> Any:
        """Answer by boto3."""
        arguments = {"RequestRoute": self.pending.route, "RequestToken": self.pending.token} | arguments
        return await asyncio.to_thread(self._client.write_get_object_response, **arguments)

    async def refused(self, **arguments: Any) -> str:
        """Answer by boto3 and return the code of the error."""
        with pytest.raises(ClientError) as caught:
            await self.write(**arguments)
        return str(caught.value.response["Error"]["Code"])

    async def raw(
        self,
        body: bytes,
        *,
        service: str = "s3-object-lambda",
        secret: str = "",
        method: str = "POST",
        host: str = "",
        is_cut: bool = False,
        **headers: str,
    ) -> bytes:
        """Send a signed request as bytes, and return the answer's bytes."""
        key = self.server.internal.key
        sent = {
            "Host": host or f"127.0.0.1:{self.server.port}",
            "Connection": "close",
            "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
            "x-amz-request-route": self.pending.route,
            "x-amz-request-token": self.pending.token,
        } | {name.replace("_", "-"): value for name, value in headers.items()}
        request = AWSRequest(method, f"http://{sent['Host']}/WriteGetObjectResponse", headers=sent, data=b"")
        SigV4Auth(Credentials(key.access_key, secret or key.secret_key), service, "us-east-1").add_auth(request)
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(f"{method} /WriteGetObjectResponse HTTP/1.1\r\n{head}\r\n".encode() + body)
        answer = b"" if is_cut else await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return answer

    async def client_error(self) -> S3Error:
        """What the reader of the result gets."""
        with pytest.raises(S3Error) as caught:
            await asyncio.wait_for(self.pending.finished, 30)
        return caught.value


@asynccontextmanager
async def handler() -> AsyncIterator[Handler]:
    """A server that expects one answer."""
    async with endpoint() as server:
        result = MemoryResult()
        with server.internal.responses.expect(result) as pending:
            yield Handler(server, pending, result)


def test_all_headers_reach_the_result() -> None:
    """What boto3 can send arrives, except what the gateway knows better."""

    async def run() -> None:
        async with handler() as it:
            await it.write(
                Body=b"abc",
                ContentType="a/b",
                ContentDisposition="my%20%20file.txt",
                ContentLanguage="en",
                ContentEncoding="x",
                CacheControl="no-cache",
                ETag='"theirs"',
                PartsCount=3,
                AcceptRanges="bytes",
                StorageClass="GLACIER",
                TagCount=2,
                VersionId="v",
                ServerSideEncryption="AES256",
                BucketKeyEnabled=True,
                Metadata={"Name": "value"},
                ChecksumSHA256=base64.b64encode(hashlib.sha256(b"abc").digest()).decode(),
            )
            await asyncio.wait_for(it.pending.finished, 30)
            assert bytes(it.result.data) == b"abc"
            assert it.result.headers == {
                "Content-Type": "a/b",
                "Content-Disposition": "my%20%20file.txt",
                "Content-Language": "en",
                "Content-Encoding": "x",
                "Cache-Control": "no-cache",
                "x-amz-storage-class": "GLACIER",
                "x-amz-tagging-count": "2",
                "x-amz-version-id": "v",
                "x-amz-server-side-encryption": "AES256",
                "x-amz-server-side-encryption-bucket-key-enabled": "true",
                "x-amz-meta-name": "value",
                "x-amz-checksum-sha256": "ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0=",
            }

    asyncio.run(run())


def test_a_token_is_valid_once() -> None:
    """The second use is refused, and so are other tokens, other routes and tokens after the end of the run."""

    async def run() -> None:
        async with handler() as it:
            assert await it.refused(Body=b"", RequestToken="other") == "InvalidTokenId"
            assert await it.refused(Body=b"", RequestRoute="other") == "InvalidTokenId"
            await it.write(Body=b"abc")
            assert await it.refused(Body=b"xyz") == "InvalidTokenId"
            assert bytes(it.result.data) == b"abc"
            with it.server.internal.responses.expect(it.result) as other:
                pass
            assert await it.refused(RequestRoute=other.route, RequestToken=other.token) == "InvalidTokenId"

    asyncio.run(run())


def test_errors_of_the_handler_reach_the_client() -> None:
    """Code, message and status are the client's; a forwarded error document supplies them, too."""

    async def run() -> None:
        async with handler() as it:
            await it.write(StatusCode=404, ErrorCode="NoSuchThing", ErrorMessage="not here")
            error = await it.client_error()
            assert (error.status, error.code, error.message) == (404, "NoSuchThing", "not here")
        async with handler() as it:
            document = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>no</Message></Error>"
            await it.write(StatusCode=403, Body=document)
            error = await it.client_error()
            assert (error.status, error.code, error.message) == (403, "AccessDenied", "no")
        async with handler() as it:
            bomb = b"<!DOCTYPE a [<!ENTITY b 'b'>]><Error><Code>Bomb</Code></Error>" + b" " * (1 << 20)
            await it.write(StatusCode=500, Body=bomb)
            assert (await it.client_error()).code == "InternalError"
            assert bytes(it.result.data) == b""

    asyncio.run(run())


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "status": ({"StatusCode": 201}, "ValidationError"),
    "code_with_success": ({"ErrorCode": "NoSuchKey"}, "ValidationError"),
    "code_with_body": ({"StatusCode": 404, "ErrorCode": "NoSuchKey", "Body": b"x"}, "ValidationError"),
    "malformed_code": ({"StatusCode": 404, "ErrorCode": "no-such-key"}, "ValidationError"),
    "two_checksums": ({"ChecksumSHA1": "a", "ChecksumSHA256": "b"}, "ValidationError"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_answers_do_not_use_the_token_up(name: str) -> None:
    """A handler that was refused for its arguments may answer again."""
    arguments, code = INVALID[name]

    async def run() -> None:
        async with handler() as it:
            assert await it.refused(**arguments) == code
            assert not it.pending.is_begun
            await it.write(Body=b"abc")
            await asyncio.wait_for(it.pending.finished, 30)

    asyncio.run(run())


UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "partial": ({"StatusCode": 206, "Body": b"x", "ContentRange": "bytes 0-0/2"}, "LambdaInvalidResponse"),
    "not_modified": ({"StatusCode": 304}, "LambdaInvalidResponse"),
    "wrong_checksum": ({"Body": b"x", "ChecksumCRC32": "AAAAAA=="}, "BadDigest"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_answers_that_are_no_results(name: str) -> None:
    """They fail for the handler, and for the client."""
    arguments, code = UNUSABLE[name]

    async def run() -> None:
        async with handler() as it:
            assert await it.refused(**arguments) == code
            assert (await it.client_error()).code == code

    asyncio.run(run())


def test_a_checksum_that_nobody_here_can_compute_is_not_promised() -> None:
    """The body is taken without it."""

    async def run() -> None:
        async with handler() as it:
            answer = await it.raw(b"abc", Content_Length="3", x_amz_fwd_header_x_amz_checksum_xxhash3="AAAA")
            assert answer.startswith(b"HTTP/1.1 200")
            assert it.result.headers == {}

    asyncio.run(run())


def test_bodies_in_chunks_and_with_a_question_first() -> None:
    """Chunks of any size arrive in order, and ``Expect: 100-continue`` is answered before the body."""

    async def run() -> None:
        async with handler() as it:
            chunks = b"1\r\na\r\n" + b"4\r\nbcde\r\n" + b"10000\r\n" + b"f" * 65536 + b"\r\n0\r\n\r\n"
            crc = base64.b64encode(zlib.crc32(b"abcde" + b"f" * 65536).to_bytes(4, "big")).decode()
            answer = await it.raw(
                chunks,
                Transfer_Encoding="chunked",
                Expect="100-continue",
                x_amz_fwd_header_x_amz_checksum_crc32=crc,
            )
            assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
            assert bytes(it.result.data) == b"abcde" + b"f" * 65536
            assert it.result.size_bytes is None

    asyncio.run(run())


CUT = {
    "length": (b"abc", {"Content_Length": "10"}),
    "chunk": (b"a\r\nabc", {"Transfer_Encoding": "chunked"}),
    "no_last_chunk": (b"3\r\nabc\r\n", {"Transfer_Encoding": "chunked"}),
}


@pytest.mark.parametrize("name", CUT)
def test_a_body_that_is_cut_off_is_no_result(name: str) -> None:
    """The run fails, with Object Lambda's code."""
    body, headers = CUT[name]

    async def run() -> None:
        async with handler() as it:
            await it.raw(body, is_cut=True, **headers)
            assert (await it.client_error()).code == "ConnectionClosedByRequester"

    asyncio.run(run())


def test_a_malformed_chunk_is_refused() -> None:
    """A chunk that is longer than its length says is no part of a result."""

    async def run() -> None:
        async with handler() as it:
            answer = await it.raw(b"3\r\nabcdef\r\n0\r\n\r\n", Transfer_Encoding="chunked")
            assert b" 400 " in answer.partition(b"\r\n")[0]
            assert not it.pending.is_complete

    asyncio.run(run())


STRANGERS: dict[str, tuple[dict[str, Any], bytes]] = {
    "wrong_secret": ({"secret": "another secret of this length"}, b"SignatureDoesNotMatch"),
    "wrong_service": ({"service": "s3"}, b"InvalidSignature"),
    "other_service": ({"service": "ec2"}, b"<Code>"),
    "other_method": ({"method": "PUT"}, b"MethodNotAllowed"),
    "other_route_in_host": ({"host": "io-0000.localhost"}, b"ValidationError"),
    "no_token": ({"x_amz_request_token": ""}, b"ValidationError"),
    "promised_another_body": ({"x_amz_content_sha256": hashlib.sha256(b"xyz").hexdigest()}, b"SHA256Mismatch"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_are_refused(name: str) -> None:
    """Without the right signature for the right service, and the right body, nothing becomes a result."""
    settings, code = STRANGERS[name]

    async def run() -> None:
        async with handler() as it:
            answer = await it.raw(b"abc", Content_Length="3", **settings)
            assert answer.startswith(b"HTTP/1.1 40")
            assert code in answer
            assert not it.pending.is_complete

    asyncio.run(run())


def test_unsigned_answers_are_refused() -> None:
    """The token alone is not enough."""

    async def run() -> None:
        async with handler() as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.server.port)
            head = f"x-amz-request-route: {it.pending.route}\r\nx-amz-request-token: {it.pending.token}\r\n"
            writer.write(
                f"POST /WriteGetObjectResponse HTTP/1.1\r\nHost: x\r\n{head}Content-Length: 0\r\n\r\n".encode()
            )
            assert (await reader.readline()).startswith(b"HTTP/1.1 403")
            writer.close()
            assert not it.pending.is_begun

    asyncio.run(run())


def test_a_result_that_is_too_long_ends_the_answer() -> None:
    """The writer's refusal reaches the handler and the client."""

    async def run() -> None:
        async with handler() as it:
            it.result.write_bytes_max = 10
            assert await it.refused(Body=b"x" * 100) == "EntityTooLarge"
            assert (await it.client_error()).code == "EntityTooLarge"

    asyncio.run(run())


def test_a_run_that_is_cancelled_stops_the_answer() -> None:
    """When nobody wants the result any more, the body is no longer read, and the handler is told."""

    async def run() -> None:
        async with handler() as it:
            sending = asyncio.create_task(
                it.raw(b"", Content_Length="1000000")  # the body never comes
            )
            while not it.pending.is_begun:
                await asyncio.wait([sending], timeout=0.005)
                if sending.done():
                    break
            it.pending.close()
            assert b"HTTP/1.1 400" in await sending

    asyncio.run(run())
