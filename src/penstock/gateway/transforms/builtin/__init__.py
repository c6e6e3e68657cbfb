"""Transforms that come with penstock. They are written against the same interface as those of users."""

BUILTINS: dict[str, str] = {}
"""For each name, the function ``module:function``. A module is imported when an access point uses it."""
