"""A directory as an S3 server: each folder in it is a bucket."""

from penstock.gateway.buckets.directory.bucket import DirectoryBucket, DirectoryBuckets

__all__ = ["DirectoryBucket", "DirectoryBuckets"]
