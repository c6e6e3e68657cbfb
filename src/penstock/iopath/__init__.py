"""The interface to iopath: a ``PathHandler`` for ``s3://``. No other part of penstock imports iopath."""

from penstock.iopath.handler import PenstockPathHandler

__all__ = ["PenstockPathHandler"]
