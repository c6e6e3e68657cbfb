"""A cache on a node's disk for objects of a store, shared by all processes that name its directory."""

from penstock.cache.cached import Cached
from penstock.cache.config import CacheConfig
from penstock.cache.statistics import CacheStatistics

__all__ = ["CacheConfig", "CacheStatistics", "Cached"]
