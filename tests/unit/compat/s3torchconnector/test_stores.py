"""Options of the client: each field's meaning for ``connect``, bounds, and endpoints without a scheme."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest

pytest.importorskip("torch")

import penstock.compat.s3torchconnector as s3torchconnector
from penstock.compat.s3torchconnector import S3Checkpoint, S3ClientConfig
from penstock.compat.s3torchconnector.stores import BucketStores, with_scheme
from penstock.config import MIB
from penstock.store.base import innermost

pytestmark = pytest.mark.torch


def test_the_defaults_are_the_connectors() -> None:
    """Fields have the connector's names, defaults and order."""
    config = S3ClientConfig()
    assert (config.throughput_target_gbps, config.part_size, config.max_attempts) == (10.0, 8 * MIB, 10)
    assert (config.unsigned, config.force_path_style, config.profile) == (False, False, None)
    assert S3ClientConfig(20.0, 16 * MIB) == S3ClientConfig(throughput_target_gbps=20.0, part_size=16 * MIB)


@pytest.mark.parametrize(
    "change",
    [{"throughput_target_gbps": 0}, {"part_size": 5 * MIB - 1}, {"part_size": 5 * 1024 * MIB + 1}, {"max_attempts": 0},
     {"part_size": 8.5e6}, {"unsigned": True, "profile": "me"}, {"unsigned": True, "requester_pays": True}],
)  # fmt: skip
def test_impossible_options_are_refused(change: dict[str, Any]) -> None:
    """A field out of its bounds, or two that exclude each other, are a ``ValueError`` at once."""
    with pytest.raises(ValueError, match=next(iter(change))):
        S3ClientConfig(**change)


def test_each_field_has_its_meaning() -> None:
    """Part size, attempts, addressing and signing reach the store of a bucket."""
    config = S3ClientConfig(part_size=16 * MIB, max_attempts=3, force_path_style=True, unsigned=True)
    stores = BucketStores(region="eu-west-1", config=config)
    store = pickle.loads(pickle.dumps(stores)).store("my-bucket")
    assert store.fetch_config.part_bytes == 16 * MIB
    assert innermost(store).endpoint.base_url == "https://s3.eu-west-1.amazonaws.com/my-bucket/"
    assert "attempts_max=3" in repr(config.connect_options()["retry"])
    assert stores.store("my-bucket") is stores.store("my-bucket")
    plain = BucketStores(region="eu-west-1").store("my-bucket")
    assert innermost(plain).endpoint.base_url == "https://my-bucket.s3.eu-west-1.amazonaws.com/"


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [("localhost:9000", "http://localhost:9000"), ("minio:9000/base", "http://minio:9000/base"),
     ("s3.example.org", "https://s3.example.org"), ("s3.example.org:443", "https://s3.example.org:443")],
)  # fmt: skip
def test_an_endpoint_without_a_scheme_works_with_a_hint(
    endpoint: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host and port, in an argument or the environment, is completed, and a warning says how and what to write."""
    with pytest.warns(UserWarning, match="Hint: name it with http:// or https://"):
        assert with_scheme(endpoint) == url
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.warns(UserWarning, match="no scheme"):
        assert innermost(BucketStores().store("my-bucket")).endpoint.endpoint_url == url
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = BucketStores(endpoint="http://other:1").store("my-bucket")
    assert innermost(whole).endpoint.endpoint_url == "http://other:1"


@pytest.mark.parametrize("uri", ["s3://bucket", "s3://bucket/", "bucket/key", "", None, "S3://b/k"])
def test_a_checkpoint_needs_the_uri_of_an_object(uri: Any) -> None:
    """``reader`` and ``writer`` refuse what is no ``s3://bucket/key``."""
    checkpoint = S3Checkpoint(region="us-east-1")
    for method in (checkpoint.reader, checkpoint.writer):
        with pytest.raises(ValueError, match=r"no key|not an s3:// URI|bucket"):
            method(uri)


def test_the_public_names_are_the_connectors() -> None:
    """The package has the names that the connector has."""
    names = (
        "S3Checkpoint S3ClientConfig S3Exception S3IterableDataset S3MapDataset S3Reader S3ReaderConstructor S3Writer"
    )
    assert sorted(s3torchconnector.__all__) == names.split()
    assert s3torchconnector.__version__
