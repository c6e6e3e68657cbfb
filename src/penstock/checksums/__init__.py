"""Checksums: CRC-32, CRC-32C, the algorithms of S3, and the CRC of joined pieces."""
