"""A file system in memory, served by the FUSE session in a process of its own.

It is a process of its own because a process that uses a mount that it serves itself cannot be killed while it waits. Run as
``python -m servers.memory_file_system DIRECTORY``; it reads commands from its input, one word in each line, and prints what it
did as JSON. Some names in the root behave badly: ``hangs`` never answers until ``answer`` is given, ``raises`` raises,
``twice`` answers twice, ``late`` is answered by another thread.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import stat
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

from penstock.errors import ObjectChangedError
from penstock.mount.fuse.answering import KernelReply
from penstock.mount.fuse.mounting import MountOptions, mount
from penstock.mount.fuse.session import FuseSession
from penstock.mount.nodes import ROOT_INODE, Attributes
from penstock.transport import engine

MODIFIED_NS = 1_700_000_000_123_456_789
LIFETIME_S = 60.0
MISBEHAVING = ("hangs", "raises", "changed", "twice", "late", "hangs-open")


def content(name: str, size: int) -> bytes:
    """The bytes of a file: they depend on its name, and differ at every offset."""
    seed = hashlib.sha256(name.encode()).digest()
    block = b"".join(hashlib.sha256(seed + bytes([number])).digest() for number in range(251))
    return (block * (size // len(block) + 1))[:size]


class MemoryFileSystem:
    """Implements ``FileSystem``: a directory is a dict, a file is bytes."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.nodes: dict[int, Any] = {}
        self.references: dict[int, int] = {}
        self.numbers: dict[tuple[int, str], int] = {}
        self.children: dict[int, list[tuple[bytes, int]]] = {}
        self.held: list[tuple[KernelReply, Any]] = []
        self.handles: set[int] = set()
        self.closed = False
        self._next = ROOT_INODE
        self._add(tree)

    def _add(self, thing: Any) -> int:
        inode = self._next
        self._next += 1
        self.nodes[inode] = thing
        if isinstance(thing, dict):
            self.children[inode] = [(name.encode(), self._add(below)) for name, below in thing.items()]
        return inode

    def _attributes(self, inode: int) -> Attributes:
        thing = self.nodes[inode]
        is_directory = isinstance(thing, dict)
        mode = stat.S_IFDIR | 0o755 if is_directory else stat.S_IFREG | 0o644
        size = 0 if is_directory else len(thing)
        return Attributes(
            inode, mode, size, 2 if is_directory else 1, MODIFIED_NS, os.getuid(), os.getgid(), inode + 1000
        )

    def _name(self, inode: int) -> str:
        return next((name.decode() for name, number in self.children[ROOT_INODE] if number == inode), "")

    def look_up(self, parent: int, name: bytes, reply: KernelReply) -> None:
        inode = next((number for known, number in self.children[parent] if known == name), None)
        if inode is None:
            reply.error(errno.ENOENT)
            return
        self.references[inode] = self.references.get(inode, 0) + 1
        reply.entry(self._attributes(inode), lifetime_s=LIFETIME_S)

    def forget(self, inode: int, count: int) -> None:
        self.references[inode] = self.references.get(inode, 0) - count

    def get_attributes(self, inode: int, reply: KernelReply) -> None:
        reply.attributes(self._attributes(inode), lifetime_s=LIFETIME_S)

    def open(self, inode: int, flags: int, reply: KernelReply) -> None:
        if self._name(inode) == "hangs-open":
            self.held.append((reply, inode))
            return
        self.handles.add(inode)
        reply.opened(inode, keeps_cache=True)

    def read(self, handle: int, offset: int, length_bytes: int, reply: KernelReply) -> None:
        name = self._name(handle)
        data = memoryview(self.nodes[handle])[offset : offset + length_bytes]
        if name == "hangs":
            self.held.append((reply, data))
        elif name == "raises":
            raise RuntimeError("this file cannot be read")
        elif name == "changed":
            raise ObjectChangedError("it was replaced")
        elif name == "late":
            threading.Timer(0.05, reply.data, [[data[:3], data[3:]]]).start()
        else:
            reply.data([data])
            if name == "twice":
                reply.data([data])

    def release(self, handle: int, reply: KernelReply) -> None:
        self.handles.discard(handle)
        reply.ok()

    def open_directory(self, inode: int, reply: KernelReply) -> None:
        reply.opened(inode, keeps_cache=self._name(inode) == "kept")

    def read_directory(self, handle: int, offset: int, reply: KernelReply) -> None:
        offered: list[int] = []

        def entries() -> Iterator[tuple[Attributes, bytes, int]]:
            here = self._attributes(handle)
            own = [(here, b"."), (here, b"..")]
            for index in range(offset, len(self.children[handle]) + 2):
                if index < 2:
                    yield *own[index], index + 1
                else:
                    name, inode = self.children[handle][index - 2]
                    offered.append(inode)
                    self.references[inode] = self.references.get(inode, 0) + 1
                    yield self._attributes(inode), name, index + 1

        taken = reply.directory(entries(), lifetime_s=LIFETIME_S)
        for inode in offered[taken:]:
            self.references[inode] -= 1

    def release_directory(self, handle: int, reply: KernelReply) -> None:
        reply.ok()

    def get_statistics(self, reply: KernelReply) -> None:
        reply.statistics(blocks=1 << 40, files=len(self.nodes), block_bytes=4096)

    def get_extended_attribute(self, inode: int, name: bytes, reply: KernelReply) -> None:
        if name == b"user.etag":
            reply.extended(b"etag of %d" % inode)
        else:
            reply.error(errno.ENODATA)

    def list_extended_attributes(self, inode: int, reply: KernelReply) -> None:
        reply.extended(b"user.etag\0")

    def close(self) -> None:
        self.closed = True


def default_tree() -> dict[str, Any]:
    """What the tests look at."""
    tree: dict[str, Any] = {
        "small.txt": content("small.txt", 1000),
        "empty": b"",
        "large.bin": content("large.bin", 20_000_003),
        "folder": {"inner": {"deep.txt": content("deep.txt", 10)}, "näme with spaces": b"x"},
        "kept": {"one": b"1", "two": b"2"},
        "many": {f"file-{number:05}": b"%d" % number for number in range(5000)},
    }
    return tree | {name: content(name, 100_000) for name in MISBEHAVING}


def serve(session: FuseSession, *, on_loop: bool) -> None:
    """Answer requests until the session ends, on this thread or on that of an event loop."""
    if not on_loop:
        session.run()
        return
    has_ended = threading.Event()
    session.start_on(engine.add_reader, ended=lambda _: has_ended.set())
    has_ended.wait()


def main(directory: str) -> None:
    """Serve the tree until it is unmounted."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    if "--user" in sys.argv:
        user = int(sys.argv[sys.argv.index("--user") + 1])
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    file_system = MemoryFileSystem(default_tree())
    options = MountOptions(
        source="memory, of a\\ test", auto_unmount="--watch" in sys.argv, allow_other="--allow-other" in sys.argv
    )
    mounted = mount(directory, options)
    session = FuseSession(mounted.descriptor, file_system)
    thread = threading.Thread(target=partial(serve, session, on_loop="--loop" in sys.argv), name="session")
    thread.start()

    def say(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    say(ready=session.wait_ready(10), read_ahead=mounted.set_read_ahead(1 << 20))
    for line in sys.stdin:
        command = line.strip()
        if command == "answer":
            replies, file_system.held = file_system.held, []
            for reply, data in replies:
                reply.data([data]) if isinstance(data, memoryview) else reply.opened(data)
            say(answered=len(replies))
        elif command == "statistics":
            found = session.statistics()
            say(
                requests=found.requests_count,
                waiting=found.waiting_count,
                minor=found.minor,
                references=sum(file_system.references.values()),
                negative=min(file_system.references.values(), default=0),
                handles=len(file_system.handles),
                held=len(file_system.held),
            )
        elif command == "unmount":
            mounted.unmount()
            say(mounted=mounted.is_mounted())
        elif command == "stop":
            session.stop()
            thread.join(20)
            say(alive=thread.is_alive(), closed=file_system.closed)
        elif command == "forget":
            say(names=session.forget_names())
        elif command == "fork":
            child = os.fork()
            if child == 0:
                threading.Event().wait(60)
                os._exit(0)
            say(child=child)
    mounted.unmount()
    thread.join()


if __name__ == "__main__":
    main(sys.argv[1])
