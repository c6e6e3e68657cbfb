"""Transforms that come with penstock. They are written against the same interface as those of users."""

_MODULES = {
    "shards": ("tar2tfrecord", "tfrecord2tar"),
    "selecting": ("select", "redact"),
    "pictures": ("resize", "recode"),
    "recordwise": ("jsonl2csv",),
    "parquet_files": ("parquet",),
    "streams": ("gzip", "gunzip", "zstd", "unzstd"),
}

BUILTINS: dict[str, str] = {name: f"{__name__}.{module}:{name}" for module, names in _MODULES.items() for name in names}
"""For each name, the function ``module:function``. A module is imported when an access point uses it."""
