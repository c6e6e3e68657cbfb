"""``penstock convert``: shards into shards of another format."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.options import Anonymous, AsJson, EndpointUrl, Profile, Region  # noqa: TC001 - typer reads them
from penstock.cli.pack import Report, bytes_of


def _print_table(wanted: bool) -> None:
    if wanted:
        from penstock.pack.keeping import table

        print(table())
        raise typer.Exit


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Shards: a prefix, a pattern, one shard.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="A folder.")],
    *,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="tar, tfrecord, recordio, jsonl, parquet.")],
    source_format: Annotated[
        str | None, typer.Option("--from", metavar="FORMAT", help="Of SRC, where names and first bytes do not say it.")
    ] = None,
    key_field: Annotated[
        str | None, typer.Option("--key-field", metavar="FIELD", help="Takes the samples' keys.")
    ] = None,
    fields: Annotated[
        str | None,
        typer.Option("--fields", metavar="SPEC", help="image/encoded=jpg,label=cls: what is taken, as what."),
    ] = None,
    allow_loss: Annotated[bool, typer.Option("--allow-loss", help="Convert though something is lost.")] = False,
    losses: Annotated[
        bool, typer.Option("--losses", callback=_print_table, is_eager=True, help="Print what each pair loses.")
    ] = False,
    append: Annotated[bool, typer.Option("--append", help="Add to shards that are there.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what penstock wrote there.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read every shard back, against its checksums.")] = False,
    skip_corrupt: Annotated[bool, typer.Option("--skip-corrupt", help="Leave corrupt samples out.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", help="Shards at a time.")] = 4,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="BYTES", help="That reading and writing may hold together.")
    ] = None,
    as_json: AsJson = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    anonymous: Anonymous = False,
) -> None:
    """Write the shards at SRC anew at DST in another format, one from one, sample for sample.

    What the format cannot hold is refused without --allow-loss; --losses prints what each pair of formats loses.
    Interrupted in any way, the same command goes on where it was.

    For example:

        penstock convert s3://bucket/tars/ s3://bucket/records/ --to tfrecord --key-field key
        penstock convert ./tfrecords ./tars --to tar --fields image/encoded=jpg,image/class/label=cls
    """
    from penstock.pack.converting import convert as convert_shards
    from penstock.pipeline import shards

    described = shards(
        source,
        format=source_format,
        on_corrupt="skip_sample" if skip_corrupt else "raise",
        endpoint_url=endpoint_url,
        region=region,
        profile=profile,
        anonymous=anonymous,
    )
    with Report(as_json=as_json) as report:
        packed = convert_shards(
            described,
            destination,
            to=to,
            key_field=key_field,
            fields=fields,
            allow_loss=allow_loss,
            append=append,
            overwrite=overwrite,
            verify=verify,
            jobs=jobs,
            memory_bytes_max=None if memory is None else bytes_of(memory, "--memory"),
            listener=report,
            endpoint_url=endpoint_url,
            region=region,
            profile=profile,
            anonymous=anonymous,
        )
    report.end(packed)
