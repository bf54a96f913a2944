"""The contract suite over every backend that comes with this package."""

import unittest

import pytest

from angee_jobs.locks import testing
from tests.support.strategies import Local, PostgresTable, SqliteTable


class TestLocal(testing.LockContract, unittest.TestCase):
    strategy = Local()


class TestSqliteTable(testing.LockContract, unittest.TestCase):
    strategy = SqliteTable()


class TestPostgresTable(testing.LockContract, unittest.TestCase):
    strategy = PostgresTable()

    @pytest.fixture(autouse=True)
    def _server(self, postgres):
        self.strategy.server = postgres
