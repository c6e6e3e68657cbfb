"""The interface to TensorFlow. No other part of penstock imports TensorFlow."""

try:
    from penstock.tensorflow.datasets import dataset, signature_of
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    text = "penstock.tensorflow needs TensorFlow. Hint: pip install tensorflow, or tensorflow-cpu"
    raise ModuleNotFoundError(text, name="tensorflow") from error

__all__ = ["dataset", "signature_of"]
