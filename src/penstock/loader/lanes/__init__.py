"""A rank's lanes: what of which shard is read, and what comes out of them in order."""
