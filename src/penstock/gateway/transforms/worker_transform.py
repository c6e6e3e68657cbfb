"""``make_transform``: a transform that is a Python function, run in worker processes."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, NamedTuple, Self

from penstock import errors
from penstock.config import check_whole, cores_count
from penstock.errors import ConfigError, StoreError, WorkerDiedError
from penstock.gateway.objects import S3Error
from penstock.gateway.transforms.messages import TransformCall, WorkerFailure
from penstock.gateway.transforms.process import TransformFailedError, TransformProcess
from penstock.gateway.transforms.program import (
    HEADER,
    QUERY,
    ProcessSetup,
    TransformProgram,
    checked_number,
    spelled_program,
)
from penstock.gateway.transforms.reading import SourceVersion
from penstock.processes.pool import WorkerPool
from penstock.types import strong_etag

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from penstock.gateway.config import AccessPoint
    from penstock.gateway.objects import GatewayRequest, ResultWriter, Source
    from penstock.gateway.transforms.program import ProgramDescription
    from penstock.types import ByteRange, ObjectInfo

log = logging.getLogger("penstock.gateway.transforms")

WAITING_MAX = 4096
"""Largest number of calls that wait for a process; further ones are refused with ``SlowDown``."""
PAUSED_S = 0.05
"""Time between two looks at a limit that has passed while the output was not taken, in seconds."""
RETIRING = frozenset({"MemoryError", "SystemError", "RecursionError"})
"""Errors after which a process is replaced, because it may be short of memory or of stack for good."""
SIZES_MAX = 1000
"""Largest number of objects in one request for sizes: a page of a listing."""
SIZES_S_MAX = 10.0
"""Longest time for one request for sizes, in seconds."""
_HEADERS = frozenset(
    {"content-type", "content-encoding", "content-language", "content-disposition", "cache-control", "expires"}
)
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


def make_transform(access_point: AccessPoint, *, folder: str | Path = ".") -> WorkerTransform:
    """Return the transform of an access point. Its processes are started by ``start()``.

    Args:
        access_point: Names the transform: a built-in one, ``module:function``, ``path.py:function``, each with arguments in
            parentheses if it takes any, or several with ``|`` between them.
        folder: Folder whose modules can be imported, and to which paths are relative.

    Raises:
        ConfigError: The spelling is wrong, or names no built-in transform.
    """
    if not access_point.transform:
        raise ConfigError(f"the access point {access_point.name} names no transform")
    program = spelled_program(access_point.transform, arguments=access_point.arguments, folder=str(folder))
    check_whole("processes", access_point.processes, 0, 1024)
    check_whole("calls_max", access_point.calls_max, 0)
    if access_point.epoch:
        checked_number("epoch", access_point.epoch)
    return WorkerTransform(program, access_point=access_point)


class WorkerTransform:
    """A transform that runs in worker processes; it implements ``Transform``.

    Args:
        program: Program that the processes run.
        access_point: Access point, whose limits apply.

    Attributes:
        name: Name for logs and metrics.
        identity: Text that changes whenever code, versions or arguments change; empty before ``start()``.
        is_deterministic: Whether results may be kept, as the access point or else the author says.
        maps_ranges: Whether ranges of results can be produced by themselves.
        pool: Worker processes.
    """

    def __init__(self, program: TransformProgram, *, access_point: AccessPoint) -> None:
        self.name = program.name
        self.identity = ""
        self.is_deterministic = True
        self.maps_ranges = False
        self._access_point = access_point
        count = access_point.processes or cores_count()
        self.pool = TransformPool(program, access_point=access_point, processes_count=count)
        # Requests for sizes have a worker process of their own, so that a listing does not wait for a run.
        self._size_pool = TransformPool(program, access_point=access_point, processes_count=1)
        self._questions: dict[tuple[tuple[str, str], ...], _SizeQuestion] = {}
        self._asking: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the processes, and wait until the first one has imported the transform; idempotent.

        Raises:
            ConfigError: It cannot be imported, or its arguments are wrong; the message has the author's traceback.
        """
        try:
            await self.pool.start()
        except (errors.PenstockError, TimeoutError) as error:
            what = f"the transform of {self._access_point.name} does not start: {self.pool.reason(error)}"
            raise ConfigError(what) from None
        described = self.pool.description
        assert described is not None, "a process has started"
        chosen = self._access_point.deterministic
        self.identity = described.identity
        self.is_deterministic = described.is_deterministic if chosen is None else chosen
        self.maps_ranges = described.maps_ranges

    def arguments(self, request: GatewayRequest) -> Mapping[str, str]:
        """Return the epoch, the seed, and the declared parameters and headers that the request has.

        Epoch and seed are ``x-penstock-epoch`` and ``x-penstock-seed`` in the query, or headers of these names.

        Raises:
            S3Error: Epoch or seed is not a number.
        """
        described = self.pool.description
        assert described is not None, "start() comes first"
        found: dict[str, str] = {}
        if described.uses_epoch:
            configured = {"epoch": self._access_point.epoch, "seed": ""}
            for name, default in configured.items():
                field = f"x-penstock-{name}"
                text = request.query.get(field) or request.headers.get(field) or default
                if text:
                    found[name] = _number(field, text)
        found |= {f"{QUERY}{name}": request.query[name] for name in described.query if name in request.query}
        for name in described.headers:
            value = request.headers.get(name)
            if value is not None:
                found[f"{HEADER}{name}"] = value
        return found

    # ── sizes ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def size_bytes(self, source: ObjectInfo, arguments: Mapping[str, str]) -> int | None:
        """Return the size of a result in bytes; None if the transform cannot compute it beforehand.

        Concurrent calls share one request to the worker process. If the author's function fails, the error is logged, and the
        size is unknown.

        Cost: About 0.2 ms for a request, and the time of the author's function.
        """
        if self.pool.description is None or not self.pool.description.has_size:
            return None
        key = tuple(sorted(arguments.items()))
        question = self._questions.get(key)
        if question is None or len(question.infos) >= SIZES_MAX:
            question = self._questions[key] = _SizeQuestion([], asyncio.get_running_loop().create_future())
            task = asyncio.get_running_loop().create_task(self._ask(key, question))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        place = len(question.infos)
        question.infos.append(source)
        sizes = await asyncio.shield(question.sizes)
        return sizes[place]

    async def _ask(self, key: tuple[tuple[str, str], ...], question: _SizeQuestion) -> None:
        """Send one request for all sizes that are wanted in this turn of the event loop."""
        await asyncio.sleep(0)
        if self._questions.get(key) is question:
            del self._questions[key]
        sizes: list[int | None] = [None] * len(question.infos)
        try:
            async with asyncio.timeout(SIZES_S_MAX):
                sizes = await self._size_pool.sizes(question.infos, dict(key))
        except TransformFailedError as error:
            self._log_sizes(f"failed\n{error.failure.traceback}")
        except (TimeoutError, errors.PenstockError, S3Error) as error:
            self._log_sizes(f"gave no answer: {error}")
        finally:
            if not question.sizes.done():
                question.sizes.set_result(sizes)

    def _log_sizes(self, text: str) -> None:
        log.error("%s: size() of %s %s", self._access_point.name, self.name, text)

    # ── running ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(
        self,
        source: Source,
        request: GatewayRequest,
        arguments: Mapping[str, str],
        output: ResultWriter,
        span: ByteRange | None = None,
    ) -> None:
        """Have a worker process write the result, or with `span` a range of it.

        Raises:
            S3Error: The transform failed, was stopped at a limit, or refused; the log has the reason.
            StoreError: The source could not be read, or was replaced.

        Cost: One copy of each byte, from the kernel into the memory of the result, and about 1 ms for a call.
        """
        call = self._call(source, arguments, span)
        deadline = CallDeadline(self._access_point.time_s_max)
        bounded = BoundedWriter(output, bytes_max=self._access_point.output_bytes_max, deadline=deadline)
        try:
            async with deadline:
                await self.pool.run(call, bounded, deadline=deadline)
        except TimeoutError:
            if not deadline.expired():
                raise
            self._log(request, source, f"was stopped after {self._access_point.time_s_max:g} s")
            message = f"The transform {self.name} took longer than {self._access_point.time_s_max:g} s."
            raise S3Error("TransformTimeout", message) from None
        except TransformFailedError as error:
            raise self._failed(request, source, error.failure) from None
        except WorkerDiedError as error:
            self._log(request, source, f"failed: {error.what}")
            message = f"The worker process of the transform {self.name} ended: {_how(error)}."
            raise S3Error("TransformFailed", message, status=500) from None

    def _call(self, source: Source, arguments: Mapping[str, str], span: ByteRange | None) -> TransformCall:
        head = source.head
        if head.size_bytes is None:
            raise S3Error("TransformFailed", "The length of the source is not known.")
        url, stored_key = source.worker_url()
        headers = {name.lower(): value for name, value in head.headers.items()}
        version = SourceVersion(source.key, stored_key, head.size_bytes, strong_etag(head.etag), headers)
        return TransformCall(url, version, dict(arguments), None if span is None else (span.start, span.end))

    def _failed(self, request: GatewayRequest, source: Source, failure: WorkerFailure) -> Exception:
        """Log why a transform failed, and return the error for the client, which names no path of this host."""
        if failure.kind == "CallCancelled":  # by close(); no other canceller waits for the result
            return S3Error("ServiceUnavailable", "The gateway is being stopped.")
        if failure.refusal is not None:
            code, message, status = failure.refusal
            return S3Error(code, message, status=status if 400 <= status < 600 else 400)
        if failure.store_error:
            kind = getattr(errors, failure.kind, StoreError)
            is_changed = kind is errors.ObjectChangedError
            self._log(request, source, f"could not read its source: {failure.message}")
            error: Exception = kind(
                "the source was replaced while it was transformed" if is_changed else "the source could not be read"
            )
            return error
        self._log(request, source, f"failed: {failure.kind}: {failure.message}", traceback=failure.traceback)
        shown = failure.kind if failure.kind.isidentifier() else "an error"
        reason = f"failed with {shown}"
        if failure.kind == "MemoryError":
            reason = "needs more memory than it is allowed"
        return S3Error("TransformFailed", f"The transform {self.name} {reason}.")

    def _log(self, request: GatewayRequest, source: Source, text: str, *, traceback: str = "") -> None:
        log.error(
            "%s: the transform %s of %r %s (request %s)%s",
            self._access_point.name,
            self.name,
            source.key,
            text,
            request.request_id,
            f"\n{traceback}".rstrip(),
            extra={"request_id": request.request_id},
        )

    async def close(self) -> None:
        """End the processes; calls that run fail. Idempotent."""
        for task in list(self._asking):
            task.cancel()
        await asyncio.gather(*self._asking, self.pool.close(), self._size_pool.close(), return_exceptions=True)


class CallDeadline:
    """Cancels the block ``async with deadline:`` when its call has taken too long, and raises ``TimeoutError`` there.

    Waiting for a worker does not count, and neither does time between ``pause`` and ``resume``.

    Args:
        time_s_max: Longest time in seconds.

    Cost: Pausing and resuming read a clock; the timer itself is looked at once in `time_s_max`.
    """

    def __init__(self, time_s_max: float) -> None:
        self._time_s_max = time_s_max
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._end_s = 0.0
        self._paused_at_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def start(self) -> None:
        """Begin to count."""
        self._end_s = self._loop.time() + self._time_s_max
        self._timer = self._loop.call_at(self._end_s, self._look)

    def pause(self) -> None:
        """Stop counting."""
        self._paused_at_s = self._loop.time()

    def resume(self) -> None:
        """Count again."""
        if self._paused_at_s is not None:
            self._end_s += self._loop.time() - self._paused_at_s
            self._paused_at_s = None

    def expired(self) -> bool:
        """Whether the call has taken too long."""
        return self._timeout.expired()

    def _look(self) -> None:
        now_s = self._loop.time()
        if self._paused_at_s is not None:
            self._timer = self._loop.call_at(now_s + PAUSED_S, self._look)
        elif now_s < self._end_s:
            self._timer = self._loop.call_at(self._end_s, self._look)
        else:
            self._timeout.reschedule(now_s)


class TransformPool(WorkerPool[TransformProcess]):
    """Worker processes that have imported a program.

    Args:
        program: Program that they run.
        access_point: Access point, whose limits apply.
        processes_count: Number of processes.

    Attributes:
        description: The program's description, as its first process sent it; None before it has started.
    """

    def __init__(self, program: TransformProgram, *, access_point: AccessPoint, processes_count: int) -> None:
        name, calls_max = access_point.name, access_point.calls_max
        super().__init__(name, workers_count=processes_count, waiting_max=WAITING_MAX, calls_max=calls_max, log=log)
        self._setup = ProcessSetup(program, access_point.memory_bytes_max, processes_count)
        self.description: ProgramDescription | None = None

    def new_worker(self) -> TransformProcess:
        """Return another process."""
        return TransformProcess(self._name, self._setup)

    def check_started(self, worker: TransformProcess) -> None:
        """Refuse a process that has imported other code than the first one.

        Raises:
            ConfigError: The code has changed.
        """
        if self.description is None:
            self.description = worker.description
        elif worker.description != self.description:
            raise ConfigError("its code has changed since the gateway was started; restart the gateway to use it")

    def busy_error(self) -> S3Error:
        """Return the error of a call that cannot wait."""
        return S3Error("SlowDown", "Too many requests wait for this transform.")

    def unavailable_error(self, failure: Exception) -> S3Error:
        """Return the error of a call for which there is no process."""
        message = f"The transform of {self._name} cannot be started; the log has the reason."
        return S3Error("TransformUnavailable", message)

    def reason(self, failure: Exception) -> str:
        """Return why a process did not start, with the author's traceback."""
        if isinstance(failure, TransformFailedError):
            cause = failure.failure
            is_plain = cause.kind == "ConfigError"
            return cause.message if is_plain else f"{cause.kind}: {cause.message}\n{cause.traceback}"
        if isinstance(failure, TimeoutError):
            return "importing it takes too long"
        if isinstance(failure, WorkerDiedError):
            return f"{failure.what} while it imported the transform"
        return str(failure)

    async def run(self, call: TransformCall, output: ResultWriter, *, deadline: CallDeadline) -> None:
        """Run a call in the next process that is free.

        Args:
            call: The call.
            output: Takes the output.
            deadline: Is started when the call begins.

        Raises:
            TransformFailedError: The transform failed.
            WorkerDiedError: The process died.
            S3Error: There is no process, or too many calls wait.
        """
        process = await self.take()
        retires = False
        try:
            deadline.start()
            await process.call(call, output)
        except TransformFailedError as error:
            retires = error.failure.kind in RETIRING
            raise
        except asyncio.CancelledError:
            retires = deadline.expired()
            raise
        finally:
            self.give_back(process, retires=retires)

    async def sizes(self, infos: Sequence[ObjectInfo], arguments: dict[str, str]) -> list[int | None]:
        """Ask the transform for sizes of results; raises the same as ``run``."""
        process = await self.take()
        try:
            return await process.sizes(infos, arguments)
        finally:
            self.give_back(process)


class _SizeQuestion(NamedTuple):
    """Sizes that are wanted.

    Attributes:
        infos: The sources.
        sizes: The answer.
    """

    infos: list[ObjectInfo]
    sizes: asyncio.Future[list[int | None]]


class BoundedWriter:
    """Checks the output of a worker, and stops the clock while the result takes no more; a ``ResultWriter``.

    Args:
        output: Takes the checked output.
        bytes_max: Size of the largest result, in bytes.
        deadline: Is paused while the output takes nothing.
    """

    def __init__(self, output: ResultWriter, *, bytes_max: int, deadline: CallDeadline) -> None:
        self._output = output
        self._rest_bytes = bytes_max
        self._deadline = deadline

    def begin(self, headers: Mapping[str, str], *, size_bytes: int | None = None) -> None:
        """Describe the output.

        Raises:
            S3Error: A header is not one that a result may have.
        """
        for name, value in headers.items():
            is_known = name.lower() in _HEADERS or name.lower().startswith("x-amz-meta-")
            if not (is_known and _HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value)):
                log.error("a transform set the header %r to %r", name, value)
                raise S3Error("TransformFailed", "The transform set a header that a result cannot have.")
        self._output.begin(headers, size_bytes=size_bytes)

    def buffer(self) -> memoryview:
        """Return memory for the next bytes."""
        return self._output.buffer()

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes."""
        self._charge(len(data))
        self._deadline.pause()
        try:
            await self._output.write(data)
        finally:
            self._deadline.resume()

    async def filled(self, length_bytes: int) -> None:
        """Append bytes that were written to ``buffer()``."""
        self._charge(length_bytes)
        self._deadline.pause()
        try:
            await self._output.filled(length_bytes)
        finally:
            self._deadline.resume()

    def _charge(self, length_bytes: int) -> None:
        self._rest_bytes -= length_bytes
        if self._rest_bytes < 0:
            raise S3Error("TransformFailed", "The result is larger than allowed.")


def _number(name: str, text: str) -> str:
    try:
        return checked_number(name, text)
    except ConfigError as error:
        raise S3Error("InvalidArgument", error.what) from None


def _how(error: WorkerDiedError) -> str:
    """Describe the end of a process without its number."""
    code = error.exit_code
    if code is None:
        return "it broke the protocol"
    return f"signal {-code}" if code < 0 else f"exit status {code}"
