"""How long does `import penstock` take beyond a bare interpreter, beside the peers in their venvs?"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

from clients import HERE, Function, ran
from harness import Row, Run, arguments

IMPORTS = {"boto3": "boto3", "connector": "s3torchconnector", "obstore": "obstore", "s3fs": "s3fs"}
METRICS = {"ms": lambda answer: answer["seconds"] * 1e3}


def started(python: Path | str, code: str) -> dict[str, Any]:
    start_s = time.perf_counter()
    ran(python, "-c", code)
    return {"seconds": time.perf_counter() - start_s}


def main(options: Any) -> None:
    clients = [
        Function("bare", started, sys.executable, "pass"),
        Function("penstock", started, sys.executable, "import penstock"),
        Function("with connect", started, sys.executable, "import penstock; penstock.connect"),
    ]
    for name, module in IMPORTS.items():
        python = HERE / ".venvs" / IMPORTS[name] / "bin" / "python"
        if python.exists():
            clients += [
                Function(f"{name}: bare", started, python, "pass"),
                Function(name, started, python, f"import {module}"),
            ]
    run = Run("import time", None, options.select(clients), METRICS, options.turns(15, 5))
    with run:
        run.turns(lambda client: client.measure(), warm=lambda client: client.measure())
    beyond = run.differences("ms", "penstock", "bare")
    peers = {
        f"{name}_beyond_ms": round(statistics.median(run.differences("ms", name, f"{name}: bare")), 1)
        for name in IMPORTS
        if name in run.answers
    }
    run.report([Row("import penstock beyond bare, ms", beyond, 60, 40, less=True)], **peers)


if __name__ == "__main__":
    main(arguments(__doc__))
