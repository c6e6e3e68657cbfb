"""Text that people and other programs wrote: JSON, sizes, times and patterns of names."""
