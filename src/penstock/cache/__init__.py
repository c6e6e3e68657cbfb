"""A node's disk cache of what was read from a store, shared by all processes that name its directory; ``Cached``."""

from penstock.cache.cached import Cached
from penstock.cache.config import CacheConfig
from penstock.cache.statistics import CacheStatistics

__all__ = ["CacheConfig", "CacheStatistics", "Cached"]
