"""Names in a store come from anyone who may write to it: printed on a terminal, they must not control it."""

from __future__ import annotations

import ast
import json
import os
import pty
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock import cli
from penstock.cli.app import run
from penstock.cli.cp import CopyReport
from penstock.cli.output import ProgressReport
from penstock.redaction import printable
from penstock.store.memory import MemoryStore
from penstock.store.reachability import reachability

EVIL = "d/\x1b]0;owned\x07\x1b[5;45m\u202e\x9b2J\nfake line.tar"


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore(name=f"saying-{uuid.uuid4().hex}")
    made.write(EVIL, b"x")
    return made


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], str]:
    """Run a command whose stdout and stderr are a terminal; return what the terminal received."""

    def go(arguments: list[str]) -> str:
        ours, theirs = pty.openpty()
        with monkeypatch.context() as patch, open(theirs, "w") as terminal:
            patch.setattr("sys.stdout", terminal)
            patch.setattr("sys.stderr", terminal)
            run(arguments)
            terminal.flush()
            os.set_blocking(ours, False)
            text = os.read(ours, 1 << 16).decode()
        os.close(ours)
        return text

    return go


@pytest.mark.parametrize(
    "command", ["ls URL", "ls -r URL", "ls --json -r URL", "cp --dry-run URL out/", "cat URLd/\x1b[5;45m",
                "info URLd/\x1b[5;45m",
                "verify URL", "peek URL", "index URL", "pack --plan URL out/", "convert --plan URL out/ --to jsonl",
                "manifest URL -o -", "ls URLd/\x1b[5;45m", "ls \x1b[5;45m", "\x1b[5;45m", "cp URLd/\x1b[5;45m out"],
)  # fmt: skip
def test_no_command_sends_a_terminal_what_a_key_says(
    store: MemoryStore,
    on_terminal: Callable[[list[str]], str],
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control characters of keys are escaped in everything that a command prints on a terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if command.startswith("manifest"):
        assert run(["manifest", f"memory://{store.name}/", "-o", "m.jsonl"]) == 0
        assert printable((tmp_path / "m.jsonl").read_text(), lines=True) == (tmp_path / "m.jsonl").read_text()
        return
    sent = on_terminal(command.replace("URL", f"memory://{store.name}/").split(" "))
    plain = sent.replace("\r\n", "\n")
    assert "owned\x07" not in sent
    assert "\x1b]" not in sent
    assert "\x1b[5;45m" not in sent
    assert "\u202e" not in sent
    assert "\x9b" not in sent
    assert "\nfake line" not in plain


def test_a_pipe_gets_exact_keys(store: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    """In a pipe or file, ``ls`` writes keys unchanged, and ``--json`` escapes them."""
    assert run(["ls", "-r", f"memory://{store.name}/"]) == 0
    assert EVIL in capsys.readouterr().out
    assert run(["ls", "-r", "--json", f"memory://{store.name}/"]) == 0
    line = capsys.readouterr().out
    assert json.loads(line)["key"] == EVIL
    assert printable(line.strip()) == line.strip()


def test_errors_are_escaped_wherever_they_go(store: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    """An error's text has control characters escaped, for logs and tracebacks; its fields are exact."""
    assert run(["ls", f"memory://{store.name}/d/\x1b[5;45mnone"]) == 1
    assert "\\x1b[5;45mnone" in capsys.readouterr().err
    with pytest.raises(ps.ObjectMissingError) as caught:
        store.read("d/\x1b[5;45mnone")
    assert "\x1b" not in str(caught.value)
    assert caught.value.url is not None
    assert "\x1b[5;45m" in caught.value.url


def test_letters_of_all_languages_stay() -> None:
    """Only characters that control a terminal are escaped."""
    assert printable("naïve/日本/שלום/👩‍🚀 a'b\"c\\d.tar") == "naïve/日本/שלום/👩‍🚀 a'b\"c\\d.tar"
    assert printable("a\nb\tc", lines=True) == "a\nb\tc"
    assert printable("a\nb\x7f") == "a\\nb\\x7f"


def test_commands_print_by_one_module() -> None:
    """Only JSON and the table of formats are printed without ``penstock.cli.output``."""
    found = []
    for path in sorted(Path(cli.__file__).parent.glob("*.py")):
        if path.name == "output.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            text = ast.unparse(node)
            prints = text.startswith(("print(", "sys.stdout.write(", "sys.stderr.write("))
            if (prints and "json.dumps(" not in text) or (".console.print(" in text and "printable(" not in text):
                found.append(text)
    assert found == ["print(loss_table())"]


def test_a_copy_shows_the_total_and_the_remaining_time(
    on_terminal: Callable[[list[str]], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar of ``cp`` knows how many bytes there are, although the copy itself lists only as it goes on."""
    monkeypatch.setattr("penstock.cli.cp.CopyReport.progressed", _slowed(CopyReport.progressed))
    monkeypatch.setenv("COLUMNS", "120")  # in 80 columns, a long rate leaves no room for the last digit
    source = MemoryStore(name=f"saying-{uuid.uuid4().hex}")
    for number in range(8):
        source.write(f"k{number}", bytes(1 << 20))
    sent = on_terminal(["cp", f"memory://{source.name}/", f"{tmp_path}/"])
    assert "of 8 MiB" in sent
    plain = re.sub("\x1b\\[[0-9;]*m", "", sent)
    assert re.search("0:00:0[0-9] 0:00:0[0-9]", plain)  # elapsed, and remaining


def _slowed(progressed: Callable[..., None]) -> Callable[..., None]:
    def slow(report: CopyReport, size_bytes: int) -> None:
        time.sleep(0.2)
        progressed(report, size_bytes)

    return slow


def test_a_bar_says_for_how_long_the_store_has_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command's bar has it, and only while something waits."""
    record = reachability("http://127.0.0.1:1")
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "200")
        for since_s in (None, time.monotonic() - 12.2):
            monkeypatch.setattr(record, "since_s", since_s)
            with ProgressReport(as_json=False):
                pass
            text = os.read(ours, 1 << 16).decode()
            assert ("the store does not answer: 12 s" in text) is (since_s is not None), text
    os.close(ours)
