"""Samples into batches: decoded, filled row by row, cut, padded, masked."""
