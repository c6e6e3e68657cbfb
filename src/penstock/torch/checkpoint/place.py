"""Where a distributed checkpoint lies: its directory, and the store of the run that the directory belongs to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self

from penstock import compose
from penstock.checkpoints import layout
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.store import Store


class PlacedStorage:
    """What ``StorageWriter`` and ``StorageReader`` have in common: a directory, in a store that is connected when it is needed.

    If the directory's name is that of a step, the store is that of the directory above, where the markers of saves are;
    otherwise it is that of the directory itself.
    """

    _options: dict[str, Any]
    _connected: Store | None = None
    _run_url = ""
    _url = ""  # of the directory, with a slash at its end
    _directory = ""  # prefix of the directory in the store; empty, or the name of a step

    def _place_at(self, url: Any, options: dict[str, Any]) -> None:
        """Take the URL of the directory, and the options of ``penstock.connect``.

        Raises:
            ConfigError: The URL or an option is not valid.
        """
        self._options = options
        self._move(url)
        self._store()  # checks the options now, and not in the middle of a save

    def _move(self, url: Any) -> None:
        """Go to another directory; the store is closed if it is not that of the new one."""
        self._url = checked_url(url)
        run_url, self._directory = run_and_directory(self._url)
        if run_url != self._run_url:
            self._disconnect()
        self._run_url = run_url

    def _store(self) -> Store:
        """Return the store, connected."""
        if self._connected is None:
            self._connected = compose.connect(self._run_url, **self._options)
        return self._connected

    def _describe(self, name: str = "") -> str:
        """Return the URL of a file of the directory for messages, without credentials."""
        return self._store().describe(self._directory + name)

    def _disconnect(self) -> None:
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def close(self) -> None:
        """Close the store. Idempotent; the next save or load opens it again."""
        self._disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._describe()!r}>"

    @property
    def checkpoint_id(self) -> str:
        """URL of the checkpoint's directory."""
        return self._url

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
