"""``penstock convert``: rewrites shards in another format or size."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.options import AsJson, ConnectionGroup, expand_groups
from penstock.cli.output import print_message
from penstock.cli.pack import AllowLoss, DryRun, ExecutionGroup, KeyField, ShardBytes, WriteGroup, run_job
from penstock.text.sizes import parse_bytes


def _print_table(wanted: bool) -> None:
    if wanted:
        from penstock.pack.sample_conversion import loss_table

        print(loss_table())
        raise typer.Exit


@expand_groups
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Shards: a prefix, a pattern, or one shard.")],
    destination: Annotated[
        str,
        typer.Argument(
            metavar="DST", help="A folder; with --bytes-max also a pattern such as s3://bucket/train-%06d.tar."
        ),
    ],
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="Format of the new shards: tar, tfrecord, recordio, jsonl, mds, parquet; compressed: tar.zst, ...",
        ),
    ],
    source_format: Annotated[
        str | None,
        typer.Option("--from", metavar="FORMAT", help="Format of SRC, if its names and first bytes do not show it."),
    ] = None,
    key_field: KeyField = None,
    fields: Annotated[
        str | None,
        typer.Option(
            "--fields", metavar="SPEC", help="Fields to take, and their new names: image/encoded=jpg,label=cls."
        ),
    ] = None,
    allow_loss: AllowLoss = False,
    losses: Annotated[
        bool,
        typer.Option(
            "--losses",
            callback=_print_table,
            is_eager=True,
            help="Print what the conversion between each pair of formats loses.",
        ),
    ] = False,
    bytes_max: ShardBytes = None,
    writing: WriteGroup,
    skip_corrupt: Annotated[bool, typer.Option("--skip-corrupt", help="Leave out corrupt samples.")] = False,
    dry_run: DryRun = False,
    execution: ExecutionGroup,
    as_json: AsJson = False,
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
