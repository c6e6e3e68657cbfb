"""A Lambda handler as a transform: its answer to a ``GetObject`` event is the result."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import MIB
from penstock.errors import ConfigError
from penstock.gateway.aws_lambda.events import arguments_of, event_of, required_headers, seen_request
from penstock.gateway.aws_lambda.worker import HandlerPool, HandlerSettings
from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.gateway.aws_lambda.responses import InternalEndpoint, PendingResponse
    from penstock.gateway.config import AccessPoint
    from penstock.gateway.objects import GatewayRequest, ResultWriter, Source
    from penstock.types import ByteRange, ObjectInfo

FILES_MAX = 10_000
CONTENT_BYTES_MAX = 16 * MIB
"""Files larger than this, in bytes, that are not Python modules count by their size only."""
LEFT_OUT = frozenset({"__pycache__", "node_modules"})


class LambdaTransform:
    """Runs an unchanged handler of S3 Object Lambda; implements ``Transform``.

    A handler does not see ranges, part numbers and conditions. It produces the whole result once, and the gateway cuts it.

    Cost: worker processes, each with the memory that the handler takes.

    Args:
        access_point: The access point, with a handler.
        endpoint: Endpoint to which the handler sends its answers.

    Raises:
        ConfigError: The access point has no handler, or the folder of its code cannot be read.
    """

    maps_ranges = False

    def __init__(self, access_point: AccessPoint, endpoint: InternalEndpoint) -> None:
        config = access_point.handler
        if config is None:
            raise ConfigError(f"the access point {access_point.name!r} has no handler")
        if not Path(config.code_dir).is_dir():
            raise ConfigError(f"code_dir {config.code_dir!r} is not a directory")
        config = replace(config, code_dir=str(Path(config.code_dir).absolute()))
        self.name = f"lambda:{config.handler}"
        self.is_deterministic = access_point.deterministic is not False
        self.identity = _identity_of(access_point, digest_of_code(Path(config.code_dir)))
        self._access_point = access_point
        self._config = config
        self._responses = endpoint.responses
        endpoint.accept_keys_of(config.environment)
        settings = HandlerSettings(access_point, config, endpoint)
        self._pool = HandlerPool(settings, size=access_point.processes or os.cpu_count() or 1)

    async def start(self) -> None:
        """Start the worker processes, which import the handler.

        Raises:
            ConfigError: The handler cannot be imported; the message has its traceback.
        """
        try:
            await self._pool.start()
        except S3Error as error:
            what = f"the handler {self._config.handler!r} cannot be used. {self._pool.reason(error)}".rstrip()
            hint = "check the handler's name, code_dir, and the interpreter that has its dependencies"
            raise ConfigError(what, hint=hint) from error

    def arguments(self, request: GatewayRequest) -> Mapping[str, str]:
        """Return the query, the caller and the headers that the handler gets."""
        return arguments_of(request, self._config.varies_by, epoch=self._access_point.epoch)

    def seen(self, request: GatewayRequest) -> GatewayRequest:
        """Return the parts of a request that the handler gets."""
        return seen_request(request, self._config.varies_by)

    async def size_bytes(self, source: ObjectInfo, arguments: Mapping[str, str]) -> int | None:
        """Return None: only the handler knows."""
        return None

    async def run(
        self,
        source: Source,
        request: GatewayRequest,
        arguments: Mapping[str, str],
        output: ResultWriter,
        span: ByteRange | None = None,
    ) -> None:
        """Call the handler, and take its answer.

        Raises:
            S3Error: The handler answered with an error, failed, took too long, or did not answer.
        """
        worker = await self._pool.take()
        with self._responses.expect(output) as pending:
            try:
                url = source.signed_url(required_headers(self.seen(request)))
                context = {"inputS3Url": url, "outputRoute": pending.route, "outputToken": pending.token}
                event = event_of(request, self._access_point, operation="GetObject", context=context)
            except BaseException:
                self._pool.give_back(worker)
                raise
            call = self._pool.call(worker, event, request_id=request.request_id)
            try:
                await self._answered(call, pending)
            finally:
                if not pending.is_complete:  # after its answer, the handler may go on within its time
                    self._pool.abandon(call)

    async def invoke(self, operation: str, request: GatewayRequest, sign: Callable[[], str]) -> Any:
        """Call the handler for ``HeadObject``, ``ListObjects`` or ``ListObjectsV2``, whose answer is the return value.

        Raises:
            S3Error: The handler failed or took too long.
        """
        worker = await self._pool.take()
        try:
            context = {"inputS3Url": sign()}  # only now, because the life of the URL begins
            event = event_of(request, self._access_point, operation=operation, context=context)
        except BaseException:
            self._pool.give_back(worker)
            raise
        call = self._pool.call(worker, event, request_id=request.request_id, wants_result=True)
        try:
            return await asyncio.shield(call)
        finally:
            self._pool.abandon(call)

    async def close(self) -> None:
        """End the worker processes; idempotent."""
        await self._pool.close()

    async def _answered(self, call: asyncio.Task[Any], pending: PendingResponse) -> None:
        """Wait for the answer, or for the end of the handler if it does not answer."""
        await asyncio.wait({call, pending.finished}, return_when=asyncio.FIRST_COMPLETED)
        if not pending.finished.done():
            call.result()  # a handler that failed
            if not pending.is_begun:
                message = "The handler returned without calling WriteGetObjectResponse."
                raise S3Error("LambdaResponseNotReceived", message)
            await asyncio.wait({pending.finished}, timeout=self._config.time_s_max)
        if not pending.finished.done():
            raise S3Error("LambdaTimeout", f"The answer took longer than {self._config.time_s_max:g} s.")
        pending.finished.result()


def _identity_of(access_point: AccessPoint, code: str) -> str:
    """Return everything besides the request on which answers depend: code, settings, and the place that events name."""
    config = access_point.handler
    assert config is not None, "the caller has checked it"
    place = [
        access_point.name,
        access_point.account,
        access_point.region,
        sorted(access_point.renamed_suffixes.items()),
    ]
    parts = [config.handler, code, config.payload, sorted(config.environment.items()), access_point.version, place]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return f"lambda:{config.handler}:{digest}"


def digest_of_code(folder: Path) -> str:
    """Return a digest of the files in a folder and below: of names and contents, never of times.

    Hidden files and folders, and virtual environments, are left out.

    Raises:
        ConfigError: The folder has too many files, or one of them cannot be read.
    """
    digest = hashlib.sha256()
    count = 0
    for root, folders, names in os.walk(folder, onerror=_refuse):
        here = Path(root)
        folders[:] = sorted(name for name in folders if _is_code(here / name))
        for name in sorted(names):
            if name.startswith(".") or name.endswith(".pyc"):
                continue
            count += 1
            if count > FILES_MAX:
                hint = "give the handler a folder of its own"
                raise ConfigError(f"code_dir {str(folder)!r} has more than {FILES_MAX} files", hint=hint)
            digest.update(_entry(here / name, str((here / name).relative_to(folder))))
    return digest.hexdigest()


def _is_code(folder: Path) -> bool:
    return not folder.name.startswith(".") and folder.name not in LEFT_OUT and not (folder / "pyvenv.cfg").exists()


def _entry(path: Path, name: str) -> bytes:
    """Return a digest of a file's name and content. A pipe or device counts by its name."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape") + b"\0")
    try:
        if path.is_file():
            size_bytes = path.stat().st_size
            digest.update(size_bytes.to_bytes(8, "big"))
            if path.suffix == ".py" or size_bytes <= CONTENT_BYTES_MAX:
                digest.update(path.read_bytes())
    except OSError as error:
        _refuse(error)
    return digest.digest()


def _refuse(error: OSError) -> None:
    raise ConfigError(f"the handler's file {error.filename!r} cannot be read: {error.strerror}") from error
