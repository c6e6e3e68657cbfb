"""Transformed objects read with boto3: ranges, conditions, sizes, failures half-way, one run for all."""

from __future__ import annotations

import concurrent.futures
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from fronts import RunningFront, s3_client
from gateway_support.results import BLOCK_BYTES, FunctionTransform, open_results, point_of, swap_case

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.server

TEXT = b"".join(b"%07d\n" % number for number in range(40 * BLOCK_BYTES // 8)) + b"the End"


@contextmanager
def _serving(folder: Path, transform: FunctionTransform, **options: object) -> Iterator[Any]:
    """Serve one transformed object, ``a``, and return a client."""
    results = open_results(folder)
    point = point_of(transform, results, {"a": TEXT}, **options)
    with RunningFront(point) as front:
        client = s3_client(front.url)
        try:
            yield client
        finally:
            client.close()
            front.call(results.close)


def test_ranges_conditions_and_sizes_cost_one_run(tmp_path: Path) -> None:
    """Many clients at once read by ranges, and see one version of one size; conditions are answered from its ETag."""
    transform = FunctionTransform(swap_case)
    wanted = TEXT.swapcase()
    with _serving(tmp_path, transform) as client:

        def part(start: int) -> bytes:
            span = f"bytes={start}-{start + 49_999}"
            data: bytes = client.get_object(Bucket="point", Key="a", Range=span)["Body"].read()
            return data

        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            assert b"".join(threads.map(part, range(0, len(wanted), 50_000))) == wanted
        assert client.get_object(Bucket="point", Key="a", Range="bytes=-7")["Body"].read() == b"THE eND"
        whole = client.get_object(Bucket="point", Key="a")
        assert (whole["ContentLength"], whole["ContentType"]) == (len(wanted), "text/plain")
        assert whole["Body"].read() == wanted
        head = client.head_object(Bucket="point", Key="a")
        assert (head["ContentLength"], head["ETag"]) == (len(wanted), whole["ETag"])
        with pytest.raises(ClientError, match="304"):
            client.get_object(Bucket="point", Key="a", IfNoneMatch=whole["ETag"])
        with pytest.raises(ClientError, match="PreconditionFailed"):
            client.get_object(Bucket="point", Key="a", IfMatch='"other"')
        with pytest.raises(ClientError, match="InvalidRange"):
            client.get_object(Bucket="point", Key="a", Range=f"bytes={len(wanted)}-")
        assert [row["Size"] for row in client.list_objects_v2(Bucket="point")["Contents"]] == [len(wanted)]
    assert transform.runs_count == 1
