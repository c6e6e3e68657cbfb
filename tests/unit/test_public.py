"""The public names are complete, and importing the package costs nearly nothing."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import penstock as ps
from penstock.version import DISTRIBUTION, install_hint

NAMES = {
    "connect", "open", "shards", "Store", "Loader", "Credentials", "Blob", "ByteRange", "ObjectInfo",
    "TransportConfig", "RetryConfig", "HedgeConfig", "FetchConfig", "Image", "Integer", "Text", "Json", "Bytes",
    "Audio", "Float", "Function", "Numpy", "mix", "objects", "describe", "cu_seqlens", "explain", "peek", "build_index",
    "Category", "balanced_numbers", "read_column", "set_process_budget", "warm_cache", "download_directory",
    "upload_directory",
    "CacheConfig", "Dataset", "LoaderStatistics", "Pipeline", "__version__",
}  # fmt: skip
HEAVY = ("numpy", "botocore", "typer", "rich", "torch", "pycurl", "crc32c", "fsspec", "PIL", "awscrt",
         "cv2", "simplejpeg", "soundfile", "soxr", "pyarrow", "zstandard", "cloudpickle")  # fmt: skip

# What importing `Loader` leaves to the first loader that is made ...
ENGINE = ("numpy", "crc32c", "penstock.access", "penstock.cache", "penstock.compose", "penstock.fetch", "penstock.formats",
          "penstock.images", "penstock.index", "penstock.loader.session", "penstock.order", "penstock.pack",
          "penstock.samples", "penstock.sources", "penstock.store")  # fmt: skip
# ... and what an epoch over tar shards does without. Both lists keep what the import costs (bench/import_time.py) down.
NOT_FOR_TARS = ("crc32c", "concurrent.futures", "difflib", "fractions", "zipfile",
                *(f"penstock.formats.{name}" for name in ("compression", "jsonl", "mds", "parquet", "recordio", "tfrecord",
                                                          "writers", "zip")),
                *(f"penstock.index.{name}" for name in ("building", "manifest", "recorder", "sample_map")),
                *(f"penstock.loader.{name}" for name in ("batches.rebatching", "plan.strided", "workers")),
                "penstock.cache", "penstock.images", "penstock.samples.joins", "penstock.transport")  # fmt: skip


def test_public_names_are_complete() -> None:
    """The names that others build on are all there, and nothing beside them but errors."""
    assert {name for name in ps.__all__ if not name.endswith("Error")} == NAMES
    for name in ps.__all__:
        assert getattr(ps, name) is not None
    assert set(ps.__all__) | {"index", "pack", "torch", "tensorflow", "testing"} <= set(dir(ps))


def test_the_version_is_that_of_the_package() -> None:
    """The distribution has a name of its own, since ``penstock`` is another project, and the version of the import."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION == "penstock-data"
    assert version(DISTRIBUTION) == ps.__version__


def test_the_pythons_that_are_named_are_tested() -> None:
    """The classifiers are those Pythons on which ``make test-pythons`` runs, from the oldest that pip accepts."""
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    named = re.findall(r":: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    assert f"PYTHONS := {' '.join(named)}\n" in (root / "Makefile").read_text()
    assert project["requires-python"] == f">={named[0]}"


def test_hints_follow_the_package_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint installs from a clone while no package index has the distribution, and from there once one has it."""
    monkeypatch.setattr("penstock.version.IS_ON_INDEX", False)
    assert install_hint("zstd") == "pip install '.[zstd]' in a clone of penstock"
    monkeypatch.setattr("penstock.version.IS_ON_INDEX", True)
    assert install_hint("zstd") == "pip install 'penstock-data[zstd]'"


def test_unknown_names_are_attribute_errors() -> None:
    """A name that does not exist is an AttributeError that names it."""
    with pytest.raises(AttributeError, match="nonsense"):
        _ = ps.nonsense


@pytest.mark.parametrize("statement", ["penstock.torch", "from penstock.torch import Tensors"])
def test_without_pytorch_the_extra_is_named(statement: str) -> None:
    """The PyTorch door without PyTorch is an ImportError that says what to install; another missing module is itself."""
    code = f"""import sys; sys.modules["torch"] = None
import penstock
try:
    {statement}
except ImportError as error:
    print(type(error).__name__, error.name, error)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("ModuleNotFoundError torch penstock.torch needs PyTorch")
    assert install_hint("torch") in done.stdout


@pytest.mark.parametrize("url", ["s3:/bucket/train/", "s3:bucket", "https:/host/key"])
def test_a_url_that_lacks_a_slash(url: str) -> None:
    """A slip in the scheme is said, instead of looked for on this machine; a path of that name can be written."""
    with pytest.raises(ps.ConfigError, match=r"begins like a URL\. Hint: \w+://(bucket|host)"):
        ps.connect(url)
    assert ps.connect(f"./{url}").describe("").startswith("file:///")


def test_other_systems_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than on Linux the package can be imported, and using it is an error that says so."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ps.ConfigError, match=r"runs only on Linux, and this is darwin\. Hint: "):
        ps.connect("memory://anything")


def test_open_creates_or_refuses(tmp_path: Path) -> None:
    """``ps.open(url, "xb")`` writes a new object, refuses to replace one, and says what to do instead."""
    url = f"file://{tmp_path}/new"
    with ps.open(url, "xb") as file:
        file.write(b"one")
    with pytest.raises(ps.ObjectExistsError, match=r"Hint: .*another key"), ps.open(url, "xb") as file:
        file.write(b"two")
    with ps.open(url) as reader:
        assert reader.read() == b"one"
    with ps.open(url, "wb") as file:
        file.write(b"three")
    assert (tmp_path / "new").read_bytes() == b"three"
    with pytest.raises(ps.ConfigError, match="'rb', 'wb' or 'xb'"):
        ps.open(url, "ab")  # type: ignore[call-overload]


@pytest.mark.parametrize("statement", ["import penstock", "import penstock; penstock.connect; penstock.ByteRange"])
def test_importing_is_light(statement: str) -> None:
    """``import penstock`` imports none of the heavy libraries."""
    code = f"import sys; {statement}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("statement", ["from penstock import Loader", "import penstock; penstock.shards('file:///x')"])
def test_importing_the_loader_is_light(statement: str) -> None:
    """Neither importing `Loader` nor describing a pipeline imports the engine."""
    code = f"import sys; {statement}; print([name for name in {ENGINE} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", [name for name in (*ENGINE, *NOT_FOR_TARS) if name.startswith("penstock.")])
def test_what_must_not_be_imported_exists(name: str) -> None:
    """Each module of the lists above exists: a name that nobody can import would hold nothing."""
    assert importlib.util.find_spec(name) is not None


def test_reading_tars_is_light(tmp_path: Path) -> None:
    """An epoch over tar shards that are not indexed imports nothing that only other jobs need."""
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        member = tarfile.TarInfo("0.cls")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"7"))
    code = f"""import sys, penstock
pipeline = penstock.shards({str(tmp_path)!r}).shuffle(window=4).decode(penstock.Integer("cls")).batch(1)
with penstock.Loader(pipeline, index="stream") as loader:
    print(*(batch["cls"].tolist() for batch in loader), [name for name in {NOT_FOR_TARS} if name in sys.modules])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[7] []"


def test_connecting_is_light(tmp_path: Path) -> None:
    """A first connect imports neither botocore, where the AWS config says nothing of it, nor urllib.request and ssl."""
    (tmp_path / "config").write_text("[default]\noutput = json\n")
    code = """import sys, penstock
penstock.connect("s3://bucket/", endpoint_url="http://127.0.0.1:9", region="us-east-1")
print([name for name in ("botocore", "urllib.request", "http.client", "ssl") if name in sys.modules])"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"AWS_CONFIG_FILE": str(tmp_path / "config")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_class_documents_itself() -> None:
    """Each public name has a docstring of its own."""
    assert [name for name in ps.__all__ if name != "__version__" and not getattr(ps, name).__doc__] == []


@pytest.mark.parametrize(
    ("door", "library", "hint"),
    [("webdataset", "webdataset", "pip install webdataset"), ("huggingface", "datasets", "pip install 'datasets>=4'")],
)
def test_without_its_library_a_door_names_it(door: str, library: str, hint: str) -> None:
    """A door without its library is an ImportError that says what to install."""
    code = f"""import sys; sys.modules["{library}"] = None
try:
    import penstock.{door}
except ImportError as error:
    print(type(error).__name__, error.name, error)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"ModuleNotFoundError {library} penstock.{door} needs ")
    assert hint in done.stdout
