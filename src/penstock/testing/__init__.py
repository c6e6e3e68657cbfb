"""Tools for testing programs that use penstock, and stores that implement its interface.

``contract`` is a pytest suite of what every store must do. ``ministack`` is an S3 server on loopback.
"""
