"""Below which gap does one request for two ranges beat two requests, for a store?

Reading a gap costs bandwidth, and a second request costs a time to first byte. They break even at a gap of rate_bytes_per_s *
first_byte_s of one connection. This benchmark measures both, prints the gap that the store's own statistics imply (by which
random access merges ranges), and times pairs of 64 KiB ranges as one request and as two, on one connection. With more
connections than work, the second request is hidden behind others, and the gap that pays is smaller.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from clients import BUCKET
from harness import arguments, objects

from penstock.bench.origin.server import Origin
from penstock.bench.turns import print_report, surroundings

KIB, MIB = 1 << 10, 1 << 20
PIECE_BYTES, OBJECT_BYTES = 64 * KIB, 64 * MIB
GAPS = [0, 64 * KIB, 256 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB]


def timed(call: Callable[[], object], repetitions: int) -> float:
    """Return the median seconds of a call, after one that does not count."""
    call()
    spent_s = []
    for _ in range(repetitions):
        start_s = time.perf_counter()
        call()
        spent_s.append(time.perf_counter() - start_s)
    return statistics.median(spent_s)


def measure(store: Any, key: str, repetitions: int) -> tuple[list[list[str]], dict[str, Any]]:
    import penstock
    from penstock.sources.readers import break_even_bytes

    def span(start: int, end: int) -> Callable[[], object]:
        return lambda: store.read(key, penstock.ByteRange(start, end))

    first_byte_s = timed(span(0, 1), repetitions)
    rate_bytes_per_s = 7 * MIB / max(timed(span(0, 8 * MIB), repetitions) - timed(span(0, MIB), repetitions), 1e-9)
    table, crossing = [["gap", "one request ms", "two ms", "better"]], 0
    for gap_bytes in GAPS:
        end = 2 * PIECE_BYTES + gap_bytes
        one_s = timed(span(0, end), repetitions)
        first, second = span(0, PIECE_BYTES), span(end - PIECE_BYTES, end)
        two_s = timed(lambda first=first, second=second: (first(), second()), repetitions)
        crossing = gap_bytes if one_s <= two_s else crossing
        better = "one" if one_s <= two_s else "two"
        table.append([f"{gap_bytes // KIB} KiB", f"{one_s * 1e3:.2f}", f"{two_s * 1e3:.2f}", better])
    record = {
        "first_byte_ms": round(first_byte_s * 1e3, 3),
        "rate_bytes_per_s": round(rate_bytes_per_s),
        "break_even_bytes": round(first_byte_s * rate_bytes_per_s),
        "break_even_by_statistics_bytes": break_even_bytes(store),
        "largest_gap_where_one_won_bytes": crossing,
    }
    return table, record


def main(options: Any) -> None:
    import penstock

    repetitions = options.turns(9, 3)
    one_connection = penstock.FetchConfig(requests_min=1, requests_max=1, part_bytes=64 * MIB)
    if options.url:
        store = penstock.connect(options.url, endpoint_url=options.endpoint_url, fetch=one_connection)
        table, record = measure(store, options.key, repetitions)
        record |= {"url": options.url}
    else:
        settings = {"ttfb_ms": 30.0, "rate_bytes_per_s": 90_000_000}
        with objects({"big": (1, OBJECT_BYTES)}) as root, Origin(root, **settings) as origin:
            credentials = penstock.Credentials(access_key="AKBENCH", secret_key="bench")
            where = {"endpoint_url": origin.url, "region": "us-east-1", "credentials": credentials}
            store = penstock.connect(f"s3://{BUCKET}", fetch=one_connection, **where)
            table, record = measure(store, "big/000000", repetitions)
            record |= settings
    about = {"bench": "break-even gap", **surroundings(), "repetitions": repetitions, **record}
    print(
        f"first byte {record['first_byte_ms']} ms, {record['rate_bytes_per_s'] / 1e6:.0f} MB/s on one connection:",
        end=" ",
    )
    print(f"break-even at {record['break_even_bytes'] / KIB:.0f} KiB", end=", ")
    print(f"by the store's statistics at {record['break_even_by_statistics_bytes'] / KIB:.0f} KiB")
    print_report("one request or two", table, [], about)


if __name__ == "__main__":
    main(
        arguments(
            __doc__,
            url={"help": "a store to measure instead, such as s3://bucket"},
            key={"help": "in that store: an object of 10 MB or more"},
            endpoint_url={"help": "of that store"},
        )
    )
