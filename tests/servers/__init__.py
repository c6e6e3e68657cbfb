"""Servers that the tests start on loopback."""
