"""Errors of buckets in S3's terms."""

from __future__ import annotations

import pytest

from penstock.errors import WIRE, CredentialsError, ObjectChangedError, PenstockError, StoreError
from penstock.gateway.http.exchanges import as_s3_error


@pytest.mark.parametrize("kind", sorted(WIRE, key=lambda kind: kind.__name__))
def test_every_error_has_a_status_and_tells_no_place(kind: type[PenstockError]) -> None:
    """The message names nothing of the error's own, and the status is that of the table.

    There are two exceptions: the caller went away, and the upstream refused the gateway's credentials.
    """
    refusal = as_s3_error(kind("/secret/path s3://upstream"), is_conditional=True)
    status = 502 if kind is CredentialsError else WIRE[kind][1]
    assert refusal.status == (503 if status == 499 else status)
    assert "secret" not in refusal.message
    assert "s3://" not in refusal.message


def test_a_replaced_object_is_the_fault_of_clients_that_named_a_version() -> None:
    """Clients that named no version get a status with which they try again."""
    error = ObjectChangedError("changed")
    statuses = [as_s3_error(error, is_conditional=named).status for named in (True, False)]
    assert statuses == [412, 503]


@pytest.mark.parametrize(("code", "status"), [("NoSuchUpload", 404), ("InvalidPart", 400), ("InvalidPartOrder", 400)])
def test_what_clients_do_wrong_with_uploads_is_told_to_them(code: str, status: int) -> None:
    """A store's refusal of an upload or of its parts keeps status and code, with S3's message instead of the store's."""
    refusal = as_s3_error(StoreError("/secret/path", status=status, code=code), is_conditional=False)
    assert (refusal.status, refusal.code) == (status, code)
    assert "secret" not in refusal.message


def test_other_codes_of_an_upstream_are_not_told() -> None:
    """What else an upstream objects to is between the gateway and its upstream."""
    refusal = as_s3_error(StoreError("bad token", status=400, code="InvalidToken"), is_conditional=False)
    assert (refusal.status, refusal.code) == (502, "InternalError")
