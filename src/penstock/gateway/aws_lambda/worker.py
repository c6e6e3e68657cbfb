"""Processes that run a Lambda handler: each is started once and answers one event at a time; calls wait for a free process."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.config import KIB, MIB
from penstock.gateway.objects import S3Error
from penstock.processes.channel import JsonChannel
from penstock.processes.group import OutputPipe, ProcessGroup
from penstock.processes.pool import WorkerPool
from penstock.redaction import printable, public_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.gateway.aws_lambda.responses import InternalEndpoint
    from penstock.gateway.config import AccessPoint, LambdaConfig

BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
LOG_BYTES_MAX = 1 * MIB
"""Largest output of one call that is logged, in bytes; the rest is dropped."""
OUTPUT_BYTES_MAX = 64 * MIB
"""Output of one call, in bytes, after which the process is killed."""
LINE_BYTES_MAX = 16 * KIB
LINES_MAX = 10_000
"""Largest number of lines of one call that are logged. A record takes about 10 µs of the event loop."""
WAITING_MAX = 1024
"""Largest number of calls that wait for a worker process; further ones are refused with ``SlowDown``."""
GRACE_S = 1.0
"""How long a handler may go on after its answer is no longer needed, in seconds. Killing it costs another import."""
START_S_MAX = 120.0
"""Longest time for importing the handler's module, in seconds; TensorFlow takes 10 to 20 s on a busy machine."""
INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables of the gateway's environment that handlers get. Credentials are not among them."""
LOG = logging.getLogger("penstock.gateway.lambda")

_RUN_FILE = (
    "import sys; sys.path.pop(0); __file__ = sys.argv.pop(1); exec(compile(open(__file__).read(), __file__, 'exec'))"
)
"""``python FILE`` would put the file's folder, which is part of penstock, in front of the handler's modules."""


class HandlerSettings(NamedTuple):
    """The settings of a worker process.

    Attributes:
        access_point: The access point, whose account and region are those of the function.
        config: The handler.
        endpoint: Endpoint to which the handler sends its answers.
    """

    access_point: AccessPoint
    config: LambdaConfig
    endpoint: InternalEndpoint

    @property
    def name(self) -> str:
        """Name of the access point, and of the function."""
        return self.access_point.name

    @property
    def python(self) -> str:
        """Path of the interpreter; links are not followed, because a virtual environment is recognized by its path."""
        python = self.config.python or sys.executable
        return str(Path(python).absolute()) if "/" in python else python

    @property
    def function(self) -> dict[str, str]:
        """Attributes of ``context`` that describe the function."""
        memory_mib = self.config.memory_bytes_max // MIB or 10_240  # the most that AWS gives, if there is no limit
        return {
            "name": self.name,
            "version": "$LATEST",
            "arn": f"arn:aws:lambda:{self.access_point.region}:{self.access_point.account}:function:{self.name}",
            "memory_mib": str(memory_mib),
            "log_group": f"/aws/lambda/{self.name}",
            "log_stream": f"penstock/{os.getpid()}",
        }

    def environment(self, temporary: str) -> dict[str, str]:
        """Return the environment of a worker process, whose temporary folder is `temporary`."""
        function = self.function
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        return {
            "LANG": "C.UTF-8",
            "TZ": ":UTC",
            **inherited,
            "HOME": temporary,
            "TMPDIR": temporary,
            "PYTHONUTF8": "1",
            "NO_PROXY": "localhost,127.0.0.1,.localhost",
            "no_proxy": "localhost,127.0.0.1,.localhost",
            "AWS_ACCESS_KEY_ID": self.endpoint.key.access_key,
            "AWS_SECRET_ACCESS_KEY": self.endpoint.key.secret_key,
            "AWS_REGION": self.access_point.region,
            "AWS_DEFAULT_REGION": self.access_point.region,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EXECUTION_ENV": "AWS_Lambda_python",
            "BOTO_DISABLE_CRT": "true",  # Lambda has no awscrt, with which botocore cannot sign bodies that are streamed
            **self.config.environment,
            "AWS_ENDPOINT_URL_S3": self.endpoint.url,
            "AWS_LAMBDA_FUNCTION_NAME": function["name"],
            "AWS_LAMBDA_FUNCTION_VERSION": function["version"],
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": function["memory_mib"],
            "AWS_LAMBDA_INITIALIZATION_TYPE": "on-demand",
            "AWS_LAMBDA_LOG_GROUP_NAME": function["log_group"],
            "AWS_LAMBDA_LOG_STREAM_NAME": function["log_stream"],
            "LAMBDA_TASK_ROOT": self.config.code_dir,
            "_HANDLER": self.config.handler,
        }


class HandlerOutput(OutputPipe):
    """Writes the output of a worker process to the gateway's log.

    Attributes:
        request_id: ID of the request that the handler is working on; empty between calls.
        is_flooded: Whether one call printed more than ``OUTPUT_BYTES_MAX``.

    Args:
        name: Name of the access point.
        descriptor: The reading end of a pipe, which this object closes.
        on_flood: Called once when a call has printed too much.
    """

    def __init__(self, name: str, descriptor: int, *, on_flood: Callable[[], None]) -> None:
        super().__init__(descriptor, self._log, line_bytes_max=LINE_BYTES_MAX)
        self.request_id = ""
        self.is_flooded = False
        self._name = name
        self._on_flood = on_flood
        self._call_bytes = self._call_lines = 0
        self._is_dropping = False

    def begin(self, request_id: str) -> None:
        """Attribute the following output to a request."""
        self.drain()
        self.request_id = request_id
        self._call_bytes = self._call_lines = 0
        self._is_dropping = False

    def take(self, data: bytes) -> None:
        """Log the lines that end in this piece, up to the limits of a call."""
        self._call_bytes += len(data)
        if self._call_bytes > OUTPUT_BYTES_MAX and not self.is_flooded:
            self.is_flooded = True
            self._on_flood()
        if self._is_dropping:
            return
        super().take(data)
        if self._call_bytes > LOG_BYTES_MAX or self._call_lines > LINES_MAX:
            self._is_dropping, self._rest, self._call_lines = True, b"", 0
            self._log(b"... the handler prints too much; the rest of this call's output is dropped")

    def _log(self, line: bytes) -> None:
        self._call_lines += 1
        if self._call_lines <= LINES_MAX:
            text = printable(public_text(line.decode("utf-8", "replace")))  # handlers print events
            LOG.info("%s %s %s", self._name, self.request_id or "-", text, extra={"request_id": self.request_id})


class HandlerWorker:
    """A process that has imported the handler; a ``PooledWorker``.

    Attributes:
        is_clean: Whether it can take another event.
        calls_count: Always 0: a handler's process is never replaced because of the number of its calls.
    """

    calls_count = 0

    def __init__(self, settings: HandlerSettings) -> None:
        self.is_clean = False
        self._idle_ended: Callable[[], object] | None = None
        self._settings = settings
        self._temporary = ""
        self._group: ProcessGroup | None = None
        self._channel: JsonChannel | None = None
        self._output: HandlerOutput | None = None

    async def start(self) -> None:
        """Start the process and import the handler. ``close`` must follow also if this fails.

        Raises:
            S3Error: ``LambdaRuntimeError``: the handler cannot be imported; `details` has the traceback in ``Traceback``.
        """
        settings = self._settings
        self._temporary = tempfile.mkdtemp(prefix="penstock-lambda-")
        try:
            async with asyncio.timeout(START_S_MAX):
                await self._spawn()
                first = {
                    "handler": settings.config.handler,
                    "code_dir": settings.config.code_dir,
                    "function": settings.function,
                    "memory_bytes_max": settings.config.memory_bytes_max,
                    "endpoint_url": settings.endpoint.url,
                }
                answer = await self._exchange(first)
        except TimeoutError as error:
            raise _failed(f"Importing the handler took longer than {START_S_MAX:.0f} s.") from error
        except OSError as error:
            raise _failed(f"The interpreter cannot be started: {error.strerror}.", str(error)) from error
        if "failed" in answer:
            failed = answer["failed"]
            raise _failed(f"Importing the handler failed: {failed['type']}.", str(failed["traceback"]))
        self.is_clean = True

    async def call(self, event: Mapping[str, object], *, request_id: str, wants_result: bool = False) -> Any:
        """Run the handler with one event, and return its return value, if that is wanted.

        Cancelling kills the process.

        Raises:
            S3Error: The handler raised an exception, exited, or took too long. If `is_clean` is false then, the process has
                ended.
        """
        assert self._output is not None, "start() comes first"
        time_s_max = self._settings.config.time_s_max
        self._output.begin(request_id)
        message = {"event": event, "request_id": request_id, "wants_result": wants_result, "time_s_max": time_s_max}
        is_complete = False
        try:
            async with asyncio.timeout(time_s_max):
                answer = await self._exchange(message)
            is_complete = True
        except TimeoutError as error:
            text = f"The handler took longer than {time_s_max:g} s."
            LOG.warning("%s %s %s", self._settings.name, request_id, text, extra={"request_id": request_id})
            raise S3Error("LambdaTimeout", text) from error
        finally:
            if not is_complete:
                self.kill()
            self._output.drain()
            self._output.request_id = ""
        if "failed" in answer:
            raise self._failure(answer["failed"], request_id)
        return answer.get("returned")

    @property
    def process_id(self) -> int:
        """Id of the process; 0 before it was started."""
        return 0 if self._group is None else self._group.process_id

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._group is None or self._group.exited.is_set()

    def watch(self, ended: Callable[[], object] | None) -> None:
        """Have `ended` called if the process ends; None takes it back."""
        self._idle_ended = ended

    def _note_end(self) -> None:
        assert self._channel is not None, "_spawn() comes first"
        self._channel.end_receiving()  # a process that it forked may still hold the other end
        if self._idle_ended is not None:
            self._idle_ended()

    def cancel(self) -> None:
        """Kill the process: a handler cannot learn that its answer is not needed."""
        self.kill()

    async def settle(self) -> bool:
        """Return whether another call can follow."""
        return self.is_clean

    def kill(self) -> None:
        """Kill the process and everything that it started; idempotent."""
        self.is_clean = False
        if self._group is not None:
            self._group.kill()

    async def close(self) -> None:
        """Kill the process, and release its resources; idempotent."""
        self.kill()
        if self._channel is not None:
            self._channel.close()
        if self._group is not None:
            await self._group.wait_exit()
            self._group.release()
        if self._output is not None:
            self._output.close()
        if self._temporary:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)
            self._temporary = ""

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        settings = self._settings
        self._output = HandlerOutput(settings.name, reading, on_flood=self.kill)
        try:
            self._channel = await JsonChannel.over(ours)
            self._group = ProcessGroup(
                [settings.python, "-c", _RUN_FILE, str(BOOTSTRAP), str(theirs.fileno())],
                on_exit=self._note_end,
                folder=self._temporary,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                cwd=settings.config.code_dir,
                env=settings.environment(self._temporary),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(writing)

    async def _exchange(self, message: Mapping[str, object]) -> dict[str, Any]:
        assert self._channel is not None, "start() comes first"
        self._channel.send(message)
        try:
            answer = await self._channel.receive()
        except ValueError as error:
            raise _failed("The handler's process sent a message that is not valid.") from error
        if answer is None:
            self.kill()
            raise _failed(await self._last_words())
        return answer

    async def _last_words(self) -> str:
        """Return how the process ended."""
        if self._group is None:
            return "The handler's process ended."
        await self._group.wait_exit()
        code = self._group.exit_code()
        if self._output is not None and self._output.is_flooded:
            return f"The handler printed more than {OUTPUT_BYTES_MAX} bytes."
        return (
            "The handler's process was killed." if code == -signal.SIGKILL else f"The handler's process ended: {code}."
        )

    def _failure(self, failed: dict[str, Any], request_id: str) -> S3Error:
        if failed.get("exits"):
            self.kill()
        where = f"{self._settings.name} {request_id}"
        text = printable(public_text(str(failed.get("traceback", ""))), lines=True)
        LOG.error("%s The handler failed.\n%s", where, text, extra={"request_id": request_id})
        return _failed(f"The handler failed: {failed.get('type', 'Exception')}.")


def _failed(message: str, traceback: str = "") -> S3Error:
    error = S3Error("LambdaRuntimeError", message)
    if traceback:
        error.add_note(traceback)
    return error


class HandlerPool(WorkerPool[HandlerWorker]):
    """The worker processes of a handler, and the calls that wait for them.

    Args:
        settings: The handler.
        size: Number of worker processes.
    """

    def __init__(self, settings: HandlerSettings, *, size: int) -> None:
        super().__init__(settings.name, workers_count=size, waiting_max=WAITING_MAX, log=LOG)
        self._settings = settings
        self._calls: set[asyncio.Task[Any]] = set()

    def new_worker(self) -> HandlerWorker:
        """Return another worker."""
        return HandlerWorker(self._settings)

    def busy_error(self) -> S3Error:
        """Return the error of a call that cannot wait."""
        message = f"{self.waiting_count} calls wait for a worker of the handler. Reduce your request rate."
        return S3Error("SlowDown", message)

    def unavailable_error(self, failure: Exception) -> Exception:
        """Return the error of a call for which there is no worker: why the handler cannot be imported any more."""
        return failure

    def reason(self, failure: Exception) -> str:
        """Return why a worker did not start, with the handler's traceback."""
        message = failure.message if isinstance(failure, S3Error) else str(failure)
        return "\n".join([message, *getattr(failure, "__notes__", ())])

    def call(self, worker: HandlerWorker, event: Mapping[str, object], **options: Any) -> asyncio.Task[Any]:
        """Start ``HandlerWorker.call`` with a worker that was taken, and give it back when it ends."""

        async def run() -> Any:
            try:
                return await worker.call(event, **options)
            finally:
                self.give_back(worker)

        task = asyncio.create_task(run())
        self._calls.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # somebody else may look at it

    def abandon(self, call: asyncio.Task[Any]) -> None:
        """Give a call whose result is not needed a short time to end, then kill its worker process."""
        if not call.done():
            handle = asyncio.get_running_loop().call_later(GRACE_S, call.cancel)
            call.add_done_callback(lambda _: handle.cancel())

    async def close(self) -> None:
        """Kill all workers; idempotent."""
        self._is_closed = True  # so that workers of calls that end now are not replaced
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await super().close()
