"""The contract suite over the session locks: on a direct connection, and through session pooling."""

import os
import unittest
from typing import Any
from unittest import mock

import pytest
from django.conf import settings
from django.test import override_settings

from angee_jobs.locks import LockKey, clock, lock_backends, lock_info, testing
from angee_jobs.locks.backends.advisory.sql import UNLOCK, advisory_key
from angee_jobs.locks.testing.contract import information
from angee_jobs.locks.testing.contract.peers import end_idle_peers
from tests.support import pooled_settings
from tests.support.pg_helpers import alias_with
from tests.support.servers import eventually
from tests.support.strategies import PostgresTable


class Advisory(PostgresTable):
    alias = "postgres_advisory"
    databases = ("postgres",)
    lacks = {
        "leases": "a session lock has no end of its own",
        "empty": "there is nothing stored",
        "unreachable": "who ends its session ends its holds",
    }

    def leftovers(self) -> list[str]:
        """Without the (shared) marks of those who have waited, which go a few seconds later."""
        return [line for line in super().leftovers() if "ShareLock" not in line]

    def delete_hold(self, key: LockKey) -> None:
        """End the hold on the server, on its own session, behind the back of its process."""
        session: Any = lock_backends.operations(self.alias)._session  # type: ignore[attr-defined]
        deadline = clock.now() + 5

        def unlock(on: Any) -> None:  # alone: the renewal thread uses the session, too
            assert on.execute(UNLOCK, [advisory_key(key.name)], deadline) == [(b"t",)]
            session.doubtful = True

        session.run(deadline, unlock)


class AdvisoryContract(testing.LockContract):
    strategy = Advisory()

    def test_a_hold_of_another_process_is_known(self):
        """The holder is published in the background, for holds that have lasted a second."""
        with mock.patch.object(information, "lock_info", known_soon):
            super().test_a_hold_of_another_process_is_known()


def known_soon(key, *, backend):
    assert lock_info(key, backend=backend).name == key.name
    return eventually(lambda: (info := lock_info(key, backend=backend)) and info.holder and info, 10)


class TestAdvisory(AdvisoryContract, unittest.TestCase):
    @pytest.fixture(autouse=True)
    def _server(self, postgres):
        self.strategy.server = postgres
        with configured("postgres"):
            yield


class TestAdvisoryThroughSessionPooling(AdvisoryContract, unittest.TestCase):
    @pytest.fixture(autouse=True, scope="class")
    @staticmethod
    def _peers():
        """Other processes know the alias from settings of their own."""
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.support.pooled_settings"
        end_idle_peers()
        yield
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
        end_idle_peers()

    @pytest.fixture(autouse=True)
    def _server(self, postgres, pgbouncer_session):
        self.strategy.server = postgres
        with alias_with("pooled", **pooled_settings.DATABASES["pooled"]), configured("pooled"):
            yield


def configured(alias: str) -> Any:
    entry = {"BACKEND": "angee_jobs.locks.PostgresAdvisoryLockBackend", "OPTIONS": {"alias": alias}}
    return override_settings(ANGEE_JOBS_LOCKS=settings.ANGEE_JOBS_LOCKS | {"postgres_advisory": entry})
