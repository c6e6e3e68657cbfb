"""The page of the matrix, ``docs/reference/doors.md``, as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from doors.matrix.data_set import LARGE_BYTES, records_of, shard_names
from doors.matrix.measuring import Cells
from doors.matrix.table import ROWS, Reason

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "doors.md"

_COLUMNS = {"order": "order", "workers": "workers", "shuffled": "shuffled", "resumes": "resumes", "cache": "cache"}
_FAULTS = {
    "replaced": "replaced between epochs", "cut off": "cut off", "deleted": "deleted", "denied": "access denied",
    "flipped": "one byte flipped on the way",
}  # fmt: skip


def render(measured: Mapping[str, Cells], faults: Mapping[str, Cells]) -> str:
    """Return the page.

    Args:
        measured: Cells of the first table, by the row's name.
        faults: Cells of the second table, by the row's name.
    """
    reasons: list[Reason] = []
    first = _table(_COLUMNS, measured, reasons)
    second = _table(_FAULTS, faults, reasons)
    notes = "\n".join(f"{number}. {reason.text}" for number, reason in enumerate(reasons, 1))
    return _TEXT.format(
        samples=len(records_of()), shards=len(shard_names()), large=f"{LARGE_BYTES / 2**20:.0f} MiB", first=first,
        second=second, notes=notes,
    )  # fmt: skip


def _table(columns: Mapping[str, str], cells: Mapping[str, Cells], reasons: list[Reason]) -> str:
    lines = [f"| | {' | '.join(columns.values())} |", "|---" * (len(columns) + 1) + "|"]
    for row in ROWS:
        texts = []
        for column in columns:
            cell = cells[row.name][column]
            if cell.reason is not None and cell.reason not in reasons:
                reasons.append(cell.reason)
            texts.append(cell.text + (f" ({reasons.index(cell.reason) + 1})" if cell.reason is not None else ""))
        lines.append(f"| {row.name} | {' | '.join(texts)} |")
    return "\n".join(lines)


_TEXT = """\
# The same samples through every door

A *door* is an interface through which a program reads with penstock: a class of ours, another library, a mount, an S3
endpoint. `make test-doors` reads one data set through each of them, and compares every sample with what was written: its
key, its fields, and every byte. It writes this page, and fails if the page differs from what it measured. To choose
a door for the library that you use today, see [coming from another library](../coming-from/README.md). Which frameworks
that drive the loop (Lightning, Keras, ...) resume exactly is
[in the training guide](../guides/training.md#frameworks-that-resume).

The data set has {samples} samples in {shards} shards. They include empty fields, samples that lack a field, keys in Unicode,
keys of more than a hundred bytes, the same key in two shards, names with several dots, a shard of one sample, and samples
from one byte to {large}. The store is a real S3 server.

## What each door has

{first}

All doors give the same samples and bytes, in every column that is not "no". Other doors have tests of their own: iopath's
handler, TorchData's DataPipes, Grain, SPDL and NVIDIA DALI.

- **order**: the order without shuffling and without workers. "The shards'" is the order in which the samples are stored.
- **workers**: the number of worker processes tried, and the order that they give. "Its own" is another order of the same
  samples.
- **shuffled**: "the Loader's" order depends on the seed, the window, and whether there is an [index](../guides/indexing.md);
  here, there is one. It is the same through each of these doors. "Its own" means that the library that reads shuffles, or
  that Pipe mode shuffles the shards. The same seed gives the same order again.
- **resumes**: an epoch that is interrupted after three batches and continued in a new reader has all samples exactly once,
  in the same order: without and with workers, and shuffled where the order is the Loader's.
- **cache**: with a [cache](../guides/cache.md) on the node's disk, a second reader gives the same samples and requests no
  shard. File mode keeps downloads (`--downloads`), and the gateway always has a cache.

## What each door says when something is wrong

In each test, one of three shards is spoilt. No door silently gives fewer samples: each raises an error that names the
object, or gives all samples of the object's new version.

{second}

- **replaced between epochs**: "the new samples" are all samples that the store has now; an error says that the object has
  changed since it was listed. To read the new version, create a new reader or call `restart()`.
- **cut off**: the stored object ends early, inside a sample. Doors that give bytes give what is stored, and the program that
  parses them, such as Python's `tarfile`, raises the error. A TFRecord file, or a tar without its end mark, that ends exactly
  between two samples is a valid file with fewer samples.
- **deleted**: the object was deleted after it was listed, and before it was read.
- **one byte flipped on the way**: the store keeps a checksum of the object, and the bytes that arrive do not match it, in
  any attempt.
- Errors of file operations, such as `OSError (EIO)`, do not name the file. The program knows which file it reads, and the
  [mount's log](../guides/mount.md#if-something-goes-wrong) names the object and the cause. TensorFlow raises its own
  exception classes with our messages. "Exit code" means that the program prints the error on standard error.

## Notes

{notes}
"""
