"""MemoryStore beyond the contract: names, copies, threads."""

import pickle

import pytest

import penstock as ps
from forking import exit_code_of, start_child
from penstock.errors import ClosedError
from penstock.store.memory import MemoryStore


def test_stores_of_one_name_share_their_objects():
    """memory://name is one place within the process; without a name each store is its own."""
    with MemoryStore(name="shared-by-test") as one, MemoryStore(name="shared-by-test") as two, MemoryStore() as other:
        one.write("k", b"x")
        assert two.read("k").data == b"x"
        assert pickle.loads(pickle.dumps(one)).read("k").data == b"x"
        assert list(other.list()) == []
        assert one.describe("k") == "memory://shared-by-test/k"


def test_a_prefix_is_a_part_of_the_store():
    """memory://name/prefix, with or without a slash at its end, is what lies below the prefix in memory://name."""
    with (
        ps.connect("memory://prefixed-by-test") as whole,
        ps.connect("memory://prefixed-by-test/run") as run,
        ps.connect("memory://prefixed-by-test/run/") as same,
    ):
        run.write("k", b"x")
        assert same.read("k").data == whole.read("run/k").data == b"x"
        with ps.open("memory://prefixed-by-test/run/k") as file:
            assert file.read() == b"x"
        whole.write("runaway", b"")
        assert [info.key for info in same.list()] == ["k"]
        assert [info.key for info in pickle.loads(pickle.dumps(run)).list()] == ["k"]
        assert same.describe("k") == "memory://prefixed-by-test/run/k"
    with MemoryStore({"k": b"x"}, prefix="below") as own:
        again = pickle.loads(pickle.dumps(own))
        assert again.read("k").data == b"x"
        assert again.describe("k") == own.describe("k")


def test_given_objects_are_copied():
    """What the caller does to its mapping and buffers later does not show."""
    data = bytearray(b"before")
    with MemoryStore({"k": data}) as store:
        data[:] = b"after!"
        assert store.read("k").data == b"before"


def test_nothing_is_left(nothing_left):
    """Closing ends the thread; so does dropping the store."""
    with nothing_left():
        with MemoryStore({"k": b"x"}) as store:
            store.read("k")
    with nothing_left():
        MemoryStore({"k": b"x"}).read("k")


def test_closed_means_closed():
    """After close() an operation is refused, and says why."""
    store = MemoryStore({"k": b"x"})
    store.close()
    with pytest.raises(ClosedError, match="closed"):
        store.stat("k")


def test_a_forked_child_may_use_the_store():
    """The thread stays in the parent: the child starts its own, on its own copy of the objects."""
    with MemoryStore({"k": b"x"}) as store:
        store.read("k")
        child = start_child(lambda: store.write("child", b"y") and store.stat("k").size_bytes == 1)
        assert exit_code_of(child) == 0
        assert [info.key for info in store.list()] == ["k"]
