"""Results that are kept: listing and removing them."""
