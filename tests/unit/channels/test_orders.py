"""Shares and orders: every entry exactly once over all readers, whatever their number, seed and epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.channels import InputChannel
from penstock.channels.entries import ChannelObject, Entries, EpochOrder, open_source
from penstock.channels.pipe import pipe_orders
from penstock.store.memory import MemoryStore

if TYPE_CHECKING:
    from penstock.channels.inputs import Mode

SEEDS = st.one_of(st.none(), st.integers(0, 2**64 - 1))


def numbers_of(order: EpochOrder, count: int, epoch: int) -> list[int]:
    """The entries of one reader, as it finds them in a list of this length."""
    found = []
    for number in order.numbers(lambda: count, epoch=epoch):
        if number >= count:
            break
        found.append(number)
    return found


@given(
    count=st.integers(0, 200), hosts=st.integers(1, 7), split=st.integers(0, 5), seed=SEEDS, epoch=st.integers(0, 2**40)
)
def test_every_entry_once_over_hosts_and_parts(
    count: int, hosts: int, split: int, seed: int | None, epoch: int
) -> None:
    """Hosts that share, and parts of a split, together have each entry once in each epoch, and equally many but for one."""
    channel = InputChannel(
        name="c", url="s3://b/", mode="Pipe", distribution="ShardedByS3Key", split=split, shuffle_seed=seed
    )
    orders = [order for rank in range(hosts) for order in pipe_orders(channel, host_rank=rank, hosts_count=hosts)]
    found = [numbers_of(order, count, epoch) for order in orders]
    assert sorted(number for each in found for number in each) == list(range(count))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@given(
    count=st.integers(0, 100), hosts=st.integers(1, 4), copies=st.integers(1, 4), seed=SEEDS, epoch=st.integers(0, 9)
)
def test_every_copy_has_every_entry(count: int, hosts: int, copies: int, seed: int | None, epoch: int) -> None:
    """Copies have all entries once each; no two copies of any hosts have the same seed."""
    if seed is not None:
        seed %= 2**32
    channel = InputChannel(name="c", url="s3://b/", mode="Pipe", copies=copies, shuffle_seed=seed)
    orders = [order for rank in range(hosts) for order in pipe_orders(channel, host_rank=rank, hosts_count=hosts)]
    assert len({order.seed for order in orders}) == hosts * copies
    for order in orders:
        assert sorted(numbers_of(order, count, epoch)) == list(range(count))


def test_entries_move_between_hosts() -> None:
    """With a seed, the share of a host is another one in another epoch; without one it stays."""
    shuffled, fixed = (EpochOrder(seed=seed, part=0, parts_count=4) for seed in (1, None))
    assert set(numbers_of(shuffled, 100, 0)) != set(numbers_of(shuffled, 100, 1))
    assert numbers_of(fixed, 100, 0) == numbers_of(fixed, 100, 1)


def test_the_order_is_defined() -> None:
    """The order of a seed is the same in every version, since a run may be continued by a newer one."""
    assert numbers_of(EpochOrder(seed=7), 10, 0) == [3, 7, 1, 6, 4, 0, 9, 5, 8, 2]
    assert numbers_of(EpochOrder(seed=7), 10, 1) == [2, 9, 1, 5, 3, 6, 0, 7, 4, 8]


@pytest.mark.parametrize("mode", ["File", "Pipe"])
def test_pipes_leave_out_indexes(mode: Mode) -> None:
    """A pipe has the shards alone; as files, the index beside them is there as well."""
    store = MemoryStore()
    keys = ["t/.penstock/dataset.index", "t/.penstock/shards/0.index", "t/0.tar", "t/a.penstock/1.tar"]
    for key in keys:
        store.write(key, b"-")
    channel = InputChannel(name="c", url="memory://bucket/t/", mode=mode)
    entries = Entries(open_source(channel, lambda _: store))
    found = [entries.get(number) for number in range(entries.count())]
    assert [piece.key for entry in found for piece in entry or () if isinstance(piece, ChannelObject)] == (
        keys[2:] if mode == "Pipe" else keys
    )


def test_listing_errors_are_raised_to_every_reader() -> None:
    """A listing that fails fails for each of the pipes that share it."""

    class Broken:
        store = MemoryStore()

        def entries(self):  # type: ignore[no-untyped-def]
            yield (b"x",)
            raise OSError("broken")

    entries = Entries(Broken())
    assert entries.get(0) == (b"x",)
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            entries.get(1)
