"""Turns a configuration into a running gateway: processes that share a port, TLS, status page, metrics, log."""
