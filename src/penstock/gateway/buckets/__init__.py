"""What answers requests for a bucket or an access point."""
