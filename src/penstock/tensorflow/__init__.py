"""The interface to TensorFlow. No other part of penstock imports TensorFlow."""

from penstock.tensorflow.datasets import LoaderCheckpoint, dataset, signature_of

__all__ = ["LoaderCheckpoint", "dataset", "signature_of"]
