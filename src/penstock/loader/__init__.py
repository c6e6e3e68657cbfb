"""Runs a pipeline: see README.md in this folder."""

from penstock.loader.loader import Loader
from penstock.loader.options import LoaderArguments
from penstock.loader.reporting import Bottleneck
from penstock.loader.statistics import LoaderStatistics

__all__ = ["Bottleneck", "Loader", "LoaderArguments", "LoaderStatistics"]
