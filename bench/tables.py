"""How many rows of numbers a second does one process read from Parquet, beside pyarrow.dataset and Hugging Face datasets?

Four columns of int64 and four of float64, local files in memory, batches of 1 024 as NumPy arrays. `rows` is penstock with a
`map`, which has it handle single samples; `shuffled` has a window of 65 536 rows over 64 lanes. pyarrow.dataset and
datasets read in stored order; datasets in its formats of NumPy and of Arrow, converted here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from clients import HERE, Function, ran
from harness import arguments, memory_folder

from penstock.bench.process import BenchError
from penstock.bench.turns import Row, Run

METRICS = {
    "rows/s": lambda answer: answer["rows"] / answer["seconds"],
    "CPU us/row": lambda answer: answer["cpu_s"] / answer["rows"] * 1e6,
}
FILES = 4


def write_tables(folder: Path, rows: int) -> float:
    """Write the files, and return the sum of all numbers."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng, total = np.random.default_rng(0), 0.0
    for number in range(FILES):
        columns = {f"i{at}": rng.integers(0, 1 << 20, rows // FILES) for at in range(4)}
        columns |= {f"f{at}": rng.random(rows // FILES) for at in range(4)}
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=1 << 16)
        total += sum(float(column.sum()) for column in columns.values())
    return total


def measured(python: Path | str, way: str, folder: Path, rows: int, total: float) -> dict[str, Any]:
    answer = json.loads(ran(python, HERE / "peers" / "read_table.py", way, folder).splitlines()[-1])
    if answer["rows"] != rows or abs(answer["total"] - total) > 1e-6 * total:
        raise BenchError(f"{way} gave {answer}, not {rows} rows that sum up to {total}")
    return answer


def main(options: Any) -> None:
    rows = FILES * (1 << 16) * (1 if options.quick else 4)
    with memory_folder() as folder:
        total = write_tables(folder, rows)
        interpreters = dict.fromkeys(("penstock", "shuffled", "rows", "pyarrow.dataset"), sys.executable)
        datasets = HERE / ".venvs" / "datasets" / "bin" / "python"
        interpreters |= dict.fromkeys(("datasets numpy", "datasets arrow"), datasets)
        clients = [Function(way, measured, python, way, folder, rows, total) for way, python in interpreters.items()]
        run = Run(f"{rows} rows of 8 numbers", None, options.select(clients), METRICS, options.turns(5, 2))
        with run:
            run.turns(lambda client: client.measure())
        run.report(
            [
                Row("rows/s : the same rows one by one", run.ratios("rows/s", "penstock", "rows"), 10, 20),
                Row("rows/s : datasets, NumPy", run.ratios("rows/s", "penstock", "datasets numpy"), 1, 3),
                Row("rows/s, shuffled : datasets, NumPy", run.ratios("rows/s", "shuffled", "datasets numpy"), 0.5, 1),
                Row("rows/s, share of datasets, Arrow", run.ratios("rows/s", "penstock", "datasets arrow"), 0.1, 0.5),
                Row("rows/s, share of pyarrow.dataset", run.ratios("rows/s", "penstock", "pyarrow.dataset"), 0.1, 0.5),
            ]
        )


if __name__ == "__main__":
    main(arguments(__doc__))
