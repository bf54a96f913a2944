"""Each thing that cannot be gets its own error with the value in it, and no request is made."""

from __future__ import annotations

import math
import unittest
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest

from angee_jobs.locks import lock, locked, reap_expired_locks, task_lock
from angee_jobs.locks.testing import ContractCase
from tests.support.strategies import Local, SqliteTable


class BadInput(ContractCase):
    def prepare(self) -> None:
        for operation in ("acquire", "extend", "release"):
            patcher = mock.patch.object(
                self.backend, operation, side_effect=AssertionError(f"{operation}() was called in spite of bad input")
            )
            patcher.start()
            self.addCleanup(patcher.stop)

    def refused(self, error: type[Exception], says: str, key: Any = "contract-bad-input", **options: Any) -> None:
        options = {"backend": self.alias, **options}

        def decorated() -> None:
            locked(lambda: key, **options)(lambda: self.fail("the body ran"))()

        def enter() -> None:
            with lock(key, **options):
                self.fail("the body ran")

        def enter_task_lock() -> None:
            with task_lock(key, **options):
                self.fail("the body ran")

        for use in (enter, enter_task_lock, decorated):
            with self.subTest(f"{use.__name__} {key!r:.40} {options!r:.80}"):
                with pytest.raises(error) as caught:
                    use()
                assert says in str(caught.value)

    def test_times(self) -> None:
        for name in ("timeout", "ttl"):
            self.refused(ValueError, "-1", **{name: -1})
            self.refused(ValueError, "-0.5", **{name: -0.5})
            self.refused(ValueError, "timedelta(days=-1)", **{name: timedelta(days=-1)})
            self.refused(ValueError, "NaN", **{name: math.nan})
            self.refused(ValueError, "1e+300", **{name: 1e300})
            self.refused(ValueError, "ten years", **{name: 10**400})
            self.refused(TypeError, "'5'", **{name: "5"})
            self.refused(TypeError, "True", **{name: True})
            self.refused(TypeError, "[5]", **{name: [5]})
        self.refused(ValueError, "positive: 0", ttl=0)
        self.refused(ValueError, "positive", ttl=timedelta(0))
        self.refused(ValueError, "-inf", timeout=-math.inf)
        self.refused(ValueError, "inf", ttl=math.inf)
        self.refused(ValueError, "1e-06", ttl=1e-6)

    def test_times_of_methods(self) -> None:
        made = lock("contract-bad-input", backend=self.alias)
        for timeout, error in ((-1, ValueError), (math.nan, ValueError), ("5", TypeError), (True, TypeError)):
            with self.subTest(timeout=timeout), pytest.raises(error):
                made.acquire(timeout)  # type: ignore[arg-type]
        for ttl, error in ((0, ValueError), (-1, ValueError), (math.nan, ValueError), ("5", TypeError)):
            with self.subTest(ttl=ttl), pytest.raises(error):
                made.extend(ttl)  # type: ignore[arg-type]

    def test_keys(self) -> None:
        self.refused(ValueError, "''", key="")
        self.refused(ValueError, "'angee:name:x'", key="angee:name:x")
        self.refused(TypeError, "None", key=None)
        self.refused(TypeError, "42", key=42)
        self.refused(TypeError, "b'x'", key=b"x")
        self.refused(TypeError, "('x',)", key=("x",))

    def test_a_bad_grace_is_refused(self) -> None:
        for grace, error in ((-1, ValueError), (float("nan"), ValueError), ("5", TypeError)):
            with self.subTest(grace=grace), pytest.raises(error):
                reap_expired_locks(grace=grace, backend=self.alias)  # type: ignore[arg-type]


class TestLocal(BadInput, unittest.TestCase):
    strategy = Local()


class TestSqlite(BadInput, unittest.TestCase):
    strategy = SqliteTable()
