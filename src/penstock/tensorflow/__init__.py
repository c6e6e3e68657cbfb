"""The interface to TensorFlow. No other part of penstock imports TensorFlow."""

try:
    from penstock.tensorflow.datasets import dataset, signature_of
    from penstock.tensorflow.loader_checkpoint import LoaderCheckpoint
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    text = "penstock.tensorflow needs TensorFlow. Hint: pip install tensorflow, or tensorflow-cpu"
    raise ModuleNotFoundError(text, name="tensorflow") from error

__all__ = ["LoaderCheckpoint", "dataset", "signature_of"]
