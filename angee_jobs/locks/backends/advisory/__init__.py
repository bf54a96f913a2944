"""PostgreSQL session locks."""

from .backend import PostgresAdvisoryLockBackend

__all__ = ["PostgresAdvisoryLockBackend"]
