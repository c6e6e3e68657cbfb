"""Where a distributed checkpoint lies: its directory, and the store of the run that the directory belongs to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self

from penstock import compose
from penstock.checkpoints import layout
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.store import Store


class CheckpointPlace:
    """The directory of a checkpoint, in a store that is connected when it is needed.

    If the directory's name is that of a step, the store is that of the directory above, where the markers of saves are;
    otherwise it is that of the directory itself.

    Args:
        url: URL of the directory.
        options: Options of ``penstock.connect``.

    Attributes:
        url: URL of the directory, with a slash at its end.
        directory: Prefix of the directory in the store; empty, or the name of a step.

    Raises:
        ConfigError: The URL or an option is not valid.
    """

    def __init__(self, url: Any, options: dict[str, Any]) -> None:
        self._options = options
        self._store: Store | None = None
        self._run_url = self.url = self.directory = ""
        self.move(url)
        self.store()  # checks the options now, and not in the middle of a save

    def move(self, url: Any) -> None:
        """Go to another directory; the store is closed if it is not that of the new one."""
        self.url = checked_url(url)
        run_url, self.directory = run_and_directory(self.url)
        if run_url != self._run_url:
            self.close()
        self._run_url = run_url

    def store(self) -> Store:
        """Return the store, connected."""
        if self._store is None:
            self._store = compose.connect(self._run_url, **self._options)
        return self._store

    def describe(self, name: str = "") -> str:
        """Return the URL of a file of the directory for messages, without credentials."""
        return self.store().describe(self.directory + name)

    def close(self) -> None:
        """Close the store, which is connected again when it is needed. Idempotent."""
        if self._store is not None:
            self._store.close()
            self._store = None


class PlacedStorage:
    """What ``StorageWriter`` and ``StorageReader`` have in common: they have a place in a store, and are context managers."""

    _place: CheckpointPlace

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._place.describe()!r}>"

    def close(self) -> None:
        """Close the store. Idempotent; the next save or load opens it again."""
        self._place.close()

    @property
    def checkpoint_id(self) -> str:
        """URL of the checkpoint's directory."""
        return self._place.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `checkpoint_id` can be the URL of a checkpoint."""
        return isinstance(checkpoint_id, str | os.PathLike) and bool(os.fspath(checkpoint_id))


def checked_url(url: Any) -> str:
    """Return the URL of a directory, with a slash at its end.

    Raises:
        ConfigError: It is not a URL or a path, it is empty, or it has no bucket, so that the name of a step would become one.
    """
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else None
    scheme, mark, rest = text.partition("://") if isinstance(text, str) else ("", "", "")
    if not isinstance(text, str) or not text or (mark and scheme != "file" and not rest.strip("/")):
        raise ConfigError(
            f"{url!r} is not the URL of a checkpoint's directory", hint="s3://bucket/run/step-0000001000/"
        )
    return text if text.endswith("/") else text + "/"


def checked_run_url(url: Any) -> str:
    """Return the URL of a training run, with a slash at its end.

    Raises:
        ConfigError: It is not the URL of a directory, or it is that of one checkpoint, below which there are none.
    """
    text = checked_url(url)
    run, directory = run_and_directory(text)
    if directory:
        hint = f"pass the URL of the run, {run}, and step={layout.step_of(directory)}"
        raise ConfigError(f"{os.fspath(url)!r} is the URL of one checkpoint, not of a run", hint=hint)
    return run


def run_and_directory(url: str) -> tuple[str, str]:
    """Split the URL of a checkpoint into that of its run and the directory's name; the name is empty if it is not a step's."""
    head, _, name = url.rstrip("/").rpartition("/")
    if layout.step_of(name) is None or not head or head.endswith(":/"):
        return url, ""
    return f"{head}/", f"{name}/"


def remade(kind: type[Any], url: str, configuration: dict[str, Any]) -> Any:
    """Make what was pickled as its configuration."""
    return kind(url, **configuration)
