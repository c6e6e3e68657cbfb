"""How many objects of 100 KB a second, and at what CPU, does one process read, plain and over TLS, with and without delay?

`read_many` of penstock gives them in order; the peers may give theirs in any order, which is cheaper.
"""

from __future__ import annotations

from typing import Any

from clients import Client, Wrk
from harness import arguments, keys_of, objects, verified

from penstock import FetchConfig
from penstock.bench.origin.server import Origin
from penstock.bench.turns import Row, Run

OBJECT_BYTES = 100_000
CONNECTIONS = FetchConfig().requests_max
METRICS = {
    "objects/s": lambda answer: answer["objects"] / answer["seconds"],
    "CPU us/object": lambda answer: answer["cpu_s"] / answer["objects"] * 1e6,
    "connections/1000": lambda answer: answer["connections"] / answer["objects"] * 1e3,
}
AS_IT_COMES, TUNED, WIDE = "connector as it comes", "connector 200 Gbps", "connector 100 Gbps"
WRK = """
local n = -1
request = function() n = (n + 1) %% %d; return wrk.format("GET", string.format("/bench/small/%%06d", n)) end"""
# Slow peers read only a share of the objects: their rate is the same, and the benchmark ends sooner.
SLOW = {"boto3": 0.25, "s3fs": 0.25, "connector's dataset": 0.04}
SLOW_QUICK = {AS_IT_COMES: 0.25, "boto3": 0.06, "s3fs": 0.06, "connector's dataset": 0.01}


def clients(count: int, *, delayed: bool, tls: bool) -> list[Any]:
    wide = 256 if delayed else 32  # threads: enough to cover the delay; without a delay, fewer threads cost less
    found = [
        Client("penstock", "penstock"),
        Client(AS_IT_COMES, "s3torchconnector", threads=64),
        Client(TUNED, "s3torchconnector", threads=wide, throughput_target_gbps=200),
        Client(WIDE, "s3torchconnector", threads=384 if delayed else 8, throughput_target_gbps=100),
        Client("connector's dataset", "s3torchconnector", dataset=True),
        Client("obstore", "obstore", threads=wide),
        Client("boto3", "boto3", threads=wide if delayed else 16),
        Client("s3fs", "s3fs"),
    ]
    if tls:  # the cost of TLS in wrk says little about ours, and the slowest peers are left out
        return [client for client in found if client.name in ("penstock", AS_IT_COMES, TUNED, WIDE, "obstore")]
    return [*found, Wrk(connections=CONNECTIONS, seconds=2, script=WRK % count)]


def rows(run: Run, *, delayed: bool, tls: bool) -> list[Row]:
    connector = (TUNED, WIDE, AS_IT_COMES)
    if tls:
        fast, lean = (*connector, "obstore"), run.best("CPU us/object", *connector, "obstore", less=True)
        if delayed:
            best = run.best("objects/s", *fast)
            return [
                Row(f"TLS objects/s : {best}", run.ratios("objects/s", "penstock", best), 0.95, 1.3),
                Row("TLS connections beyond the window per 1 000", _beyond(run), 1, 0, less=True),
            ]
        return [Row(f"TLS CPU/object : {lean}", run.ratios("CPU us/object", "penstock", lean), 1.05, 0.8, less=True)]
    if delayed:
        best = run.best("objects/s", *connector)
        return [
            Row("objects/s : connector as it comes", run.ratios("objects/s", "penstock", AS_IT_COMES), 6, 9),
            Row("objects/s : connector at its best", run.ratios("objects/s", "penstock", best), 1.5, 1.8),
            Row("objects/s : wrk", run.ratios("objects/s", "penstock", "wrk"), 0.75, 0.9),
        ]
    lean = run.best("CPU us/object", *connector, less=True)
    return [
        Row("CPU/object : wrk", run.ratios("CPU us/object", "penstock", "wrk"), 3, 2.4, less=True),
        Row("CPU/object : connector", run.ratios("CPU us/object", "penstock", lean), 0.4, 0.3, less=True),
        Row("objects/s : obstore", run.ratios("objects/s", "penstock", "obstore"), 0.75, 1),
        Row("CPU/object : obstore", run.ratios("CPU us/object", "penstock", "obstore"), 1.05, 0.75, less=True),
    ]


def _beyond(run: Run) -> list[float]:
    """Return the connections that a warm penstock opened per 1 000 objects in each turn."""
    return run.values("penstock", "connections/1000") if "penstock" in run.answers else []


def measure(options: Any, ttfb_ms: float, *, tls: bool) -> None:
    count, slow = 8000, SLOW_QUICK if options.quick else SLOW
    with objects({"small": (count, OBJECT_BYTES)}) as root, Origin(root, ttfb_ms=ttfb_ms, tls=tls) as origin:
        question = f"{count} objects of 100 KB, {ttfb_ms:g} ms first byte{', TLS' if tls else ''}"
        chosen = options.select(clients(count, delayed=ttfb_ms > 0, tls=tls))
        run = Run(question, origin, chosen, METRICS, options.turns(5, 2))

        def turn(client: Any, share: float = 1.0) -> dict[str, Any]:
            before = origin.connections_accepted()
            if isinstance(client, Wrk):
                return {**client.measure(), "connections": origin.connections_accepted() - before}
            keys = keys_of("small", int(count * share * slow.get(client.name, 1.0)))
            command = {"do": "read", "keys": keys, "size_bytes": OBJECT_BYTES, "in_order": client.driver == "penstock"}
            answer = verified(client, client.ask(command), root, keys)
            return {**answer, "connections": origin.connections_accepted() - before}

        with run:
            run.turns(turn, warm=lambda client: turn(client, 0.1))
        run.report(rows(run, delayed=ttfb_ms > 0, tls=tls), object_bytes=OBJECT_BYTES, ttfb_ms=ttfb_ms, objects=count)


if __name__ == "__main__":
    cases = {"choices": ["plain", "tls", "both"], "default": "both"}
    chosen = arguments(__doc__, delay={"choices": ["0", "30", "both"], "default": "both"}, case=cases)
    for over_tls in (False, True):
        for delay_ms in (30, 0):
            if chosen.delay in (str(delay_ms), "both") and chosen.case in ("tls" if over_tls else "plain", "both"):
                measure(chosen, delay_ms, tls=over_tls)
