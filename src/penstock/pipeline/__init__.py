"""Frozen descriptions of what a loader is to do: see README.md in this folder."""

from penstock.pipeline.arrays import Audio, Image, Numpy
from penstock.pipeline.batching import Batch, BatchBySize, SizeBudget, TokenBlocks
from penstock.pipeline.dataset import Dataset
from penstock.pipeline.factories import ConnectionOptions, mix, objects, shards
from penstock.pipeline.fields import Bytes, Category, Field, Float, Function, Integer, Json, Spec, Stored, Text
from penstock.pipeline.pipeline import Pipeline, check_rereadable
from penstock.pipeline.source import (
    Connection,
    Flat,
    Mix,
    Objects,
    Sequential,
    SequentialEpoch,
    SequentialReader,
    Shards,
)
from penstock.pipeline.stages import (
    Decode,
    Evaluate,
    Filter,
    FlatMap,
    Join,
    Map,
    Sample,
    Select,
    Shuffle,
    Stage,
    Take,
)

__all__ = [
    "Audio",
    "Batch",
    "BatchBySize",
    "Bytes",
    "Category",
    "Connection",
    "ConnectionOptions",
    "Dataset",
    "Decode",
    "Evaluate",
    "Field",
    "Filter",
    "Flat",
    "FlatMap",
    "Float",
    "Function",
    "Image",
    "Integer",
    "Join",
    "Json",
    "Map",
    "Mix",
    "Numpy",
    "Objects",
    "Pipeline",
    "Sample",
    "Select",
    "Sequential",
    "SequentialEpoch",
    "SequentialReader",
    "Shards",
    "Shuffle",
    "SizeBudget",
    "Spec",
    "Stage",
    "Stored",
    "Take",
    "Text",
    "TokenBlocks",
    "check_rereadable",
    "mix",
    "objects",
    "shards",
]
