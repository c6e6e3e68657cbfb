"""Frozen descriptions of what a loader is to do: see README.md in this folder."""

from penstock.pipeline.fields import Bytes, Field, Image, Integer, Json, Text
from penstock.pipeline.pipeline import Pipeline, shards
from penstock.pipeline.source import Connection, Shards
from penstock.pipeline.stages import Batch, Decode, Map, Sample, Shuffle, Stage

__all__ = [
    "Batch",
    "Bytes",
    "Connection",
    "Decode",
    "Field",
    "Image",
    "Integer",
    "Json",
    "Map",
    "Pipeline",
    "Sample",
    "Shards",
    "Shuffle",
    "Stage",
    "Text",
    "shards",
]
