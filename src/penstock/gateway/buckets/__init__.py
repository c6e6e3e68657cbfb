"""What answers requests for a bucket: a store, a folder that can be written, an access point with a transform."""
