"""Ask the behaviours of ``test_s3_behaviours.py`` of several servers, and print which has which.

python tests/s3_behaviours.py [gateway ministack moto]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

SUITE = Path(__file__).parent / "integration/gateway/test_s3_behaviours.py"


def ask(server: str) -> dict[str, bool]:
    """Return whether a server has each behaviour."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", str(SUITE), "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        subprocess.run(
            command, env={**os.environ, "PENSTOCK_BEHAVIOURS": server}, check=False, stdout=subprocess.DEVNULL
        )
        cases = ET.parse(report).getroot().iter("testcase")
        return {case.get("name", ""): case.find("failure") is None and case.find("error") is None for case in cases}


def main() -> None:
    servers = sys.argv[1:] or ["gateway", "ministack", "moto"]
    answers = {server: ask(server) for server in servers}
    names = list(dict.fromkeys(name for answer in answers.values() for name in answer))
    width = max(map(len, names))
    print(" " * width, *servers)
    for name in names:
        marks = ["yes" if answers[server].get(name) else "NO" for server in servers]
        if "NO" in marks:
            print(name.ljust(width), *(mark.ljust(len(server)) for mark, server in zip(marks, servers, strict=True)))
    sums = (f"{sum(answers[server].values())}/{len(names)}".ljust(len(server)) for server in servers)
    print("passed".ljust(width), *sums)


if __name__ == "__main__":
    main()
