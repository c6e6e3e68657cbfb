"""``s3://`` for the WebDataset library: importing this package registers it. No other part of penstock imports WebDataset."""

try:
    from penstock.webdataset.opening import open_url, register, url_opener
except ModuleNotFoundError as error:
    if error.name != "webdataset":
        raise
    text = "penstock.webdataset needs the WebDataset library. Hint: pip install webdataset"
    # Not ConfigError: code that tries imports catches ImportError.
    raise ModuleNotFoundError(text, name="webdataset") from error

__all__ = ["open_url", "register", "url_opener"]

register()
