"""`guard()`, whichever backend holds the lock."""

import math
import unittest
from typing import Any

import pytest
from django.db import OperationalError, connections, transaction

from angee_jobs.locks import (
    lock,
)
from angee_jobs.locks.testing import ContractCase
from tests.support.strategies import Local, SqliteTable


def test_a_guard_may_wait_for_ever():
    with transaction.atomic(), lock("guarded", backend="local") as held, held.guard(timeout=math.inf):
        pass


class Refused(ContractCase):
    """What is refused before anything is written."""

    def test_the_guard_needs_a_transaction(self) -> None:
        for using in self.strategy.databases:
            with (
                self.lock() as held,
                pytest.raises(transaction.TransactionManagementError) as caught,
                held.guard(using=using),
            ):
                self.fail("outside of a transaction the guard protects nothing")
            assert repr(using) in str(caught.value)

    def test_a_bad_timeout_is_refused(self) -> None:
        using = self.strategy.databases[0]
        with self.lock() as held, transaction.atomic(using):
            bad: list[tuple[Any, type[Exception]]] = [(-1, ValueError), ("5", TypeError), (float("nan"), ValueError)]
            for timeout, error in bad:
                with self.subTest(timeout=timeout), pytest.raises(error), held.guard(using, timeout=timeout):
                    self.fail("a bad timeout was taken")
            with connections[using].cursor() as cursor:
                assert cursor.execute("SELECT 1").fetchall() == [(1,)]


class TestLocal(Refused, unittest.TestCase):
    strategy = Local()


class TestSqlite(Refused, unittest.TestCase):
    strategy = SqliteTable()


@pytest.mark.once
@pytest.mark.parametrize("backend", ["postgres_table", "redis"])
def test_a_guard_on_a_connection_that_is_gone_raises_an_error_of_django(postgres, valkey, backend):
    """And not one of the driver, which nobody who uses Django would catch.

    Found by the torture run (`python -m tests.torture`).
    """
    with lock("torture-guard", backend=backend) as held:
        with pytest.raises(OperationalError):
            with transaction.atomic(using="postgres"):
                connections["postgres"].ensure_connection()
                postgres.terminate(connections["postgres"].connection.info.backend_pid)
                with held.guard(using="postgres"):
                    raise AssertionError("nothing can be guarded here")
    connections["postgres"].close_if_unusable_or_obsolete()
    with lock("torture-guard", backend=backend) as held:
        with transaction.atomic(using="postgres"), held.guard(using="postgres"):
            pass
