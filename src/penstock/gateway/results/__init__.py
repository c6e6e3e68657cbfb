"""Results of transforms: each is produced once, kept in the node's cache, and read while it is being produced."""
