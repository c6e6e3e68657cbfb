"""The interface to Hugging Face's ``datasets``. No other part of penstock imports it."""

try:
    from penstock.huggingface.iterable import dataset, features_of
except ModuleNotFoundError as error:
    if error.name != "datasets":
        raise
    text = "penstock.huggingface needs Hugging Face's datasets. Hint: pip install 'datasets>=4'"
    # Not ConfigError: code that tries imports catches ImportError.
    raise ModuleNotFoundError(text, name="datasets") from error

__all__ = ["dataset", "features_of"]
