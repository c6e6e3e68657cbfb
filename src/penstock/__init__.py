"""Feeds training loops from S3-compatible object storage, and reads and writes objects there.

Importing this package imports nothing but the standard library; each public name loads its part on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.errors import __all__ as _errors
from penstock.pipeline import dataset as bindings
from penstock.version import __version__ as __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock import bench as bench
    from penstock import channels as channels
    from penstock import cost as cost
    from penstock import fsspec as fsspec
    from penstock import huggingface as huggingface
    from penstock import index as index
    from penstock import ray as ray
    from penstock import tensorflow as tensorflow
    from penstock import testing as testing
    from penstock import torch as torch
    from penstock import webdataset as webdataset
    from penstock.advise import AdviseModule
    from penstock.cache import CacheConfig as CacheConfig
    from penstock.compose import connect as connect
    from penstock.compose import open as open  # noqa: A004
    from penstock.config import FetchConfig as FetchConfig
    from penstock.config import HedgeConfig as HedgeConfig
    from penstock.config import RetryConfig as RetryConfig
    from penstock.config import TransportConfig as TransportConfig
    from penstock.errors import *  # noqa: F403 - __all__ there
    from penstock.fetch import set_process_budget as set_process_budget
    from penstock.loader import Loader as Loader
    from penstock.loader import LoaderStatistics as LoaderStatistics
    from penstock.loader.batches.rebatching import cu_seqlens as cu_seqlens
    from penstock.loader.explain import explain as explain
    from penstock.loader.explain import warm_cache as warm_cache
    from penstock.loader.preview import balanced_numbers as balanced_numbers
    from penstock.loader.preview import describe as describe
    from penstock.loader.preview import peek as peek
    from penstock.loader.preview import read_column as read_column
    from penstock.mount import MountModule
    from penstock.pack import PackModule
    from penstock.pipeline import Audio as Audio
    from penstock.pipeline import Bytes as Bytes
    from penstock.pipeline import Category as Category
    from penstock.pipeline import Dataset as Dataset
    from penstock.pipeline import Float as Float
    from penstock.pipeline import Function as Function
    from penstock.pipeline import Image as Image
    from penstock.pipeline import Integer as Integer
    from penstock.pipeline import Json as Json
    from penstock.pipeline import Numpy as Numpy
    from penstock.pipeline import Pipeline as Pipeline
    from penstock.pipeline import Text as Text
    from penstock.pipeline import mix as mix
    from penstock.pipeline import objects as objects
    from penstock.pipeline import shards as shards
    from penstock.sources.indexing import build_index as build_index
    from penstock.store import Credentials as Credentials
    from penstock.store import Store as Store
    from penstock.transfer.directories import download_directory as download_directory
    from penstock.transfer.directories import upload_directory as upload_directory
    from penstock.types import Blob as Blob
    from penstock.types import ByteRange as ByteRange
    from penstock.types import ObjectInfo as ObjectInfo

    advise: AdviseModule
    mount: MountModule
    pack: PackModule

_ORIGIN = {
    **dict.fromkeys(("connect", "open"), "penstock.compose"),
    "CacheConfig": "penstock.cache",
    **dict.fromkeys(("Credentials", "Store"), "penstock.store"),
    **dict.fromkeys(("Blob", "ByteRange", "ObjectInfo"), "penstock.types"),
    **dict.fromkeys(("FetchConfig", "HedgeConfig", "RetryConfig", "TransportConfig"), "penstock.config"),
    **dict.fromkeys(
        (
            "Audio",
            "Bytes",
            "Category",
            "Dataset",
            "Float",
            "Function",
            "Image",
            "Integer",
            "Json",
            "Numpy",
            "Pipeline",
            "Text",
            "mix",
            "objects",
            "shards",
        ),
        "penstock.pipeline",
    ),
    **dict.fromkeys(("Loader", "LoaderStatistics"), "penstock.loader"),
    "build_index": "penstock.sources.indexing",
    "cu_seqlens": "penstock.loader.batches.rebatching",
    "describe": "penstock.loader.preview",
    "explain": "penstock.loader.explain",
    "peek": "penstock.loader.preview",
    **dict.fromkeys(("balanced_numbers", "read_column"), "penstock.loader.preview"),
    "warm_cache": "penstock.loader.explain",
    "set_process_budget": "penstock.fetch",
    **dict.fromkeys(("download_directory", "upload_directory"), "penstock.transfer.directories"),
    **dict.fromkeys(_errors, "penstock.errors"),
}
_SUBPACKAGES = (
    "advise",
    "bench",
    "channels",
    "cost",
    "fsspec",
    "huggingface",
    "index",
    "mount",
    "pack",
    "ray",
    "tensorflow",
    "testing",
    "torch",
    "webdataset",
)

__all__ = sorted((*_ORIGIN, "__version__"))  # noqa: PLE0605 - computed from the one table


if not TYPE_CHECKING:  # a type checker that saw it would accept every name

    def __getattr__(name: str) -> Any:
        if name in _ORIGIN:
            value = getattr(importlib.import_module(_ORIGIN[name]), name)
            globals()[name] = value
            return value
        if name in _SUBPACKAGES:
            return importlib.import_module(f"penstock.{name}")
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, *_SUBPACKAGES))


def _open_dataset(pipeline: Pipeline, **options: Any) -> Dataset:
    from penstock.access import PipelineDataset

    return PipelineDataset(pipeline, **options)


def _iter_batches(pipeline: Pipeline) -> Iterator[dict[str, Any]]:
    from penstock.loader import Loader

    with Loader(pipeline, rank=0, world_size=1) as loader:
        yield from loader


bindings.open_dataset = _open_dataset
bindings.iter_batches = _iter_batches
