"""The plan: which samples each shard holds, fixed before any of them is read.

It is a pure function of the listing and the options, written down at the destination first; a run that is resumed
follows what is written, whatever the source lists by then. Sources are read in the versions that the plan names.

Stored as gzipped JSON lines, without a time: a header, the stores, then one line per shard.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError, DataError
from penstock.order.permutation import key_of, permutation
from penstock.pack.entries import Entry, Member, split_of
from penstock.pack.identity import unsigned_url
from penstock.pack.options import PLAN_VERSION
from penstock.pack.shard_file import stored_bytes, tail_bytes
from penstock.redaction import public_key, stored_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pack.options import PackOptions
    from penstock.types import Buffer

_HTTP = ("http://", "https://")
_SHUFFLE = 0x7061636B  # "pack": the permutation is not that of any epoch


class ShardPlan(NamedTuple):
    """One shard: its name, its samples, and about how many bytes it will have (tar without transform: exactly)."""

    name: str
    entries: tuple[Entry, ...]
    size_bytes: int

    @property
    def source_bytes(self) -> int:
        """Bytes that are read for it."""
        return sum(entry.size_bytes for entry in self.entries)


@dataclass(slots=True, kw_only=True)
class Plan:
    """What one packing does.

    Attributes:
        identity: Of source and options, 16 hex digits.
        kind: ``entries``: samples of objects; ``sequence``: a Python iterable, whose shards are found as they are
            written; ``shards``: one shard from one shard.
        format: That is written.
        patterns: Of the shards' names, by split.
        starts: The first number of each split's names.
        roots: URLs of the stores that the members lie in.
        shards: What is to be written.
        passed_over: Files of the source that are in no sample.
        classes: Words of labels, in the order of their numbers.
        job: What is done with which source, see ``identity``; None in a plan of an earlier version.
    """

    identity: str
    kind: str
    format: str
    patterns: dict[str, str]
    starts: dict[str, int]
    roots: list[str] = field(default_factory=list)
    shards: list[ShardPlan] = field(default_factory=list)
    passed_over: int = 0
    classes: list[str] | None = None
    job: dict[str, Any] | None = None

    @property
    def samples_count(self) -> int:
        """Of all shards; 0 of a sequence."""
        return sum(len(shard.entries) for shard in self.shards) if self.kind == "entries" else 0

    @property
    def source_bytes(self) -> int:
        """Bytes that are read."""
        return self.bytes_of(self.shards)

    def bytes_of(self, shards: list[ShardPlan]) -> int:
        """Bytes that are read for some of its shards."""
        if self.kind == "shards":  # a piece of a source, where sizes are new
            return sum(shard.size_bytes or shard.source_bytes for shard in shards)
        return sum(shard.source_bytes for shard in shards)

    def check_source(self, now: Plan) -> None:
        """Refuse to call this plan done, where another would be made of what the source holds now.

        Raises:
            DataError: Objects were added, removed or changed since; names the first.
        """
        before, after = (_contents(plan) for plan in (self, decode(now.encode(), "")))
        if before == after:
            return
        added, removed = len(after.keys() - before.keys()), len(before.keys() - after.keys())
        differing = [key for key in [*before, *after] if before.get(key) != after.get(key)]
        changed = sum(before[key] != after[key] for key in before.keys() & after.keys())
        what = f"{added} more, {removed} fewer, {changed} changed" if differing else "they come in another order"
        raise DataError(
            f"the source is not what was planned: of its {'samples' if self.kind == 'entries' else 'shards'} {what}",
            hint="--overwrite (overwrite=True) begins anew; --append adds what lies below another URL or in a manifest",
            sample_key=differing[0] if differing else None,
        )

    @property
    def is_of_urls(self) -> bool:
        """Whether members are read over HTTP, so that a plan that was written down lacks what signed their URLs."""
        return any(root.startswith(_HTTP) for root in self.roots)

    def _stored(self, member: Member) -> Member:
        """As it is written down: without a signature, and with a digest for what else is in a query."""
        root = self.roots[member.root]
        if not root.startswith(_HTTP):
            return member
        return member._replace(key=stored_key(unsigned_url(root + member.key)[len(root) :]))

    def complete(self, now: Plan) -> None:
        """Take the members' keys, with the queries that are not written down, from another plan of the same source.

        Raises:
            ConfigError: the source names an object no longer.
        """
        members = (member for shard in now.shards for entry in shard.entries for member in entry.members)
        known = {(now.roots[member.root], now._stored(member).key): member.key for member in members}

        def completed(member: Member) -> Member:
            root = self.roots[member.root]
            if not root.startswith(_HTTP):
                return member
            key = known.get((root, self._stored(member).key)) or known.get((root, member.key))
            if key is None:
                raise ConfigError(
                    f"the source no longer names {root}{public_key(member.key)}, which the unfinished run planned to read",
                    hint="give the same URLs, signed again or not; or --overwrite to begin anew",
                )
            return member._replace(key=key)

        self.shards = [
            shard._replace(
                entries=tuple(entry._replace(members=tuple(map(completed, entry.members))) for entry in shard.entries)
            )
            for shard in self.shards
        ]

    def encode(self) -> bytes:
        """As stored; the same bytes for the same plan."""
        head = {
            "penstock_plan": PLAN_VERSION,
            "identity": self.identity,
            "kind": self.kind,
            "format": self.format,
            "patterns": self.patterns,
            "starts": self.starts,
            "roots": self.roots,
            "passed_over": self.passed_over,
            "classes": self.classes,
            "shards_count": len(self.shards),
            "job": self.job,
        }
        lines = [json.dumps(head)]
        for shard in self.shards:
            entries = [[entry.key, [*map(self._stored, entry.members)], entry.values] for entry in shard.entries]
            lines.append(json.dumps([shard.name, shard.size_bytes, entries], separators=(",", ":")))
        return gzip.compress("\n".join(lines).encode(), compresslevel=3, mtime=0)


def decode(data: Buffer, name: str) -> Plan:
    """What ``Plan.encode`` wrote.

    Raises:
        DataError: it is no plan, is damaged, or is one of another version.
    """
    try:
        lines = gzip.decompress(bytes(data)).split(b"\n")
        head = json.loads(lines[0])
        if head["penstock_plan"] != PLAN_VERSION:
            raise DataError(f"its version is {head['penstock_plan']}, this penstock's {PLAN_VERSION}", shard=name)
        shards = [_decode_shard(line) for line in lines[1:]]
        if len(shards) != head["shards_count"]:
            raise DataError(f"it has {len(shards)} of {head['shards_count']} shards", shard=name)
        names = ("identity", "kind", "format", "patterns", "starts", "roots", "passed_over", "classes")
        return Plan(**{name: head[name] for name in names}, shards=shards, job=head.get("job"))
    except (ValueError, KeyError, TypeError, OSError, EOFError, zlib.error) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"it is no plan of a packing ({error})", hint="--overwrite begins anew", shard=name) from error


def _contents(plan: Plan) -> dict[str, list[Any]]:
    """What the source holds, by sample, or of a conversion by shard."""
    found: dict[str, list[Any]] = {}
    for shard in plan.shards:
        for entry in shard.entries:
            members = [member._replace(root=0) for member in entry.members]
            roots = [plan.roots[member.root] for member in entry.members]
            found.setdefault(entry.key, []).extend([members, roots, entry.values])
    return found


def _decode_shard(line: bytes) -> ShardPlan:
    name, size_bytes, entries = json.loads(line)
    made = tuple(Entry(key, tuple(Member(*member) for member in members), values) for key, members, values in entries)
    return ShardPlan(name, made, size_bytes)


def cut(entries: list[Entry], options: PackOptions, starts: dict[str, int]) -> list[ShardPlan]:
    """Shards of `entries`, in their order or permuted, each filled until the next sample would make it too large.

    Args:
        entries: Samples, in the source's order.
        options: Of the packing.
        starts: The first number of each split's names.

    Raises:
        DataError: a sample is larger than a shard, or two have one key.
    """
    if options.shuffle:
        entries = [entries[index] for index in permutation(len(entries), key_of(options.seed, _SHUFFLE))]
    seen: set[str] = set()
    for entry in entries:
        if entry.key in seen:
            raise DataError("two samples have this key", sample_key=entry.key)
        seen.add(entry.key)
    shards = []
    for split, pattern in options.patterns.items():
        chosen = entries
        if options.split:
            shares = dict(options.split)
            chosen = [entry for entry in entries if split_of(entry.key, shares, options.seed) == split]
        for number, (group, size_bytes) in enumerate(_filled(chosen, options), starts[split]):
            shards.append(ShardPlan(pattern % number, tuple(group), size_bytes))
    return shards


def _filled(entries: list[Entry], options: PackOptions) -> Iterator[tuple[list[Entry], int]]:
    format_name = options.format_name
    tail = tail_bytes(format_name)
    samples_max = options.samples_max or len(entries)
    group: list[Entry] = []
    size_bytes = tail
    for entry in entries:
        more = stored_bytes(entry.key, entry.sizes(), format_name)
        check_sample_size(entry.key, more + tail, options.bytes_max)
        if group and (size_bytes + more > options.bytes_max or len(group) >= samples_max):
            yield group, size_bytes
            group, size_bytes = [], tail
        group.append(entry)
        size_bytes += more
    if group:
        yield group, size_bytes


def check_sample_size(key: str, size_bytes: int, bytes_max: int) -> None:
    """Refuse a sample that no shard can hold.

    Raises:
        DataError: it is larger than `bytes_max`.
    """
    if size_bytes > bytes_max:
        raise DataError(
            f"the sample takes {size_bytes} bytes, a shard has at most {bytes_max}",
            hint="raise --bytes-max (bytes_max=), or leave the sample out",
            sample_key=key,
        )
