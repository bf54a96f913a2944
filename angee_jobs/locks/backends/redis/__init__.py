"""Leases in Redis or Valkey, through a cache of the project."""

from .backend import RedisLockBackend

__all__ = ["RedisLockBackend"]
