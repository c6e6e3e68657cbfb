"""One epoch of one rank: where its batches come from, and in which form they leave."""
