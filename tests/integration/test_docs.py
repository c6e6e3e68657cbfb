"""The documentation's examples run, page by page and in order, against a real S3 server.

A block after ``<!-- runs -->`` is run. One after ``<!-- runs: fuse -->`` is run where ``/dev/fuse`` can be used, and skipped
elsewhere. One after ``<!-- file: NAME -->`` is written to a file first, and one after ``<!-- serves -->`` starts a server,
which says that it is serving and runs until the end of the page.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import warm
from mounting import HAS_FUSE

if TYPE_CHECKING:
    from penstock.testing.ministack import Ministack

ROOT = Path(__file__).parents[2]
PAGES = [
    Path("README.md"),
    Path("docs/start.md"),
    Path("docs/concepts/memory.md"),
    Path("docs/concepts/processes.md"),
    *(path.relative_to(ROOT) for path in sorted((ROOT / "docs").glob("guides/*.md"))),
    *(path.relative_to(ROOT) for path in sorted((ROOT / "docs").glob("recipes/*.md"))),
]
BLOCK = re.compile(r"^<!-- (runs|runs: fuse|serves|file: [\w.-]+) -->\n+```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN_SOMEWHERE = re.compile(r"^<!-- runs(: \w+)? -->\n+```python$", re.MULTILINE)
START_S_MAX = 60.0
SAMPLES = 64  # that the start page writes


class Block(NamedTuple):
    """One example: what is done with it, its language, its text, and the line of the page that it begins at."""

    use: str
    language: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    """The runnable blocks of a page, consecutive ones of one language joined: they share names."""
    text = (ROOT / page).read_text()
    joined: list[Block] = []
    for match in BLOCK.finditer(text):
        use, language, body = match.groups()
        line = text.count("\n", 0, match.start(3))
        if joined and use.startswith("runs") and (joined[-1].use, joined[-1].language) == (use, language):
            before = joined[-1]
            padding = "\n" * (line - before.line - before.text.count("\n"))  # tracebacks name the page's line
            joined[-1] = before._replace(text=before.text + padding + body)
        else:
            joined.append(Block(use, language, body, line))
    return joined


def run(blocks: list[Block], folder: Path, environment: dict[str, str]) -> None:
    """Run a page's blocks in order: Python in one process after another that keeps the imports, shell by bash."""
    imports = ""
    with contextlib.ExitStack() as servers:
        for block in blocks:
            if block.use == "runs: fuse" and not HAS_FUSE:
                continue
            if block.use == "serves":
                servers.enter_context(serving(block.text, folder, environment))
                continue
            if block.use.startswith("file: "):
                (folder / block.use.removeprefix("file: ")).write_text(block.text)
                continue
            if block.language == "python":
                padding = "\n" * max(0, block.line - imports.count("\n"))
                program = imports + padding + block.text
                done = warm.run(program, environment=environment, folder=folder, warns=["error"])
                imports += "".join(re.findall(r"^(?:import|from) .*\n", block.text, re.MULTILINE))
            else:
                command = ["bash", "-euo", "pipefail", "-c", block.text]
                done = subprocess.run(
                    command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
                )
            assert done.returncode == 0, f"{block.text}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"


@contextlib.contextmanager
def unmounting(folder: Path) -> Iterator[None]:
    """Unmount what an example that failed has left mounted below a directory."""
    try:
        yield
    finally:
        for line in Path("/proc/self/mounts").read_text().splitlines():
            directory = line.split()[1]
            if directory.startswith(f"{folder}/"):
                subprocess.run(["umount", "--lazy", directory], check=False)


@contextlib.contextmanager
def serving(command: str, folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run a command that starts a server; it must get ready, and end without an error when it is asked to."""
    log = folder / f"served-{len(list(folder.glob('served-*')))}.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", command], cwd=folder, env=environment, stderr=stderr
        )
    try:
        deadline_s = time.monotonic() + START_S_MAX
        while "serving" not in log.read_text() and process.poll() is None and time.monotonic() < deadline_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        assert process.poll() is None, f"{command}\n{log.read_text()[-3000:]}"
        yield
        process.terminate()
        assert process.wait(30) in (0, -signal.SIGTERM), f"{command}\n{log.read_text()[-3000:]}"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def documented(ministack: Ministack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a user who has followed the start page: ``s3://bucket/train/`` holds what it writes."""
    pytest.importorskip("torch")
    ministack.create_bucket("bucket")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **ministack.environment, "PATH": path}
    written, uploaded = blocks_of(Path("docs/start.md"))[:2]
    folder = tmp_path_factory.mktemp("start")
    run([written, uploaded], folder, {**environment, "XDG_CACHE_HOME": str(folder / ".cache")})
    return environment


@pytest.mark.server
@pytest.mark.torch
@pytest.mark.parametrize("page", PAGES, ids=str)
def test_examples_of_a_page(page: Path, documented: dict[str, str], tmp_path: Path) -> None:
    """What a page shows as runnable runs, in order, in an empty directory, with warnings as errors."""
    pytest.importorskip("torch")
    homes = {"XDG_CACHE_HOME": str(tmp_path / ".cache"), "XDG_STATE_HOME": str(tmp_path / ".state")}
    with unmounting(tmp_path):
        run(blocks_of(page), tmp_path, {**documented, **homes})
    if not HAS_FUSE and any(block.use == "runs: fuse" for block in blocks_of(page)):
        pytest.skip("the blocks that need /dev/fuse were left out; the others ran")


@pytest.mark.torch
def test_the_first_example_runs_twice(tmp_path: Path) -> None:
    """Who tries it again, perhaps after a change of the training loop, packs nothing and gets no error."""
    pytest.importorskip("torch")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / ".cache")}
    run([blocks_of(Path("docs/start.md"))[0]] * 2, tmp_path, environment)


@pytest.mark.server
@pytest.mark.torch
def test_quickstart(documented: dict[str, str], tmp_path: Path) -> None:
    """The example file runs, and two epochs bring each sample twice."""
    pytest.importorskip("torch")
    command = [sys.executable, "-W", "error", str(ROOT / "examples/quickstart.py")]
    done = subprocess.run(
        command, cwd=tmp_path, env=documented, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * SAMPLES // 32 + 1
    assert "[32, 224, 224, 3]" in lines[0]


def test_the_readme_shows_the_quickstart() -> None:
    """The README's first example is the example file, word for word."""
    code = (ROOT / "examples/quickstart.py").read_text().split('"""\n\n', 1)[1]
    assert blocks_of(Path("README.md"))[0].text.startswith(code)


def test_the_quickstart_is_ten_lines() -> None:
    """What is shown first stays short: 15 lines of code at most, the chain's one stage per line included."""
    code = (ROOT / "examples/quickstart.py").read_text().split('"""\n\n', 1)[1]
    assert len([line for line in code.splitlines() if line]) <= 15


def test_every_page_with_code_runs_some() -> None:
    """A guide that shows Python has at least one block that CI runs, here or in the suite of its framework."""
    shown = {page: text for page in PAGES if "```python" in (text := (ROOT / page).read_text())}
    assert not [str(page) for page, text in shown.items() if not blocks_of(page) and not RUN_SOMEWHERE.search(text)]
