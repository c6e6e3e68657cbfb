"""A cache on a node's disk of what is read from a store, shared by all processes that name its directory."""

from penstock.cache.cached import Cached
from penstock.cache.config import CacheConfig
from penstock.cache.statistics import CacheStatistics

__all__ = ["CacheConfig", "CacheStatistics", "Cached"]
