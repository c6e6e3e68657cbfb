"""Breaks the most important contracts one by one, and checks that tests notice: ``make mutations``.

Each row of ``MUTATIONS`` names a contract, the text that keeps it, a text that breaks it, and tests that must fail then.
The tree is copied to a temporary directory, and each mutation is applied there alone. A mutation survives if all of its
tests pass; then a test is missing. A mutation whose text is no longer in its file has to be written anew.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "pyproject.toml")
RUN_S_MAX = 300  # a mutation may make tests hang, which counts as noticed


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One way to break a contract.

    Attributes:
        contract: What users rely on.
        path: File, relative to ``src/penstock``.
        function: Where in the file, for readers.
        old: The text to replace; it is in the file exactly once.
        new: What replaces it.
        tests: What pytest is to run, relative to ``tests``; at least one test must fail.
    """

    contract: str
    path: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        contract="no short read is returned after a connection ended",
        path="transport/plain.py",
        function="PlainPool._on_body",
        old="            self._fail(connection, pycurl.E_PARTIAL_FILE, f",
        new="            self._finish(connection), str(",
        tests=("integration/test_transport_hostile.py::test_an_answer_cut_anywhere_is_an_error",),
    ),
    Mutation(
        contract="no file is short after a connection ended",
        path="transport/plain.py",
        function="PlainPool._on_file",
        old="            self._fail(connection, pycurl.E_PARTIAL_FILE, what)\n",
        new="            self._finish(connection)\n",
        tests=("integration/test_transport.py::test_a_body_for_a_file_that_breaks_is_broken",),
    ),
    Mutation(
        contract="no short read is returned from a body in chunks",
        path="store/exchange.py",
        function="Exchange._fill_get",
        old="        if received != self.span.length_bytes:\n",
        new="        if False:\n",
        tests=("integration/test_chunked.py::test_chunks_that_end_before_the_range_does_are_an_error",),
    ),
    Mutation(
        contract="a read sees one version: the request names it",
        path="store/s3_requests.py",
        function="_get",
        old='        headers.append(f"If-Match: {if_match}")\n',
        new="        pass\n",
        tests=("unit/store/test_s3_requests.py", "integration/test_s3_faults.py"),
    ),
    Mutation(
        contract="a read sees one version: the answer is compared",
        path="store/exchange.py",
        function="Exchange._learn",
        old="if pin is not None and info.etag is not None and info.etag != pin:",
        new="if False:",
        tests=("integration/test_s3_faults.py::test_a_server_that_ignores_if_match_is_caught",),
    ),
    Mutation(
        contract="a read sees one version: parts are compared with each other",
        path="fetch/requests.py",
        function="ObjectRead.pin",
        old="        if not same_version(info, known):\n",
        new="        if False:\n",
        tests=("integration/test_s3_faults.py::test_without_etags_parts_of_two_versions_are_never_one_body",),
    ),
    Mutation(
        contract="the caller's memory is filled even if a hedged request wins",
        path="store/hedged.py",
        function="HedgedOperation._move",
        old="            landing.append(body)\n",
        new="            landing.append(bytes(len(body)))\n",
        tests=("contract/test_memory.py",),
    ),
    Mutation(
        contract="each request of try_read_many gets one answer",
        path="store/reading.py",
        function="_answers",
        old="for request in merged or [item]]",
        new="for request in [item]]",
        tests=("contract/test_memory.py", "property/test_read_ahead.py"),
    ),
    Mutation(
        contract="whole objects of one request are compared with their checksum",
        path="store/exchange.py",
        function="Exchange._fill_get",
        old="        if self.whole and self.info.checksums and landing is not None:\n",
        new="        if False:\n",
        tests=("integration/test_s3_faults.py::test_wrong_checksums_are_retried_then_told",),
    ),
    Mutation(
        contract="whole objects of several parts are compared with their checksum",
        path="store/reading.py",
        function="bytes_of_read",
        old="        return data, checksums.verify(info.checksums, data)\n",
        new='        return data, "length"\n',
        tests=("integration/test_s3_faults.py::test_a_corrupt_part_is_caught_by_the_whole",),
    ),
    Mutation(
        contract="held memory is charged to the budget",
        path="fetch/budget.py",
        function="Budget._reserve",
        old="        self._used += size_bytes\n        return True\n",
        new="        return True\n",
        tests=("unit/fetch/test_budget.py",),
    ),
    Mutation(
        contract="released memory is returned to the budget",
        path="fetch/budget.py",
        function="Budget._collect",
        old="            self._used -= self._released.popleft()\n",
        new="            self._released.popleft()\n",
        tests=("unit/fetch/test_budget.py", "property/test_read_ahead.py"),
    ),
    Mutation(
        contract="an epoch has every sample exactly once",
        path="order/permutation.py",
        function="permutation",
        old="    return np.argsort(x)",
        new="    return np.argsort(x) // 2 * 2",
        tests=("unit/loader/test_loader.py::test_every_sample_exactly_once", "unit/order/test_permutation.py"),
    ),
    Mutation(
        contract="a resumed job continues with the next sample",
        path="order/batches.py",
        function="Batches.position_after",
        old="        return self.span(batch_index).stop",
        new="        return self.span(batch_index).start",
        tests=("unit/order/test_batches.py", "unit/loader/test_index_modes.py"),
    ),
    Mutation(
        contract="all ranks have the same number of batches, by count",
        path="order/batches.py",
        function="Batches.__len__",
        old="        return max(0, self.stop - self.origin + self.global_size - 1) // self.global_size",
        new="        return max(0, self.stop - self.origin - self.rank + self.global_size - 1) // self.global_size",
        tests=("unit/order/test_batches.py", "property/test_order_indexed.py"),
    ),
    Mutation(
        contract="all ranks have the same number of batches, by agreement",
        path="loader/epoch.py",
        function="RankConsensus.smallest",
        old="        found = self._agree(n)\n",
        new="        found = (self._agree(n), n)[1]\n",
        tests=("unit/loader/test_agreed_mode.py",),
    ),
    Mutation(
        contract="signed queries are never shown",
        path="redaction.py",
        function="_public",
        old='        host, path = host.partition("?")[0], path.partition("?")[0]\n',
        new="        pass\n",
        tests=("unit/test_redaction.py",),
    ),
    Mutation(
        contract="a cached block is compared with its checksum",
        path="cache/entry.py",
        function="check_data",
        old="    if crc32c(data) != header.data_crc:\n",
        new="    if False:\n",
        tests=("unit/cache/test_entry.py", "unit/cache/test_cached.py"),
    ),
    Mutation(
        contract="a corrupt shard is noticed",
        path="formats/tar_header.py",
        function="_check_sum",
        old="    if said != unsigned and",
        new="    if False and",
        tests=("unit/formats/test_tar.py",),
    ),
    Mutation(
        contract="a corrupt shard raises an error",
        path="formats/parsing.py",
        function="Parser._give_up",
        old='        if self._on_corrupt == "raise":\n',
        new="        if False:\n",
        tests=("unit/formats/test_tar.py", "unit/formats/test_records.py"),
    ),
)


def ran(tree: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Exit status of pytest in `tree`, and the tests that failed, or its last lines."""
    environment = os.environ | {
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",  # a mutation may have the size and the second of what it replaces
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout=60", "-p", "no:cacheprovider"]
    command += [f"tests/{test}" for test in tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=RUN_S_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"more than {RUN_S_MAX} seconds"
    lines = done.stdout.splitlines()
    failed = [line.split(" ", 2)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return done.returncode, " ".join(failed) or "\n".join(lines[-5:])


def checked(tree: Path, mutation: Mutation) -> bool:
    """Apply one mutation to `tree`, and take it back. Whether a test failed of it."""
    path = tree / "src" / "penstock" / mutation.path
    sound = path.read_text()
    if sound.count(mutation.old) != 1:
        print(
            f"STALE     {mutation.contract}: {mutation.path} has the text {sound.count(mutation.old)} times", flush=True
        )
        return False
    begun_s = time.monotonic()
    path.write_text(sound.replace(mutation.old, mutation.new))
    try:
        status, told = ran(tree, mutation.tests)
    finally:
        path.write_text(sound)
    noticed = status == 1  # pytest's own: some test failed. Others mean that none was run.
    verdict = "noticed" if noticed else "SURVIVED"
    print(f"{verdict:9} {mutation.contract} ({time.monotonic() - begun_s:.0f} s): {told}", flush=True)
    return noticed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only contracts whose description contains this text")
    asked = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if asked.only in mutation.contract]
    with tempfile.TemporaryDirectory(prefix="penstock-mutations-") as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
            else:
                shutil.copy(source, tree / name)
        status, told = ran(tree, tuple(dict.fromkeys(test for mutation in chosen for test in mutation.tests)))
        if status != 0:
            sys.exit(f"the tests fail without any mutation: {told}")
        noticed = [checked(tree, mutation) for mutation in chosen]
    print(f"{sum(noticed)} of {len(noticed)} mutations were noticed")
    sys.exit(not all(noticed))


if __name__ == "__main__":
    main()
