"""``penstock advise``: measures a store and a data set, and says what to change."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli.info import print_facts
from penstock.cli.options import (
    AS_JSON,
    ConnectionGroup,
    argument,
    expand_groups,
    flag,
    function_of,
    option,
    pipeline_of,
)
from penstock.cli.output import ProgressReport, print_record, print_result
from penstock.errors import ConfigError
from penstock.text.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.advise.profiles import Report


@expand_groups
def advise(
    url: str = argument("URL", "One object, a prefix that ends with a slash, or a pattern."),
    *,
    pipeline: str | None = option("MODULE:NAME", "Pipeline whose stages are applied to the data, or a function of it."),
    step: str | None = option("MODULE:FUNCTION", "Training step, which is called on a real batch."),
    step_ms: float | None = option("NUMBER", "Milliseconds that a training step takes, instead of --step.", min=0),
    batch: int | None = option("N", "Samples in a batch; default: the pipeline's, or 4 MiB of samples.", min=1),
    epochs: int = option("N", "Number of times that training reads the data.", default=10, min=1),
    seconds: float = option("NUMBER", "Seconds that the measurement takes, about.", default=30.0, min=0.1),
    bytes_max: str = option("BYTES", "Bytes to read from the store, about.", default="2GB"),
    tried: list[str] | None = option(
        "NAME=VALUE,...",
        "Only measure a Loader with these options (threads, processes, lanes, prefetch_batches, requests_max, cache) "
        "against one with its defaults; may be repeated.",
        names=("--try",),
    ),
    apply: bool = flag("Print the advised configuration: as a Python program, and as flags."),
    as_json: bool = AS_JSON,
    connection: ConnectionGroup,
) -> None:
    """Measure a store, this machine and a data set, and say what limits training and what to change.

    Each advice comes with the measured numbers that it follows from, the gain that they predict, and a command that
    measures it. Nothing is written to the store. Ctrl-C prints what was found until then. The exit code is 1 if decoding
    could not be measured, e.g. because the pipeline raised an error.

    For example:

        penstock advise s3://bucket/train/
        penstock advise s3://bucket/train/ --pipeline train:pipeline --step train:step
        penstock advise s3://bucket/train/ --step-ms 180 --batch 256 --epochs 90 --apply
        penstock advise s3://bucket/train/ --try processes=4,lanes=4 --try threads=8,requests_max=64
    """
    from penstock.advise.measurement import advise as measure
    from penstock.advise.measurement import try_options
    from penstock.advise.recommendations import code, flags, recommend

    common: dict[str, Any] = {
        "pipeline": None if pipeline is None else pipeline_of(pipeline, "--pipeline"),
        "bytes_max": parse_bytes(bytes_max, option="--bytes-max"),
        **connection.options(),
    }
    if tried:
        options = [{}, *map(_loader_options, tried)]
        rates = try_options(url, options, batch=batch, seconds=seconds, **common)
        for each, rate in zip(options, rates, strict=True):
            shown = ", ".join(f"{name}={value}" for name, value in each.items()) or "the defaults"
            text = f"{rate:14,.1f} samples/s  {rate / max(rates[0], 1e-9):5.2f} x  {shown}"
            print_record({"kind": "try", "options": each, "samples_per_s": rate}, text, as_json=as_json)
        return
    with ProgressReport(as_json=as_json) as progress:
        report = measure(
            url,
            step=None if step is None else function_of(step, "--step"),
            step_s=None if step_ms is None else step_ms / 1000,
            batch=batch,
            epochs=epochs,
            seconds=seconds,
            progress=lambda part: progress.update(description=part),
            **common,
        )
    is_function = pipeline is not None and function_of(pipeline, "--pipeline") is not common["pipeline"]
    report = recommend(
        replace(report.profile, pipeline_name=pipeline, is_pipeline_function=is_function)
    )  # for commands
    (_print_json if as_json else _print)(report)
    if apply:
        text = f"\n# as code\n{code(report)}\n\n# as flags\n{flags(report)}"
        print_record({"kind": "apply", "code": code(report), "flags": flags(report)}, text, as_json=as_json)
    if report.profile.is_interrupted:
        raise KeyboardInterrupt
    if report.profile.data is None or not report.profile.data.cpu_rates:
        raise typer.Exit(1)


def _loader_options(text: str) -> dict[str, Any]:
    from penstock.advise.measurement import TRY_NAMES

    pairs = dict(pair.partition("=")[::2] for pair in text.split(","))
    for name, value in pairs.items():
        if name not in TRY_NAMES or not (value.isdigit() or (name == "cache" and value)):
            raise ConfigError(f"--try {text!r}: {name!r} must be one of {', '.join(TRY_NAMES)}, and have a number")
    return {name: value if name == "cache" else int(value) for name, value in pairs.items()}


def _print(report: Report) -> None:
    from penstock.advise.recommendations import rate_text

    for group, values in _facts(report):
        shown = {name: value for name, value in values.items() if not isinstance(value, list)}
        shown |= {f"{name}_bytes": size for name, size in shown.pop("member_bytes", {}).items()}
        print_facts({group: {name: value for name, value in shown.items() if value not in (None, "")}})
    for advice in report.advice:
        rate, gain = advice.samples_per_s, advice.gain_samples_per_s
        then = f" (+{rate_text(gain)}: {rate_text(rate)})" if rate is not None and gain >= 1 else ""
        print_result(f"\n{advice.topic}: {advice.text}{then}\n    because {advice.evidence}")
        if advice.command:
            print_result(f"    try     {advice.command}")
    profile = report.profile
    for note in profile.notes:
        print_result(f"\nnote: {note}")
    print_result(f"\nThis read {format_bytes(profile.received_bytes)} in {profile.seconds:.0f} s.")


def _print_json(report: Report) -> None:
    names = ("url", "epochs", "step_samples_per_s", "received_bytes", "seconds", "notes", "is_interrupted")
    profile, advice = _values(report.profile), [("advice", _values(each)) for each in report.advice]
    summary = {name: profile[name] for name in names}
    for kind, values in *_facts(report), *advice, ("configuration", _values(report.best)), ("summary", summary):
        print_result(json.dumps({"kind": kind, **values}))


def _facts(report: Report) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was measured, by part."""
    profile = report.profile
    yield "machine", _values(profile.machine)
    if profile.store is not None:
        yield "store", {**_values(profile.store), "listed_per_s": profile.listed_per_s}
    if profile.data is not None:
        values = _values(profile.data)
        yield "data", {"stored_as": values.pop("kind"), **values}


def _values(record: Any) -> dict[str, Any]:
    """The fields and the properties of a record as JSON has them: infinite numbers are null."""
    derived = [name for name, value in vars(type(record)).items() if isinstance(value, property)]
    values = asdict(record) | {name: getattr(record, name) for name in derived}
    return dict(json.loads(json.dumps(values), parse_constant=lambda _: None))
