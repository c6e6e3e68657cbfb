"""An S3 server on loopback, for tests of programs that use penstock."""
