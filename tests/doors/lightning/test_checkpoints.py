"""Lightning's checkpoints on a real store: its own callbacks, the plugin, and fsspec by penstock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from connecting import connection_to
from penstock.errors import ConfigError, ObjectMissingError, StoreError
from penstock.testing.ministack import Ministack

lightning = pytest.importorskip("lightning")
import fsspec  # noqa: E402 - Lightning brings it
import torch  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins import AsyncCheckpointIO  # noqa: E402

from penstock.torch.checkpoint import LightningCheckpointIO  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, loggers and checkpoints


class Counting(lightning.LightningModule):  # type: ignore[misc]
    """Writes down the samples that it is given, and has an optimizer with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1000))
        self.seen: list[float] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += batch.tolist()
        loss = ((self.weight - batch.mean()) ** 2).mean()
        self.log("count", float(self.global_step))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


@pytest.fixture
def environment(user: Any) -> Iterator[None]:
    """The settings of a user of the session's S3, with ``s3://`` in fsspec by penstock."""
    ps.fsspec.register("s3")
    yield
    fsspec.register_implementation("s3", "s3fs.S3FileSystem", clobber=True)


def fit(model: Any, url: str | None, *, steps: int, plugin: Any = None, **options: Any) -> Any:
    """Train on the numbers 0 to 3, one by one, and keep checkpoints below `url`."""
    keep = [ModelCheckpoint(url, monitor="count", mode="max", save_top_k=2, save_last=True, every_n_train_steps=2)]
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=steps,
        callbacks=keep if url else [],
        enable_checkpointing=url is not None,
        plugins=[plugin or LightningCheckpointIO()],
    )
    trainer.fit(model, torch.utils.data.DataLoader(torch.arange(4.0)), **options)
    return trainer


def names_in(bucket: str) -> list[str]:
    with ps.connect(f"s3://{bucket}") as store:
        return [info.key for info in store.list()]


@pytest.mark.parametrize("wrapped", [False, True])
def test_model_checkpoint_keeps_the_best_on_the_store(environment: None, bucket: str, wrapped: bool) -> None:
    """save_top_k=2 and save_last=True keep these objects and remove the others, also from a thread of Lightning's."""
    plugin = AsyncCheckpointIO(LightningCheckpointIO()) if wrapped else LightningCheckpointIO()
    trainer = fit(Counting(), f"s3://{bucket}/run", steps=9, plugin=plugin)
    kept = ["run/epoch=1-step=6.ckpt", "run/epoch=1-step=8.ckpt", "run/last.ckpt"]
    assert names_in(bucket) == kept
    assert trainer.checkpoint_callback.best_model_path == f"s3://{bucket}/{kept[1]}"
    model = Counting.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    assert model.weight.shape == (1000,)


def test_a_run_resumes_from_the_store(environment: None, bucket: str) -> None:
    """A run that goes on from a URL ends with the weights and the optimizer of one that was not interrupted."""
    whole, first, rest = Counting(), Counting(), Counting()
    fit(whole, None, steps=8)
    fit(first, f"s3://{bucket}/run", steps=4)
    trainer = fit(rest, f"s3://{bucket}/run", steps=8, ckpt_path=f"s3://{bucket}/run/last.ckpt")
    assert first.seen + rest.seen == whole.seen
    assert torch.equal(rest.weight, whole.weight)
    assert trainer.global_step == 8


def test_a_failed_save_leaves_the_earlier_checkpoint(environment: None, bucket: str) -> None:
    """What cannot be saved is an error, and the object of that name remains as it was."""
    plugin, url = LightningCheckpointIO(), f"s3://{bucket}/a.ckpt"
    plugin.save_checkpoint({"weight": torch.ones(3)}, url)
    with pytest.raises(Exception, match="pickle"):
        plugin.save_checkpoint({"weight": torch.ones(3), "bad": lambda: None}, url)
    assert list(plugin.load_checkpoint(url)) == ["weight"]
    assert names_in(bucket) == ["a.ckpt"]


def test_checkpoints_are_removed(environment: None, bucket: str) -> None:
    """A file, everything below a directory, and nothing beside it; a missing one is no error."""
    with ps.connect(f"s3://{bucket}") as store:
        for name in ("a.ckpt", "b/1", "b/c/2", "b.ckpt", "bb/1"):
            store.write(name, b"x")
    plugin = LightningCheckpointIO()
    for name in ("a.ckpt", "b", "none"):
        plugin.remove_checkpoint(f"s3://{bucket}/{name}")
    assert names_in(bucket) == ["b.ckpt", "bb/1"]


@pytest.mark.parametrize(
    "path", ["", "/", "//", "s3://", "s3://bucket", "s3://bucket/", "file:///", "memory://x", "memory://x//"]
)
def test_no_store_is_removed_as_a_whole(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that names a bucket, the root directory or nothing is refused, and nothing is removed."""
    (tmp_path / "mine").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="not the path of a checkpoint"):
        LightningCheckpointIO(anonymous=True).remove_checkpoint(path)
    assert (tmp_path / "mine").exists()


def test_options_reach_the_store(ministack: Ministack, bucket: str, tmp_path: Path) -> None:
    """Those of the plugin count for every call, those of a save for that save; paths are local files."""
    options = connection_to(ministack)
    elsewhere = {"endpoint_url": "http://127.0.0.1:1", "retry": ps.RetryConfig(attempts_max=1)}
    plugin = LightningCheckpointIO(**(options | elsewhere))
    plugin.save_checkpoint({"x": 1}, f"s3://{bucket}/a.ckpt", storage_options=options)
    with pytest.raises(StoreError):
        plugin.load_checkpoint(f"s3://{bucket}/a.ckpt")
    with pytest.raises(ConfigError, match=r"LightningCheckpointIO\(endpoint=\.\.\.\).*endpoint_url=\?"):
        LightningCheckpointIO(endpoint="http://minio:9000")
    with pytest.raises(ConfigError, match="storage_options"):
        plugin.save_checkpoint({"x": 1}, f"s3://{bucket}/a.ckpt", storage_options=3)  # type: ignore[arg-type]
    assert LightningCheckpointIO(**options).load_checkpoint(f"s3://{bucket}/a.ckpt") == {"x": 1}
    with pytest.raises(ObjectMissingError):
        LightningCheckpointIO(**options).load_checkpoint(f"s3://{bucket}/none.ckpt")
    plugin.save_checkpoint({"x": 1}, tmp_path / "run/a.ckpt")
    assert plugin.load_checkpoint(tmp_path / "run/a.ckpt", map_location="cpu", weights_only=True) == {"x": 1}


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_both_packages_take_the_plugin(package: str) -> None:
    """Lightning comes as two packages with an interface each; the plugin has that of the package that is imported."""
    pytest.importorskip(package.partition(".")[0])
    program = f"import {package} as L, penstock as ps; plugin = ps.torch.checkpoint.LightningCheckpointIO()\n"
    program += "trainer = L.Trainer(accelerator='cpu', logger=False, plugins=[plugin])\n"
    program += "assert trainer.strategy.checkpoint_io is plugin"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
