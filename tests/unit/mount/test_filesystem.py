"""The answers to the kernel's requests, from a store in memory and without a kernel."""

from __future__ import annotations

import errno
import math
import os
import stat
import threading
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import AccessDeniedError, ObjectChangedError, UnavailableError
from penstock.mount.filesystem import NodeView, StoreFileSystem
from penstock.mount.namespace.directories import StoreDirectories
from penstock.mount.nodes import ROOT_INODE, Attributes
from penstock.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.errors import PenstockError
    from penstock.mount.nodes import Node

WAIT_S = 20
OBJECTS = {"a/1": b"one", "a/2": b"two two", "b": b"bee"}


class Answered:
    """A reply that keeps what it was given."""

    def __init__(self, *, fits_max: int = 1000, is_wanted: bool = True) -> None:
        self._done = threading.Event()
        self._fits_max = fits_max
        self._is_wanted = is_wanted
        self.calls: list[tuple[Any, ...]] = []

    @property
    def entries_max(self) -> int:
        return 100

    def _note(self, *values: Any) -> None:
        self.calls.append(values)
        self._done.set()

    def wait(self) -> tuple[Any, ...]:
        assert self._done.wait(WAIT_S), "there was no reply"
        (call,) = self.calls
        return call

    def error(self, number: int) -> None:
        self._note("error", number)

    def entry(self, attributes: Attributes, *, lifetime_s: float) -> bool:
        self._note("entry", attributes, lifetime_s)
        return self._is_wanted

    def attributes(self, attributes: Attributes, *, lifetime_s: float) -> None:
        self._note("attributes", attributes, lifetime_s)

    def opened(self, handle: int, *, keeps_cache: bool = False, is_direct: bool = False) -> bool:
        self._note("opened", handle, keeps_cache)
        return self._is_wanted

    def data(self, pieces: Sequence[Any]) -> None:
        self._note("data", b"".join(pieces))

    def directory(self, entries: Iterable[tuple[Attributes, bytes, int]], *, lifetime_s: float) -> int:
        taken = [entry for entry, _ in zip(entries, range(self._fits_max), strict=False)]
        self._note("directory", taken, lifetime_s)
        return len([1 for _, name, _ in taken if name not in (b".", b"..")])

    def extended(self, value: bytes) -> None:
        self._note("extended", value)

    def statistics(self, *, blocks: int, files: int, block_bytes: int) -> None:
        self._note("statistics", blocks * block_bytes)

    def ok(self) -> None:
        self._note("ok")


class FilesInMemory:
    """Opens files whose bytes are in memory, or fails as a test says."""

    def __init__(self) -> None:
        self.open_count = 0
        self.error: PenstockError | None = None

    def open_file(self, node: Node) -> OpenInMemory:
        self.open_count += 1
        return OpenInMemory(self, node)

    def close(self) -> None:
        """Hold nothing."""


class OpenInMemory:
    keeps_pages = True

    def __init__(self, files: FilesInMemory, node: Node) -> None:
        assert node.info is not None
        self._files, self._data = files, OBJECTS[node.info.key]

    def read(self, offset: int, length_bytes: int, then: Callable[[Any], None]) -> None:
        then(self._files.error or [memoryview(self._data)[offset : offset + length_bytes]])

    def close(self) -> None:
        self._files.open_count -= 1


class Mounting:
    """A file system, and the parts that it is made of."""

    def __init__(self, *, ttl_s: float = math.inf) -> None:
        self.store = MemoryStore(OBJECTS)
        self.directories = StoreDirectories(self.store, ttl_s=ttl_s)
        self.files = FilesInMemory()
        view = NodeView(uid=7, gid=8, file_mode=0o440, directory_mode=0o550)
        self.system = StoreFileSystem(self.directories, self.files, view=view, ttl_s=ttl_s, negative_ttl_s=ttl_s)

    def ask(self, method: str, *arguments: Any, **how: Any) -> tuple[Any, ...]:
        reply = Answered(**how)
        getattr(self.system, method)(*arguments, reply)
        return reply.wait()

    def inode(self, path: str) -> int:
        inode = ROOT_INODE
        for name in path.split("/"):
            inode = self.ask("look_up", inode, name.encode())[1].inode
        return inode

    def opened(self, path: str) -> int:
        return int(self.ask("open", self.inode(path), os.O_RDONLY)[1])


def test_a_lookup_describes_the_node() -> None:
    """Size, mode, owner and link count are those of the view and of the object; the lifetime is what is left of it."""
    mounting = Mounting(ttl_s=60)
    _, found, lifetime_s = mounting.ask("look_up", mounting.inode("a"), b"2")
    assert (found.size_bytes, found.mode, found.uid, found.gid) == (7, stat.S_IFREG | 0o440, 7, 8)
    assert 0 < lifetime_s <= 60
    _, folder, _ = mounting.ask("look_up", ROOT_INODE, b"a")
    assert (folder.mode, folder.links_count) == (stat.S_IFDIR | 0o550, 1)
    assert mounting.ask("get_attributes", found.inode)[1] == found


def test_names_that_do_not_exist_have_a_lifetime() -> None:
    """The kernel may remember that a name is missing, unless nothing may be remembered."""
    kind, described, lifetime_s = Mounting(ttl_s=60).ask("look_up", ROOT_INODE, b"none")
    assert (kind, described.inode) == ("entry", 0)
    assert 0 < lifetime_s <= 60
    assert Mounting(ttl_s=0).ask("look_up", ROOT_INODE, b"none") == ("error", errno.ENOENT)
    assert Mounting().ask("look_up", ROOT_INODE, b"n" * 256) == ("error", errno.ENAMETOOLONG)


def test_a_reply_that_nobody_waits_for_leaves_nothing() -> None:
    """If the program was killed meanwhile, the reference and the open file are dropped."""
    mounting = Mounting()
    mounting.ask("look_up", ROOT_INODE, b"b", is_wanted=False)
    assert mounting.directories.nodes_count == 1
    mounting.ask("open", mounting.inode("b"), os.O_RDONLY, is_wanted=False)
    assert mounting.files.open_count == 0
    mounting.ask("open_directory", ROOT_INODE, is_wanted=False)


def test_a_directory_is_read_in_pieces() -> None:
    """Offsets go on where the last reply ended, ``.`` and ``..`` come first, and what did not fit is not referred to."""
    mounting = Mounting()
    handle = mounting.ask("open_directory", ROOT_INODE)[1]
    seen: list[bytes] = []
    offset = 0
    while True:
        _, entries, _ = mounting.ask("read_directory", handle, offset, fits_max=1)
        if not entries:
            break
        ((_, name, offset),) = entries
        seen.append(name)
    assert seen == [b".", b"..", b"a", b"b"]
    assert mounting.directories.nodes_count == 3
    assert [name for _, name, _ in mounting.ask("read_directory", handle, 0)[1]] == seen
    assert [name for _, name, _ in mounting.ask("read_directory", handle, 3)[1]] == [b"b"]
    mounting.ask("release_directory", handle)


def test_files_are_read_and_closed() -> None:
    """Reads return the bytes of the range, nothing past the end, and the pages of a version may be kept."""
    mounting = Mounting()
    kind, handle, keeps_cache = mounting.ask("open", mounting.inode("a/2"), os.O_RDONLY)
    assert (kind, keeps_cache) == ("opened", True)
    assert mounting.ask("read", handle, 4, 100) == ("data", b"two")
    assert mounting.ask("read", handle, 7, 100) == ("data", b"")
    assert mounting.ask("release", handle) == ("ok",)
    assert mounting.files.open_count == 0
    assert mounting.ask("open", mounting.inode("a"), os.O_RDONLY) == ("error", errno.EISDIR)
    assert mounting.ask("open", 12345, os.O_RDONLY) == ("error", errno.ESTALE)
    assert mounting.ask("get_attributes", 12345) == ("error", errno.ESTALE)
    assert mounting.ask("open_directory", 12345) == ("error", errno.ENOENT)


def test_a_changed_object_is_stale_and_its_name_is_asked_for_again() -> None:
    """Reading a replaced object is ``ESTALE``; then the listing is not used any more, and the kernel forgets its names."""
    mounting = Mounting()
    forgotten: list[bool] = []
    mounting.system.when_outdated(lambda: forgotten.append(True))
    entries = mounting.ask("read_directory", mounting.ask("open_directory", ROOT_INODE)[1], 0)[1]
    assert [name for _, name, _ in entries][2:] == [b"a", b"b"]
    before = mounting.inode("b")
    handle = mounting.opened("b")
    mounting.store.write("b", b"another")
    assert mounting.inode("b") == before, "the listing is not too old"
    mounting.files.error = ObjectChangedError("replaced")
    assert mounting.ask("read", handle, 0, 10) == ("error", errno.ESTALE)
    assert forgotten == [True]
    assert mounting.inode("b") != before


@pytest.mark.parametrize(
    ("error", "number"), [(AccessDeniedError("403"), errno.EACCES), (UnavailableError("503"), errno.EIO)]
)
def test_errors_become_their_errno(error: PenstockError, number: int) -> None:
    """The one table says which errno an error is."""
    mounting = Mounting()
    handle = mounting.opened("b")
    mounting.files.error = error
    assert mounting.ask("read", handle, 0, 10) == ("error", number)


def test_extended_attributes() -> None:
    """The ETag can be read and is listed; other names are ``ENODATA``, and directories have none."""
    mounting = Mounting()
    inode = mounting.inode("b")
    etag = mounting.store.stat("b").etag
    assert etag is not None
    assert mounting.ask("get_extended_attribute", inode, b"user.etag") == ("extended", etag.strip('"').encode())
    assert mounting.ask("list_extended_attributes", inode) == ("extended", b"user.etag\0")
    for name in (b"user.storage_class", b"security.selinux", b"user.other"):
        assert mounting.ask("get_extended_attribute", inode, name) == ("error", errno.ENODATA)
    assert mounting.ask("list_extended_attributes", ROOT_INODE) == ("extended", b"")
    assert mounting.ask("get_statistics")[1] == 1 << 50


def test_close_drops_open_files() -> None:
    """When the file system is unmounted, its open files and directories are closed."""
    mounting = Mounting()
    mounting.opened("b")
    mounting.ask("open_directory", ROOT_INODE)
    mounting.system.close()
    assert mounting.files.open_count == 0
    assert mounting.ask("look_up", ROOT_INODE, b"b") == ("error", errno.ECANCELED)
