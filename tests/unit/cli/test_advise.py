"""``penstock advise`` refuses what it cannot use before it measures anything."""

from __future__ import annotations

import pytest

from penstock.cli.app import run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--try", "gpus=2"], "'gpus' must be one of threads"),
        (["--try", "threads=many"], "'threads' must be one of threads"),
        (["--pipeline", "no.such:module"], "--pipeline 'no.such:module' does not name"),
        (["--pipeline", "math:pi"], "is float, not a pipeline"),
        (["--step", "math:sqrt", "--step-ms", "5"], "give only one"),
        (["--bytes-max", "much"], "--bytes-max 'much' is not a size"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and one line that names the option."""
    assert run(["advise", "memory://advise/", *arguments]) == 2
    assert message in capsys.readouterr().err
