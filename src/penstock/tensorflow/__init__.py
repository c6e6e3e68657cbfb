"""The TensorFlow door, the one place that imports TensorFlow: see README.md in this folder."""

try:
    from penstock.tensorflow.datasets import dataset, signature_of
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    text = "penstock.tensorflow needs TensorFlow. Hint: pip install tensorflow, or tensorflow-cpu"
    raise ModuleNotFoundError(text, name="tensorflow") from error

__all__ = ["dataset", "signature_of"]
