"""``penstock pack`` and ``penstock convert``: pack files into shards, and rewrite shards in another format or size."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from penstock.cli.options import AS_JSON, ConnectionGroup, argument, expand_groups, flag, function_of, option
from penstock.cli.output import ProgressReport, counted, print_message, print_record, shortened, shown_classes
from penstock.errors import ConfigError
from penstock.text.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.index import ShardRow
    from penstock.pack.converting import Conversion
    from penstock.pack.packing import Packing
    from penstock.pack.plan import PackPlan
    from penstock.pack.recipes import Packed
    from penstock.pack.workers import ExecutionOptions
    from penstock.pipeline import ConnectionOptions, Pipeline


shard_bytes = partial(
    option, "BYTES", "Size limit of a shard, e.g. 256MB, 1GiB.", names=("--bytes-max", "--shard-size")
)
KEY_FIELD = option(
    "FIELD", "Field that takes the samples' keys; with `__key__`, TFRecord stores them so that they are read back."
)
ALLOW_LOSS = flag("Continue even if the format loses something.")
DRY_RUN = flag("Print the plan, and write nothing.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteGroup:
    """The options that say what happens to shards at the destination."""

    append: bool = flag("Add shards to those that exist.")
    overwrite: bool = flag("Start again; this deletes the shards that penstock packed there, and no others.")
    verify: bool = flag("Read every shard back, and compare it with its checksums.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionGroup:
    """The options that say how a plan is carried out."""

    jobs: int | None = option(
        "N",
        "Number of shards at a time; default 4, or with a transform the number of cores. With --tokens: number "
        "of processes that tokenise; default none.",
    )
    memory_bytes_max: str | None = option(
        "BYTES",
        "Memory that reading and writing may hold together, e.g. 2GB.",
        names=("--memory-bytes-max", "--memory"),
    )
    executor: str = option(
        "threads|ray",
        "Run in threads of this process, or on a Ray cluster.",
        default="threads",
        values=lambda: ("threads", "ray"),
    )
    address: str | None = option("ADDRESS", "Address of the Ray cluster.")

    def options(self, *, verify: bool) -> ExecutionOptions:
        """Return the options as ``penstock.pack`` takes them.

        Raises:
            ConfigError: An option is out of bounds.
        """
        from penstock.pack.workers import ExecutionOptions

        memory = self.memory_bytes_max
        return ExecutionOptions(
            executor=self.executor,  # type: ignore[arg-type]
            address=self.address,
            jobs=self.jobs,
            memory_bytes_max=None if memory is None else parse_bytes(memory, option="--memory-bytes-max"),
            verify=verify,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensGroup:
    """The options for blocks of tokens."""

    tokens: int | None = option("N", "Pack blocks of N tokens, of the documents in the shards at SRC.")
    tokenizer: str | None = option(
        "MODULE:FUNCTION", "With --tokens: fn(text) that returns the tokens; without it, the field holds tokens."
    )
    field: str | None = option(
        "FIELD",
        "With --tokens: the field with the text; default text, or without --tokenizer tokens.",
        names=("--token-field",),
    )
    separator: int | None = option("ID", "With --tokens: token that follows each document.")
    dtype: str = option(
        "NAME", "With --tokens: int32, uint16, uint32 or int64.", names=("--token-dtype",), default="int32"
    )

    def pipeline(self, url: str, *, shuffle: bool, seed: int, connection: ConnectionOptions) -> Pipeline | None:
        """Return the blocks of the documents at `url`; None without ``--tokens``.

        Raises:
            ConfigError: An option is out of bounds, or needs ``--tokens``.
        """
        from penstock.pipeline import Text, shards

        if self.tokens is None:
            if self.tokenizer is not None or self.separator is not None:
                raise ConfigError("--tokenizer and --separator need --tokens", hint="--tokens 2048")
            return None
        documents = shards(url, **connection)
        if shuffle:
            documents = documents.shuffle(seed=seed)
        if self.tokenizer is None:
            field = self.field or "tokens"
            documents = documents.select(field)
        else:
            field, text = "tokens", self.field or "text"
            documents = documents.decode(Text(text)).map(_Tokenize(function_of(self.tokenizer, "--tokenizer"), text))
        return documents.token_blocks(self.tokens, field=field, separator=self.separator, dtype=self.dtype)  # type: ignore[arg-type]


@expand_groups
def pack(
    source: str = argument("SRC", "A directory or prefix, a manifest, or a table; with --tokens, shards."),
    destination: str = argument("DST", "A folder, or a pattern such as s3://bucket/train-%06d.tar."),
    *,
    format: str | None = option(  # noqa: A002 - the option's name
        "NAME",
        "tar, tfrecord, recordio, jsonl, mds, parquet; compressed: tar.zst, ...; default: by the name, or tar; "
        "with --tokens mds.",
    ),
    name: str | None = option("PATTERN", "Pattern of the shards' names; default shard-%06d.tar."),
    bytes_max: str | None = shard_bytes(default="256MB"),
    samples_max: int | None = option("N", "Limit of samples in a shard.", names=("--samples-max", "--shard-samples")),
    group_by: str = option(
        "stem|file", "stem: a.jpg and a.json are one sample; file: each file is one.", default="stem"
    ),
    fields: str | None = option("SPEC", "Fields to take, their new names and types: image=png,label=cls:int."),
    labels: str | None = option("folders|TABLE", "Where the samples' labels come from."),
    label_field: str = option("FIELD", "Field that takes the label.", default="cls"),
    split: str | None = option("SHARES", "Divide the samples by a hash of their keys: train=0.9,val=0.1."),
    shuffle: bool = flag("Permute the samples before they are cut into shards."),
    seed: int = option("N", "Seed of --shuffle and --split.", default=0),
    transform: str | None = option("MODULE:FUNCTION", "Function that is applied to each sample: fn(sample) -> sample."),
    transform_version: str | None = option(
        "TEXT", "Identifies the transform in place of its code; change it when the transform changes."
    ),
    tokens: TokensGroup,
    key_field: str | None = KEY_FIELD,
    allow_loss: bool = ALLOW_LOSS,
    skip_unnamed: bool = flag("Pass over files whose names are not sample keys."),
    writing: WriteGroup,
    dry_run: bool = DRY_RUN,
    execution: ExecutionGroup,
    as_json: bool = AS_JSON,
    connection: ConnectionGroup,
) -> None:
    """Pack SRC into shards at DST, with an index and a manifest under .penstock/ beside them.

    Files with the same name up to the first dot are one sample. After any interruption, the same command continues:
    finished shards stay, and no shard is ever visible in part. The same input gives the same bytes.

    For example:

        penstock pack ./imagenet/train s3://bucket/train-%06d.tar --labels folders --shuffle
        penstock pack s3://raw/images/ s3://bucket/set/ --split train=0.95,val=0.05 --verify
        penstock pack rows.csv ./shards --fields path=jpg:file,label=cls:int --dry-run
        penstock pack s3://corpus/ s3://bucket/tokens-%05d.mds --tokens 2048 --tokenizer my_tokens:encode --separator 50256
    """
    from penstock.pack.destination import split_destination
    from penstock.pack.options import PackOptions, advice
    from penstock.pack.packing import Packing

    shard_bytes = parse_bytes(bytes_max or "256MB", option="--bytes-max")
    execution_options = execution.options(verify=writing.verify)
    folder, named = split_destination(destination)
    if named is not None and name is not None:
        raise ConfigError(f"DST names the shards {named!r}, but --name says {name!r}")
    blocks = tokens.pipeline(source, shuffle=shuffle, seed=seed, connection=connection.options())
    options = PackOptions(
        format=format,
        name=named or name,
        bytes_max=shard_bytes,
        samples_max=samples_max,
        group_by="stem" if group_by == "stem" else "file" if group_by == "file" else group_by,  # type: ignore[arg-type]
        fields=fields,
        labels=labels,
        label_field=label_field,
        split=None if split is None else shares_of(split),
        shuffle=shuffle and blocks is None,
        seed=seed,
        key_field=key_field,
        allow_loss=allow_loss,
        skip_unnamed=skip_unnamed,
        transform=None if transform is None else function_of(transform, "--transform"),
        transform_version=transform_version,
    )
    if (warning := advice(shard_bytes)) is not None:
        print_message(f"penstock: {warning}")
    with Packing(blocks or source, folder, options, connection=connection.options()) as packing:
        plan = packing.plan(
            append=writing.append,
            overwrite=writing.overwrite,
            memory_bytes_max=execution_options.memory_bytes_max,
        )
        run_job(packing, plan, execution_options, dry_run=dry_run, as_json=as_json)


def _print_table(wanted: bool) -> None:
    if wanted:
        from penstock.pack.written_formats import loss_table

        print(loss_table())
        raise typer.Exit


@expand_groups
def convert(
    source: str = argument("SRC", "Shards: a prefix, a pattern, or one shard."),
    destination: str = argument("DST", "A folder; with --bytes-max also a pattern such as s3://bucket/train-%06d.tar."),
    *,
    to: str = option(
        "FORMAT",
        "Format of the new shards: tar, tfrecord, recordio, jsonl, mds, parquet; compressed: tar.zst, ...",
        required=True,
    ),
    source_format: str | None = option(
        "FORMAT", "Format of SRC, if its names and first bytes do not show it.", names=("--from",)
    ),
    key_field: str | None = KEY_FIELD,
    fields: str | None = option("SPEC", "Fields to take, and their new names: image/encoded=jpg,label=cls."),
    allow_loss: bool = ALLOW_LOSS,
    losses: bool = flag(
        "Print what the conversion between each pair of formats loses.", callback=_print_table, is_eager=True
    ),
    bytes_max: str | None = shard_bytes(),
    writing: WriteGroup,
    skip_corrupt: bool = flag("Leave out corrupt samples."),
    dry_run: bool = DRY_RUN,
    execution: ExecutionGroup,
    as_json: bool = AS_JSON,
    connection: ConnectionGroup,
) -> None:
    """Rewrite the shards at SRC as shards at DST in another format or size, sample for sample.

    Each shard becomes one shard of the same name; with --bytes-max, samples are divided into shards of a new size.

    It is an error if the format cannot hold everything, unless --allow-loss is given; --losses prints what each pair of
    formats loses. After any interruption, the same command continues.

    For example:

        penstock convert s3://bucket/tars/ s3://bucket/records/ --to tfrecord --key-field __key__
        penstock convert ./small-tars ./tars --to tar --bytes-max 256MB --dry-run
        penstock convert ./tfrecords ./tars --to tar --fields image/encoded=jpg,image/class/label=cls
    """
    from penstock.pack.converting import Conversion, ConvertOptions
    from penstock.pack.options import advice
    from penstock.pipeline import shards

    given = connection.options()
    described = shards(source, format=source_format, on_corrupt="skip_sample" if skip_corrupt else "raise", **given)
    execution_options = execution.options(verify=writing.verify)
    shard_bytes = None if bytes_max is None else parse_bytes(bytes_max, option="--bytes-max")
    if shard_bytes is not None and (warning := advice(shard_bytes)) is not None:
        print_message(f"penstock: {warning}")
    options = ConvertOptions(to=to, bytes_max=shard_bytes, key_field=key_field, fields=fields, allow_loss=allow_loss)
    with Conversion(described, destination, options, connection=given) as conversion:
        plan = conversion.plan(append=writing.append, overwrite=writing.overwrite)
        run_job(conversion, plan, execution_options, dry_run=dry_run, as_json=as_json)


def run_job(
    job: Packing | Conversion, plan: PackPlan, execution: ExecutionOptions, *, dry_run: bool, as_json: bool
) -> None:
    """Carry out the plan of a packing or a conversion and report on it; with `dry_run`, only print the plan."""
    if dry_run:
        print_plan(plan, job.destination.url, as_json=as_json)
        return
    job.save()
    with PackReport(as_json=as_json) as report:
        packed = job.run(execution, report)
    report.end(packed)


def shares_of(text: str) -> dict[str, float]:
    """Return the shares by name of a text such as ``train=0.9,val=0.1``.

    Raises:
        ConfigError: The text has another form.
    """
    try:
        pairs = [item.split("=") for item in text.split(",")]
        return {name.strip(): float(share) for name, share in pairs}
    except ValueError:
        raise ConfigError(f"--split {text!r} is not NAME=SHARE,...", hint="train=0.9,val=0.1") from None


def print_plan(plan: PackPlan, url: str, *, as_json: bool) -> None:
    """Print each planned shard, then a summary. The number of samples is unknown if the sources are shards."""
    has_samples = plan.kind == "entries"
    for shard in plan.shards:
        row: dict[str, Any] = {"action": "planned", "shard": shard.name}
        row |= {"samples": len(shard.entries)} if has_samples else {"sources": [entry.key for entry in shard.entries]}
        row["size_bytes"] = size_bytes = shard.size_bytes or shard.source_bytes
        what = f"{len(shard.entries):>9} samples" if has_samples else f"{len(shard.entries):>5} sources"
        print_record(row, f"{what} {format_bytes(size_bytes):>10}  {shard.name}", as_json=as_json)
    found = contents_of(plan)
    summary = {
        "action": "plan",
        "destination": url,
        "format": plan.format,
        "shards": len(plan.shards),
        "samples": plan.samples_count if has_samples else None,
        "source_bytes": plan.source_bytes,
        "passed_over": plan.passed_over,
        **({"fields": found.fields, "empty": found.empty, "classes": plan.classes} if has_samples else {}),
    }
    if as_json:
        print(json.dumps(summary))
    else:
        samples = counted(plan.samples_count, "sample") if has_samples else format_bytes(plan.source_bytes)
        shards = f"{plan.format} shards"
        if plan.kind != "sequence":
            shards = counted(len(plan.shards), f"{plan.format} shard")
        print_message(f"{'blocks of tokens,' if plan.kind == 'sequence' else samples} in {shards}: {url}")
        for line in found.lines(plan.classes) if has_samples else ():
            print_message(line)


class PlanContents(NamedTuple):
    """What the samples of a plan consist of.

    Attributes:
        fields: Number of samples that have each field.
        empty: Keys of files of 0 bytes.
        samples_count: Number of samples.
    """

    fields: dict[str, int]
    empty: list[str]
    samples_count: int

    def lines(self, classes: list[str] | None) -> Iterator[str]:
        """Yield what people should know before they pack."""
        counts = [f"{name} {count}" if count < self.samples_count else name for name, count in self.fields.items()]
        yield f"fields: {', '.join(counts)}"
        if classes is not None:
            yield shown_classes(classes)
        if self.empty:
            yield f"empty files: {len(self.empty)}, {shortened(self.empty)}"
        from penstock.pack.fields import IMAGE_FORMATS

        pictures = {name: count for name, count in self.fields.items() if name in IMAGE_FORMATS}
        if len(pictures) > 1 and sum(pictures.values()) == self.samples_count:
            yield f'each sample has one of {", ".join(pictures)}: --fields "{";".join(pictures)}" makes them one field'


def contents_of(plan: PackPlan) -> PlanContents:
    """Return what the samples of a plan consist of."""
    entries = [entry for shard in plan.shards for entry in shard.entries]
    fields = Counter(name for entry in entries for name in entry.sizes())
    empty = [member.key for entry in entries for member in entry.members if not member.size_bytes]
    return PlanContents(dict(fields.most_common()), empty, len(entries))


class PackReport(ProgressReport):
    """The report of ``pack`` and ``convert``; a ``penstock.pack.PackListener``."""

    shown = ("Bar", "Rate", "TimeRemaining")

    def __init__(self, *, as_json: bool) -> None:
        super().__init__(as_json=as_json)
        self._samples = 0
        self._bytes = 0
        self._verified = 0
        self._goal_bytes = 0  # the bar counts bytes if the number of samples is unknown

    def planned(self, shards_count: int, samples_count: int, source_bytes: int) -> None:
        """This much is left to do."""
        self.start_s = time.monotonic()
        self._goal_bytes = 0 if samples_count else source_bytes
        if samples_count or source_bytes:
            self.update(description=counted(shards_count, "shard"), total=samples_count or source_bytes)
        self.print_json(action="begin", shards=shards_count, samples=samples_count, source_bytes=source_bytes)

    def progressed(self, samples_count: int, source_bytes: int) -> None:
        """This many more samples and bytes were read."""
        self._samples += samples_count
        self._bytes += source_bytes
        if self.has_bar:
            advance = source_bytes if self._goal_bytes else samples_count
            self.update(advance=advance, rate=f"{self._samples} samples, {self.rate(self._bytes)}")

    def finished(self, row: ShardRow, *, known: bool) -> None:
        """A shard is finished."""
        self.print_json(action="known" if known else "packed", **row._asdict())

    def verified(self, row: ShardRow) -> None:
        """A shard was read back and equals what was written."""
        self._verified += 1
        self.print_json(action="verified", key=row.key)

    def end(self, packed: Packed) -> None:
        """Print the summary."""
        if self.as_json:
            self.print_summary(
                destination=packed.url,
                shards=len(packed.rows),
                shards_written=packed.shards_written,
                samples=packed.samples_count,
                size_bytes=packed.size_bytes,
                verified=self._verified,
                passed_over=packed.passed_over,
            )
            return
        known = len(packed.rows) - packed.shards_written
        words = f" ({known} were there)" if known else ""
        words += f", {self._verified} verified" if self._verified else ""
        words += f", {counted(packed.passed_over, 'file')} passed over" if packed.passed_over else ""
        rate = f", {self.rate(self._bytes)}" if self._bytes else ""
        print_message(
            f"{counted(packed.samples_count, 'sample')} in {counted(len(packed.rows), 'shard')}{words}, "
            f"{format_bytes(packed.size_bytes)}, {self.seconds:.1f} s{rate}: {packed.url}",
        )


@dataclass(frozen=True, slots=True)
class _Tokenize:
    """Calls the tokeniser on the text of a document."""

    function: Callable[[str], Any]
    field: str

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": self.function(sample[self.field])}
