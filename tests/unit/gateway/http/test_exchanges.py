"""Errors of buckets in S3's terms."""

from __future__ import annotations

import pytest

from penstock.errors import WIRE, CredentialsError, ObjectChangedError, PenstockError
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
