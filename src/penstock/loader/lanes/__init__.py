"""The lanes of a rank: they read shards and give samples in the order of the job. See README.md in this folder."""
