"""Runs a pipeline. See README.md in this folder."""

from penstock.loader.loader import Loader
from penstock.loader.options import LoaderArguments
from penstock.loader.statistics import Bottleneck, LoaderStatistics

__all__ = ["Bottleneck", "Loader", "LoaderArguments", "LoaderStatistics"]
