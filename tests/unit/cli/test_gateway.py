"""The flags of ``penstock gateway``."""

from __future__ import annotations

import pytest

from penstock.cli.gateway import TransformGroup, UpstreamGroup, make_config
from penstock.errors import ConfigError


@pytest.mark.parametrize("flags", [{"timeout": "9s"}, {"processes": 2}, {"memory": "1GiB"}], ids=str)
def test_limits_of_a_transform_that_is_not_there_are_refused(flags: dict[str, object]) -> None:
    """A flag that would have no effect is an error that names it."""
    upstream = UpstreamGroup(upstream="s3://bucket")
    with pytest.raises(ConfigError, match=f"--{next(iter(flags))} is for a transform"):
        make_config(None, upstream, transform=TransformGroup(**flags))  # type: ignore[arg-type]
    (point,) = make_config(None, upstream, transform=TransformGroup(transform="gzip", **flags)).access_points  # type: ignore[arg-type]
    assert point.transform == "gzip"
