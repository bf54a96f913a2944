"""The contract suite over the lock table through transaction pooling."""

import contextlib
import unittest
from collections.abc import Iterator

import pytest

from angee_jobs.locks import testing
from tests.support.servers import PgBouncer
from tests.support.strategies import PostgresTable


class PooledTable(PostgresTable):
    alias = "pgbouncer_table"
    databases = ("postgres",)
    lacks = {"push": "notifications do not pass a pooler"}
    pooler: PgBouncer

    @contextlib.contextmanager
    def unreachable(self) -> Iterator[None]:
        self.pooler.kill()
        try:
            yield
        finally:
            self.pooler.start()

    def break_connections(self) -> None:
        self.pooler.kill()
        self.pooler.start()


class TestTableThroughTransactionPooling(testing.LockContract, unittest.TestCase):
    strategy = PooledTable()

    @pytest.fixture(autouse=True)
    def _server(self, postgres, pgbouncer):
        self.strategy.server = postgres
        self.strategy.pooler = pgbouncer
