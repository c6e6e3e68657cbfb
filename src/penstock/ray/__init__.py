"""Ray: the workers of a loader on the machines of a cluster, and tasks for packing and filling. Only this part imports Ray."""

from penstock.ray.workers import Workers as Workers

__all__ = ["Workers"]
