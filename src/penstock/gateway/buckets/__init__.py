"""The buckets and access points that answer requests."""
