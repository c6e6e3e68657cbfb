"""``RequestRecords``: the numbers and the log entry of each request, after its answer."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from penstock.gateway.http.access_log import AccessRecord
from penstock.gateway.http.addressing import path_and_query, public_query
from penstock.gateway.http.service import METHODS

if TYPE_CHECKING:
    from penstock.gateway.http.access_log import AccessLog
    from penstock.gateway.http.exchanges import WatchedExchange
    from penstock.gateway.metrics import LabelledName, Metrics

_SENT_BYTES: Final[LabelledName] = ("penstock_gateway_sent_bytes_total", ())


class RequestRecords:
    """Counts requests, and passes a record of each to the access log.

    Args:
        metrics: Takes the numbers.
        log: Takes the records; None for no access log.
    """

    def __init__(self, metrics: Metrics, log: AccessLog | None) -> None:
        self._metrics = metrics
        self._log = log

    def note(self, exchange: WatchedExchange, code: str, *, is_complete: bool) -> None:
        """Take a request that has ended.

        Args:
            exchange: The request and its answer.
            code: S3's code of the error; empty if there was none.
            is_complete: Whether the answer was sent to its end.
        """
        request, status = exchange.request, exchange.status
        seconds = exchange.elapsed_s
        metrics = self._metrics
        counter, histogram = _names_of(request.method, status)
        metrics.counters[counter] += 1
        metrics.counters[_SENT_BYTES] += exchange.sent_bytes
        metrics.histograms[histogram].add(seconds)
        if self._log is not None:
            self._log(
                AccessRecord(
                    time_s=exchange.started_s,
                    remote=request.remote or "",
                    access_key=exchange.access_key,
                    method=request.method,
                    bucket=exchange.bucket,
                    key=exchange.key,
                    query=public_query(path_and_query(request.raw_path)[1]),
                    status=status,
                    code=code,
                    sent_bytes=exchange.sent_bytes,
                    received_bytes=exchange.received_bytes,
                    seconds=seconds,
                    complete=is_complete,
                    request_id=exchange.request_id,
                    user_agent=request.headers.get("User-Agent", ""),
                )
            )


@lru_cache(maxsize=1024)
def _names_of(method: str, status: int) -> tuple[LabelledName, LabelledName]:
    """Return the names of the counter and of the histogram of requests."""
    known = method if method in METHODS or method == "OPTIONS" else "other"
    return (
        ("penstock_gateway_requests_total", (("method", known), ("status", str(status)))),
        ("penstock_gateway_request_seconds", (("method", known),)),
    )
