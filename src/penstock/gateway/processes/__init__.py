"""Processes that run the code of others: each ends with all that it started, also if the gateway is killed."""
