"""Directories that frameworks save: uploaded and downloaded so that a reader finds all of a directory, or no model in it.

Hugging Face's ``save_pretrained``, TensorFlow's and Orbax's checkpoints are directories of many files, of which one or two say
what the others are, such as ``config.json``. Those are removed from the target first and written last, so a transfer that was
killed leaves nothing that could be loaded in part, or mixed with the files of an earlier model.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from penstock import compose
from penstock.errors import ConfigError, DirectoryMissingError, ObjectExistsError, ObjectMissingError
from penstock.store.local import LocalStore
from penstock.system.tracebacks import boundary
from penstock.transfer.download import is_downloaded
from penstock.transfer.moving import TransferItem, copy_between, stream
from penstock.transfer.receiving import FileReceiver

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.store.base import Store
    from penstock.transfer.moving import TransferListener
    from penstock.types import Key, ObjectInfo

LAST_NAMES = (
    "config.json",  # transformers, and most other libraries of Hugging Face
    "model_index.json",  # diffusers
    "adapter_config.json",  # peft
    "*.index.json",  # which file holds which tensor
    "checkpoint",  # TensorFlow: which checkpoint is the newest
    "training_metadata.json",  # Keras: the epoch of a BackupAndRestore
    "manifest.ocdbt",  # Orbax: where the arrays lie
    "_CHECKPOINT_METADATA",  # Orbax
    "commit_success.txt",  # Orbax
    ".metadata",  # torch.distributed.checkpoint
)
"""Names of files through which a reader finds the others; they are written last."""


@boundary
def upload_directory(
    path: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    delete: bool = False,
    listener: TransferListener | None = None,
    **options: Any,
) -> None:
    """Upload a directory that a framework saved, such as that of Hugging Face's ``save_pretrained``.

    Files such as ``config.json`` and ``*.index.json`` (``penstock.transfer.directories.LAST_NAMES``) are removed from the
    target first, and written when all others are stored. An upload that was killed therefore leaves nothing that loads; run it
    again. Empty directories are not uploaded.

    Args:
        path: The directory.
        url: URL that gets its files, with or without a slash at its end.
        delete: Whether to remove objects below `url` that the directory does not have. Otherwise they are an error, because a
            framework might take one of them for a part of the model.
        listener: Hears of each file, and of bytes as they are read.
        **options: Options of ``penstock.connect``.

    Raises:
        ConfigError: The two overlap, the directory has a link that leads nowhere or a special file, or an option is not valid.
        ObjectMissingError: The directory is missing or empty.
        ObjectExistsError: There are other objects below `url`, and `delete` is false. Nothing was changed.
        StoreError: A file could not be uploaded.

    Cost: A listing of the target, and one upload per file, up to 32 small ones at a time.
    """
    with LocalStore(_local("path", path)) as source, _StoreDirectory.open(url, **options) as target:
        _refuse_overlap(source.root, target)
        _refuse_others(source.root)
        found = _DirectoryListing.of(source, "")
        if not found.keys:
            what = "there is no such directory, or it is empty"
            raise ObjectMissingError(what, hint="check the path", url=source.describe(""))
        extra = _DirectoryListing.of(target.store, target.prefix).less(found)
        _refuse_extra(extra, target.store.describe(target.prefix), delete=delete)
        target.store.delete(target.prefix + name for name in found.last)
        items = {name: TransferItem(info, target.prefix + name, None) for name, info in found.keys.items()}
        _upload(source, target.store, [items[name] for name in found.first], listener)
        target.store.delete(target.prefix + name for name in extra.keys)
        _upload(source, target.store, [items[name] for name in found.last], listener)


@boundary
def download_directory(
    url: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    delete: bool = False,
    listener: TransferListener | None = None,
    **options: Any,
) -> None:
    """Download everything below a URL into a directory, for frameworks that load from local files only.

    Files that were downloaded before and have not changed on either side are not downloaded again, so an interrupted download
    continues where it ended. Files such as ``config.json`` and ``*.index.json`` are written last.

    Args:
        url: URL of the directory in the store, with or without a slash at its end.
        path: The directory; it is made if it is missing.
        delete: Whether to remove files of the directory that are not below `url`. Otherwise they are an error, because a
            framework might take one of them for a part of the model.
        listener: Hears of each file, and of bytes as they arrive.
        **options: Options of ``penstock.connect``.

    Raises:
        ConfigError: The two overlap, a key is not a safe name of a file, or an option is not valid.
        ObjectMissingError: There is nothing below `url`.
        ObjectExistsError: The directory has other files, and `delete` is false. Nothing was changed.
        StoreError: A file could not be downloaded.
        OSError: This machine failed, for example because its disk is full.

    Cost: A listing, and parallel requests of 8 MiB, within the byte budget.
    """
    with LocalStore(_local("path", path)) as target, _StoreDirectory.open(url, **options) as source:
        _refuse_overlap(target.root, source)
        found = _DirectoryListing.of(source.store, source.prefix)
        if not found.keys:
            raise ObjectMissingError("there are no objects below this URL", url=source.store.describe(source.prefix))
        items = {name: TransferItem(info, info.key, target.path(name)) for name, info in found.keys.items()}
        extra = _DirectoryListing.of(target, "").less(found)
        _refuse_extra(extra, target.describe(""), delete=delete)
        due = {name for name, item in items.items() if item.path and not is_downloaded(item.path, item.info)}
        if due or extra.keys:
            target.delete(found.last)
            due.update(found.last)
        _download(source.store, [items[name] for name in found.first if name in due], listener)
        target.delete(extra.keys)
        _download(source.store, [items[name] for name in found.last if name in due], listener)


class _StoreDirectory:
    """A prefix of a store; a context manager that closes the store."""

    def __init__(self, url: str, store: Store, prefix: Key) -> None:
        self.url = url
        self.store = store
        self.prefix = prefix

    @classmethod
    def open(cls, url: str | os.PathLike[str], **options: Any) -> _StoreDirectory:
        """Connect to the store of `url`.

        Raises:
            ConfigError: The URL is empty, or an option is not valid.
        """
        text = _named("url", url)
        root, prefix = compose.split(text if text.endswith("/") else f"{text}/")
        return cls(text, compose.connect(root, **options), prefix)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()


class _DirectoryListing(NamedTuple):
    """The files of a directory, or the objects below a prefix.

    Attributes:
        keys: Listed record of each file, by its name relative to the directory.
    """

    keys: dict[str, ObjectInfo]

    @classmethod
    def of(cls, store: Store, prefix: Key) -> _DirectoryListing:
        """List a directory; a missing one is empty, and objects that stand for folders are left out."""
        try:
            infos = [info for info in store.list(prefix) if info.key != prefix and not info.key.endswith("/")]
        except DirectoryMissingError:
            infos = []
        return cls({info.key[len(prefix) :]: info for info in infos})

    def less(self, other: _DirectoryListing) -> _DirectoryListing:
        """Return what is here and not in `other`."""
        return _DirectoryListing({name: info for name, info in self.keys.items() if name not in other.keys})

    @property
    def last(self) -> list[str]:
        """Names that are written last."""
        return [name for name in self.keys if _is_last(name)]

    @property
    def first(self) -> list[str]:
        """The other names."""
        return [name for name in self.keys if not _is_last(name)]


def _local(name: str, value: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a local directory.

    Raises:
        ConfigError: It is empty, or the URL of a store.
    """
    text = _named(name, value)
    if "://" in text and not text.startswith("file:"):
        hint = "upload_directory(path, url), download_directory(url, path)"
        raise ConfigError(f"{name}={text!r} must be a directory of this machine", hint=hint)
    return compose.local_path(text)


def _named(name: str, value: str | os.PathLike[str]) -> str:
    """Return a URL or path; an empty one would mean the root, or wherever the program was started."""
    text = os.fspath(value)
    if not text:
        raise ConfigError(f"{name}= is empty", hint="name a directory")
    return text


def _is_last(name: str) -> bool:
    return any(fnmatchcase(name.rpartition("/")[2], pattern) for pattern in LAST_NAMES)


def _refuse_overlap(path: Path, folder: _StoreDirectory) -> None:
    """Refuse to copy a directory into itself, of which files would be removed first."""
    if "://" in folder.url and not folder.url.startswith("file:"):
        return
    one, other = path.resolve(), compose.local_path(folder.url).resolve()
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise ConfigError(f"{one} and {other} overlap", hint="name separate directories")


def _refuse_others(folder: Path) -> None:
    """Refuse a directory with something that cannot be uploaded, because a part of the model would be missing."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)  # noqa: PTH118 - a directory may have 100 000 files
            if not os.path.isfile(path):  # noqa: PTH113 - the same
                what = f"{path!r} is neither a file nor a directory, or is a link that leads nowhere"
                raise ConfigError(what, hint="remove it, or restore what the link names")


def _refuse_extra(extra: _DirectoryListing, place: str, *, delete: bool) -> None:
    if extra.keys and not delete:
        names = ", ".join(sorted(extra.keys)[:3]) + (", ..." if len(extra.keys) > 3 else "")
        hint = "choose an empty place, or remove them with delete=True"
        count = "is 1 other file" if len(extra.keys) == 1 else f"are {len(extra.keys)} other files"
        raise ObjectExistsError(f"there {count}: {names}", hint=hint, url=place)


def _upload(source: Store, target: Store, items: list[TransferItem], listener: TransferListener | None) -> None:
    report = _FirstFailure(listener)
    copy_between(source, target, iter(items), report)
    report.check()


def _download(source: Store, items: list[TransferItem], listener: TransferListener | None) -> None:
    report = _FirstFailure(listener)
    stream(source, iter(items), FileReceiver(report), report)
    report.check()


class _FirstFailure:
    """A listener that passes events on, and keeps the first failure."""

    def __init__(self, listener: TransferListener | None) -> None:
        self._listener = listener
        self._error: Exception | None = None

    def moved(self, item: TransferItem) -> None:
        """Pass the event on."""
        if self._listener is not None:
            self._listener.moved(item)

    def failed(self, item: TransferItem, error: Exception) -> None:
        """Keep the first error, and pass the event on."""
        self._error = self._error or error
        if self._listener is not None:
            self._listener.failed(item, error)

    def progressed(self, size_bytes: int) -> None:
        """Pass the event on."""
        if self._listener is not None:
            self._listener.progressed(size_bytes)

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self._error is not None:
            raise self._error
