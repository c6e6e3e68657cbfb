"""What is kept of results: listing and removing it."""
