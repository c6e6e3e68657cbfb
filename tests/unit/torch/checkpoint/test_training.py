"""``Checkpoint`` in one process: what is saved comes back, and what does not fit changes nothing."""

from __future__ import annotations

import math
import pprint
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from loading import index_beside, pipeline, write_counted
from penstock.checkpoints import Checkpoints, layout, step_directory
from penstock.checkpoints.directory import read_manifest
from penstock.errors import CheckpointError, ClosedError, ConfigError, DataError, StoreError

torch = pytest.importorskip("torch")
from penstock.torch.checkpoint import model_parts, plan_reading, storage_reader, training  # noqa: E402 - imports torch

pytestmark = pytest.mark.torch


class Run:
    """A small training run with everything that has a state."""

    def __init__(self, folder: Path | None = None, *, seed: int = 0, width: int = 8, **options: Any) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        nn = torch.nn
        self.model = nn.Sequential(
            nn.Linear(4, width), nn.Dropout(0.5), nn.BatchNorm1d(width), nn.Linear(width, 2, dtype=torch.float32)
        )
        first, *rest = self.model.parameters()
        self.optimizer = torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": rest}], lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=50)
        self.loader = None if folder is None else ps.Loader(pipeline(folder, batch=4), threads=1)
        self.checkpoint = ps.torch.Checkpoint(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, loader=self.loader, **options
        )

    def train(self, steps: int) -> list[Any]:
        """Losses and keys of some steps."""
        made: list[Any] = []
        batches = iter([] if self.loader is None else self.loader)
        for _ in range(steps):
            batch = next(batches, {"__key__": []})
            noise = random.random() + np.random.rand()
            loss = self.model(torch.randn(5, 4) + noise).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            made.append((loss.item(), batch["__key__"]))
        return made

    def state(self) -> list[Any]:
        """Everything that a failed restore must not change."""
        tensors = [value.clone() for value in self.model.state_dict().values() if isinstance(value, torch.Tensor)]
        kept = self.optimizer.state_dict()
        tensors += [value.clone() for entries in kept["state"].values() for _, value in sorted(entries.items())]
        rng = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index]
        loader = None if self.loader is None else self.loader.state_dict()
        return [
            [value.tolist() for value in tensors], kept["param_groups"], self.scheduler.state_dict(), rng, loader,
        ]  # fmt: skip


@pytest.fixture
def url(tmp_path: Path) -> str:
    """An empty place for checkpoints."""
    return f"{tmp_path}/checkpoints"


@pytest.mark.parametrize("scheme", ["memory://", "file://", ""])
def test_a_slash_at_the_end_makes_no_difference(scheme: str, tmp_path: Path) -> None:
    """With and without a slash at its end, a URL names the same checkpoints, which also lie where single files are opened."""
    url = f"{scheme}{tmp_path}/run"
    run = Run()
    run.checkpoint.save(url, step=1)
    run.checkpoint.save(f"{url}/", step=2)
    assert run.checkpoint.latest(url) == run.checkpoint.latest(f"{url}/") == 2
    assert run.checkpoint.restore(f"{url}/", step=1) == 1
    with ps.open(f"{url}/{step_directory(1)}.metadata") as one, ps.open(f"{url}/{step_directory(2)}.metadata") as two:
        assert one.read(1) == two.read(1) != b""


def test_a_wait_that_is_interrupted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C while a save is waited for, the next one still waits for it: both must not use the same memory."""
    run = Run()
    go_on, write_items = threading.Event(), training.write_items

    def held(*arguments: Any) -> None:
        assert go_on.wait(20)
        write_items(*arguments)

    monkeypatch.setattr(training, "write_items", held)
    run.checkpoint.save(url, step=1, wait=False)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.checkpoint.wait()
    assert run.checkpoint.is_saving
    go_on.set()
    run.checkpoint.save(url, step=2, wait=False)
    run.checkpoint.close()
    with Checkpoints(url) as checkpoints:
        assert [(info.step, info.status) for info in checkpoints.all()] == [(1, "whole"), (2, "whole")]


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("url", ["", "s3://", "s3:///", "gs://", "memory://", "http://"])
def test_a_url_without_a_bucket_is_refused(url: str) -> None:
    """An empty URL is not taken for the root directory, and the name of a step for no bucket."""
    run = Run()
    for call in (
        lambda: run.checkpoint.save(url, step=1),
        lambda: run.checkpoint.save(url, step=1, wait=False),
        lambda: run.checkpoint.latest(url),
        lambda: run.checkpoint.restore(url),
        lambda: ps.torch.checkpoint.StorageWriter(url),
        lambda: ps.torch.checkpoint.StorageReader(url),
    ):
        with pytest.raises(ConfigError, match="not the URL"):
            call()


# ── saving and restoring ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.server
def test_a_restored_run_is_the_same(tmp_path: Path, url: str, wait: bool) -> None:
    """From each of several checkpoints, a new run makes the same steps; saving changes nothing."""
    write_counted(tmp_path, (9, 4, 7))
    index_beside(tmp_path)
    run, plain = Run(tmp_path), Run(tmp_path)
    expected = plain.train(5)
    run = Run(tmp_path)
    made: list[Any] = []
    for step in range(5):
        run.checkpoint.save(url, step=step, wait=wait)
        made += run.train(1)
    run.checkpoint.close()
    assert made == expected
    for step in range(5):
        other = Run(tmp_path, seed=9)
        other.train(2)
        assert other.checkpoint.restore(url, step=step) == step
        assert other.train(5 - step) == expected[step:]
        assert other.state() == run.state()


def test_the_newest_is_restored(url: str) -> None:
    """Without a step the newest whole checkpoint counts, and without a checkpoint the run begins unchanged."""
    run = Run()
    before = run.state()
    assert run.checkpoint.latest(url) is None
    assert run.checkpoint.restore(url) is None
    assert run.state() == before
    for step in (9, 10, 100):
        run.checkpoint.save(url, step=step)
    assert run.checkpoint.latest(url) == 100
    with Checkpoints(url) as checkpoints:
        checkpoints.store.delete(step_directory(100) + ".metadata")
    assert Run(seed=1).checkpoint.restore(url) == 10
    with pytest.raises(CheckpointError, match="step 100 is unfinished"):
        Run().checkpoint.restore(url, step=100)
    with pytest.raises(CheckpointError, match="step 11"):
        Run().checkpoint.restore(url, step=11)


def test_a_snapshot_is_of_the_moment_of_the_call(url: str) -> None:
    """What training changes after save(wait=False) has returned is not in the checkpoint."""
    run = Run(width=400)
    run.train(1)
    saved = run.state()
    run.checkpoint.save(url, step=1, wait=False)
    with torch.no_grad():
        for value in run.model.parameters():
            value.zero_()
    run.train(3)
    run.checkpoint.wait()
    other = Run(seed=5, width=400)
    other.checkpoint.restore(url)
    assert other.state() == saved


def test_memory_of_snapshots_is_used_again(url: str) -> None:
    """The second snapshot lies where the first one did, and close() frees it."""
    from penstock.torch.checkpoint.training import SnapshotMemory

    memory = SnapshotMemory(bytes_max=None)
    values = {"a": torch.ones(3), "b": torch.ones(4, 5).t()}
    first = {name: value.data_ptr() for name, value in memory.take(values).items()}
    values["a"].zero_()
    second = memory.take(values)
    assert {name: value.data_ptr() for name, value in second.items()} == first
    assert second["a"].tolist() == [0, 0, 0]
    assert torch.equal(second["b"], values["b"])


def test_the_memory_of_a_snapshot_has_a_bound(url: str) -> None:
    """A state that is larger than the bound is refused with both sizes, before anything is written; wait=True needs none."""
    run = Run(snapshot_bytes_max=1000)
    with pytest.raises(ConfigError, match=r"snapshot_bytes_max=1000.*wait=True"):
        run.checkpoint.save(url, step=1, wait=False)
    assert run.checkpoint.latest(url) is None
    run.checkpoint.save(url, step=1)
    assert run.checkpoint.latest(url) == 1
    for wrong in (0, -1, 1.5, math.nan, True):
        with pytest.raises(ConfigError, match="snapshot_bytes_max"):
            Run(snapshot_bytes_max=wrong)


def test_retention(url: str) -> None:
    """keep_last and keep_every leave the newest ones and the multiples; nothing is removed without them."""
    run = Run()
    for step in (10, 20, 25, 30):
        run.checkpoint.save(url, step=step)
    with Checkpoints(url) as checkpoints:
        assert checkpoints.steps() == [10, 20, 25, 30]
        run.checkpoint.save(url, step=35, wait=False, keep_last=2, keep_every=20)
        run.checkpoint.wait()
        assert checkpoints.steps() == [20, 30, 35]
        run.checkpoint.save(url, step=36, keep_last=1)
        assert checkpoints.steps() == [36]


def test_parts_may_be_left_out(url: str) -> None:
    """A checkpoint of everything restores a model alone, with its own random generators."""
    run = Run()
    run.train(2)
    run.checkpoint.save(url, step=2)
    other = Run(seed=3)
    before = other.state()
    ps.torch.Checkpoint(model=other.model, rng=False).restore(url)
    weights = other.state()
    assert weights[3] == before[3]
    assert [value.tolist() for value in other.model.state_dict().values()] == [
        value.tolist() for value in run.model.state_dict().values()
    ]


class Counter:
    """An object with a state, for extras."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_extras(url: str) -> None:
    """Other objects are saved by name, with tensors and tuples; what could not be read again is refused when it is saved."""
    saved = {"scale": torch.ones(2), "names": ("a", None), "nan": 1.5}
    model = torch.nn.Linear(1, 1)
    ps.torch.Checkpoint(model=model, extras={"scaler": Counter(saved)}).save(url, step=0)
    found = Counter({})
    ps.torch.Checkpoint(model=model, extras={"scaler": found}).restore(url)
    assert str(found.state) == str(saved)
    with pytest.raises(ConfigError, match=r"extras\.bad holds an object"):
        ps.torch.Checkpoint(model=model, extras={"bad": Counter({"path": Path()})}).save(url, step=1)
    with pytest.raises(CheckpointError, match=r"no state of extras\.other"):
        ps.torch.Checkpoint(model=model, extras={"other": Counter({})}).restore(url)
    assert ps.torch.Checkpoint(model=model).latest(url) == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch.compile's own import
@pytest.mark.server
def test_names_are_those_of_the_bare_model(url: str) -> None:
    """A compiled model with checkpointed activations is restored as a plain one."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def model() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.Linear(3, 1)))

    wrapped, plain = model(), model()
    wrapped[1] = checkpoint_wrapper(wrapped[1])
    compiled = torch.compile(wrapped)
    optimizer = torch.optim.SGD(compiled.parameters(), momentum=0.9, lr=0.1)
    ps.torch.Checkpoint(model=compiled, optimizer=optimizer).save(url, step=0)
    ps.torch.Checkpoint(model=plain, optimizer=torch.optim.SGD(plain.parameters(), lr=1.0)).restore(url)
    assert [each.tolist() for each in plain.parameters()] == [each.tolist() for each in wrapped.parameters()]


def test_tied_weights_and_states_of_modules(url: str) -> None:
    """Tied parameters stay tied, and a module's own state comes back."""

    class Tied(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, value: float) -> None:
            super().__init__()
            self.a = torch.nn.Linear(2, 2)
            self.b = torch.nn.Linear(2, 2)
            self.b.weight = self.a.weight
            self.register_buffer("short", torch.full((3,), value, dtype=torch.bfloat16))
            self.register_buffer("scratch", torch.full((3,), value), persistent=False)
            self.extra = {"value": value}

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    first, second = Tied(1.0), Tied(2.0)
    ps.torch.Checkpoint(model=first).save(url, step=0)
    ps.torch.Checkpoint(model=second).restore(url)
    assert second.b.weight is second.a.weight
    assert torch.equal(second.a.weight, first.a.weight)
    assert (second.short.tolist(), second.extra) == ([1.0] * 3, {"value": 1.0})
    assert second.scratch.tolist() == [2.0] * 3


# ── what does not fit ───────────────────────────────────────────────────────────────────────────────────────────────


def other_width(run: Run) -> None:
    run.model[0] = torch.nn.Linear(4, 9)


def other_dtype(run: Run) -> None:
    run.model[0].bfloat16()


def another_layer(run: Run) -> None:
    run.model.append(torch.nn.Linear(2, 2))


def one_layer_less(run: Run) -> None:
    run.model[3] = torch.nn.Identity()


def on_meta(run: Run) -> None:
    run.model[3] = torch.nn.Linear(8, 2, device="meta")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_width, r"another model: model\.0\.weight is \[8, 4\] of torch\.float32 there, and \[9, 4\]"),
        (other_dtype, r"another model: model\.0\.weight.*torch\.bfloat16 here"),
        (another_layer, r"another model: the checkpoint lacks model\.4\.bias, model\.4\.weight"),
        (one_layer_less, r"another model: the model lacks model\.3\.bias, model\.3\.weight"),
        (on_meta, r"model\.3\.weight is on the device 'meta'"),
    ],
)
def test_a_checkpoint_of_another_model(url: str, change: Callable[[Run], None], message: str) -> None:
    """The error names the tensor and both shapes, and nothing was changed: not a weight, not a random number."""
    saved = Run()
    saved.train(1)
    saved.checkpoint.save(url, step=1)
    run = Run(seed=4)
    change(run)
    run.checkpoint = ps.torch.Checkpoint(model=run.model, rng=True)
    before = [value.clone() for value in run.model.state_dict().values()]
    rng = torch.get_rng_state()
    with pytest.raises((CheckpointError, ConfigError), match=message):
        run.checkpoint.restore(url)
    after = list(run.model.state_dict().values())
    assert all(x.is_meta or torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)


def test_another_model_may_take_what_fits(url: str) -> None:
    """strict=False takes over the tensors that both have; a different shape is refused even then."""
    saved = Run()
    saved.train(1)
    saved.checkpoint.save(url, step=1)
    run = Run(seed=4)
    run.model[3] = torch.nn.Identity()
    run.model.append(torch.nn.Linear(8, 5))
    own = run.model[4].weight.clone()
    optimizer = torch.optim.AdamW(run.model.parameters())
    checkpoint = ps.torch.Checkpoint(model=run.model)
    assert checkpoint.restore(url, strict=False) == 1
    assert torch.equal(run.model[0].weight, saved.model[0].weight)
    assert torch.equal(run.model[4].weight, own)
    run.model[0] = torch.nn.Linear(4, 9)
    with pytest.raises(CheckpointError, match="another model"):
        checkpoint.restore(url, strict=False)
    del optimizer


def test_another_optimizer(url: str) -> None:
    """Other groups are an error that counts both, and the model is not touched."""
    saved = Run()
    saved.train(1)
    saved.checkpoint.save(url, step=1)
    run = Run(seed=4)
    before = run.state()
    optimizer = torch.optim.AdamW(run.model.parameters())
    with pytest.raises(CheckpointError, match=r"2 groups with \[1, 5\] parameters, this one has 1 with \[6\]"):
        ps.torch.Checkpoint(model=run.model, optimizer=optimizer).restore(url)
    assert run.state() == before
    assert optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize(
    ("name", "argument"), [("loader", "loader="), ("scheduler", "scheduler="), ("rng", "rng=False")]
)
def test_a_missing_part(tmp_path: Path, url: str, name: str, argument: str) -> None:
    """A part that the checkpoint lacks is named, with what restores the rest, and nothing was changed."""
    write_counted(tmp_path, (9,))
    bare = Run()
    ps.torch.Checkpoint(model=bare.model, optimizer=bare.optimizer, rng=False).save(url, step=1)
    run = Run(seed=2)
    parts = {"loader": ps.Loader(pipeline(tmp_path)), "scheduler": run.scheduler, "rng": True}
    checkpoint = ps.torch.Checkpoint(model=run.model, **{"rng": False, name: parts[name]})
    before = run.state()
    with pytest.raises(CheckpointError, match=f"no state of {name}.*{argument}"):
        checkpoint.restore(url)
    assert run.state() == before


def test_damage_changes_nothing(tmp_path: Path) -> None:
    """A flipped byte in a data file is an error that names the file; the run that tried it is as it was."""
    saved = Run(width=64)
    saved.train(1)
    saved.checkpoint.save(tmp_path / "run", step=1)
    file = next((tmp_path / "run").rglob("*.distcp"))
    data = bytearray(file.read_bytes())
    run = Run(seed=3, width=64)
    before = run.state()
    with Checkpoints(tmp_path / "run") as checkpoints:
        items = read_manifest(checkpoints.store, step_directory(1), layout.save_of_data(file.name) or "").files[0].items
    for item in random.Random(0).sample(items, 5):
        damaged = bytearray(data)
        damaged[item.data_offset_bytes + item.data_length_bytes // 2] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=re.escape(file.name)):
            run.checkpoint.restore(tmp_path / "run")
        assert run.state() == before
    file.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=re.escape(file.name)):
        run.checkpoint.restore(tmp_path / "run", step=1)
    assert run.state() == before
    assert run.checkpoint.latest(tmp_path / "run") is None


# ── bad arguments ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("step", [math.nan, math.inf, -1, 1.0, "1", True, None, 10**10])
def test_a_step_is_a_whole_number(url: str, step: Any) -> None:
    """Anything else is refused by save, with and without waiting, and by restore."""
    run = Run()
    for wait in (True, False):
        with pytest.raises(ConfigError, match="step="):
            run.checkpoint.save(url, step=step, wait=wait)
    if step is not None:
        with pytest.raises(ConfigError, match="step="):
            run.checkpoint.restore(url, step=step)
    assert run.checkpoint.latest(url) is None


def test_wrong_arguments() -> None:
    """What cannot be saved is refused when the Checkpoint is made."""
    run = Run()
    make: Any = ps.torch.Checkpoint
    with pytest.raises(ConfigError, match="2 parameters that are not the model's"):
        make(model=torch.nn.Linear(1, 1), optimizer=torch.optim.SGD(torch.nn.Linear(1, 1).parameters()))
    with pytest.raises(ConfigError, match=r"loader= has no state_dict.*StatefulDataLoader"):
        make(model=run.model, loader=[1, 2])
    with pytest.raises(ConfigError, match=r"extras\.epoch has no state_dict.*a class with these two methods"):
        make(model=run.model, extras={"epoch": 3})
    with pytest.raises(ConfigError, match=r"Checkpoint\(endpoint=\.\.\.\) is not an option.*endpoint_url=\?"):
        make(model=run.model, endpoint="http://minio:9000")
    with pytest.raises(ConfigError, match="scheduler has no state_dict"):
        make(model=run.model, scheduler=object())
    with pytest.raises(ConfigError, match=r"extras has the name 'a\.b'"):
        make(model=run.model, extras={"a.b": run.scheduler})
    with pytest.raises(ConfigError, match="model= must be a module"):
        make(model=run.model.state_dict())
    with pytest.raises(ConfigError, match="optimizer= must be"):
        make(model=run.model, optimizer=run.optimizer.state_dict())
    with pytest.raises(ConfigError, match="profile"):
        make(model=run.model, anonymous=True, profile="x").latest("s3://bucket/run/")


def test_the_url_of_one_checkpoint_is_not_that_of_a_run(url: str) -> None:
    """Nothing would be found below it, so it is refused rather than taken for a run that begins."""
    run = Run()
    run.checkpoint.save(url, step=7)
    one = f"{url.rstrip('/')}/step-0000000007"
    calls: list[Callable[[str], object]] = [
        run.checkpoint.restore,
        run.checkpoint.latest,
        lambda each: run.checkpoint.save(each, step=8),
        lambda each: run.checkpoint.save(each, step=8, wait=False),
    ]
    for call in calls:
        for spelling in (one, f"{one}/"):
            with pytest.raises(
                ConfigError, match=rf"one checkpoint, not of a run. Hint: .* {url.rstrip('/')}/, and step=7"
            ):
                call(spelling)
    assert run.checkpoint.latest(url) == 7
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 8"):
        run.checkpoint.restore(url, step=8)


def test_a_damaged_checkpoint_has_one_hint(url: str) -> None:
    """The error names the file, and says once what to do."""
    run = Run()
    run.checkpoint.save(url, step=1)
    with ps.connect(url) as store:
        [key] = [info.key for info in store.list() if info.key.endswith(".distcp")]
        store.write(key, b"short")
    with pytest.raises(CheckpointError, match=r"step 1 is damaged: .*distcp: the file has 5 bytes") as caught:
        run.checkpoint.restore(url, step=1)
    assert str(caught.value).count("Hint: ") == 1


def test_options_that_others_add_to_an_optimizer(url: str) -> None:
    """Options that schedulers and a newer PyTorch add to the groups do not make another kind of optimizer."""
    saved = Run()
    saved.train(1)
    saved.checkpoint.save(url, step=1)
    model = Run().model
    first, *rest = model.parameters()
    same = type(saved.optimizer)([{"params": [first]}, {"params": rest}])
    same.param_groups[0]["option_of_a_newer_pytorch"] = True
    assert ps.torch.Checkpoint(model=model, optimizer=same, rng=False).restore(url) == 1


KINDS: dict[str, dict[str, Any]] = {
    "Adam": {}, "AdamW": {}, "RAdam": {}, "NAdam": {}, "Adamax": {}, "Adagrad": {}, "Adadelta": {}, "RMSprop": {},
    "Rprop": {}, "ASGD": {}, "Adafactor": {}, "SGD": {"momentum": 0.9}, "LBFGS": {"max_iter": 2},
}  # fmt: skip


class Mixed(torch.optim.Optimizer):  # type: ignore[misc,name-defined]
    """Keeps tensors of other dtypes than those of its parameters, also in lists and dicts, as quantizing optimizers do."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            exact = state.setdefault("exact", parameter.double() * math.pi)
            exact.add_(parameter.grad.double(), alpha=1e-7)
            state["codes"] = (exact * 100).to(torch.uint8)
            state["nested"] = {"list": [exact + 1, 5], "flag": torch.tensor(True)}
            parameter.sub_(exact.to(parameter.dtype), alpha=0.01)


class Half:
    """A model of bfloat16 with an optimizer of a kind."""

    def __init__(self, kind: str, *, steps: int = 0) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 3).bfloat16()
        make = Mixed if kind == "Mixed" else getattr(torch.optim, kind)
        self.optimizer = make(self.model.parameters(), lr=0.01, **KINDS.get(kind, {}))
        self.checkpoint = ps.torch.Checkpoint(model=self.model, optimizer=self.optimizer)
        self.train(steps)

    def train(self, steps: int) -> None:
        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = self.model(torch.arange(8.0).reshape(2, 4).bfloat16() / 8).float().square().mean()
            loss.backward()
            return loss

        for _ in range(steps):
            closure()
            self.optimizer.step(closure)

    def state(self) -> str:
        """Everything, with dtypes and all digits."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "__repr__", lambda self, **_: f"{self.dtype}{self.tolist()}")
            return pprint.pformat([self.model.state_dict(), self.optimizer.state_dict(), torch.get_rng_state()])


@pytest.mark.parametrize("kind", [*KINDS, "Mixed"])
def test_the_state_of_an_optimizer_keeps_its_dtypes(url: str, kind: str) -> None:
    """State of another dtype than its bfloat16 parameters comes back to the bit, so that the next steps are the same."""
    run = Half(kind, steps=2)
    run.checkpoint.save(url, step=2)
    other = Half(kind)
    assert other.checkpoint.restore(url) == 2
    assert other.state() == run.state()
    run.train(2)
    other.train(2)
    assert other.state() == run.state()


@pytest.mark.parametrize("kind", KINDS)
def test_every_other_kind_of_optimizer_is_refused(url: str, kind: str) -> None:
    """An optimizer of another class is told both names, with state and without, and nothing is changed."""
    Half(kind, steps=1).checkpoint.save(url, step=1)
    at, kinds = list(KINDS).index(kind), [*KINDS, *KINDS]
    for other in kinds[at + 1 : at + 4]:  # kinds that are alike stand together
        for steps in (0, 1):
            run = Half(other, steps=steps)
            before = run.state()
            for strict in (True, False):
                with pytest.raises(
                    CheckpointError, match=rf"another kind of optimizer: it is of {kind}, and .* {other}"
                ):
                    run.checkpoint.restore(url, strict=strict)
            assert run.state() == before


def test_a_checkpoint_that_does_not_name_the_class(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of earlier versions load; the names of groups and states still tell most other kinds."""
    encoded = model_parts.encoded
    monkeypatch.setattr(
        model_parts,
        "encoded",
        lambda value, what: encoded({name: value[name] for name in value.keys() - {"kind"}}, what),
    )
    run = Half("Adam", steps=2)
    run.checkpoint.save(url, step=2)
    other = Half("Adam")
    assert other.checkpoint.restore(url) == 2
    assert other.state() == run.state()
    for kind in ("SGD", "Adagrad", "Adafactor", "RMSprop"):
        with pytest.raises(CheckpointError, match="another kind of optimizer: its groups have"):
            Half(kind).checkpoint.restore(url)
    with pytest.raises(CheckpointError, match=r"another kind of optimizer: its states have exp_avg_sq, and .* exp_inf"):
        Half("Adamax", steps=1).checkpoint.restore(url)


class Drawing(torch.nn.Linear):  # type: ignore[misc,name-defined]
    """A module with a state of its own."""

    own = 0

    def get_extra_state(self) -> Any:
        return {"own": self.own}

    def set_extra_state(self, state: Any) -> None:
        self.own = state["own"]


STAGES = ("scheduler", "extras", "optimizer", "loader", "model", "generators")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.server
def test_a_restore_that_fails_half_way_changes_nothing(
    tmp_path: Path, url: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an object has taken a part of its state over and then fails, everything is put back to the bit."""
    write_counted(tmp_path, (9, 4, 7))
    index_beside(tmp_path)

    def made(seed: int, steps: int) -> tuple[Run, Counter]:
        run, extra = Run(tmp_path, seed=seed), Counter({"count": seed})
        run.model.append(Drawing(2, 2))
        run.model[4].own = seed
        run.checkpoint = ps.torch.Checkpoint(
            model=run.model, optimizer=run.optimizer, scheduler=run.scheduler, loader=run.loader, extras={"x": extra}
        )
        run.train(steps)
        return run, extra

    saved, _ = made(1, 3)
    saved.checkpoint.save(url, step=3)
    run, extra = made(2, 2)
    targets: dict[str, tuple[Any, str]] = {
        "scheduler": (run.scheduler, "load_state_dict"), "extras": (extra, "load_state_dict"),
        "optimizer": (run.optimizer, "load_state_dict"), "loader": (run.loader, "load_state_dict"),
        "model": (run.model[4], "set_extra_state"), "generators": (random, "setstate"),
    }  # fmt: skip
    target, name = targets[stage]
    whole, failures = getattr(target, name), []

    def fail_once(state: Any) -> None:
        whole(state)
        if not failures:
            failures.append(torch.rand(1))
            raise ZeroDivisionError

    before = [*run.state(), extra.state, run.model[4].own]
    if stage == "generators":
        monkeypatch.setattr(target, name, fail_once)
    else:
        monkeypatch.setattr(type(target), name, lambda _, state: fail_once(state))
    with pytest.raises((ZeroDivisionError, RuntimeError)):
        run.checkpoint.restore(url)
    assert failures
    assert [*run.state(), extra.state, run.model[4].own] == before
    assert run.checkpoint.restore(url) == 3
    assert run.state() == saved.state()


def test_a_tensor_that_cannot_be_written_to(url: str) -> None:
    """A buffer of which several elements share memory is refused by name before anything is changed."""
    model = torch.nn.Linear(2, 2)
    model.register_buffer("shared", torch.zeros(1).expand(3))
    checkpoint = ps.torch.Checkpoint(model=model)
    checkpoint.save(url, step=1)
    weight = model.weight.detach().clone().add_(0)
    with torch.no_grad():
        model.weight += 1
    with pytest.raises(ConfigError, match=r"model\.shared .*share memory"):
        checkpoint.restore(url)
    assert torch.equal(model.weight, weight + 1)


@pytest.mark.parametrize("moment", ["read_manifest", "list_directory", "read"])
@pytest.mark.parametrize("becomes", ["replaced", "removed"])
def test_a_checkpoint_that_is_replaced_while_it_is_restored(
    url: str, moment: str, becomes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is chosen again, so that the new one is restored; if it was removed, the newest of the others is."""
    run, later = Run(seed=1), Run(seed=2)
    run.checkpoint.save(url, step=3)
    run.checkpoint.save(url, step=4)
    holder = plan_reading.PlanReader if moment == "read" else storage_reader
    whole = getattr(holder, moment)

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(holder, moment, whole)
        if becomes == "replaced":
            later.checkpoint.save(url, step=4)
        else:
            with Checkpoints(url) as checkpoints:
                checkpoints.remove(4)
        return whole(*arguments)

    monkeypatch.setattr(holder, moment, meanwhile)
    other = Run(seed=3)
    assert other.checkpoint.restore(url) == (4 if becomes == "replaced" else 3)
    assert other.state()[0] == (later if becomes == "replaced" else run).state()[0]


@pytest.mark.parametrize(
    "options",
    [{"keep_last": 0}, {"keep_last": -1}, {"keep_last": 1.5}, {"keep_every": 10}, {"keep_last": 1, "keep_every": 0}],
)
def test_wrong_retention(url: str, options: dict[str, Any]) -> None:
    """Numbers out of bounds are refused before anything is written."""
    run = Run()
    with pytest.raises(ConfigError, match="keep_"):
        run.checkpoint.save(url, step=1, **options)
    assert run.checkpoint.latest(url) is None


def test_meta_tensors_are_not_saved(url: str) -> None:
    """A tensor on meta has no values; the error names it, and nothing is written."""
    model = torch.nn.Linear(2, 2, device="meta")
    for wait in (True, False):
        with pytest.raises(ConfigError, match=r"model\.weight is on the device 'meta'.*to_empty"):
            ps.torch.Checkpoint(model=model).save(url, step=1, wait=wait)
    assert ps.torch.Checkpoint(model=model).latest(url) is None


def test_a_closed_checkpoint(url: str) -> None:
    """After close(), which may be called again, every use is an error."""
    run = Run()
    run.checkpoint.save(url, step=1, wait=False)
    run.checkpoint.close()
    run.checkpoint.close()
    for use in (run.checkpoint.latest, run.checkpoint.restore, lambda where: run.checkpoint.save(where, step=2)):
        with pytest.raises(ClosedError):
            use(url)
    assert Run().checkpoint.latest(url) == 1


# ── failures in the background ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def unwritable(tmp_path: Path) -> str:
    """A place where nothing can be written: below a file."""
    (tmp_path / "file").touch()
    return f"{tmp_path}/file/run"


def test_a_failure_is_raised_by_what_comes_next(url: str, unwritable: str) -> None:
    """save, wait, close and the end of a with block raise the failure of the save before, once."""
    run = Run()
    run.checkpoint.save(unwritable, step=1, wait=False)
    with pytest.raises((StoreError, ConfigError)):
        run.checkpoint.save(url, step=2, wait=False)
    run.checkpoint.save(unwritable, step=3, wait=False)
    with pytest.raises((StoreError, ConfigError)):
        run.checkpoint.wait()
    run.checkpoint.wait()
    with pytest.raises((StoreError, ConfigError)), run.checkpoint:
        run.checkpoint.save(unwritable, step=4, wait=False)
    run = Run()

    def fail() -> None:
        with run.checkpoint:
            run.checkpoint.save(unwritable, step=5, wait=False)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fail()
    assert "last save of the checkpoint failed" in "".join(caught.value.__notes__)
