"""``penstock verify``: compares shards with their index."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import EXIT_UNCHECKED
from penstock.cli.options import AsJson, ConnectionGroup, expand_groups
from penstock.cli.output import print_message
from penstock.text.sizes import format_bytes

if TYPE_CHECKING:
    from penstock.errors import PenstockError
    from penstock.index import ShardRow


@expand_groups
def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="Shards: s3://bucket/prefix/, a pattern, or a directory.")],
    *,
    index_dir: Annotated[
        str | None,
        typer.Option(
            "--index-dir", metavar="DIR", help="Folder of the index; default: beside the shards, or the user's cache."
        ),
    ] = None,
    as_json: AsJson = False,
    connection: ConnectionGroup,
) -> None:
    """Read every shard at URL, and compare the position, key and CRC32C of each sample with the data set's index.

    Shards that are not in the index, that are in the index but do not exist, and that have changed are failures too. The
    exit code is 1 if there is a failure. It is 3 if nothing is wrong but some shards have no checksums, neither in their
    index nor in themselves, so that only the number and lengths of their samples were checked.

    For example:

        penstock verify s3://bucket/train/
        penstock verify --json ./shards/ | jq 'select(.error)'
    """
    from penstock.errors import UncheckedError
    from penstock.pack.verification import verify as verify_url

    start_s = time.monotonic()

    def on_shard(shard_url: str, row: ShardRow | None, error: PenstockError | None) -> None:
        if as_json:
            samples = None if row is None else row.samples_count
            action = "unchecked" if isinstance(error, UncheckedError) else "failed" if error else "verified"
            line = {"action": action, "shard": shard_url, "samples": samples}
            line |= {} if error is None else {"error": type(error).__name__, "message": str(error)}
            print(json.dumps(line), flush=True)
        elif error is not None and not isinstance(error, UncheckedError):  # unchecked shards are counted in one line
            print_message(f"penstock: {shard_url}: {error}")

    found = verify_url(
        url,
        index_dir=index_dir,
        on_shard=on_shard,
        **connection.options(),
    )
    seconds = time.monotonic() - start_s
    if as_json:
        summary = {
            "action": "summary",
            "index": found.url,
            "shards": found.shards_count,
            "samples": found.samples_count,
            "size_bytes": found.size_bytes,
            "failed": len(found.failed),
            "unchecked": len(found.unchecked),
            "seconds": round(seconds, 3),
        }
        print(json.dumps(summary))
    else:
        failed = f", {len(found.failed)} failed" if found.failed else ""
        failed += f", {len(found.unchecked)} not verified" if found.unchecked else ""
        rate = format_bytes(found.size_bytes / max(seconds, 1e-9))
        print_message(
            f"{found.samples_count} samples in {found.shards_count} shards verified{failed}, "
            f"{seconds:.1f} s, {rate}/s: {found.url}",
        )
        if found.unchecked:
            url, error = found.unchecked[0]
            print_message(f"penstock: {len(found.unchecked)} shards, the first {url}: {error.what}")
            print_message(f"penstock: {error.hint}")
    if found.problems:
        raise typer.Exit(1 if found.failed else EXIT_UNCHECKED)
