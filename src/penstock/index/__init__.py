"""Indexes of data sets, and manifests: see README.md in this folder.

``lookup`` finds the indexes of shards, and ``build`` indexes the other shards. ``IndexBuilder`` indexes shards as a by-product
of a pass that is made anyway, ``Verifier`` compares ranges with their checksums, and ``SampleMap`` finds samples by number.
"""

from typing import TYPE_CHECKING

from penstock.index.dataset_index import DatasetIndex as DatasetIndex
from penstock.index.place import FOLDER as FOLDER
from penstock.index.place import PACKED_KEY as PACKED_KEY
from penstock.index.place import EarlyIndex as EarlyIndex
from penstock.index.place import IndexPlace as IndexPlace
from penstock.index.place import Lookup as Lookup
from penstock.index.place import ShardLike as ShardLike
from penstock.index.place import VersionedShard as VersionedShard
from penstock.index.place import beside as beside
from penstock.index.place import found_beside as found_beside
from penstock.index.place import in_directory as in_directory
from penstock.index.place import lookup as lookup
from penstock.index.place import resolve as resolve
from penstock.index.shard_index import ShardIndex as ShardIndex
from penstock.index.shard_index import ShardRow as ShardRow
from penstock.system.lazy import lazy_getattr

if TYPE_CHECKING:
    from penstock.index.building import BuildListener as BuildListener
    from penstock.index.building import Built as Built
    from penstock.index.building import build as build
    from penstock.index.manifest import ManifestEntry as ManifestEntry
    from penstock.index.manifest import is_manifest_name as is_manifest_name
    from penstock.index.manifest import is_sagemaker_manifest as is_sagemaker_manifest
    from penstock.index.manifest import iter_manifest as iter_manifest
    from penstock.index.manifest import read_manifest as read_manifest
    from penstock.index.manifest import write_manifest as write_manifest
    from penstock.index.recorder import IndexBuilder as IndexBuilder
    from penstock.index.recorder import ShardRecorder as ShardRecorder
    from penstock.index.recorder import Verifier as Verifier
    from penstock.index.sample_map import SampleExtent as SampleExtent
    from penstock.index.sample_map import SampleMap as SampleMap

if not TYPE_CHECKING:  # a type checker that saw it would accept every name
    __getattr__ = lazy_getattr(
        __name__,
        {
            **dict.fromkeys(("Built", "BuildListener", "build"), "building"),
            **dict.fromkeys(("ManifestEntry", "is_manifest_name", "is_sagemaker_manifest"), "manifest"),
            **dict.fromkeys(("iter_manifest", "read_manifest", "write_manifest"), "manifest"),
            **dict.fromkeys(("IndexBuilder", "ShardRecorder", "Verifier"), "recorder"),
            "SampleExtent": "sample_map",
            "SampleMap": "sample_map",
        },
    )
