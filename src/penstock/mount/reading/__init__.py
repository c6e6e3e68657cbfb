"""Open files: reads at any offset, read-ahead, and the version that each of them has pinned."""
