"""Indexes of data sets, and manifests: see README.md in this folder.

``lookup`` says what is known of some shards, ``build`` indexes what is not, ``IndexBuilder`` does so as a by-product of
a pass that is made anyway, ``Verifier`` holds bytes read by range against their checksums, ``SampleMap`` gives samples
by number.
"""

from typing import TYPE_CHECKING

from penstock.index.dataset_index import DatasetIndex
from penstock.index.lookup import Lookup, lookup
from penstock.index.place import (
    FOLDER,
    EarlyIndex,
    Found,
    IndexPlace,
    ShardLike,
    beside,
    found_beside,
    in_directory,
    resolve,
)
from penstock.index.shard_index import ShardIndex, ShardRow
from penstock.lazy import lazy_getattr

if TYPE_CHECKING:
    from penstock.index.building import Built, Listener, build
    from penstock.index.manifest import ManifestEntry, is_manifest_name, read_manifest, write_manifest
    from penstock.index.recorder import IndexBuilder, ShardRecorder, Verifier
    from penstock.index.sample_map import SampleExtent, SampleMap

__all__ = [
    "FOLDER",
    "Built",
    "DatasetIndex",
    "EarlyIndex",
    "Found",
    "IndexBuilder",
    "IndexPlace",
    "Listener",
    "Lookup",
    "ManifestEntry",
    "SampleExtent",
    "SampleMap",
    "ShardIndex",
    "ShardLike",
    "ShardRecorder",
    "ShardRow",
    "Verifier",
    "beside",
    "build",
    "found_beside",
    "in_directory",
    "is_manifest_name",
    "lookup",
    "read_manifest",
    "resolve",
    "write_manifest",
]

if not TYPE_CHECKING:  # a type checker that saw it would accept every name
    __getattr__ = lazy_getattr(
        __name__,
        {
            **dict.fromkeys(("Built", "Listener", "build"), "building"),
            **dict.fromkeys(("ManifestEntry", "is_manifest_name", "read_manifest", "write_manifest"), "manifest"),
            **dict.fromkeys(("IndexBuilder", "ShardRecorder", "Verifier"), "recorder"),
            "SampleExtent": "sample_map",
            "SampleMap": "sample_map",
        },
    )
