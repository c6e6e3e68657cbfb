"""The interface through which Lightning saves and loads checkpoints; the only file that imports Lightning."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from penstock import compose
from penstock.errors import ConfigError
from penstock.torch.checkpoint.serialization import load, save

if TYPE_CHECKING:
    from collections.abc import Mapping

_PACKAGES = ("lightning.fabric", "lightning_fabric")
"""Lightning has two packages with an interface each: ``lightning``, and ``pytorch_lightning`` with ``lightning_fabric``."""


def _interfaces() -> list[Any]:
    """Return the interface of each package that the program has imported, or else of the first that is installed.

    Raises:
        ModuleNotFoundError: None is installed.
    """
    imported = [name for name in _PACKAGES if name in sys.modules]
    for name in imported or _PACKAGES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
        else:
            imported = imported or [name]
    if not imported:
        text = "LightningCheckpointIO needs Lightning. Hint: pip install lightning"
        raise ModuleNotFoundError(text, name="lightning")
    return [importlib.import_module(f"{name}.plugins.io.checkpoint_io").CheckpointIO for name in imported]


_INTERFACES = _interfaces()
_Interface: Any = _INTERFACES[0]


class LightningCheckpointIO(_Interface):  # type: ignore[misc]  # Lightning is not installed where types are checked
    """Saves and loads Lightning's checkpoints: ``lightning.Trainer(plugins=[LightningCheckpointIO()])``.

    A checkpoint becomes visible when all of it is stored, so ``ModelCheckpoint`` never removes an old checkpoint in favour of
    an incomplete one. Paths without a scheme are local files.

    ``ModelCheckpoint`` and ``Trainer`` also list files, with fsspec. Call ``ps.fsspec.register("s3")`` first, so that penstock
    does this, too; otherwise s3fs has to be installed.

    Args:
        **options: Options of ``penstock.connect``.

    Raises:
        ConfigError: An option does not exist.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        compose.check_connect_options("LightningCheckpointIO", options)
        self._options = options

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Save a checkpoint; an earlier one of this path remains until the new one is whole.

        Args:
            checkpoint: Dict that Lightning saves.
            path: URL or path of the file.
            storage_options: Options of ``penstock.connect`` for this save, which take precedence over those of the plugin.

        Raises:
            ConfigError: The URL or an option is not valid.
            StoreError: Writing failed.

        Cost: That of ``penstock.torch.save``: an upload in parts, a few of which are in memory.
        """
        save(checkpoint, path, **(self._options | _checked(storage_options)))

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint.

        Args:
            path: URL or path of the file.
            map_location: Device of the tensors, as for ``torch.load``; None is the CPU, as in Lightning's own plugin.
            weights_only: Whether to refuse anything but tensors and plain values; None is PyTorch's default, which is True.

        Raises:
            ObjectMissingError: There is no such file.
            CheckpointError: The file is truncated or damaged.
            StoreError: Reading failed.

        Cost: That of ``penstock.torch.load``: parallel requests of 8 MiB, straight into the tensors.
        """
        place = "cpu" if map_location is None else map_location
        weights_only = True if weights_only is None else weights_only
        loaded: dict[str, Any] = load(path, place, weights_only=weights_only, **self._options)
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, and everything below it if it is a directory; a missing one is no error.

        Raises:
            ConfigError: `path` names no checkpoint, but a whole bucket, the root directory, or nothing.
            StoreError: Removing failed.

        Cost: A listing, and one request per 1 000 objects.
        """
        root, key = _removable(os.fspath(path))
        with compose.connect(root, **self._options) as store:
            below = [info.key for info in store.list(f"{key}/" if key else "")]
            store.delete([*below, key] if key else below)

    def teardown(self) -> None:
        """Do nothing: every save is complete when ``save_checkpoint`` returns."""


for _interface in _INTERFACES[1:]:
    _interface.register(LightningCheckpointIO)


def _removable(path: str) -> tuple[str, str]:
    """Split the path of a checkpoint that is to be removed into the URL of a store and the key in it.

    Raises:
        ConfigError: It names all of a store rather than a checkpoint in it.
    """
    text = path.rstrip("/")
    if text and not text.endswith(":"):  # of "/" and "s3://" nothing else is left
        root, key = compose.split(text)
        if key or "://" not in text or text.startswith("file:"):
            return root, key
    raise ConfigError(f"{path!r} is not the path of a checkpoint", hint="s3://bucket/run/epoch=3.ckpt")


def _checked(storage_options: Mapping[str, Any] | None) -> dict[str, Any]:
    if storage_options is None:
        return {}
    if not hasattr(storage_options, "items"):
        raise ConfigError(f"storage_options={storage_options!r} must be a dict of options of penstock.connect")
    return dict(storage_options.items())
