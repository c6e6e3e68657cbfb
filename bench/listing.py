"""How long does listing 100 000 keys over 100 prefixes take behind 30 ms, beside boto3's paginator?"""

from __future__ import annotations

import zlib
from typing import Any

from clients import BUCKET, BenchError, Client
from harness import Row, Run, arguments, objects
from origin.origin import Origin

METRICS = {
    "seconds": lambda answer: answer["seconds"],
    "keys/s": lambda answer: answer["objects"] / answer["seconds"],
    "CPU us/key": lambda answer: answer["cpu_s"] / answer["objects"] * 1e6,
}


def main(options: Any) -> None:
    prefixes, each = 100, 100 if options.quick else 1000
    keys = [f"part-{prefix:03d}/{index:07d}.jpg" for prefix in range(prefixes) for index in range(each)]
    check = zlib.crc32("\n".join(keys).encode())
    clients = [
        Client("penstock", "penstock"),
        Client("boto3", "boto3"),
        Client("connector", "s3torchconnector"),
        Client("obstore", "obstore"),
        Client("s3fs", "s3fs"),
    ]
    with objects({}) as root, Origin(root, listed={BUCKET: keys}, ttfb_ms=30) as origin:
        question = f"{len(keys)} keys over {prefixes} prefixes, 30 ms first byte"
        run = Run(question, origin, options.select(clients), METRICS, options.turns(3, 1))

        def turn(client: Client) -> dict[str, Any]:
            answer = client.ask({"do": "list"})
            if (answer["objects"], answer["check"]) != (len(keys), check):
                raise BenchError(f"{client.name} listed {answer['objects']} keys, or not in order, of {len(keys)}")
            return answer

        with run:
            run.turns(turn)
        rows = [Row("keys/s : boto3", run.ratios("keys/s", "penstock", "boto3"), 12, 20)]
        run.report(rows, keys=len(keys), prefixes=prefixes)


if __name__ == "__main__":
    main(arguments(__doc__))
