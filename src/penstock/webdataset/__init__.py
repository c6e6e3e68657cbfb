"""``s3://`` for the WebDataset library: importing this package registers it. No other part of penstock imports WebDataset."""

from penstock.system.lazy import needing

with needing("webdataset", "penstock.webdataset needs the WebDataset library. Hint: pip install webdataset"):
    from penstock.webdataset.opening import open_url, register, url_opener

__all__ = ["open_url", "register", "url_opener"]

register()
