"""What does preprocessing on a Ray cluster gain, and what does it cost? It needs `make .venvs/bench/.ready`, and its Python.

All machines of the cluster are this one, so scaling is emulated: in the part "gpu", preprocessing is a ``map`` that sleeps, as
if a core of another machine computed. A training step waits as long as ViT-base takes on an A10G, so that two threads here keep
it busy for a quarter of the time. "cores" is the CPU of the training host (the process and all that it started) in the steady
state, "with sleeping" adds the time that preprocessing takes there.

In the part "decode", nothing is emulated: JPEGs of 115 KB in tars are decoded and resized to 224 by two workers on two cores,
which also run the server and the training loop. tf.data service has its dispatcher and workers in the client's process, whose
batches need not cross a socket, and makes them of the same tars or of TFRecords with the same pictures; Ray Data decodes in
``map_batches`` with Pillow, as its users do, or with our decoder, for ``iter_torch_batches``. "samples/s" and "CPU s/1000"
begin with the tenth batch; the CPU of all starts is in "with starts".

In the part "transport", an actor of a cluster sends the rows of a batch, and they arrive in every fourth row of memory here: by
Ray's object store and a copy, or by a socket from which the kernel writes them to their places.

In the part "kill", a cluster has three nodes, one of which is killed with all its processes: how long did the loop wait, which
asks for the next batch at once?
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from clients import BUCKET, HERE, KEYS, Function
from epochs import BATCH, METRICS, STORE, Loads, Samples, bucket, compare
from harness import arguments

import penstock as ps
from penstock.bench.clients.loop import tree, tree_cpu_s
from penstock.bench.clients.steps import GPU_SAMPLES_PER_S
from penstock.bench.measuring import Monitor
from penstock.bench.origin.server import Origin
from penstock.bench.process import client_environment
from penstock.bench.samples import photographs
from penstock.bench.turns import Row, Run
from penstock.loader.workers.landing import receive_into

LOCAL_THREADS, LOCAL_BUSY = 2, 0.25
SLEEP_S = LOCAL_THREADS / (LOCAL_BUSY * GPU_SAMPLES_PER_S)
"""Time that preprocessing of a sample takes a core."""
GPU_BATCH = 32
LANES = 12
WORKERS = (4, 8, 12)
STARTED = 10
"""Batches after which the rate is steady."""
MEASURED_S = 20.0
SENT_ROWS, ROW_BYTES, CALLS = 64, 224 * 224 * 3, 200
DECODED = 2
"""Workers that decode: one for each core of the machine on which the limits were set."""


# ── a busy GPU ───────────────────────────────────────────────────────────────────────────────────────────────────────


def sleeping() -> Any:
    """The pipeline of the part "gpu": it sleeps for each sample, and gives a picture as large as a real one."""

    seconds = SLEEP_S  # the function travels by value, and this module does not

    def prepared(sample: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        time.sleep(seconds)
        label = int(bytes(sample["cls"]))
        return {"jpg": np.full((224, 224, 3), label % 251, np.uint8), "cls": label}

    pipeline = ps.shards(f"s3://{BUCKET}/tar/", endpoint_url=os.environ["BENCH_URL"]).shuffle(window=256)
    return pipeline.map(prepared).batch(GPU_BATCH)


class Training(Loads):
    """A training process on the pipeline that sleeps, with threads or workers of a cluster."""

    def start(self, origin: Origin) -> None:
        path = os.pathsep.join([str(HERE), client_environment()["PYTHONPATH"]])
        self.environment = {"BENCH_URL": origin.url, "PYTHONPATH": path}
        if self.options.get("cluster"):
            self.environment["RAY_ADDRESS"] = os.environ["RAY_ADDRESS"]
        super().start(origin)

    @property
    def python(self) -> Path:
        return Path(sys.executable)

    def trained(self, batches: int) -> dict[str, Any]:
        """Some batches, and what they took after the first `STARTED`."""
        job = {"pipeline": "offload:sleeping", "step": "gpu", "batches_max": batches + STARTED}
        with Monitor(self.pid) as monitor:
            answer = self.ask({"do": "epoch", "job": job})
        rate, cores = steady(answer, monitor)
        here = 0.0 if self.options.get("cluster") else rate * SLEEP_S
        return {"busy": rate / GPU_SAMPLES_PER_S, "cores": cores, "preprocessing": cores + here}


def steady(answer: dict[str, Any], monitor: Monitor) -> tuple[float, float]:
    """Samples per second after the first batches, and the cores that they took."""
    times_s, counts = answer["times_s"], answer["counts"]
    begin = min(STARTED, len(counts) // 2)
    late_s = answer["start_s"] - monitor.start_s  # a cluster was started
    cores = fmean(row[1] for row in monitor.series if times_s[begin] < row[0] - late_s < times_s[-1])
    return (counts[-1] - counts[begin]) / (times_s[-1] - times_s[begin]), cores


@contextmanager
def cluster(nodes_count: int, cpus: int) -> Iterator[Any]:
    """A cluster of some nodes on this machine, each its own processes, whose address is in ``RAY_ADDRESS``."""
    from ray.cluster_utils import Cluster

    paths = [str(HERE), client_environment()["PYTHONPATH"]]
    os.environ.update(KEYS, PYTHONPATH=os.pathsep.join(paths), RAY_DEDUP_LOGS="0", RAY_USAGE_STATS_ENABLED="0")
    node = {"num_cpus": cpus, "object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(nodes_count):
            made.add_node(**node)
        os.environ["RAY_ADDRESS"] = made.address
        yield made
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        made.shutdown()


def busy(options: Any) -> None:
    """How busy an emulated GPU is, with threads here and with more and more workers."""
    counts = WORKERS[:1] if options.quick else WORKERS
    local = f"{LOCAL_THREADS} threads"
    clients = [Training(local, "pipeline", threads=LOCAL_THREADS, lanes=LANES)]
    clients += [Training(f"{count} Ray workers", "pipeline", cluster=count, lanes=LANES) for count in counts]
    metrics = {
        "GPU busy": lambda answer: answer["busy"],
        "cores": lambda answer: answer["cores"],
        "with sleeping": lambda answer: answer["preprocessing"],
    }
    question = f"an emulated GPU, {GPU_SAMPLES_PER_S:g} samples/s; preprocessing sleeps for {SLEEP_S * 1e3:.0f} ms"
    with bucket() as (root, folder), cluster(3, max(counts) // 3 + 1):
        samples = Samples(photographs(40))
        samples.write_tars(folder / "tar", [64] * 48, "jpg")
        with (
            Origin(root, **STORE) as origin,
            Run(question, origin, options.select(clients), metrics, options.turns(3, 1)) as run,
        ):
            run.turns(lambda client: client.trained(4 if options.quick else 12 if client.name == local else 60))
        run.report(
            [
                Row(f"GPU busy, {counts[-1]} workers", run.values(f"{counts[-1]} Ray workers", "GPU busy"), 0.95, 0.98),
                Row(
                    "cores of the training host for preprocessing, after : before",
                    run.ratios("with sleeping", f"{counts[-1]} Ray workers", local), 0.5, 0.2, less=True,
                ),
            ]
        )  # fmt: skip


# ── real decoding ────────────────────────────────────────────────────────────────────────────────────────────────────


class Decoding(Loads):
    """A library in the environment that runs this program."""

    answer_s_max = 400.0

    @property
    def python(self) -> Path:
        return Path(sys.executable)

    def measured(self, samples: Samples, job: dict[str, Any]) -> dict[str, Any]:
        """Most of an epoch. Its end is left out, because a cluster takes the CPU seconds of its processes along."""
        most = {"check": False, "batches_max": len(samples) // BATCH - 1, "seconds_max": MEASURED_S}
        with Monitor(self.pid) as monitor:
            answer = self.ask({"do": "epoch", "job": {**self.job(job), **most}})
        rate, cores = steady(answer, monitor)
        return {**answer, "pss_mb": self.pss_mb, "rate": rate, "steady_cpu_s": 1e3 * cores / rate}


def decode(options: Any) -> None:
    """Two workers on this machine, beside processes, tf.data service and Ray Data."""
    metrics = {
        "samples/s": lambda answer: answer["rate"],
        "CPU s/1000": lambda answer: answer["steady_cpu_s"],
        "with starts": METRICS["CPU s/1000"],
        **{name: METRICS[name] for name in ("first batch s", "PSS MB")},
    }
    with bucket() as (root, folder):
        samples = Samples(photographs(40 if options.quick else 200))
        samples.write_tars(folder / "tar", [64] * (12 if options.quick else 64), "jpg")
        tfrecord = samples.write_tfrecords(folder / "tfrecord", 64)
        records = {"format": "tfrecord", "image": "image", "label": "label", "tfrecord": tfrecord}
        tf_names = "tf.data service, tars", "tf.data service, TFRecords"
        ray_names = "Ray Data", "Ray Data, our decoder"
        clients = [
            Decoding("processes", "penstock", processes=DECODED, lanes=4),
            Decoding("Ray workers", "penstock", cluster=DECODED, lanes=4),
            Decoding(tf_names[0], "tensorflow", way="service"),
            Decoding(tf_names[1], "tensorflow", way="service", same=records),
            Decoding(ray_names[0], "ray", prefetch=4),
            Decoding(ray_names[1], "ray", prefetch=4, decoder="penstock"),
        ]
        job = {"prefix": "tar", "format": "tar", "decode": True}
        question = f"{len(samples)} JPEGs of {samples.image_bytes // 1000} KB, decoded by {DECODED} workers here"
        run = compare(question, root, options.select(clients), samples, job, options.turns(5, 1), metrics=metrics)
        rows = [Row("samples/s : processes", run.ratios("samples/s", "Ray workers", "processes"), 0.8, 0.95)]
        for name, names in (("tf.data service", tf_names), ("Ray Data", ray_names)):
            best = run.best("samples/s", *names)
            rows.append(Row(f"samples/s : {name} at its best", run.ratios("samples/s", "Ray workers", best), 1.5, 3))
            least = run.best("CPU s/1000", *names, less=True)
            ratios = run.ratios("CPU s/1000", "Ray workers", least)
            rows.append(Row(f"CPU : {name} with the least", ratios, 1, 0.5, less=True))
        run.report(rows)


# ── rows on their way ────────────────────────────────────────────────────────────────────────────────────────────────


class Sender:
    """An actor that holds the rows of a batch."""

    def __init__(self) -> None:
        import numpy as np

        self.rows = np.random.default_rng(0).integers(0, 255, (SENT_ROWS, ROW_BYTES), "u1")

    def call(self) -> None:
        """Nothing: what a call takes."""

    def give(self) -> Any:
        return self.rows

    def send(self, port: int, count: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as end:
            for _ in range(count):
                end.sendall(self.rows)


def given(sender: Any, places: Any, count: int) -> None:
    """Batches by Ray's object store, three of them ahead."""
    import ray

    waiting = [sender.give.remote() for _ in range(3)]
    for _ in range(count):
        places[:] = ray.get(waiting.pop(0))
        waiting.append(sender.give.remote())


def sent(sender: Any, places: Any, count: int) -> None:
    """Batches by a socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender.send.remote(listener.getsockname()[1], count)
        end, _ = listener.accept()
    with end:
        for _ in range(count):
            receive_into(end, [memoryview(row) for row in places])


def moved(move: Any, sender: Any, count: int) -> dict[str, Any]:
    """What it takes to move so many batches."""
    import numpy as np

    places = np.zeros((4 * SENT_ROWS, ROW_BYTES), "u1")[1::4]
    cpu_s, begin_s = tree_cpu_s(os.getpid()), time.perf_counter()
    move(sender, places, count)
    size_gb = count * places.nbytes / 1e9
    return {"rate": 1e3 * size_gb / (time.perf_counter() - begin_s), "cpu": (tree_cpu_s(os.getpid()) - cpu_s) / size_gb}


def transport(options: Any) -> None:
    """Ray's object store beside a socket."""
    import ray

    metrics = {"MB/s": lambda answer: answer["rate"], "CPU s/GB": lambda answer: answer["cpu"]}
    count = 20 if options.quick else 100
    with cluster(1, 1) as made:
        ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
        try:
            sender = ray.remote(num_cpus=1)(Sender).remote()
            ray.get(sender.call.remote())
            begin_s = time.perf_counter()
            for _ in range(CALLS):
                ray.get(sender.call.remote())
            call_ms = (time.perf_counter() - begin_s) / CALLS * 1e3
            clients = [
                Function("object store", moved, given, sender, count),
                Function("socket", moved, sent, sender, count),
            ]
            question = f"{SENT_ROWS} rows of {ROW_BYTES} bytes; a call of an actor takes {call_ms:.1f} ms"
            with Run(question, None, options.select(clients), metrics, options.turns(5, 1)) as run:
                run.turns(lambda client: client.measure())
            run.report([Row("MB/s, socket : object store", run.ratios("MB/s", "socket", "object store"), 1, 3)])
        finally:
            ray.shutdown()


# ── a node is killed ─────────────────────────────────────────────────────────────────────────────────────────────────


def killed(made: Any, node: Any, folder: str, after_s: float) -> dict[str, Any]:
    """Begin, kill a node, and go on for `after_s` seconds."""
    pipeline = (
        ps.shards(f"{folder}/").shuffle(window=256).decode(ps.Image("jpg", height=224, width=224), ps.Integer("cls"))
    )
    times_s = [time.perf_counter()]
    node, node_s = made.add_node(**node), 0.0
    made.wait_for_nodes()
    with ps.Loader(pipeline.batch(64), workers=ps.ray.Workers(count=3, address=made.address), lanes=3) as loader:
        times_s[0] = time.perf_counter()
        for _ in loader.epochs(100):
            for _batch in loader:
                times_s.append(time.perf_counter())
                if len(times_s) == 30:
                    assert loader.statistics().cluster_workers_count == 3
                    for pid in tree(node.all_processes["raylet"][0].process.pid):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    node_s = time.perf_counter()
                    made.remove_node(node, allow_graceful=False)
                if node_s and times_s[-1] - node_s > after_s:
                    break
            else:
                continue
            break
    waits_s = [after - before for before, after in itertools.pairwise(times_s)]
    return {"first_s": waits_s[0], "gap_s": max(waits_s[29:]), "usual_s": max(waits_s[10:28])}


def kill(options: Any) -> None:
    """Seconds to the first batch, and to go on."""
    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    metrics = {
        "first batch s": lambda answer: answer["first_s"],
        "longest wait after a kill s": lambda answer: answer["gap_s"],
        "before it s": lambda answer: answer["usual_s"],
    }
    with bucket() as (_, folder), cluster(2, 1) as made:
        Samples(photographs(40)).write_tars(folder / "tar", [64] * 24, "jpg")
        name = "three nodes, one killed"
        client = Function(name, killed, made, node, str(folder / "tar"), 5.0 if options.quick else 15.0)
        with Run(name, None, [client], metrics, options.turns(5, 1)) as run:
            run.turns(lambda client: client.measure())
        run.report(
            [
                Row("seconds to the first batch", run.values(name, "first batch s"), 10, 3, less=True),
                Row("seconds to go on", run.values(name, "longest wait after a kill s"), 10, 3, less=True),
            ]
        )


PARTS = {"gpu": busy, "decode": decode, "transport": transport, "kill": kill}

if __name__ == "__main__":
    chosen = arguments(__doc__, part={"choices": PARTS, "help": "only this part"})
    for name, measure in PARTS.items():
        if chosen.part in (None, name):
            measure(chosen)
