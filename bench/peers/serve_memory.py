"""A file system of equal bytes in memory, mounted by penstock's FUSE session: the process that bench/fuse_session.py measures.

Usage: serve_memory.py DIRECTORY REQUEST_BYTES
"""

from __future__ import annotations

import stat
import sys
import threading
from collections.abc import Iterator

from penstock.mount.fuse.answering import KernelReply
from penstock.mount.fuse.dispatching import FileSystem
from penstock.mount.fuse.mounting import MountOptions, mount
from penstock.mount.fuse.session import FuseSession
from penstock.mount.nodes import Attributes

MIB = 1 << 20
LARGE, SMALL, FOLDERS = 0, 1, 2
LARGE_COUNT, LARGE_BYTES = 8, 256 * MIB
SMALL_COUNT, SMALL_BYTES = 4_000, 100_000
FOLDER_COUNT, FOLDER_FILES = 20, 1_000
LIFETIME_S = 3600.0
FILE, DIRECTORY = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755


class BenchFileSystem:
    """``large/``, ``small/``, and ``folders/`` with 20 folders of 1 000 files each; a file's bytes are zeros."""

    def __init__(self) -> None:
        self.zeros = memoryview(bytes(16 * MIB))
        self.nodes: dict[int, Attributes] = {}
        self.entries: dict[int, list[tuple[Attributes, bytes, int]]] = {}
        self.names: dict[tuple[int, bytes], int] = {}
        self._directory(1, 1)
        self.build()

    def build(self) -> None:
        """Add what the root holds."""
        large, small, folders = (
            self._directory(1, inode, name) for inode, name in ((2, b"large"), (3, b"small"), (4, b"folders"))
        )
        for number in range(LARGE_COUNT):
            self._file(large, b"%d" % number, LARGE_BYTES)
        for number in range(SMALL_COUNT):
            self._file(small, b"sample-%06d.jpg" % number, SMALL_BYTES)
        for number in range(FOLDER_COUNT):
            folder = self._directory(folders, len(self.nodes) + 1, b"class-%03d" % number)
            for index in range(FOLDER_FILES):
                self._file(folder, b"sample-%06d.jpg" % index, SMALL_BYTES)

    def _directory(self, parent: int, inode: int, name: bytes = b"") -> int:
        self.nodes[inode] = Attributes(inode, DIRECTORY, 0, 2, 0, 0, 0)
        self.entries[inode] = [(self.nodes[inode], b".", 1), (self.nodes[parent], b"..", 2)]
        if name:
            self._entry(parent, inode, name)
        return inode

    def _file(self, parent: int, name: bytes, size_bytes: int) -> int:
        inode = len(self.nodes) + 1
        self.nodes[inode] = Attributes(inode, FILE, size_bytes, 1, 0, 0, 0)
        self._entry(parent, inode, name)
        return inode

    def _entry(self, parent: int, inode: int, name: bytes) -> None:
        self.names[parent, name] = inode
        self.entries[parent].append((self.nodes[inode], name, len(self.entries[parent]) + 1))

    def look_up(self, parent: int, name: bytes, reply: KernelReply) -> None:
        inode = self.names.get((parent, name))
        if inode is None:
            reply.error(2)
        else:
            reply.entry(self.nodes[inode], lifetime_s=LIFETIME_S)

    def forget(self, inode: int, count: int) -> None:
        pass

    def get_attributes(self, inode: int, reply: KernelReply) -> None:
        reply.attributes(self.nodes[inode], lifetime_s=LIFETIME_S)

    def open(self, inode: int, flags: int, reply: KernelReply) -> None:
        reply.opened(inode)  # the kernel drops what it had read: each turn reads everything again

    def read(self, handle: int, offset: int, length_bytes: int, reply: KernelReply) -> None:
        reply.data([self.zeros[: max(0, min(length_bytes, self.nodes[handle].size_bytes - offset))]])

    def release(self, handle: int, reply: KernelReply) -> None:
        reply.ok()

    def open_directory(self, inode: int, reply: KernelReply) -> None:
        reply.opened(inode)

    def read_directory(self, handle: int, offset: int, reply: KernelReply) -> None:
        reply.directory(self.entries[handle][offset : offset + reply.entries_max], lifetime_s=LIFETIME_S)

    def release_directory(self, handle: int, reply: KernelReply) -> None:
        reply.ok()

    def get_statistics(self, reply: KernelReply) -> None:
        reply.statistics(blocks=0, files=len(self.nodes), block_bytes=4096)

    def get_extended_attribute(self, inode: int, name: bytes, reply: KernelReply) -> None:
        reply.error(61)

    def list_extended_attributes(self, inode: int, reply: KernelReply) -> None:
        reply.extended(b"")

    def close(self) -> None:
        pass


def numbers() -> Iterator[int]:
    """Parse the command line after the directory."""
    yield from map(int, sys.argv[2:])


def serve(directory: str, file_system: FileSystem, request_bytes: int) -> FuseSession:
    """Mount a file system, and return its session; it is unmounted when standard input ends."""
    mounted = mount(directory, MountOptions(source="bench"))
    session = FuseSession(mounted.descriptor, file_system, request_bytes_max=request_bytes)

    def wait() -> None:
        session.wait_ready(30)
        mounted.set_read_ahead(request_bytes)
        print("ready", flush=True)
        sys.stdin.read()
        mounted.unmount()

    threading.Thread(target=wait).start()
    return session


def main() -> None:
    (request_bytes,) = numbers()
    serve(sys.argv[1], BenchFileSystem(), request_bytes).run()


if __name__ == "__main__":
    main()
