"""Runs a Lambda handler in an interpreter of its own. That interpreter sees no other file of penstock.

This module uses only the standard library of Python 3.7, because the handler's interpreter may be old and has none of
penstock's dependencies. The gateway starts it with one connected socket, whose descriptor is the first argument. Over it, both
sides send frames: the length as 4 bytes, big-endian, then JSON. The first frame from the gateway holds the settings; it is
answered by ``{"ready": true}`` or ``{"failed": ...}``. Each further frame is an event, which ``{"returned": ...}`` or
``{"failed": ...}`` answers. The end of the stream ends the process. Output and log messages are ordinary output of the process.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import io
import json
import logging
import os
import select
import socket
import struct
import sys
import threading
import time
import traceback
from decimal import Decimal
from typing import Any

FRAME_BYTES_MAX = 16 * 1024 * 1024
RETURNED_BYTES_MAX = 6 * 1024 * 1024  # Lambda's own limit of a response
TRACEBACK_CHARACTERS_MAX = 64 * 1024
LOCAL_NAMES = (".localhost", b".localhost")


class HandlerChannel:
    """Frames of JSON over the socket to the gateway."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # programs that the handler starts do not get it
        self._socket = socket.socket(fileno=descriptor)

    def receive(self) -> Any:
        """Return the next frame; None at the end of the stream."""
        head = self._exactly(4)
        if head is None:
            return None
        body = self._exactly(struct.unpack(">I", head)[0])
        return None if body is None else json.loads(body.decode("utf-8"))

    def send(self, message: Any) -> None:
        """Send one frame."""
        body = json.dumps(message).encode("ascii")
        self._socket.sendall(struct.pack(">I", len(body)) + body)

    def end_with_gateway(self) -> None:
        """End this process as soon as the gateway closes its end, whatever the handler is doing."""
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLHUP)

        def watch() -> None:
            poll.poll()
            os._exit(1)

        threading.Thread(target=watch, name="gateway", daemon=True).start()

    def _exactly(self, length_bytes: int) -> bytes | None:
        if length_bytes > FRAME_BYTES_MAX:
            raise ValueError(f"a frame of {length_bytes} bytes is too long")
        parts = []
        while length_bytes:
            part = self._socket.recv(min(length_bytes, 1 << 20))
            if not part:
                return None
            parts.append(part)
            length_bytes -= len(part)
        return b"".join(parts)


class CognitoIdentity:
    """``context.identity``; Object Lambda never fills it in."""

    cognito_identity_id = None
    cognito_identity_pool_id = None


class LambdaContext:
    """The second argument of a handler, with the names of AWS's runtime."""

    def __init__(self, request_id: str, time_s_max: float, function: dict[str, str]) -> None:
        self._deadline_s = time.monotonic() + time_s_max
        self.aws_request_id = request_id
        self.function_name = function["name"]
        self.function_version = function["version"]
        self.memory_limit_in_mb = function["memory_mib"]
        self.log_group_name = function["log_group"]
        self.log_stream_name = function["log_stream"]
        self.invoked_function_arn = function["arn"]
        self.identity = CognitoIdentity()
        self.client_context = None
        self.tenant_id = None

    def get_remaining_time_in_millis(self) -> int:
        """Return how long the handler may still run, in milliseconds."""
        return max(0, int((self._deadline_s - time.monotonic()) * 1000))

    def log(self, message: Any) -> None:
        """Write a message to the log."""
        print(message)


class RequestIdFilter(logging.Filter):
    """Adds the ID of the request to log records, as AWS's runtime does."""

    request_id = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attribute; accept every record."""
        record.aws_request_id = self.request_id
        return True


class PatchedLoader(importlib.abc.Loader):
    """Loads ``botocore.session`` as its own loader does, then directs its clients of S3 to the gateway."""

    def __init__(self, loader: Any, endpoint_url: str) -> None:
        self._loader = loader
        self._endpoint_url = endpoint_url

    def create_module(self, spec: Any) -> Any:
        """Create the module as its own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Execute the module, then replace ``Session.create_client``."""
        self._loader.exec_module(module)
        original, endpoint_url = module.Session.create_client, self._endpoint_url
        before_endpoint = 4  # positional arguments between service_name and endpoint_url

        def create_client(session: Any, service_name: str, *args: Any, **kwargs: Any) -> Any:
            if service_name == "s3" and len(args) <= before_endpoint and kwargs.get("endpoint_url") is None:
                kwargs["endpoint_url"] = endpoint_url
            return original(session, service_name, *args, **kwargs)

        module.Session.create_client = create_client


class SessionFinder(importlib.abc.MetaPathFinder):
    """Finds ``botocore.session`` for ``PatchedLoader``.

    botocore knows ``AWS_ENDPOINT_URL_S3`` since 1.31 of 2023; handlers bring older ones.
    """

    def __init__(self, endpoint_url: str) -> None:
        self._endpoint_url = endpoint_url
        self._is_searching = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Find the module by the other finders, and wrap its loader."""
        if fullname != "botocore.session" or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = PatchedLoader(spec.loader, self._endpoint_url)
        return spec


def resolve_local_names() -> None:
    """Make names below ``.localhost`` the address 127.0.0.1, as RFC 6761 wants it and many resolvers do not.

    boto3 puts the route of an answer in front of the host, e.g. ``io-1a2b.localhost``.
    """
    original = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(host, (str, bytes)) and host.endswith(LOCAL_NAMES[isinstance(host, bytes)]):  # type: ignore[arg-type]
            host = "127.0.0.1"
        return original(host, *args, **kwargs)

    socket.getaddrinfo = getaddrinfo


def limit_memory(memory_bytes_max: int) -> None:
    """Bound the address space of this process and its children, and write no core files."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes_max:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = memory_bytes_max if hard == resource.RLIM_INFINITY else min(hard, memory_bytes_max)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def set_up_output() -> RequestIdFilter:
    """Make output appear line by line, and log messages look as in AWS's runtime."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    request_id = RequestIdFilter()
    handler = logging.StreamHandler(sys.stdout)
    form = "[%(levelname)s]\t%(asctime)s.%(msecs)03dZ\t%(aws_request_id)s\t%(message)s"
    handler.setFormatter(logging.Formatter(form, "%Y-%m-%dT%H:%M:%S"))
    handler.formatter.converter = time.gmtime  # type: ignore[union-attr]
    handler.addFilter(request_id)
    logging.getLogger().addHandler(handler)
    return request_id


def load_handler(name: str) -> Any:
    """Import the function that ``module.function`` or ``folder/module.function`` names."""
    module_name, _, function_name = name.replace(":", ".").rpartition(".")
    module = importlib.import_module(module_name.replace("/", "."))
    handler = getattr(module, function_name, None)
    if handler is None:
        raise AttributeError(f"module {module_name!r} has no function {function_name!r}")
    if not callable(handler):
        raise TypeError(f"{function_name!r} of module {module_name!r} is not a function")
    return handler


def described(error: BaseException) -> dict[str, Any]:
    """Describe an exception, without the frames of this file."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in (__file__, importlib.__file__):
        frame = frame.tb_next
    lines = traceback.format_exception(type(error), error, frame)
    text = "".join(line for line in lines if "<frozen importlib" not in line)
    return {
        "type": type(error).__name__,
        "message": str(error)[:4096],
        "traceback": text[-TRACEBACK_CHARACTERS_MAX:],
        "exits": isinstance(error, (SystemExit, MemoryError)),
    }


def plain(value: Any) -> Any:
    """Return what JSON can hold for types that AWS's runtime accepts as well."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def answer_to(handler: Any, call: dict[str, Any], function: dict[str, str]) -> dict[str, Any]:
    """Call the handler with one event, and return the frame that answers it."""
    try:
        returned = handler(call["event"], LambdaContext(call["request_id"], call["time_s_max"], function))
    except BaseException as error:  # SystemExit, too: it ends this process after it has been reported
        return {"failed": described(error)}
    if not call["wants_result"]:
        return {"returned": None}
    try:
        text = json.dumps(returned, default=plain)
    except (TypeError, ValueError, RecursionError) as error:
        return {"failed": described(error)}
    if len(text) > RETURNED_BYTES_MAX:
        problem = f"the result has {len(text)} bytes of JSON, more than {RETURNED_BYTES_MAX}"
        return {"failed": described(ValueError(problem))}
    return {"returned": json.loads(text)}


def main() -> int:
    """Load the handler, then answer events until the gateway closes the channel."""
    channel = HandlerChannel(int(sys.argv[1]))
    settings = channel.receive()
    if settings is None:
        return 0
    channel.end_with_gateway()
    request_id = set_up_output()
    try:
        limit_memory(settings["memory_bytes_max"])
        resolve_local_names()
        sys.meta_path.insert(0, SessionFinder(settings["endpoint_url"]))
        sys.path.insert(0, settings["code_dir"])
        handler = load_handler(settings["handler"])
    except BaseException as error:  # whatever a module raises while it is imported
        channel.send({"failed": described(error)})
        return 1
    channel.send({"ready": True, "python": ".".join(map(str, sys.version_info[:3]))})
    while True:
        call = channel.receive()
        if call is None:
            return 0
        request_id.request_id = call["request_id"]
        answer = answer_to(handler, call, settings["function"])
        request_id.request_id = ""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        channel.send(answer)
        if answer.get("failed", {}).get("exits"):
            return 1


if __name__ == "__main__":
    sys.exit(main())
