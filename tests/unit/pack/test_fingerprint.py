"""Digests of transforms: equal in every process for the same transform, different if its result can differ."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.pack.fingerprint import function_digest, modules_of, value_digest

HELPERS = """
STRENGTH = 3

def blur(sample, by=2):
    return inner(sample, STRENGTH, by)

def inner(sample, *numbers):
    return {**sample, "n": sum(numbers)}

def never(sample):
    return "not used by anybody"
"""

USER = """
import dataclasses, enum, functools, re, threading
import helpers
from helpers import blur

SIZE = 224
WORDS = {"cat", "dog", "bird", "fish"}
TABLE = {"a": 1, "b": 2}
PATTERN = re.compile("a+")

class Mode(enum.Enum):
    FAST = 1
    SLOW = 2

class Base:
    def scale(self, x):
        return x * 2

@dataclasses.dataclass
class Resize(Base):
    size: int
    mode: Mode = Mode.FAST
    words: frozenset = frozenset({"x", "y", "z"})

    def __call__(self, sample):
        return {**sample, "size": self.scale(self.size), "mode": self.mode}

    @property
    def area(self):
        return self.size * self.size

    @staticmethod
    def named(sample):
        return {**sample, "name": "static"}

def with_constant(sample):
    return {**sample, "size": 256}

def with_global(sample):
    return {**sample, "size": SIZE, "known": sample["txt"] in WORDS, "t": TABLE, "p": PATTERN}

def with_set(sample):
    return sample if sample["txt"] in {"one", "two", "three", "four"} else {}

def with_helper(sample):
    return blur(sample)

def with_module(sample):
    return helpers.blur(sample)

def with_import(sample):
    from helpers import blur as soft
    return soft(sample)

def with_default(sample, size=3, *, name="n"):
    return {**sample, name: size}

def with_nested(sample):
    def add(x):
        return x + [n * 7 for n in range(3)][-1]
    return {**sample, "n": add(1)}

def with_itself(sample, depth=0):
    return sample if depth > 2 else with_itself(sample, depth + 1)

def closed(size):
    def transform(sample):
        return {**sample, "size": size}
    return transform

def counted(sample):
    global _count
    _count = _count + 1
    return sample

_count = 0
_model = None

def loaded(sample):
    global _model
    if _model is None:
        _model = threading.Lock()
    return sample

@functools.lru_cache
def cached(sample):
    return SIZE

@functools.wraps(with_constant)
def wrapping(sample):
    return with_constant(sample)

closed_5 = closed(5)
partial = functools.partial(with_default, size=9)
bound = Resize(7).scale
instance = Resize(8)
static = Resize.named
method = Resize.scale
kind = Resize
"""

NAMES = [
    "with_constant", "with_global", "with_set", "with_helper", "with_module", "with_import", "with_default",
    "with_nested", "with_itself", "counted", "loaded", "cached", "wrapping", "closed_5", "partial", "bound", "instance",
    "static", "method", "kind",
]  # fmt: skip

SHOW = f"""
import user
from penstock.pack.fingerprint import function_digest
for name in {NAMES!r}:
    print(name, function_digest(getattr(user, name), version=None))
"""


def written(folder: Path, user: str = USER, helpers: str = HELPERS) -> Path:
    """Return a folder with the two modules."""
    folder.mkdir(exist_ok=True)
    (folder / "user.py").write_text(user)
    (folder / "helpers.py").write_text(helpers)
    return folder


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of each transform in the modules of `folder`, which are imported temporarily."""
    modules = ("helpers", "user")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        user = importlib.import_module("user")
        return {name: function_digest(getattr(user, name), version=None) for name in NAMES}
    finally:
        sys.path.remove(str(folder))
        for name in modules:
            del sys.modules[name]


def digests_elsewhere(folder: Path, *, seed: str) -> dict[str, str]:
    """Return the same digests from a new process."""
    environment = os.environ | {
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": f"{folder}:{Path(sys.modules['penstock'].__path__[0]).parent}",
    }
    run = subprocess.run([sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, check=False)
    assert not run.returncode, run.stderr
    return dict(line.split() for line in run.stdout.splitlines())  # type: ignore[misc]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the digests of the modules above."""
    return digests(written(tmp_path_factory.mktemp("before")))


def test_the_same_code_has_the_same_digest(before: dict[str, str], tmp_path: Path) -> None:
    """Hash seeds, the folder, line numbers, comments and unused names make no difference."""
    moved = "# a comment\n\n\n" + USER.replace('{"a": 1, "b": 2}', '{"b": 2, "a": 1}')
    elsewhere = written(tmp_path / "1", moved, HELPERS.replace("not used", "unused"))
    assert digests_elsewhere(elsewhere, seed="1") == before
    assert digests_elsewhere(written(tmp_path / "2"), seed="2") == before
    assert len(set(before.values())) == len(NAMES)


CHANGES = [
    ("256", "224", {"with_constant", "wrapping"}),
    ("SIZE = 224", "SIZE = 256", {"with_global", "cached"}),
    ('"fish"}', '"frog"}', {"with_global"}),
    ('"b": 2}', '"b": 3}', {"with_global"}),
    ('"a+"', '"a*"', {"with_global"}),
    ('"three"', '"five"', {"with_set"}),
    ("size=3", "size=4", {"with_default", "partial"}),
    ('name="n"', 'name="m"', {"with_default", "partial"}),
    ("n * 7", "n * 8", {"with_nested"}),
    ("depth > 2", "depth > 3", {"with_itself"}),
    ("closed(5)", "closed(6)", {"closed_5"}),
    ("size=9", "size=10", {"partial"}),
    ("Resize(7)", "Resize(77)", {"bound"}),
    ("Resize(8)", "Resize(88)", {"instance"}),
    ("x * 2", "x * 3", {"bound", "instance", "method", "kind"}),
    ("Mode = Mode.FAST", "Mode = Mode.SLOW", {"bound", "instance", "kind"}),
    ("SLOW = 2", "SLOW = 3", {"bound", "instance", "kind"}),
    ('"static"', '"other"', {"bound", "instance", "static", "kind"}),
    ('"z"})', '"w"})', {"bound", "instance", "kind"}),
]


@pytest.mark.parametrize(("old", "new", "changed"), CHANGES, ids=[change[1] for change in CHANGES])
def test_other_code_has_another_digest(
    before: dict[str, str], tmp_path: Path, old: str, new: str, changed: set[str]
) -> None:
    """A changed constant, global, default, closure, state, class or nested function changes only its users' digests."""
    assert USER.count(old) == 1
    now = digests(written(tmp_path / "1", USER.replace(old, new)))
    assert {name for name in NAMES if now[name] != before[name]} == changed


@pytest.mark.parametrize(("old", "new"), [("STRENGTH = 3", "STRENGTH = 4"), ("by=2", "by=1"), ("sum(", "max(")])
def test_functions_of_other_modules_count(before: dict[str, str], tmp_path: Path, old: str, new: str) -> None:
    """A change in a function of another module of the user's, called directly or indirectly, changes the digest."""
    now = digests(written(tmp_path / "1", helpers=HELPERS.replace(old, new)))
    assert {name for name in NAMES if now[name] != before[name]} == {"with_helper", "with_module", "with_import"}


def test_values_that_cannot_be_compared_need_a_version(tmp_path: Path) -> None:
    """An open file, a lock or a generator is refused with the variable's name; with a version, only the version counts."""
    lock = threading.Lock()
    handle: Any = (tmp_path / "x").open("w")
    numbers: Any = (n for n in range(3))

    class Open:
        def __init__(self) -> None:
            self.file = handle

        def __call__(self, sample: dict) -> dict:
            return sample

    transforms: list[tuple[Any, str]] = [
        (lambda sample: lock, "lock holds an object of _thread.lock"),
        (lambda sample: handle, "handle holds an object of _io.TextIOWrapper"),
        (functools.partial(max, numbers), "itself holds an object of builtins.generator"),
        (Open(), "itself holds an object of _io.TextIOWrapper"),
    ]
    for transform, what in transforms:
        with pytest.raises(ConfigError, match=what) as caught:
            function_digest(transform, version=None)
        assert "transform_version" in str(caught.value)
        assert "0x" not in str(caught.value)
        assert function_digest(transform, version="1") == function_digest(transform, version="1")
        assert function_digest(transform, version="1") != function_digest(transform, version="2")
    handle.close()


def test_values_count_by_what_they_hold() -> None:
    """Arrays, nested containers and objects that refer to themselves have digests; open resources have none."""
    assert value_digest([{"x": np.arange(3)}]) == value_digest([{"x": np.arange(3)}])
    assert value_digest([{"x": np.arange(3)}]) != value_digest([{"x": np.arange(4)}])
    assert value_digest(1) != value_digest(1.0) != value_digest(True) != value_digest("1") != value_digest(b"1")
    assert value_digest([[1], 2]) != value_digest([[1, 2]])
    itself: list[Any] = [1]
    itself.append(itself)
    assert value_digest(itself) is not None
    assert value_digest(threading.Lock()) is None


def test_the_modules_of_a_transform_are_found(tmp_path: Path) -> None:
    """The user's modules are found also behind a partial, a method or an object, so that they travel to a cluster."""
    sys.path.insert(0, str(written(tmp_path)))
    importlib.invalidate_caches()
    try:
        user, helpers = importlib.import_module("user"), importlib.import_module("helpers")
        assert modules_of(user.with_helper) == [helpers, user]
        for transform in (user.partial, user.bound, user.instance, functools.partial(user.with_constant)):
            assert modules_of(transform) == [user]
        assert modules_of(len) == []
    finally:
        sys.path.remove(str(tmp_path))
        for name in ("helpers", "user"):
            del sys.modules[name]
