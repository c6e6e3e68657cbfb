"""The tree of names of a mount: what is listed, what is hidden, and what a lookup costs."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import AccessDeniedError, CancelledOperationError, PenstockError, UnavailableError
from penstock.mount.namespace.directories import StoreDirectories
from penstock.mount.namespace.inodes import key_number
from penstock.mount.nodes import ROOT_INODE, Absent, Node
from penstock.store.base import Store, Wrapper
from penstock.store.local import LocalStore
from penstock.store.memory import MemoryStore
from penstock.types import Completion, Head, ListPage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from penstock.types import Operation, Sink, Transfer

WAIT_S = 20


class Watched(Wrapper):
    """Notes the operations, and lets a test refuse or hold back some of them."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.operations: list[Operation] = []
        self.refuses: Callable[[Operation], Any] = lambda operation: None
        self.holds: Callable[[Operation], bool] = lambda operation: False
        self.held: list[tuple[Operation, Sink]] = []

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        self.operations.append(operation)
        error = self.refuses(operation)
        if error is not None:
            sink.done(Completion(operation, error=error))
            return _Nothing()
        if self.holds(operation):
            self.held.append((operation, sink))
            return _Held(operation, sink)
        return self.inner.submit(operation, sink)

    def release(self) -> None:
        """Perform what was held back."""
        held, self.held = self.held, []
        self.holds = lambda operation: False
        for operation, sink in held:
            self.inner.submit(operation, sink)

    def listed(self) -> list[str]:
        """Return the prefixes of the pages of directories that were requested."""
        return [one.prefix for one in self.operations if isinstance(one, ListPage) and one.delimiter]


class _Nothing:
    def cancel(self) -> None:
        """Do nothing."""

    def unanswered_s(self) -> float:
        return 0.0


class _Held(_Nothing):
    def __init__(self, operation: Operation, sink: Sink) -> None:
        self._operation, self._sink = operation, sink

    def cancel(self) -> None:
        self._sink.done(Completion(self._operation, error=CancelledOperationError("cancelled")))


def store_of(keys: Iterable[str]) -> Watched:
    return Watched(MemoryStore({key: key.encode() for key in keys}))


class Answer:
    """Receives one answer."""

    def __init__(self) -> None:
        self._arrived = threading.Event()
        self.values: list[Any] = []

    def __call__(self, value: Any) -> None:
        self.values.append(value)
        self._arrived.set()

    def wait(self) -> Any:
        assert self._arrived.wait(WAIT_S), "nothing was answered"
        (value,) = self.values
        if isinstance(value, PenstockError):
            raise value
        return value


def look_up(directories: StoreDirectories, name: str | bytes, *, parent: int = ROOT_INODE) -> Any:
    answer = Answer()
    directories.look_up(parent, name if isinstance(name, bytes) else name.encode(), answer)
    return answer.wait()


def look_up_path(directories: StoreDirectories, path: str) -> Any:
    found: Any = directories.node(ROOT_INODE)
    for name in path.split("/"):
        found = look_up(directories, name, parent=found.inode)
    return found


def entries(directories: StoreDirectories, inode: int = ROOT_INODE, *, count_max: int = 170) -> list[Node]:
    read = directories.open_directory(inode)
    found: list[Node] = []
    while True:
        answer = Answer()
        read(len(found), count_max, answer)
        more = answer.wait()
        if not more:
            return found
        found += more


def names(directories: StoreDirectories, inode: int = ROOT_INODE) -> list[str]:
    return [node.name.decode() + "/" * node.is_directory for node in entries(directories, inode)]


def walk(directories: StoreDirectories, inode: int = ROOT_INODE) -> list[str]:
    """Return the paths of all files, as a program finds them that walks depth first."""
    found = []
    for node in entries(directories, inode):
        if node.is_directory:
            found += [f"{node.name.decode()}/{below}" for below in walk(directories, node.inode)]
        else:
            found.append(node.name.decode())
    return found


def test_directories_and_files_come_from_the_listing_alone() -> None:
    """Reading a directory costs one request per 1 000 keys, and gives sizes and times without one."""
    store = store_of(["a/x", "a/y/z", "b.txt"])
    directories = StoreDirectories(store, ttl_s=math.inf)
    found = entries(directories)
    assert [(node.name, node.is_directory) for node in found] == [(b"a", True), (b"b.txt", False)]
    assert found[1].info is not None
    assert (found[1].info.size_bytes, found[1].parent) == (5, ROOT_INODE)
    assert found[1].modified_s == found[1].info.last_modified_s
    assert len(store.operations) == 1


def test_all_pages_of_a_directory_are_read() -> None:
    """A directory of several pages has each entry once, whichever numbers its reader asks for."""
    store = store_of(f"{number:06d}" for number in range(3456))
    directories = StoreDirectories(store, ttl_s=math.inf)
    for count_max in (1000, 999, 5000):
        found = entries(directories, count_max=count_max)
        assert [int(node.name) for node in found] == list(range(3456))
    assert len(store.operations) == 4


def test_an_offset_may_be_read_again() -> None:
    """``rewinddir`` and ``seekdir`` see the same entries under the same numbers."""
    directories = StoreDirectories(store_of("abcdef"), ttl_s=0)
    read = directories.open_directory(ROOT_INODE)
    found = []
    for offset in (0, 3, 0, 6):
        answer = Answer()
        read(offset, 3, answer)
        found.append(b"".join(node.name for node in answer.wait()))
    assert found == [b"abc", b"def", b"abc", b""]


@pytest.mark.parametrize("gap", [0, 1, 997, 998, 999, 1000, 2500])
def test_a_directory_hides_the_file_of_its_name(gap: int) -> None:
    """Of the keys ``p`` and ``p/1``, the directory is shown, also if the pages of the listing part them."""
    between = [f"p-{number:05d}" for number in range(gap)]
    directories = StoreDirectories(store_of(["o", "p", *between, "p.txt", "p/1", "q"]), ttl_s=math.inf)
    found = names(directories)
    assert sorted(found) == sorted(["o", *between, "p.txt", "p/", "q"])
    assert directories.hidden_count == 1
    assert look_up(directories, "p").is_directory
    assert look_up(StoreDirectories(store_of(["p", *between, "p/1"]), ttl_s=0), "p").is_directory


@pytest.mark.parametrize("gap", [0, 996, 997, 998, 999, 1000, 2500])
def test_a_file_that_is_held_back_appears_in_the_end(gap: int) -> None:
    """A file whose name begins later names is listed and found once it is certain that it is no directory."""
    between = [f"p-{number:05d}" for number in range(gap)]
    directories = StoreDirectories(store_of(["p", *between, "p.txt", "q"]), ttl_s=math.inf)
    assert sorted(names(directories)) == sorted(["p", *between, "p.txt", "q"])
    assert directories.hidden_count == 0
    assert look_up(directories, "p").info.size_bytes == 1


def test_keys_without_a_path_are_hidden_and_counted() -> None:
    """Empty, dot and over-long components, and NUL, are hidden; the directories above them are shown."""
    long = "n" * 256
    keys = ["a//b", "b/./c", "b/../d", "b/ok", f"c/{long}", f"c/{long}/x", "c/" + long[1:], "d\0e", "/top", "m/"]
    directories = StoreDirectories(store_of(keys), ttl_s=math.inf)
    assert names(directories) == ["a/", "b/", "c/", "m/"]
    assert walk(directories) == ["b/ok", "c/" + long[1:]]
    assert directories.hidden_count == 2 + 1 + 2 + 2
    assert isinstance(look_up(directories, "d\0e"), Absent)


def test_hidden_keys_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever misses a file finds in the log where keys are hidden; listing the directory again says nothing new."""
    store = store_of(["ok", "a//b", "a//c"])
    directories = StoreDirectories(store, ttl_s=0)
    for _ in range(3):
        walk(directories)
    store.write("a//d", b"")
    store.write("d\0", b"")
    walk(directories)
    said = [record.getMessage() for record in caplog.records]
    assert [message.split(" are ")[0] for message in said] == ["Keys below memory:///a/", "Keys below memory:///"]
    assert all("are hidden (1): no path can express them" in message for message in said)


def test_a_marker_makes_a_directory_and_is_no_entry_of_it() -> None:
    """The key ``m/`` makes ``m`` an empty directory, for a listing and for a lookup."""
    directories = StoreDirectories(store_of(["m/", "n/", "n/x"]), ttl_s=math.inf)
    assert names(directories, look_up(directories, "m").inode) == []
    assert names(directories, look_up(directories, "n").inode) == ["x"]
    assert directories.hidden_count == 0


@pytest.mark.parametrize("name", [b"\xff\xfe", b"n" * 256, b"n" * 1025, b".."])
def test_names_that_no_key_has_cost_no_request(name: bytes) -> None:
    """A name that is not UTF-8, or is too long, does not exist, and the store is not asked."""
    store = store_of(["a"])
    assert isinstance(look_up(StoreDirectories(store, ttl_s=0), name), Absent)
    assert store.operations == []


def test_a_first_lookup_costs_two_requests_at_once() -> None:
    """A HEAD and a listing of one key are sent together, however large the directory is."""
    store = store_of(f"big/{number:06d}" for number in range(5000))
    directories = StoreDirectories(store, ttl_s=math.inf)
    assert look_up(directories, "big").is_directory
    assert store.operations == [ListPage("big/", keys_max=1), Head("big")]


def test_a_lookup_keeps_no_headers_but_the_storage_class() -> None:
    """What HEAD says of a file is kept as long as the kernel refers to it, so what nobody sees is dropped."""
    store = store_of(["a"])
    described = store.stat("a")._replace(headers={b"x-amz-storage-class": b"GLACIER", b"x-amz-meta-long": b"x" * 1000})

    class Described(Watched):
        def submit(self, operation: Operation, sink: Sink) -> Transfer:
            if not isinstance(operation, Head):
                return super().submit(operation, sink)
            completion = Completion(operation)
            completion.info = described
            sink.done(completion)
            return _Nothing()

    node = look_up(StoreDirectories(Described(store), ttl_s=0), "a")
    assert node.info == described
    assert node.info.headers == {b"x-amz-storage-class": b"GLACIER"}


def test_lookups_of_one_directory_pay_for_its_listing() -> None:
    """A program that opens 4 000 files by name sends few requests, because its lookups bring in the listing."""
    keys = [f"{number:06d}" for number in range(4000)]
    store = store_of(keys)
    directories = StoreDirectories(store, ttl_s=math.inf)
    for key in keys:
        assert look_up(directories, key).info.key == key
    pages = len(store.listed())
    assert pages == 4
    assert len(store.operations) < 200, "almost every lookup asked the store"
    assert isinstance(look_up(directories, "nothing"), Absent)


def test_a_lookup_does_not_wait_for_the_listing() -> None:
    """While a page of the listing is outstanding, names that are not listed yet are asked for by themselves."""
    store = store_of(f"{number:06d}" for number in range(5000))
    directories = StoreDirectories(store, ttl_s=math.inf)
    store.holds = lambda operation: isinstance(operation, ListPage) and operation.delimiter == "/"
    directories.open_directory(ROOT_INODE)
    assert look_up(directories, "004999").info.size_bytes == 6
    assert isinstance(look_up(directories, "005000"), Absent)
    store.release()


def test_equal_lookups_share_one_question() -> None:
    """Programs that look up the same name at the same time cause two requests together."""
    store = store_of(["a"])
    directories = StoreDirectories(store, ttl_s=math.inf)
    store.holds = lambda operation: True
    answers = [Answer() for _ in range(5)]
    for answer in answers:
        directories.look_up(ROOT_INODE, b"a", answer)
    assert len(store.operations) == 2
    store.release()
    inodes = {answer.wait().inode for answer in answers}
    assert len(inodes) == 1
    directories.forget(*inodes, 4)
    assert directories.node(*inodes) is not None, "each answer gives a reference"
    directories.forget(*inodes, 1)
    assert directories.node(*inodes) is None


@pytest.mark.parametrize(("ttl_s", "expected"), [(0, True), (1e-9, True), (60, False)])
def test_a_lookup_does_not_share_a_question_that_is_too_old(ttl_s: float, expected: bool) -> None:
    """What the store said before an object was written is no answer to who asks after that, beyond the time to live."""
    store = store_of(["b"])
    directories = StoreDirectories(store, ttl_s=ttl_s)
    store.holds = lambda operation: isinstance(operation, ListPage)
    before, after = Answer(), Answer()
    directories.look_up(ROOT_INODE, b"a", before)  # HEAD has said that there is no such key
    store.write("a", b"new")
    directories.look_up(ROOT_INODE, b"a", after)
    store.release()
    assert isinstance(before.wait(), Absent)
    assert isinstance(after.wait(), Node) is expected


def test_a_listing_is_used_for_its_lifetime_only() -> None:
    """With a time to live of 0, each opening lists anew and sees what has changed; with none, the first answer stays."""
    for ttl_s, expected in ((0, ["a", "b"]), (math.inf, ["a"])):
        store = store_of(["a"])
        directories = StoreDirectories(store, ttl_s=ttl_s)
        assert names(directories) == ["a"]
        store.write("b", b"new")
        assert names(directories) == expected
        assert isinstance(look_up(directories, "b"), Node if ttl_s == 0 else Absent)


def test_inode_numbers_depend_on_path_and_version() -> None:
    """``st_ino`` is the same in every version and mount; the kernel's number changes with the version of a file."""
    store = store_of(["d/a", "d/b"])
    first, second = (StoreDirectories(store, ttl_s=0) for _ in range(2))
    before = look_up_path(first, "d/a")
    assert look_up_path(second, "d/a")[::6] == before[::6]
    assert entries(second, before.parent)[0].inode == before.inode
    store.write("d/a", b"another version")
    after = look_up_path(first, "d/a")
    assert after.st_ino == before.st_ino
    assert after.inode != before.inode
    assert first.node(before.inode) == before, "an open handle still describes its version"


@pytest.mark.parametrize("number", [key_number, lambda key: 1 << 62 | key_number(key) % 3])
def test_numbers_that_collide_are_kept_apart(number: Callable[[str], int]) -> None:
    """Directories that programs walk through show their own files, and are listed once, also if digests are equal."""
    keys = [f"{outer}/{inner}/{outer}" for outer in ("2024090112000", "run_0", "007", "7") for inner in range(9)]
    keys += [f"{name}/of {name}" for name in ("20240901120005", "20240101120006", "run_8123_0040", "run_0123_0041")]
    store = store_of(keys)
    directories = StoreDirectories(store, ttl_s=math.inf, number=number)
    assert walk(directories) == sorted(keys)
    assert len(store.listed()) == 1 + 4 * (9 + 1) + 4
    nodes = {key: look_up_path(directories, key) for key in keys}
    assert len({node.st_ino for node in nodes.values()}) == len(keys)
    assert all(look_up_path(directories, key)[::6] == node[::6] for key, node in nodes.items())


def test_forgotten_nodes_leave_nothing_behind() -> None:
    """When the kernel has dropped all references and the listings are too old, only the root is left."""
    directories = StoreDirectories(store_of(f"{number % 7}/{number}" for number in range(100)), ttl_s=0)
    for node in entries(directories):
        for inner in entries(directories, node.inode):
            directories.forget(inner.inode, 1)
        directories.forget(node.inode, 1)
    assert directories.nodes_count == 1
    assert directories.node(ROOT_INODE) is not None


def test_listings_are_dropped_beyond_the_bound() -> None:
    """Listings hold at most `entries_max` entries together, and a dropped one is listed again when it is needed."""
    keys = [f"{number // 100:02d}/{number}" for number in range(2000)]
    store = store_of(keys)
    directories = StoreDirectories(store, ttl_s=math.inf, entries_max=500)
    assert len(walk(directories)) == 2000
    assert directories.entries_count <= 500
    assert len(walk(directories)) == 2000


def test_a_walk_lists_the_next_directories_ahead() -> None:
    """While a program reads one directory of a walk, the next ones are already requested, and none twice."""
    keys = [f"{outer:02d}/{inner:02d}/{number}" for outer in range(10) for inner in range(10) for number in range(3)]
    store = store_of(keys)
    directories = StoreDirectories(store, ttl_s=math.inf)
    root = entries(directories)
    for node in root[:3]:
        entries(directories, node.inode)
    opened = {"", "00/", "01/", "02/"}
    assert len(set(store.listed()) - opened) >= 2, "nothing was listed ahead"
    assert walk(directories) == keys
    assert sorted(store.listed()) == sorted(["", *{key[:3] for key in keys}, *{key[:6] for key in keys}])


def test_a_walk_does_not_wait_for_one_directory_after_the_other() -> None:
    """In a walk over 100 directories, the answers of at most ten round trips are waited for."""
    keys = [f"{outer:03d}/{number}" for outer in range(100) for number in range(3)]
    store = store_of(keys)
    directories = StoreDirectories(store, ttl_s=math.inf)
    root = entries(directories)
    round_trips = 0
    for node in root:
        store.holds = lambda operation: True
        read = directories.open_directory(node.inode)
        answer = Answer()
        read(0, 100, answer)
        if not answer.values:
            round_trips += 1
            store.release()
        assert len(answer.wait()) == 3
    assert round_trips <= 10


def test_no_directory_is_listed_ahead_without_a_walk() -> None:
    """Opening one directory by its path, or with a time to live of 0, requests nothing but it."""
    store = store_of(f"{number}/x" for number in range(9))
    directories = StoreDirectories(store, ttl_s=math.inf)
    assert names(directories, look_up(directories, "3").inode) == ["x"]
    assert store.listed() == ["3/"]
    fresh = StoreDirectories(store, ttl_s=0)
    walk(fresh)
    assert store.listed()[1:] == ["", *(f"{number}/" for number in range(9))]


def test_the_files_after_one_are_known() -> None:
    """``following`` returns the next files of a listing in order, over the end of a page, and sends no request."""
    keys = [f"{number:05d}" for number in range(1500)]
    store = store_of([*keys, "00998/x", "01001-d/x"])
    directories = StoreDirectories(store, ttl_s=math.inf)
    node = next(node for node in entries(directories) if node.name == b"00996")
    sent_count = len(store.operations)
    following = directories.following(node, 5)
    assert [one.name for one in following] == [b"00997", b"00999", b"01000", b"01001", b"01002"]
    assert len(store.operations) == sent_count
    assert directories.following(look_up(directories, "01499"), 5) == []


def test_an_error_of_the_listing_is_reported_and_not_kept() -> None:
    """A page that fails ends the read with its error; the next read asks again and goes on."""
    store = store_of(f"{number:06d}" for number in range(1500))
    directories = StoreDirectories(store, ttl_s=math.inf)
    store.refuses = lambda operation: UnavailableError("503")
    read = directories.open_directory(ROOT_INODE)
    answer = Answer()
    read(0, 100, answer)
    with pytest.raises(UnavailableError):
        answer.wait()
    store.refuses = lambda operation: None
    assert len(entries(directories)) == 1500


def test_an_error_of_a_lookup_is_reported_and_not_kept() -> None:
    """If the store does not say whether a name exists, the lookup fails; it is neither absent nor a file."""
    store = store_of(["a"])
    directories = StoreDirectories(store, ttl_s=math.inf)
    for kind in (Head, ListPage):
        store.refuses = lambda operation, kind=kind: UnavailableError("503") if isinstance(operation, kind) else None
        with pytest.raises(UnavailableError):
            look_up(directories, "a")
    store.refuses = lambda operation: None
    assert look_up(directories, "a").info.size_bytes == 1


def test_files_can_be_opened_without_permission_to_list() -> None:
    """If listing is denied but the object is there, the path is a file."""
    store = store_of(["a"])
    store.refuses = lambda operation: AccessDeniedError("403") if isinstance(operation, ListPage) else None
    directories = StoreDirectories(store, ttl_s=math.inf)
    assert look_up(directories, "a").info.size_bytes == 1
    with pytest.raises(AccessDeniedError):
        look_up(directories, "b")


def test_a_server_that_repeats_pages_is_noticed() -> None:
    """A listing that does not advance ends with an error, and not never."""

    class Repeating(MemoryStore):
        def _list_page(self, operation: ListPage) -> Any:
            page = super()._list_page(operation._replace(token=None))
            return page._replace(next_token=(operation.token or "") + "+")

    directories = StoreDirectories(Repeating({f"{number}": b"" for number in range(9)}), ttl_s=math.inf)
    with pytest.raises(PenstockError, match="begins at"):
        entries(directories)


@pytest.mark.parametrize("ttl_s", [0, math.inf])
def test_close_ends_what_waits(ttl_s: float) -> None:
    """Lookups and reads that wait when the file system is unmounted end with an error, and later ones do at once."""
    store = store_of(["a/x", "b"])
    directories = StoreDirectories(store, ttl_s=ttl_s)
    store.holds = lambda operation: True
    answers = [Answer(), Answer(), Answer()]
    directories.look_up(ROOT_INODE, b"a", answers[0])
    directories.look_up(ROOT_INODE, b"a", answers[1])
    directories.open_directory(ROOT_INODE)(0, 10, answers[2])
    directories.close()
    for answer in answers:
        with pytest.raises(CancelledOperationError):
            answer.wait()
    with pytest.raises(CancelledOperationError):
        look_up(directories, "b")


def test_a_local_directory_looks_like_itself(tmp_path: Path) -> None:
    """On a store of local files, the tree is that of the directory; its own temporary names are not visible."""
    for path in ("a/b/c.txt", "a/d.txt", "e.txt", ".penstock-0.tmp"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    with LocalStore(tmp_path) as store:
        directories = StoreDirectories(store, ttl_s=0)
        assert walk(directories) == ["a/b/c.txt", "a/d.txt", "e.txt"]
        assert look_up_path(directories, "a/b").is_directory
        for missing in (".penstock-0.tmp", "e.txt.gone", "a/d.txt/below"):
            assert isinstance(look_up_path(directories, missing.rpartition("/")[2]), Absent)


@pytest.mark.server
def test_many_threads_use_it_at_once() -> None:
    """Walks, lookups and forgets from several threads leave the right references behind."""
    keys = [f"{number % 11}/{number:05d}" for number in range(5000)]
    directories = StoreDirectories(store_of(keys), ttl_s=math.inf)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for node in entries(directories):
                for inner in entries(directories, node.inode):
                    assert look_up(directories, inner.name, parent=node.inode).inode == inner.inode
                    directories.forget(inner.inode, 2)
                directories.forget(node.inode, 1)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert directories.nodes_count == 1
