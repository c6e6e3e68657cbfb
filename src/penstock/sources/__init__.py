"""What a data set consists of: its shards or objects, in a fixed order. See README.md in this folder."""
