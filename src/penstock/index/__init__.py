"""Indexes of data sets, and manifests: see README.md in this folder.

``lookup`` says what is known of shards, and ``build`` indexes the others. ``IndexBuilder`` indexes them as a by-product of a
pass that is made anyway, ``Verifier`` compares ranges with their checksums, and ``SampleMap`` finds samples by number.
"""

from typing import TYPE_CHECKING

from penstock.index.dataset_index import DatasetIndex
from penstock.index.place import (
    FOLDER,
    EarlyIndex,
    IndexPlace,
    Lookup,
    ShardLike,
    VersionedShard,
    beside,
    found_beside,
    in_directory,
    lookup,
    resolve,
)
from penstock.index.shard_index import ShardIndex, ShardRow
from penstock.system.lazy import lazy_getattr

if TYPE_CHECKING:
    from penstock.index.building import BuildListener, Built, build
    from penstock.index.manifest import (
        ManifestEntry,
        is_manifest_name,
        is_sagemaker_manifest,
        iter_manifest,
        read_manifest,
        write_manifest,
    )
    from penstock.index.recorder import IndexBuilder, ShardRecorder, Verifier
    from penstock.index.sample_map import SampleExtent, SampleMap

__all__ = [
    "FOLDER",
    "BuildListener",
    "Built",
    "DatasetIndex",
    "EarlyIndex",
    "IndexBuilder",
    "IndexPlace",
    "Lookup",
    "ManifestEntry",
    "SampleExtent",
    "SampleMap",
    "ShardIndex",
    "ShardLike",
    "ShardRecorder",
    "ShardRow",
    "Verifier",
    "VersionedShard",
    "beside",
    "build",
    "found_beside",
    "in_directory",
    "is_manifest_name",
    "is_sagemaker_manifest",
    "iter_manifest",
    "lookup",
    "read_manifest",
    "resolve",
    "write_manifest",
]

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
