"""The shards or objects of a data set, in a fixed order. See README.md in this folder."""
