"""Every way in which the server of the tests can misbehave, and when each makes sense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from servers.records import Request, Response, error

Match = Callable[[Request], bool] | str | None

WIRE_KINDS = frozenset(
    {
        "close",
        "close_head",
        "promise_more",
        "stall",
        "stall_head",
        "reset",
        "reset_head",
        "drip",
        "chunked",
        "chunked_cut",
        "chunked_whole",
        "unsized",
    }
)
"""Kinds that spoil the sending; the answer itself is right."""

KINDS: dict[str, str] = {
    "close": "closes the connection after `after_bytes` of the body (default: half)",
    "close_head": "closes the connection instead of answering",
    "promise_more": "announces 100 bytes more than the object has, sends it all, closes",
    "stall": "sends `after_bytes` of the body, then nothing for `seconds`",
    "stall_head": "sends nothing for `seconds`",
    "delay": "answers rightly, `seconds` late",
    "reset": "TCP reset after `after_bytes` of the body",
    "reset_head": "TCP reset instead of an answer",
    "drip": "sends the body at `bytes_per_s`",
    "chunked": "sends the body rightly, but chunked and without Content-Length",
    "chunked_cut": "sends the body chunked and closes before the last chunk",
    "chunked_whole": "200 with the whole object, chunked, also to a ranged request: what a function makes of it",
    "unsized": "sends the body rightly, but neither Content-Length nor chunks: it ends with the connection",
    "500": "500 InternalError",
    "501": "501 NotImplemented, as functions answer to ranges",
    "503": "503 without a body and without Retry-After",
    "503_retry_after": "503 with Retry-After: `seconds`",
    "429": "429 TooManyRequests",
    "slow_down": "503 SlowDown as XML",
    "403": "403 AccessDenied",
    "quota": "403 QuotaExceeded, as Ceph says it",
    "507": "507 XMinioStorageFull, as MinIO says it",
    "expired_token": "400 ExpiredToken, as AWS says it",
    "expired_token_403": "403 ExpiredToken",
    "time_skewed": "403 RequestTimeTooSkewed with the server's Date",
    "wrong_region_301": "301 PermanentRedirect with x-amz-bucket-region: `region`",
    "wrong_region_400": "400 AuthorizationHeaderMalformed with x-amz-bucket-region: `region`",
    "change": "answers rightly; then the object has another version of the same length",
    "wrong_checksum": "announces another CRC32C than the object's",
    "corrupt": "sends the body with one byte flipped, under the right checksum",
    "garbage_headers": "sends header lines that are none",
    "garbage_status": "sends a status line that is none",
    "html": "200 with an HTML page, as a captive portal does",
    "redirect_self": "307 to the same URL",
    "redirect": "307 to `location` and the same path",
    "wrong_range": "Content-Range and bytes one further than asked",
    "short_range": "206 with fewer bytes than asked, consistently announced",
    "ignore_range": "200 with the whole object to a ranged request",
    "empty_200": "200 with no body",
    "complete_error": "InternalError inside the 200 of a CompleteMultipartUpload",
    "truncated_listing": "XML of a listing that ends in the middle, consistently announced",
    "reversed_listing": "a page of a listing whose keys are in the opposite order",
    "incomplete_listing": "a page of a listing without its first half",
}
"""Every way to misbehave. A test demands that each is tested."""


def applies(kind: str, request: Request) -> bool:
    """Whether `kind` makes sense as an answer to `request`."""
    match kind:
        case "close" | "promise_more" | "stall" | "reset" | "drip" | "chunked" | "chunked_cut" | "chunked_whole":
            return request.method == "GET"
        case "unsized":
            return request.method in ("GET", "HEAD")
        case "change" | "wrong_checksum" | "corrupt":
            return request.is_read
        case "wrong_range" | "short_range" | "ignore_range":
            return request.is_read and request.span is not None
        case "complete_error":
            return request.is_complete
        case "truncated_listing" | "reversed_listing" | "incomplete_listing":
            return request.is_list
    return True


@dataclass(slots=True)
class Fault:
    """One way to misbehave, and its measures."""

    kind: str
    times: int | None = None
    match: Match = None
    after_bytes: int | None = None
    seconds: float = 3600.0
    bytes_per_s: int = 100
    location: str = ""
    region: str = "eu-central-1"

    def wants(self, request: Request) -> bool:
        """Whether it is this request's turn."""
        if self.times == 0 or not applies(self.kind, request):
            return False
        if callable(self.match):
            return self.match(request)
        return self.match is None or self.match in request.key


def wrong_region(status: int, region: str) -> Response:
    """S3's two ways to say that the bucket lives elsewhere."""
    if status == 301:
        response = error(301, "PermanentRedirect", "Address the bucket elsewhere.", Region=region)
    else:
        response = error(400, "AuthorizationHeaderMalformed", f"expecting {region!r}", Region=region)
    response.headers["x-amz-bucket-region"] = region
    return response


def time_skewed() -> Response:
    """The answer to a signature of another time; the answer's ``Date`` tells the right one."""
    return error(403, "RequestTimeTooSkewed", "The clocks differ too much.")


STATUSES: dict[str, Callable[[Fault], Response]] = {
    "500": lambda _: error(500, "InternalError", "We encountered an internal error. Please try again."),
    "501": lambda _: error(501, "NotImplemented", "This functionality is not implemented"),
    "503": lambda _: Response(503),
    "503_retry_after": lambda fault: Response(503, {"Retry-After": f"{min(fault.seconds, 3600):.0f}"}),
    "429": lambda _: error(429, "TooManyRequests"),
    "slow_down": lambda _: error(503, "SlowDown", "Please reduce your request rate."),
    "403": lambda _: error(403, "AccessDenied", "Access Denied"),
    "quota": lambda _: error(403, "QuotaExceeded", "The bucket's quota is used up."),
    "507": lambda _: error(
        507, "XMinioStorageFull", "The storage backend has reached its minimum free drive threshold."
    ),
    "expired_token": lambda _: error(400, "ExpiredToken", "The provided token has expired."),
    "expired_token_403": lambda _: error(403, "ExpiredToken", "The provided token has expired."),
    "time_skewed": lambda _: time_skewed(),
    "wrong_region_301": lambda fault: wrong_region(301, fault.region),
    "wrong_region_400": lambda fault: wrong_region(400, fault.region),
    "html": lambda _: Response(
        200, {"Content-Type": "text/html"}, b"<html><body>Please log in</body></html>", is_s3=False
    ),
    "empty_200": lambda _: Response(200, is_s3=False),
    "complete_error": lambda _: Response(
        200, {"Content-Type": "application/xml"}, bytes(error(500, "InternalError").body)
    ),
}


def garbage(kind: str) -> bytes:
    """Bytes that are no HTTP answer, or one whose header lines are none."""
    if kind == "garbage_status":
        return b"\x00\x01\x02 this is not HTTP at all \xff\r\n\r\n"
    return b"HTTP/1.1 200 OK\r\n\xff\xfe\x00no colon here\r\n: no name\r\nContent-Length: many\r\n\r\n"
