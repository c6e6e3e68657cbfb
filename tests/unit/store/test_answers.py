"""What an HTTP answer means: the errors of statuses and error documents."""

from __future__ import annotations

import errno

import pytest

from penstock.errors import ProtocolError, StoreFullError, ThrottledError
from penstock.store.answers import THROTTLES, is_throttled, served_span, status_error
from penstock.types import ByteRange

STATUSES = range(300, 600)
CODES = (None, "NoSuchKey", "InternalError", *sorted(THROTTLES))


@pytest.mark.parametrize("code", CODES)
def test_an_answer_that_shrinks_the_window_is_a_throttled_error(code: str | None) -> None:
    """The flag to which ``Concurrency`` adapts and the error that the caller sees agree on every status."""
    for status in STATUSES:
        is_error = isinstance(status_error(status, {}, code, None), ThrottledError)
        assert is_error == is_throttled(status, code), (status, code)


@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "QuotaExceeded"), (507, None), (507, "XMinioStorageFull"), (400, "XMinioAdminBucketQuotaExceeded")],
)
def test_a_full_bucket(status: int, code: str | None) -> None:
    """A bucket without room is an error of its own, which trying again does not mend, with the errno of a full disk."""
    error = status_error(status, {}, code, "full")
    assert isinstance(error, StoreFullError)
    assert (error.retryable, error.errno) == (False, errno.ENOSPC)


def test_an_answer_without_a_body_does_not_blame_the_key() -> None:
    """The answer to a HEAD says 404 or 403 and no more, so the hint names everything that may be wrong."""
    assert "the bucket and the endpoint" in str(status_error(404, {}, None, None))
    assert "the keys are wrong" in str(status_error(403, {}, None, None))
    assert "the request was anonymous" in str(status_error(403, {}, "AccessDenied", "Access Denied", is_signed=False))
    assert "endpoint" not in str(status_error(404, {}, "NoSuchKey", "The key does not exist."))


@pytest.mark.parametrize("size", [b"", b"-1", b"+9", b"1_0", b" 9", b"1.5", b"4611686018427387904", b"9" * 5000])
def test_a_size_that_no_object_has_is_refused(size: bytes) -> None:
    """Sizes are digits, fewer than 64 bits hold, wherever an answer states them."""
    with pytest.raises(ProtocolError):
        served_span(200, {b"content-length": size}, None)
    for text in (b"bytes 0-7/" + size, b"bytes 0-" + size + b"/9", b"bytes " + size + b"-7/9"):
        with pytest.raises(ProtocolError):
            served_span(206, {b"content-range": text}, ByteRange(0, 8))
    assert served_span(206, {b"content-range": b"bytes 0-7/9", b"content-length": b"8"}, ByteRange(0, 8))[0] == 9
