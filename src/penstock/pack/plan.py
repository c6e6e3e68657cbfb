"""The plan of a packing: which samples each shard holds, decided before any of them is read.

A plan is a pure function of the listing and the options. It is written to the destination first, and a resumed run
follows it, whatever the source lists by then. Sources are read in the versions that the plan names.

A plan is stored as gzipped JSON lines without a timestamp: a header, which names the stores, and one line per shard.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from penstock.errors import ConfigError, DataError
from penstock.order.permutation import key_of, permutation
from penstock.pack.entries import PlanEntry, PlanMember, split_of
from penstock.pack.options import PLAN_VERSION, job_identity, unsigned_url
from penstock.pack.written_formats import stored_bytes, tail_bytes
from penstock.redaction import public_key, stored_key
from penstock.text.json_text import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pack.options import PackOptions
    from penstock.types import Buffer

_HTTP = ("http://", "https://")
_STORED_NAMES = ("identity", "kind", "format", "patterns", "starts", "roots", "passed_over", "classes")
_SHUFFLE = 0x7061636B  # "pack", so that the permutation differs from those of epochs


class ShardPlan(NamedTuple):
    """One shard of a plan.

    Attributes:
        name: Key of the shard in the destination.
        entries: Samples of the shard; in a conversion, its source shards or pieces of them.
        size_bytes: Approximate size of the shard in bytes; exact for tar without a transform. 0 if it is unknown.
    """

    name: str
    entries: tuple[PlanEntry, ...]
    size_bytes: int

    @property
    def source_bytes(self) -> int:
        """Bytes that are read to write it."""
        return sum(entry.size_bytes for entry in self.entries)


@dataclass(slots=True, kw_only=True)
class PackPlan:
    """The plan of one packing.

    Attributes:
        identity: Identity of source and options, 16 hexadecimal digits.
        kind: ``entries`` if samples consist of objects; ``sequence`` for a Python iterable, whose shards are not known
            before they are written; ``shards`` if shards are made from shards.
        format: Name of the format that is written.
        patterns: Pattern of the shards' names, by split.
        starts: First number in the shards' names, by split.
        roots: URLs of the members' stores.
        shards: Shards to be written; empty for a sequence.
        passed_over: Number of files of the source that belong to no sample.
        classes: Labels as words, in the order of their numbers; None if there are none.
        job: Description of the sources and options, from ``PackOptions.job``; None in a plan of an earlier version.
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

    @classmethod
    def of_options(cls, options: PackOptions, job: dict[str, Any], kind: str, starts: dict[str, int]) -> Self:
        """Return a plan without shards, for a packing that `job` describes."""
        return cls(
            identity=job_identity(job),
            kind=kind,
            format=options.format_name,
            patterns=options.patterns,
            starts=starts,
            job=job,
        )

    @property
    def samples_count(self) -> int:
        """Number of samples in all shards; 0 unless `kind` is ``entries``."""
        return sum(len(shard.entries) for shard in self.shards) if self.kind == "entries" else 0

    @property
    def source_bytes(self) -> int:
        """Bytes that are read for all shards."""
        return self.bytes_of(self.shards)

    def bytes_of(self, shards: list[ShardPlan]) -> int:
        """Return how many bytes are read for some of its shards."""
        if self.kind == "shards":  # a piece of a source has its own size
            return sum(shard.size_bytes or shard.source_bytes for shard in shards)
        return sum(shard.source_bytes for shard in shards)

    def check_source(self, now: PackPlan) -> None:
        """Refuse a finished plan if the source has changed since it was made.

        Args:
            now: Plan of the source as it is now.

        Raises:
            DataError: Objects were added, removed or changed; the error names the first one.
        """
        before, after = (_contents(plan) for plan in (self, decode(now.encode(), "")))
        if before == after:
            return
        added, removed = len(after.keys() - before.keys()), len(before.keys() - after.keys())
        differing = [key for key in [*before, *after] if before.get(key) != after.get(key)]
        changed = sum(before[key] != after[key] for key in before.keys() & after.keys())
        what = f"{added} added, {removed} removed, {changed} changed" if differing else "the order changed"
        raise DataError(
            f"the source changed after it was planned: {what} ({'samples' if self.kind == 'entries' else 'shards'})",
            hint="--overwrite (overwrite=True) starts again; --append adds the contents of another URL or manifest",
            sample_key=differing[0] if differing else None,
        )

    @property
    def is_of_urls(self) -> bool:
        """Whether members are read over HTTP, so that a stored plan lacks the signatures of their URLs."""
        return any(root.startswith(_HTTP) for root in self.roots)

    def _stored(self, member: PlanMember) -> PlanMember:
        """Return a member as it is stored: without its signature, and with a digest in place of other query parameters."""
        root = self.roots[member.root]
        if not root.startswith(_HTTP):
            return member
        return member._replace(key=stored_key(unsigned_url(root + member.key)[len(root) :]))

    def complete(self, now: PackPlan) -> None:
        """Restore the members' keys, with the queries that are not stored, from another plan of the same source.

        Args:
            now: Plan of the source as it is now.

        Raises:
            ConfigError: The source no longer names an object of this plan.
        """
        members = (member for shard in now.shards for entry in shard.entries for member in entry.members)
        known = {(now.roots[member.root], now._stored(member).key): member.key for member in members}

        def completed(member: PlanMember) -> PlanMember:
            root = self.roots[member.root]
            if not root.startswith(_HTTP):
                return member
            key = known.get((root, self._stored(member).key)) or known.get((root, member.key))
            if key is None:
                raise ConfigError(
                    f"the source no longer names {root}{public_key(member.key)}, which the unfinished run planned to read",
                    hint="give the same URLs, with the same or new signatures, or start again with --overwrite",
                )
            return member._replace(key=key)

        self.shards = [
            shard._replace(
                entries=tuple(entry._replace(members=tuple(map(completed, entry.members))) for entry in shard.entries)
            )
            for shard in self.shards
        ]

    def encode(self) -> bytes:
        """Return the plan as it is stored; equal plans give equal bytes."""
        head = {"penstock_plan": PLAN_VERSION, **{name: getattr(self, name) for name in _STORED_NAMES}}
        head |= {"shards_count": len(self.shards), "job": self.job}
        lines = [json.dumps(head)]
        for shard in self.shards:
            entries = [[entry.key, [*map(self._stored, entry.members)], entry.values] for entry in shard.entries]
            lines.append(json.dumps([shard.name, shard.size_bytes, entries], separators=(",", ":")))
        return gzip.compress("\n".join(lines).encode(), compresslevel=3, mtime=0)


def decode(data: Buffer, name: str) -> PackPlan:
    """Return the plan that ``PackPlan.encode`` stored.

    Args:
        data: uint8[n], the stored plan.
        name: Name of the plan, for errors.

    Raises:
        DataError: The data is not a plan, is damaged, or has another version.
    """
    try:
        lines = gzip.decompress(bytes(data)).split(b"\n")
        head = parse_json(lines[0])
        if head["penstock_plan"] != PLAN_VERSION:
            raise DataError(
                f"it has version {head['penstock_plan']}, but this penstock reads version {PLAN_VERSION}", shard=name
            )
        shards = [_decode_shard(line) for line in lines[1:]]
        if len(shards) != head["shards_count"]:
            raise DataError(f"it has {len(shards)} of {head['shards_count']} shards", shard=name)
        return PackPlan(**{name: head[name] for name in _STORED_NAMES}, shards=shards, job=head.get("job"))
    except (ValueError, KeyError, TypeError, OSError, EOFError, zlib.error) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"it is not a plan of a packing ({error})", hint="--overwrite starts again", shard=name
        ) from error


def _contents(plan: PackPlan) -> dict[str, list[Any]]:
    """Return the contents of the source, by sample; in a conversion, by shard."""
    found: dict[str, list[Any]] = {}
    for shard in plan.shards:
        for entry in shard.entries:
            members = [member._replace(root=0) for member in entry.members]
            roots = [plan.roots[member.root] for member in entry.members]
            found.setdefault(entry.key, []).extend([members, roots, entry.values])
    return found


def _decode_shard(line: bytes) -> ShardPlan:
    name, size_bytes, entries = parse_json(line)
    decoded = tuple(
        PlanEntry(key, tuple(PlanMember(*member) for member in members), values) for key, members, values in entries
    )
    return ShardPlan(name, decoded, size_bytes)


def cut(entries: list[PlanEntry], options: PackOptions, starts: dict[str, int]) -> list[ShardPlan]:
    """Cut `entries`, in their order or permuted, into shards. A shard ends before the sample that would exceed its size.

    Args:
        entries: Samples in the source's order.
        options: Options of the packing.
        starts: First number in the shards' names, by split.

    Raises:
        DataError: A sample is larger than a shard, or two samples have the same key.
    """
    if options.shuffle:
        entries = [entries[index] for index in permutation(len(entries), key_of(options.seed, _SHUFFLE))]
    seen: set[str] = set()
    for entry in entries:
        if entry.key in seen:
            raise DataError("two samples have the same key", sample_key=entry.key)
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


def _filled(entries: list[PlanEntry], options: PackOptions) -> Iterator[tuple[list[PlanEntry], int]]:
    format_name = options.format_name
    tail = tail_bytes(format_name)
    samples_max = options.samples_max or len(entries)
    group: list[PlanEntry] = []
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
        DataError: The sample is larger than `bytes_max`.
    """
    if size_bytes > bytes_max:
        raise DataError(
            f"the sample takes {size_bytes} bytes, but a shard has at most {bytes_max}",
            hint="raise --bytes-max (bytes_max=), or leave the sample out",
            sample_key=key,
        )
