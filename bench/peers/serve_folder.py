"""A folder in memory, mounted by penstock's FUSE session: what a mount could reach at most. bench/mount.py measures it.

Usage: serve_folder.py DIRECTORY FOLDER

It reads a file into a buffer, writes that to the kernel, and does nothing else.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from serve_memory import MIB, BenchFileSystem, serve

from penstock.mount.fuse.answering import KernelReply


class FolderFileSystem(BenchFileSystem):
    """The files and folders of a folder, which must not change."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[int, Path] = {}  # by node
        self.buffer = memoryview(bytearray(MIB))
        super().__init__()

    def build(self) -> None:
        self._add(self.root, 1)

    def _add(self, folder: Path, parent: int) -> None:
        for path in sorted(folder.iterdir()):
            name = os.fsencode(path.name)
            if path.is_dir():
                self._add(path, self._directory(parent, len(self.nodes) + 1, name))
            else:
                self.files[self._file(parent, name, path.stat().st_size)] = path

    def open(self, inode: int, flags: int, reply: KernelReply) -> None:
        reply.opened(os.open(self.files[inode], os.O_RDONLY | os.O_CLOEXEC), keeps_cache=True)

    def read(self, handle: int, offset: int, length_bytes: int, reply: KernelReply) -> None:
        view = self.buffer[:length_bytes]
        reply.data([view[: os.preadv(handle, [view], offset)]])

    def release(self, handle: int, reply: KernelReply) -> None:
        os.close(handle)
        reply.ok()


def main() -> None:
    directory, root = sys.argv[1:]
    serve(directory, FolderFileSystem(Path(root)), MIB).run()


if __name__ == "__main__":
    main()
