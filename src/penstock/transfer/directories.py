"""Uploads and downloads directories that frameworks save, so that a reader finds all of a directory, or no model in it.

Hugging Face's ``save_pretrained``, TensorFlow's and Orbax's checkpoints are directories of many files, of which one or two name
the others, such as ``config.json``. These are removed from the target first and written last, so a killed transfer leaves
nothing that could be loaded in part, or mixed with the files of an earlier model.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from penstock import compose
from penstock.errors import ConfigError, DirectoryMissingError, ObjectExistsError, ObjectMissingError
from penstock.store.local import LocalStore
from penstock.system.tracebacks import boundary
from penstock.transfer.download import FileReceiver, is_downloaded
from penstock.transfer.moving import FirstFailure, TransferItem, copy_between, stream

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
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
    local, (target, prefix) = _local("path", path), _connected(url, options)
    with LocalStore(local) as source, target:
        _refuse_overlap(source.root, url)
        _refuse_others(source.root)
        found = _listed(source, "")
        if not found:
            what = "there is no such directory, or it is empty"
            raise ObjectMissingError(what, hint="check the path", url=source.describe(""))
        extra = sorted(_listed(target, prefix).keys() - found)
        _refuse_extra(extra, target.describe(prefix), delete=delete)
        first, last = _in_order(found)
        target.delete(prefix + name for name in last)
        items = {name: TransferItem(info, prefix + name, None) for name, info in found.items()}
        _upload(source, target, [items[name] for name in first], listener)
        target.delete(prefix + name for name in extra)
        _upload(source, target, [items[name] for name in last], listener)


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
    local, (source, prefix) = _local("path", path), _connected(url, options)
    with LocalStore(local) as target, source:
        _refuse_overlap(target.root, url)
        found = _listed(source, prefix)
        if not found:
            raise ObjectMissingError("there are no objects below this URL", url=source.describe(prefix))
        items = {name: TransferItem(info, info.key, target.path(name)) for name, info in found.items()}
        extra = sorted(_listed(target, "").keys() - found)
        _refuse_extra(extra, target.describe(""), delete=delete)
        first, last = _in_order(found)
        due = {name for name, item in items.items() if item.path and not is_downloaded(item.path, item.info)}
        if due or extra:
            target.delete(last)
            due.update(last)
        _download(source, [items[name] for name in first if name in due], listener)
        target.delete(extra)
        _download(source, [items[name] for name in last if name in due], listener)


def _connected(url: str | os.PathLike[str], options: Mapping[str, Any]) -> tuple[Store, Key]:
    """Connect to the store of `url`, and return it with the prefix of the directory in it.

    Raises:
        ConfigError: The URL is empty, or an option is not valid.
    """
    text = _named("url", url)
    root, prefix = compose.split(text if text.endswith("/") else f"{text}/")
    return compose.connect(root, **options), prefix


def _listed(store: Store, prefix: Key) -> dict[str, ObjectInfo]:
    """List a directory, by names relative to it; a missing one is empty, and objects that stand for folders are left out."""
    try:
        infos = [info for info in store.list(prefix) if info.key != prefix and not info.key.endswith("/")]
    except DirectoryMissingError:
        infos = []
    return {info.key[len(prefix) :]: info for info in infos}


def _in_order(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names that are written first, and those that are written last."""
    last = [name for name in names if any(fnmatchcase(name.rpartition("/")[2], each) for each in LAST_NAMES)]
    return [name for name in names if name not in last], last


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


def _refuse_overlap(path: Path, url: str | os.PathLike[str]) -> None:
    """Refuse to copy a directory into itself, of which files would be removed first."""
    text = os.fspath(url)
    if "://" in text and not text.startswith("file:"):
        return
    one, other = path.resolve(), compose.local_path(text).resolve()
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


def _refuse_extra(extra: list[str], place: str, *, delete: bool) -> None:
    if extra and not delete:
        names = ", ".join(extra[:3]) + (", ..." if len(extra) > 3 else "")
        hint = "choose an empty place, or remove them with delete=True"
        count = "is 1 other file" if len(extra) == 1 else f"are {len(extra)} other files"
        raise ObjectExistsError(f"there {count}: {names}", hint=hint, url=place)


def _upload(source: Store, target: Store, items: list[TransferItem], listener: TransferListener | None) -> None:
    report = FirstFailure(listener)
    copy_between(source, target, iter(items), report)
    report.check()


def _download(source: Store, items: list[TransferItem], listener: TransferListener | None) -> None:
    report = FirstFailure(listener)
    stream(source, iter(items), FileReceiver(report), report)
    report.check()
