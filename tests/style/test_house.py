"""The house's rules (CONTRIBUTING.md) as tests: what matters is held, not remembered."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
from pathlib import Path

import pytest

import penstock as ps
from penstock.pipeline import Pipeline
from penstock.version import install_command
from style.syntax import nodes_of, parsed

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
LINES_MAX = 600
REASON = "Not split because "  # what the docstring of a longer module says, followed by why it is not split
POSITIONAL_MAX = 2
SCREEN_LINES = 60
FILES_OBVIOUS = 3  # so many files need no table
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|Not" + r"ImplementedError)\b")
MACHINE = re.compile(
    r"(?<![\w.])/(?:home/\w+/|Users/\w+/|work/main|work/shared|tmp/x/)|\b(?:10|192\.168)(?:\.\d{1,3}){2,3}:\d+"
)
NAMED_FILE = re.compile(r"`([\w.-]+/[\w./-]*\.py)(?:::\w+)*`")
NAMES_WHAT_IS_NOT = {"0005-compose-module.md"}
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def tracked(*patterns: str) -> list[Path]:
    """Files that git tracks, or would; all files where this is no checkout."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return [path for pattern in patterns for path in ROOT.rglob(pattern) if ".venv" not in str(path)]
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]


def shown(path: Path) -> str:
    """A file's name for people."""
    return str(path.relative_to(ROOT))


def test_modules_are_short() -> None:
    """A module has at most 600 lines, or its docstring says why it is not split."""
    long = []
    for path in SOURCES:
        text = path.read_text()
        if text.count("\n") > LINES_MAX and REASON not in (ast.get_docstring(parsed(path)) or ""):
            long.append(shown(path))
    assert long == []


def test_hints_can_be_pasted() -> None:
    """No hint installs a stranger's ``penstock``; brackets are in quotes, because zsh takes bare ones for a pattern."""
    wrong = re.compile(r"\bpenstock(?=\[\w+[],])|pip install (?:-\S+ )*'?penstock(?!-data\b)\b|install penstock-data\[")
    found = [
        f"{shown(path)}: {match[0]}"
        for path in tracked("*.py", "*.md", "*.toml", "deploy/*", "Makefile")
        if path != Path(__file__)
        for match in wrong.finditer(path.read_text())
    ]
    assert found == []


def test_one_place_says_how_to_install() -> None:
    """Only the README gives commands that install penstock, as ``version.py`` composes them; other pages name extras."""
    command = re.compile(r"pip install [^\n`]*(?:'\.\[|penstock-data\[)([\w,]+)\][^\n`]*")
    files = [path for path in tracked("*.py", "*.md") if ROOT / "tests" not in path.parents]
    found = [(shown(path), match) for path in files for match in command.finditer(path.read_text())]
    assert len(found) >= 2
    for name, match in found:
        assert (name, match[0]) == ("README.md", install_command(*match[1].split(",")))


def test_nothing_is_unfinished() -> None:
    """No marker of unfinished work is left in code, tests or documentation."""
    found = [
        f"{shown(path)}: {match[0]}"
        for path in tracked("*.py", "*.md", "*.toml", "Makefile")
        if path != Path(__file__)
        for match in UNFINISHED.finditer(path.read_text())
    ]
    assert found == []


def test_every_module_says_what_it_is() -> None:
    """Every module of the package begins with a docstring."""
    assert [shown(path) for path in SOURCES if not ast.get_docstring(parsed(path))] == []


def test_every_test_states_its_property() -> None:
    """Every test function has a docstring."""
    silent = []
    for path in TESTS:
        tree = parsed(path)
        for node in tree.body + [inner for each in tree.body for inner in getattr(each, "body", ())]:
            is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
            if is_test and not ast.get_docstring(node):
                silent.append(f"{shown(path)}: {node.name}")
    assert silent == []


def test_links_of_the_documentation_resolve() -> None:
    """Every relative link of every page leads to a file, and its anchor to a heading."""
    broken = []
    for page in tracked("*.md"):
        for target in LINK.findall(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            if not path.exists() or (anchor and anchor not in anchors_of(path)):
                broken.append(f"{shown(page)}: {target}")
    assert broken == []


REFERRED_FILE = re.compile(r"\b(?:docs|bench|tests|examples)/[\w./-]+\.(?:md|py)\b")


def test_files_that_code_refers_to_exist() -> None:
    """Every page, benchmark or test whose path a docstring or comment mentions exists."""
    missing = []
    for path in [*SOURCES, *TESTS, *tracked("bench/*.py")]:
        missing += [
            f"{shown(path)}: {name}" for name in REFERRED_FILE.findall(path.read_text()) if not (ROOT / name).exists()
        ]
    assert missing == []


def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_files_that_pages_name_exist() -> None:
    """A Python file that a page of the documentation names is there, relative to the repository or to the package."""
    roots = [
        ROOT,
        ROOT / "src/penstock",
        ROOT / "src/penstock/gateway",
        ROOT / "bench",
        ROOT / "examples",
        ROOT / "tests",
        ROOT / "src",
    ]
    missing = []
    for page in tracked("docs/*.md", "CONTRIBUTING.md", "bench/*.md", "tests/README.md"):
        for name in NAMED_FILE.findall(page.read_text()):
            if not any((root / name).exists() for root in (*roots, page.parent)) and page.name not in NAMES_WHAT_IS_NOT:
                missing.append(f"{shown(page)}: {name}")
    assert missing == []


def test_no_path_of_a_machine() -> None:
    """No tracked file names a directory or an address that exists on one developer's machine only."""
    found = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{shown(path)}: {match[0]}" for match in MACHINE.finditer(text) if path != Path(__file__)]
    assert found == []


ELIDED = re.compile(
    r"^\s+[\w*]+: (?:Of|See)\b.*"
    r"|^\s+[a-z_*][\w*]*: (?:That|What|How|Its|Which|Who|Whoever|Where)\b.*"
    r'|"""See [^"]{0,60}"""'
    r"|\bwhere there (?:is|are) (?:one|some|none|any|no)\b",
    re.MULTILINE,
)
"""Fragments (``epoch: Of the loader.``, ``landing: Where the body goes.``), docstrings that only refer to another one, and word
order of another language."""


def test_docstrings_are_sentences() -> None:
    """Docstrings describe arguments with whole phrases, and say themselves what a caller needs."""
    found = []
    for path in SOURCES:
        found += [f"{shown(path)}: {match[0].strip()}" for match in ELIDED.finditer(path.read_text())]
    assert found == []


TAKEN_APART = re.compile(
    r"""partition\(["'][?@]["']\)|split\(["'][?@]["']|urlunsplit|urlparse|urlsplit\(|\.netloc\b|\.username\b|\.password\b"""
)
MAY_TAKE_APART = {
    "redaction.py": "it is the place",
    "bench" + "/clients/penstock.py": "finds the host for a plain HTTP connection",
    "compose.py": "keeps the query with the key",
    "gateway/http/addressing.py": "takes the request line of a client apart, and drops its signature",
    "index/place.py": "looks at what describe() gave",
    "pack/options.py": "compares URLs without their signatures",
    "store/http.py": "asks for the URL, and refuses passwords",
    "store/s3.py": "compares hosts of a redirect",
    "store/s3_endpoint.py": "finds the host of an endpoint, and refuses passwords",
    "transport/signing.py": "signs the query",
}


def test_one_place_decides_what_is_shown_of_a_url() -> None:
    """Code that takes a URL apart is in redaction.py, or in a module that asks for it; all others show it by ``public_url``."""
    package = ROOT / "src/penstock"
    found = {str(path.relative_to(package)) for path in SOURCES if TAKEN_APART.search(path.read_text())}
    assert found == set(MAY_TAKE_APART)


def test_every_folder_has_a_readme() -> None:
    """Each part of the package says on one screen what belongs there, and where it has many files, names them."""
    for folder in sorted({path.parent for path in SOURCES} - {ROOT / "src/penstock"}):
        text = (folder / "README.md").read_text()
        names = [path.stem for path in folder.glob("*.py") if path.name != "__init__.py"]
        missing = [name for name in names if len(names) > FILES_OBVIOUS and name not in text]
        assert text.count("\n") <= SCREEN_LINES, f"{shown(folder)}/README.md is longer than a screen"
        assert missing == [], f"{shown(folder)}/README.md does not name them"


def test_no_module_has_a_public_name() -> None:
    """No module shadows a public name of the package: docs/decisions/0005."""
    modules = {path.stem if path.is_file() else path.name for path in (ROOT / "src/penstock").iterdir()}
    assert modules & set(ps.__all__) == set()


def test_no_two_classes_of_a_folder_have_the_same_name() -> None:
    """In its folder, a name stands for one idea. Elsewhere it may stand for another one."""
    places: dict[tuple[Path, str], list[str]] = {}
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault((path.parent, node.name), []).append(f"{shown(path)}:{node.lineno}")
    assert {name: found for (_, name), found in places.items() if len(found) > 1} == {}


PRIVATE_ALLOWED = {"_replace", "_asdict", "_fields", "_make", "_exit", "_getframe", "_initial_epoch"}
"""Attributes of the standard library; and of Keras's models, one that its own callback sets."""


def test_private_attributes_stay_in_their_module() -> None:
    """A module reads, of other modules' objects, only attributes without a leading underscore."""
    found = []
    for path in SOURCES:
        if path.parent.name == "clients" and path.parent.parent.name == "bench":
            continue  # other libraries have no option for plain HTTP
        tree = nodes_of(path)
        nodes = [node for node in tree if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
        own = {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")}
        own |= {node.name for node in tree if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for node in tree:
            is_private = isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr)
            if is_private and node.attr not in own | PRIVATE_ALLOWED:
                found.append(f"{shown(path)}:{node.lineno}: {ast.unparse(node)}")
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
                names = [name.name for name in node.names if re.match(r"_[^_]", name.name)]
                found += [f"{shown(path)}:{node.lineno}: import {name}" for name in names]
    assert found == []


CALLS_WITH_IO = [
    ps.Store.read, ps.Store.read_many, ps.Store.read_parts, ps.Store.stat, ps.Store.list, ps.Store.write,
    ps.Store.delete, ps.Loader,
]  # fmt: skip
CALLS_THAT_RAISE = [
    ps.connect, ps.open, ps.shards, ps.Store.read, ps.Store.stat, ps.Store.write, ps.Loader, ps.Loader.epochs,
    Pipeline.shuffle, Pipeline.decode, Pipeline.map, Pipeline.batch,
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS_WITH_IO, ids=lambda call: call.__qualname__)
def test_what_does_io_says_what_it_costs(call: object) -> None:
    """Docstrings of what asks the network have a ``Cost:``."""
    assert "Cost:" in (inspect.getdoc(call) or "")


@pytest.mark.parametrize("call", CALLS_THAT_RAISE, ids=lambda call: call.__qualname__)
def test_what_raises_says_so(call: object) -> None:
    """Docstrings of what may refuse or fail have a ``Raises:``."""
    assert "Raises:" in (inspect.getdoc(call) or "")


@pytest.mark.parametrize("kind", [ps.Store, Pipeline, ps.Loader], ids=lambda kind: kind.__name__)
def test_at_most_two_positional_arguments(kind: type) -> None:
    """Public methods take at most two arguments by position; the rest by name."""
    wide = []
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_") and name != "__init__":
            continue
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positional = [p for p in inspect.signature(method).parameters.values() if p.kind in kinds and p.name != "self"]
        if len(positional) > POSITIONAL_MAX:
            wide.append(name)
    assert wide == []


@pytest.mark.parametrize(
    "config", [ps.TransportConfig, ps.RetryConfig, ps.HedgeConfig, ps.FetchConfig], ids=lambda kind: kind.__name__
)
def test_configs_are_frozen_and_document_each_field(config: type) -> None:
    """A config cannot be changed, takes no positional argument, and says of each field what it is for."""
    made = config()
    name = next(iter(config.__dataclass_fields__))  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        setattr(made, name, 1)
    with pytest.raises(TypeError):
        config(1)
    fields = config.__dataclass_fields__  # type: ignore[attr-defined]
    assert [field for field in fields if f"{field}:" not in (inspect.getdoc(config) or "")] == []
