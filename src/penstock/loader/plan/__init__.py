"""What an epoch will do, before anything of it is read: whose shards, which way, in which memory, from which position."""
