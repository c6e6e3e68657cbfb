"""No secret is shown or stored: planted in every place that may hold one, it comes out of nothing that penstock writes.

What is looked at: standard output and error, all log records, warnings, errors with everything that stands behind them,
reprs, statistics, states, plans of packing, indexes, caches and access profiles.
Pickles are excepted: they carry what a worker needs.
"""

from __future__ import annotations

import gzip
import io
import logging
import pickle
import tarfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli.app import run
from servers.faulty import FaultyServer

pytestmark = pytest.mark.server

SECRET = "Pl4nted"
QUERIES = {
    "named": f"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AK{SECRET}%2F2026/us-east-1/s3&X-Amz-Signature={SECRET}"
    f"&sv=2024-01-01&sp=r&sig={SECRET}%2B&X-Goog-Credential={SECRET}&X-Goog-Signature={SECRET}&token={SECRET}",
    "bare": SECRET,
}
CREDENTIALS = ps.Credentials(access_key="AKIAEXAMPLE", secret_key=SECRET + "/key", session_token=SECRET)
PROXY = ps.TransportConfig(proxy=f"http://user:{SECRET}@127.0.0.1:9", connect_s_max=2)
HASTY = {"retry": ps.RetryConfig(attempts_max=1)}


class Witness:
    """Collects all that was shown or stored, and looks for the secret in it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def see(self, what: str, *values: object) -> None:
        """Look at objects as people and logs would."""
        for value in values:
            self.seen += [(what, str(value)), (what, repr(value)), (what, f"{value}")]

    def fails(self, call: Callable[[], object], what: str = "error") -> BaseException:
        """`call` raises; look at the error, at what stands behind it, and at its copy from another process."""
        try:
            call()
        except Exception as error:
            self.see_error(what, error)
            return error
        pytest.fail(f"{what} raised nothing")

    def see_error(self, what: str, error: BaseException) -> None:
        copy = pickle.loads(pickle.dumps(error))
        self.see(what, copy)
        self.seen.append((what, "".join(traceback.TracebackException.from_exception(error).format_exception_only())))
        following: BaseException | None = error
        while following is not None:
            self.see(f"{what}, {type(following).__name__}", following, vars(following), following.args)
            following = following.__cause__ or following.__context__

    def see_files(self, folder: Path) -> None:
        """Look at every file, and into those that are compressed."""
        for path in folder.rglob("*"):
            self.seen.append(("name of a file", path.name))
            if path.is_file():
                data = path.read_bytes()
                self.seen.append((str(path), data.decode("latin-1")))
                if data[:2] == b"\x1f\x8b":
                    self.seen.append((str(path), gzip.decompress(data).decode("latin-1")))

    def check(self) -> None:
        """Nothing showed the secret."""
        assert self.seen, "nothing was looked at"
        assert [(what, text) for what, text in self.seen if SECRET in text] == []


@pytest.fixture
def witness(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> Iterator[Witness]:
    """Looks at all output and every log record of the test, too."""
    caplog.set_level(logging.DEBUG)
    found = Witness()
    yield found
    out, err = capfd.readouterr()
    found.seen += [("stdout", out), ("stderr", err), ("log", caplog.text)]
    found.see("log record", *[record.getMessage() for record in caplog.records])
    found.see("warning", *[warning.message for warning in recwarn])
    found.check()


def tar(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


OBJECTS = {
    "d/a.tar": tar({f"{n:03d}.txt": b"text" for n in range(8)}),
    "d/b.tar": tar({f"{n:03d}.txt": b"text" for n in range(8, 16)}),
    "d/bad.tar": b"no tar" * 400,
    "d/x.jpg": b"not a picture",
    "d/y.jpg": b"not a picture either",
    "d/table.csv": b"key,label\n000,1\n",
    "d/labels.csv": b"name,label\nx,1\ny,2\n",
    "d/bad.csv": b'key,label\n"0',
    "d/bad.manifest.jsonl": b"{oh",
}


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyServer]:
    with FaultyServer(OBJECTS) as running:
        yield running


@pytest.fixture(params=QUERIES, ids=str)
def signed(server: FaultyServer, request: pytest.FixtureRequest) -> Callable[[str], str]:
    """``signed("a.tar")`` is a URL of it with a secret in its query."""
    return lambda name: f"{server.endpoint_url}/bucket/d/{name}?{QUERIES[request.param]}"


# ── what is only described ──────────────────────────────────────────────────────────────────────────────────────────

TELLING: dict[str, Callable[[], object]] = {
    "Audio": lambda: ps.Audio("wav"),
    "Blob": lambda: ps.Blob(
        memoryview(b"x"), key=f"a.tar?sig={SECRET}", span=None, etag=None, request_index=0, verified="length"
    ),
    "ByteRange": lambda: ps.ByteRange(0, 1),
    "Bytes": lambda: ps.Bytes("x"),
    "CacheConfig": lambda: ps.CacheConfig("/cache", 1 << 30),
    "Category": lambda: ps.Category("x", ["a"]),
    "Credentials": lambda: CREDENTIALS,
    "FetchConfig": ps.FetchConfig,
    "Float": lambda: ps.Float("x"),
    "Function": lambda: ps.Function("x", bytes),
    "HedgeConfig": ps.HedgeConfig,
    "Image": lambda: ps.Image("jpg", height=8, width=8),
    "Integer": lambda: ps.Integer("x"),
    "Json": lambda: ps.Json("x"),
    "Loader": lambda: ps.Loader(
        ps.shards([f"https://h/a.tar?{QUERIES['bare']}"], transport=PROXY, credentials=CREDENTIALS).batch(2)
    ),
    "Numpy": lambda: ps.Numpy("x"),
    "ObjectInfo": lambda: ps.ObjectInfo(f"a?sig={SECRET}", 1),
    "RetryConfig": ps.RetryConfig,
    "Store": lambda: ps.connect("s3://bucket", credentials=CREDENTIALS, sse_customer_key=SECRET.encode() * 4 + b"....",
                                transport=PROXY),
    "Text": lambda: ps.Text("x"),
    "TransportConfig": lambda: PROXY,
    "connect": lambda: ps.connect(f"https://host/d/?sig={SECRET}", transport=PROXY),
    "mix": lambda: ps.mix({ps.shards(f"https://u:{SECRET}@h/a.tar"): 1.0, ps.shards(f"https://h/b.tar?{SECRET}"): 1.0}),
    "objects": lambda: ps.objects(manifest=f"https://h/m.jsonl?{SECRET}", credentials=CREDENTIALS),
    "shards": lambda: ps.shards(
        f"https://u:{SECRET}@h/a.tar", endpoint_url=f"https://u:{SECRET}@h", credentials=CREDENTIALS, transport=PROXY,
        sse_customer_key=SECRET.encode(),
    ).join(f"https://u:{SECRET}@h/t.csv?{SECRET}"),
}  # fmt: skip
ELSEWHERE = {
    "Dataset", "LoaderStatistics", "Pipeline", "__version__", "balanced_numbers", "build_index", "cu_seqlens", "describe",
    "download_directory", "explain", "open", "peek", "read_column", "set_process_budget", "upload_directory", "warm_cache",
}  # fmt: skip
"""Calls that do something, and what they give: below."""


def test_every_public_name_is_looked_at() -> None:
    """Each public name is an error, which tests/unit/test_redaction.py takes one by one, or is in one of the tables here."""
    errors = {name for name in ps.__all__ if name.endswith("Error")}
    assert set(TELLING) | ELSEWHERE | errors == set(ps.__all__)
    assert not set(TELLING) & ELSEWHERE


@pytest.mark.parametrize("name", TELLING)
def test_descriptions(witness: Witness, name: str) -> None:
    """What an object says of itself holds no secret, nor does the error where it is put in a wrong place."""
    value = TELLING[name]()
    witness.see(name, value)
    witness.fails(lambda: ps.Loader(value), "not a pipeline") if name != "Loader" else None  # type: ignore[arg-type]
    if isinstance(value, ps.Store):
        layer: Any = value
        while layer is not None:
            witness.see(name, layer, layer.describe(f"k?sig={SECRET}") if name == "connect" else layer)
            layer = getattr(layer, "inner", None)
        value.close()


WRONG: dict[str, Callable[[], object]] = {
    "a scheme with one slash": lambda: ps.connect(f"http:/u:{SECRET}@h/x"),
    "no slash": lambda: ps.connect(f"s3:u:{SECRET}@h/x"),
    "a key in the URL": lambda: ps.connect(f"s3://AKIA:{SECRET}@bucket/x"),
    "a slash in that key": lambda: ps.connect(f"s3://AKIA:ab/{SECRET}@bucket/x"),
    "half of that key": lambda: ps.connect(f"s3://AKIA:{SECRET}/c@bucket/x"),
    "a password": lambda: ps.connect(f"https://u:{SECRET}@h/x"),
    "a slash in the password": lambda: ps.connect(f"https://u:{SECRET}/c@h/x"),
    "a letter that is no host": lambda: ps.connect(f"https://u:{SECRET}℀@h/x"),
    "an endpoint with a password": lambda: ps.connect("s3://bucket", endpoint_url=f"https://u:{SECRET}@h"),
    "an endpoint with another": lambda: ps.connect("s3://bucket", endpoint_url=f"https://u:{SECRET}/x@h"),
    "an endpoint with a query": lambda: ps.connect("s3://bucket", endpoint_url=f"https://h/?sig={SECRET}"),
    "an endpoint that is none": lambda: ps.connect("s3://bucket", endpoint_url=f"ftp://u:{SECRET}℀@h"),
    "a file's host": lambda: ps.connect(f"file://u:{SECRET}@host/x"),
    "a scheme nobody knows": lambda: ps.connect(f"nosuch://u:{SECRET}@h/x"),
    "fsspec's port": lambda: ps.connect(f"ftp://u:{SECRET}/c@h:80/x"),
    "braces": lambda: ps.shards(f"https://u:{SECRET}@h/a-{{0..1.tar?sig={SECRET}"),
    "backwards": lambda: ps.shards(f"https://u:{SECRET}@h/a-{{9..1}}.tar?{SECRET}"),
    "no format": lambda: ps.shards(f"https://h/a.tar?{SECRET}", format=""),
    "no table": lambda: ps.shards("a.tar").join(f"https://h/x.bin?sig={SECRET}"),
    "no such join": lambda: ps.shards("a.tar").join(f"https://h/x.csv?sig={SECRET}", missing="no"),  # type: ignore[arg-type]
    "no object": lambda: ps.open(f"https://h/?sig={SECRET}"),
    "no mode": lambda: ps.open(f"https://h/x?sig={SECRET}", "r+"),
    "another host": lambda: ps.connect(f"s3://bucket?sig={SECRET}"),
    "white space in the key": lambda: ps.Credentials(access_key="A", secret_key=f"{SECRET}\n"),
    "a short key": lambda: ps.connect("s3://bucket", sse_customer_key=SECRET.encode()),
    "both": lambda: ps.connect("s3://bucket", anonymous=True, credentials=CREDENTIALS),
    "explain": lambda: ps.explain(f"https://h/a.tar?sig={SECRET}"),  # type: ignore[arg-type]
    "peek": lambda: ps.peek(f"https://h/a.tar?sig={SECRET}", 1),  # type: ignore[arg-type]
    "read_column": lambda: ps.read_column(f"https://h/a.tar?sig={SECRET}", "x"),  # type: ignore[arg-type]
    "warm_cache": lambda: ps.warm_cache(f"https://h/a.tar?sig={SECRET}", cache="/c:1GB"),  # type: ignore[arg-type]
    "mix": lambda: ps.mix({f"https://h/a.tar?sig={SECRET}": 1.0}),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("what", WRONG)
def test_refusals(witness: Witness, what: str) -> None:
    """What is refused for its form is refused without showing it, by the error and by all that stands behind it."""
    witness.fails(WRONG[what], what)


def test_broken_credential_files(witness: Witness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A credentials or config file that cannot be read is named; its lines, which may be keys, are not quoted."""
    for variable in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        file = tmp_path / variable
        file.write_text(f"[default]\naws_secret_access_key {SECRET}\n")
        with monkeypatch.context() as patch:
            patch.setenv(variable, str(file))
            patch.setenv("AWS_PROFILE", "default")

            def read() -> None:
                with ps.connect("s3://bucket", endpoint_url="http://127.0.0.1:9", **HASTY) as store:
                    store.read("x")

            witness.fails(read, variable)


# ── what is read ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_stores(witness: Witness, signed: Callable[[str], str], tmp_path: Path) -> None:
    """Reading by a signed URL, with and without a cache, shows and stores nothing of the signature."""
    record = tmp_path / "accesses"
    for cache in (None, ps.CacheConfig(tmp_path / "cache", 1 << 30, metadata_ttl_s=60, record_path=str(record))):
        with ps.open(signed("a.tar"), cache=cache) as file:
            witness.see("file", file, file.name, file.read(10))
        root, _, name = signed("a.tar").partition("a.tar")
        with ps.connect(root, cache=cache, **HASTY) as store:
            witness.see("blob", store.read(f"a.tar{name}"))
            for chunk in store.read_parts([f"a.tar{name}"]):
                witness.see("chunk", chunk)
            witness.see("answers", list(store.try_read_many([f"none{name}", f"a.tar{name}"])))
            witness.fails(lambda: store.read(f"none{name}"), "no object")  # noqa: B023
            witness.fails(lambda: store.read(f"../a{name}"), "a segment")  # noqa: B023
            witness.fails(lambda: store.read(f"a.tar{name}", ps.ByteRange(1 << 40, 1 << 41)), "no range")  # noqa: B023
            witness.fails(lambda: store.write(f"a.tar{name}", b""), "read only")  # noqa: B023
            witness.fails(lambda: list(store.list(f"a.tar{name}")), "no listing")  # noqa: B023
            witness.see("statistics", store.statistics())
    if "bare" not in signed("").lower() and signed("").partition("?")[2] != SECRET:
        witness.see_files(tmp_path)
    else:  # a query without names may be what tells one object from another: an access profile keeps it
        witness.see_files(tmp_path / "cache")


def test_directories(witness: Witness, signed: Callable[[str], str], tmp_path: Path) -> None:
    """A directory that cannot be uploaded or downloaded is an error that does not show the signature of its URL."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    for url in (signed("model/"), f"https://u:{SECRET}@127.0.0.1:9/model/?sig={SECRET}"):
        witness.fails(lambda: ps.upload_directory(tmp_path / "model", url), url)  # noqa: B023
        witness.fails(lambda: ps.download_directory(url, tmp_path / "copy"), url)  # noqa: B023
    witness.see_files(tmp_path)


def test_a_server_that_repeats_what_it_was_asked(witness: Witness, server: FaultyServer) -> None:
    """What a server says in an answer that fails is shown without the secrets that it repeats."""
    server.fail("close", times=None, match="a.tar", after_bytes=0)
    with ps.connect(f"{server.endpoint_url}/bucket/d/", **HASTY) as store:
        witness.fails(lambda: store.read(f"a.tar?sig={SECRET}"), "closed")
    server._faults.clear()


def test_proxies(witness: Witness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that does not answer, or whose URL cannot be read, is not quoted with its password."""
    witness.fails(lambda: ps.TransportConfig(proxy=f"http://u:a {SECRET}@h:9"))
    proxies = ["http://user:{}@127.0.0.1:9", "user:{}@127.0.0.1:9", "http://user:{}/x@127.0.0.1:9"]
    for proxy in proxies:
        config = ps.TransportConfig(proxy=proxy.format(SECRET), connect_s_max=2)
        witness.see("config", config)
        with ps.connect("http://127.0.0.1:9/", transport=config, **HASTY) as store:
            witness.fails(lambda: store.read("x"), proxy)
    monkeypatch.setenv("HTTP_PROXY", f"http://u:a {SECRET}@h:9")
    with ps.connect("http://store.invalid/", **HASTY) as store:
        witness.fails(lambda: store.read("x"), "proxy of the environment")


def test_loaders(witness: Witness, signed: Callable[[str], str], tmp_path: Path) -> None:
    """A loader's batches, log, statistics, metrics, state, explanation and index show nothing of a signed URL."""
    pipeline = ps.shards([signed("a.tar"), signed("b.tar")], transport=ps.TransportConfig()).shuffle(window=4)
    table = pipeline.join(signed("table.csv"), on="key", missing="drop")
    witness.see("pipeline", pipeline, table)
    witness.see("built", ps.build_index(pipeline, index_dir=tmp_path / "index"))
    for piped in (pipeline.batch(4), table.batch(1)):
        with ps.Loader(piped, index_dir=tmp_path / "index", progress=True) as loader:
            for batch in loader:
                witness.see("batch", batch)
            witness.see("loader", loader, loader.statistics(), loader.metrics(job="x"), loader.state_dict())
    witness.see("explanation", ps.explain(pipeline.batch(4)))
    witness.see("samples", ps.peek(pipeline, 2))
    with ps.shards([signed("a.tar")]).open(index_dir=tmp_path / "index") as dataset:
        witness.see("dataset", dataset, dataset[0])
    witness.see("warmed", ps.warm_cache(pipeline, cache=f"{tmp_path / 'cache'}:1GB"))
    witness.see_files(tmp_path)


@pytest.mark.parametrize("processes", [0, 1])  # errors of worker processes travel as pickles
def test_loaders_that_fail(witness: Witness, signed: Callable[[str], str], processes: int) -> None:
    """A shard that is corrupt or missing, a manifest or table that is none: the error names it without its signature."""
    ok, bad, none = ps.shards([signed("a.tar")]), ps.shards([signed("bad.tar")]), ps.shards([signed("none.tar")])
    failing = {
        "corrupt": bad,
        "missing": none,
        "manifest": ps.shards(manifest=signed("bad.manifest.jsonl")),
        "no manifest": ps.objects(manifest=signed("none.manifest.jsonl")),
        "join": ok.join(signed("bad.csv")),
        "join on": ok.join(signed("table.csv"), on="no"),
        "join bytes": ok.join(signed("table.csv"), bytes_max=1),
        "no table": ok.join(signed("none.csv")),
        "field": ok.decode(ps.Integer("no")),
        "decoding": ok.decode(ps.Image("txt", height=8, width=8)),
        "map": ok.map(_failing),
        "picture": ps.objects([signed("x.jpg"), signed("y.jpg")]).decode(ps.Image("jpg", height=8, width=8)),
        "object's field": ps.objects([signed("x.jpg")]).decode(ps.Integer("no")),
        "prefix": ps.shards(signed("").replace("/?", "/no/?")),
    }
    for what in failing if processes == 0 else ("corrupt", "join", "map"):
        pipeline = failing[what]

        def read(pipeline: Any = pipeline) -> None:
            with ps.Loader(pipeline.batch(2), processes=processes) as loader:
                for _ in loader:
                    pass

        witness.fails(read, what)


def _failing(sample: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("no")


def test_objects(witness: Witness, signed: Callable[[str], str]) -> None:
    """A sample that is an object of a signed URL has its name as key and its extension as field, without the query."""
    samples = ps.peek(ps.objects([signed("x.jpg"), signed("y.jpg")]), 2)
    witness.see("samples", samples)
    assert [sample["__key__"] for sample in samples] == ["x.jpg", "y.jpg"]
    assert all("jpg" in sample for sample in samples)


# ── what is written ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_packing(witness: Witness, signed: Callable[[str], str], tmp_path: Path) -> None:
    """Nothing that packing leaves at its destination holds a signature, and an interrupted run goes on by the same URLs."""
    from penstock.pack import convert, pack, verify

    files = ps.objects([signed("x.jpg"), signed("y.jpg")])
    jobs: dict[str, Callable[..., Any]] = {
        "packed": lambda folder, **more: pack(files, folder, name="s-%06d.tar", samples_max=1, **more),
        "converted": lambda folder, **_: convert(ps.shards([signed("a.tar"), signed("b.tar")]), folder, to="jsonl"),
    }
    for name, job in jobs.items():
        folder = tmp_path / name
        witness.see(name, job(f"{folder}/"))
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        lost = min(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("manifest"))
        lost.unlink()
        entry = folder / ".penstock" / "pack"
        for path in entry.rglob(f"*{lost.name}*"):
            path.unlink()
        witness.see(name, job(f"{folder}/"))
        assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
        witness.see("verified", verify(f"{folder}/"))
    pack(files, f"{tmp_path}/labelled/", labels=signed("labels.csv"))
    for labels in ("bad.csv", "table.csv", "none.csv"):
        witness.fails(lambda labels=labels: pack(files, f"{tmp_path}/l/", labels=signed(labels)), labels)  # type: ignore[misc]
    witness.fails(lambda: pack(signed("bad.csv"), f"{tmp_path}/t/"), "a table")
    witness.fails(lambda: pack(signed("bad.manifest.jsonl"), f"{tmp_path}/m/"), "a manifest")
    witness.fails(lambda: convert(ps.shards([signed("bad.tar")]), f"{tmp_path}/c/", to="jsonl"), "a corrupt shard")
    witness.see_files(tmp_path)


def test_commands(witness: Witness, signed: Callable[[str], str], tmp_path: Path) -> None:
    """No command prints, logs or writes a signature, whether it succeeds or fails."""
    witness.see("info", run(["info", signed("none.tar")]), run(["info", "--json", signed("none.tar")]))
    for name in ("a.tar", "none.tar", ""):
        url, folder = signed(name), tmp_path / (name or "root")
        for command in (
            ["ls", url], ["cat", url], ["cp", url, f"{folder}/"], ["cp", "--dry-run", url, f"{folder}/"],
            ["cp", "--json", url, f"{folder}/json/"], ["cp", str(tmp_path), url], ["index", url, "--index-dir", f"{folder}/i"],
            ["index", "--json", url], ["verify", url], ["manifest", url, "-o", "-"], ["manifest", str(folder), "-o", url],
            ["peek", url], ["peek", "--json", url],
            ["pack", url, f"{folder}/p/"], ["pack", "--plan", url, f"{folder}/p/"], ["pack", str(folder), url],
            ["pack", str(folder), f"{folder}-l/", "--labels", url],
            ["convert", url, f"{folder}/c/", "--to", "jsonl"], ["convert", "--plan", url, f"{folder}/c/", "--to", "mds"],
            ["cache", "warm", url, "--cache", f"{tmp_path}/cache:1GB"],
            ["cache", "warm", "--json", url, "--cache", f"{tmp_path}/cache:1GB"],
            ["cache", "info", f"{tmp_path}/cache"], ["cache", "verify", f"{tmp_path}/cache"],
        ):  # fmt: skip
            if command[0] == "cat" and name:
                continue  # writes bytes to its descriptor
            witness.see(" ".join(command[:1]), run(command))
    witness.see_files(tmp_path)
