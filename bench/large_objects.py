"""At what rate and CPU does one process read 100 MB objects in order: plain, over TLS, 90 MB/s per connection, and at first?

penstock reads with `read_many` and drops each object before the next. The connector's pieces and obstore's parts are
not even joined, so a peer does less than penstock, which delivers each object as one buffer.
"""

from __future__ import annotations

from typing import Any

from clients import Client, Wrk
from harness import arguments, keys_of, objects, verified

from penstock.bench.origin.server import Origin
from penstock.bench.turns import Row, Run

OBJECT_BYTES = 100 << 20
PART_BYTES = 8 << 20
COUNT = 8
PACED = {"ttfb_ms": 30, "rate_bytes_per_s": 90_000_000}
PACED_CONNECTIONS = 32
METRICS = {
    "MB/s": lambda answer: answer["bytes"] / answer["seconds"] / 1e6,
    "CPU ms/GB": lambda answer: answer["cpu_s"] / answer["bytes"] * 1e12,
}
STEADY = {"steady MB/s": lambda answer: answer["steady_bytes_per_s"] / 1e6}  # from the second second on
ONE, TWO, MANY = "connector as it comes", "connector 200 Gbps", "connector tuned"
# What did best of parts of 5 to 32 MiB, 1 to 8 objects at a time and 10 to 200 Gbps.
TUNED = {
    "plain": {"part_bytes": 5 << 20, "threads_large": 8},
    "paced": {"throughput_target_gbps": 200, "threads_large": 4},
}
WRK = f"""
local n, size, part = -1, {OBJECT_BYTES}, {PART_BYTES}
local parts = math.ceil(size / part)
request = function()
  n = (n + 1) % ({COUNT} * parts)
  local start = (n % parts) * part
  local range = string.format("bytes=%d-%d", start, math.min(start + part, size) - 1)
  return wrk.format("GET", string.format("/bench/big/%06d", math.floor(n / parts)), {{ ["Range"] = range }})
end"""


def clients(case: str) -> list[Any]:
    paced = case == "paced"
    penstock = {"fetch": {"requests_max": PACED_CONNECTIONS}} if paced else {}
    found = [
        Client("penstock", "penstock", **penstock),
        Client(ONE, "s3torchconnector"),
        Client(TWO, "s3torchconnector", throughput_target_gbps=200),
        Client(MANY, "s3torchconnector", **TUNED["paced" if paced else "plain"]),
        Client("obstore", "obstore", threads_large=PACED_CONNECTIONS if paced else 8),
    ]
    if case == "plain":
        found += [Client("boto3", "boto3"), Client("s3fs", "s3fs")]
    if case == "cold":
        return [client for client in found if client.name in ("penstock", ONE, "obstore")]
    if case != "tls":  # what wrk's TLS costs says little of ours
        found.append(Wrk(connections=PACED_CONNECTIONS, seconds=4 if paced else 2, script=WRK))
    return found


def rows(case: str, run: Run) -> list[Row]:
    fast = run.best("MB/s", ONE, TWO, MANY)
    lean = run.best("CPU ms/GB", ONE, TWO, MANY, less=True)
    rate, cpu = run.ratios("MB/s", "penstock", fast), run.ratios("CPU ms/GB", "penstock", lean)
    if case == "plain":
        return [
            Row("MB/s : connector", rate, 2.5, 4),
            Row("CPU/GB : connector", cpu, 0.3, 0.22, less=True),
            Row("MB/s : obstore", run.ratios("MB/s", "penstock", "obstore"), 1, 1.2),
        ]
    if case == "cold":
        return [Row("first pass, MB/s : obstore", run.ratios("MB/s", "penstock", "obstore"), 0.7, 1.2)]
    if case == "tls":
        return [Row("TLS MB/s : connector", rate, 1.2, 1.5), Row("TLS CPU/GB : connector", cpu, 0.75, 0.6, less=True)]
    return [Row("steady MB/s : wrk, 32 connections", run.ratios("steady MB/s", "penstock", "wrk"), 0.85, 0.95)]


def wrk_answer(client: Wrk, paced: bool) -> dict[str, Any]:
    """With ``steady_bytes_per_s`` from the second second on: what a long run gave beyond a run of one second."""
    answer = client.measure()
    if paced:
        head = client.measure(seconds=1)
        gained_s = answer["seconds"] - head["seconds"]
        answer["steady_bytes_per_s"] = (answer["bytes"] - head["bytes"]) / gained_s
    return answer


def first_answer(client: Client, origin: Origin, command: dict[str, Any]) -> dict[str, Any]:
    """What a process of its own answers that has read nothing before: all its memory is fresh."""
    fresh = Client(client.name, client.driver, **client.options)
    try:
        fresh.start(origin)
        return fresh.ask({**command, "skip_s": 0.0})
    finally:
        fresh.close()


def measure(options: Any, case: str) -> None:
    paced = case == "paced"
    settings = {"plain": {}, "tls": {"tls": True}, "paced": PACED, "cold": {}}[case]
    # The paced case must outlast its first second: 8 objects take 0.4 s at 2 GB/s.
    repeats = (5 if options.quick else 12) if paced else 1
    keys = keys_of("big", COUNT) * repeats
    with objects({"big": (COUNT, OBJECT_BYTES)}) as root, Origin(root, **settings) as origin:
        question = f"{len(keys)} objects of 100 MiB in order, {case}"
        metrics = METRICS | STEADY if paced else METRICS
        run = Run(question, origin, options.select(clients(case)), metrics, options.turns(3 if paced else 5, 1))

        def turn(client: Any, count: int | None = None) -> dict[str, Any]:
            if isinstance(client, Wrk):
                return wrk_answer(client, paced)
            slow = paced and client.driver == "s3torchconnector"  # at 0.3 GB/s a third outlasts a second too
            wanted = keys[: count or (len(keys) // 3 if slow else len(keys))]
            command = {"do": "read", "keys": wanted, "size_bytes": OBJECT_BYTES, "in_order": True}
            if case == "cold":
                return verified(client, first_answer(client, origin, command), root, wanted)
            return verified(client, client.ask({**command, "skip_s": 1.0 if paced else 0.0}), root, wanted)

        with run:
            warm = None if case == "cold" else lambda client: turn(client, COUNT)
            run.turns(turn, warm=warm)  # fresh pages cost more than bytes: see README
        run.report(rows(case, run), object_bytes=OBJECT_BYTES, case=case, **settings)


if __name__ == "__main__":
    chosen = arguments(__doc__, case={"choices": ["plain", "tls", "paced", "cold", "all"], "default": "all"})
    for one in ("plain", "tls", "paced", "cold"):
        if chosen.case in (one, "all"):
            measure(chosen, one)
