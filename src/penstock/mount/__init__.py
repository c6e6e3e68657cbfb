"""A bucket as a read-only file system."""
