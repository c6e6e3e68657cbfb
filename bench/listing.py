"""How long does listing 100 000 keys behind 30 ms take, beside boto3's paginator: over 100 prefixes, and under one?"""

from __future__ import annotations

import zlib
from typing import Any

from clients import BUCKET, Client
from harness import arguments, objects

from penstock.bench.origin.server import Origin
from penstock.bench.process import BenchError
from penstock.bench.turns import Row, Run

METRICS = {
    "seconds": lambda answer: answer["seconds"],
    "keys/s": lambda answer: answer["objects"] / answer["seconds"],
    "CPU us/key": lambda answer: answer["cpu_s"] / answer["objects"] * 1e6,
}
CASES = {"prefixes": "{prefix:03d}/{index:07d}.jpg", "flat": "{number:08d}.jpg", "hashes": "{hashed:08x}.jpg"}
"""Names of keys, 1 000 of each prefix; the last two have no prefixes."""


def keys_of(case: str, each: int) -> list[str]:
    numbers = [(prefix, index, prefix * each + index) for prefix in range(100) for index in range(each)]
    return sorted(
        CASES[case].format(prefix=prefix, index=index, number=number, hashed=number * 2654435761 % (1 << 32))
        for prefix, index, number in numbers
    )


def measure(options: Any, case: str) -> None:
    keys = keys_of(case, 100 if options.quick else 1000)
    check = zlib.crc32("\n".join(keys).encode())
    clients = [
        Client("penstock", "penstock"),
        Client("boto3", "boto3"),
        Client("connector", "s3torchconnector"),
        Client("obstore", "obstore"),
        Client("s3fs", "s3fs"),
    ]
    with objects({}) as root, Origin(root, listed={BUCKET: keys}, ttfb_ms=30) as origin:
        question = f"{len(keys)} keys, {case}, 30 ms first byte"
        run = Run(question, origin, options.select(clients), METRICS, options.turns(3, 1))

        def turn(client: Client) -> dict[str, Any]:
            answer = client.ask({"do": "list"})
            if (answer["objects"], answer["check"]) != (len(keys), check):
                raise BenchError(f"{client.name} listed {answer['objects']} keys, or not in order, of {len(keys)}")
            return answer

        with run:
            run.turns(turn)
        run.report(
            [Row("keys/s : boto3", run.ratios("keys/s", "penstock", "boto3"), 12, 20)], keys=len(keys), case=case
        )


if __name__ == "__main__":
    chosen = arguments(__doc__, case={"choices": [*CASES, "all"], "default": "all"})
    for one in CASES:
        if chosen.case in (one, "all"):
            measure(chosen, one)
