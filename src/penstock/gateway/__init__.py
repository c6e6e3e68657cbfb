"""The gateway: an S3 endpoint that serves the objects of any store, transformed while they are read."""
