"""The connector's driver after its import was changed: the same program on ``penstock.compat.s3torchconnector``."""

from __future__ import annotations

import sys

import penstock.compat.s3torchconnector

sys.modules["s3torchconnector"] = penstock.compat.s3torchconnector

from penstock.bench.clients.s3torchconnector import Connector  # noqa: E402 - it imports the name that was changed


class Changed(Connector):
    """The driver's own class; only the packages are others."""

    packages = ("penstock-data", "torch")


CLIENT = Changed
