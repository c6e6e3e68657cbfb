"""Ray Data reads and writes S3 by the file system for fsspec, which its workers get pickled."""

from __future__ import annotations

import pandas as pd
import pyarrow.fs
import pytest
import ray.data
from ray.cluster_utils import Cluster

import penstock as ps
from penstock.testing.s3_server import S3Server

ROWS = 1000


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # Ray Data's own
def test_tables_and_files(cluster: Cluster, s3_endpoint: S3Server, bucket: str) -> None:
    """Tables go there and back and files are read, in the processes of a cluster that were told nothing else."""
    files = ps.fsspec.PenstockS3FileSystem(
        endpoint_url=s3_endpoint.endpoint_url, key=s3_endpoint.access_key, secret=s3_endpoint.secret_key
    )
    wrapped = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(files))
    data = ray.data.from_pandas(pd.DataFrame({"number": range(ROWS)})).repartition(4)
    data.write_parquet(f"{bucket}/table", filesystem=wrapped)
    assert len(files.find(f"{bucket}/table")) >= 4
    assert ray.data.read_parquet(f"{bucket}/table", filesystem=wrapped).sum("number") == sum(range(ROWS))
    files.pipe({f"{bucket}/binary/{number}": b"%d" % number for number in range(20)})
    found = ray.data.read_binary_files(f"{bucket}/binary", filesystem=files, include_paths=True).take_all()
    assert {row["path"].rpartition("/")[2].encode(): row["bytes"] for row in found} == {
        b"%d" % number: b"%d" % number for number in range(20)
    }
