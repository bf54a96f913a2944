"""Locks in transactions that Django makes: requests (scenario 25), test cases (42); long writes on SQLite (45)."""

import gc
import shutil
import threading
import time
import unittest
import weakref
from unittest import mock

import pytest
from django.contrib.auth.models import Group
from django.db import connection as default_connection
from django.db import connections, reset_queries, transaction
from django.http import HttpResponse
from django.test import Client, TestCase, override_settings
from django.urls import path

from angee_jobs.locks import lock, task_lock
from angee_jobs.locks.testing import Peer
from angee_jobs.locks.testing.contract import tasks
from angee_jobs.locks.testing.contract.base import Background
from tests.support.aio import renewed
from tests.support.servers import eventually

plan = None


def view(request):
    return HttpResponse(str(plan(request)))


urlpatterns = [path("", view)]


class Where:
    """A lock backend, and the database in which the requests run."""

    def __init__(self, alias, using):
        self.alias, self.using = alias, using

    def groups(self):
        return sorted(Group.objects.using(self.using).values_list("name", flat=True))

    def write(self, name):
        Group.objects.using(self.using).create(name=name)

    def is_free(self, key):
        def look():
            other = lock(key, ttl=5, backend=self.alias)
            return other.acquire() and other.release()

        return Background(look).result()


@pytest.fixture(params=["local", "sqlite", "postgres_table"])
def where(request):
    if request.param == "postgres_table":
        request.getfixturevalue("postgres")
    place = Where(request.param, "postgres" if request.param == "postgres_table" else "default")
    yield place
    Group.objects.using(place.using).all().delete()


@pytest.fixture
def key(request):
    return f"{request.node.name}-{time.monotonic_ns()}"


@pytest.fixture
def atomic_requests(where):
    with (
        mock.patch.dict(connections.settings[where.using], ATOMIC_REQUESTS=True),
        override_settings(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["testserver"]),
    ):
        yield


def get(name=""):
    client = Client(raise_request_exception=False)
    response = client.get("/", {"name": name})
    return response.status_code, response.content.decode()


# ATOMIC_REQUESTS


def test_s25_no_second_request_enters_before_the_commit_of_the_first(where, key, atomic_requests, monkeypatch):
    left_its_block, go_on = threading.Event(), threading.Event()

    def work(request):
        with lock(key, timeout=20, backend=where.alias):
            seen = where.groups()
            where.write(f"{key} {request.GET['name']}")
        if request.GET["name"] == "first":
            left_its_block.set()
            go_on.wait(20)
        return len(seen)

    monkeypatch.setattr(f"{__name__}.plan", work)
    first = Background(get, "first")
    try:
        assert left_its_block.wait(10)
        second = Background(get, "second")
        second.join(0.4)
        assert second.is_alive(), "it entered before the commit"
        assert not where.is_free(key)
    finally:
        go_on.set()
    assert first.result() == (200, "0")
    assert second.result() == (200, "1"), "it did not see what the first request had written"
    assert where.is_free(key)


def test_s25_a_second_request_is_refused_until_the_commit_of_the_first(where, key, atomic_requests, monkeypatch):
    left_its_block, go_on = threading.Event(), threading.Event()

    def work(request):
        with task_lock(key, backend=where.alias) as acquired:
            pass
        if request.GET["name"] == "first":
            left_its_block.set()
            go_on.wait(20)
        return acquired

    monkeypatch.setattr(f"{__name__}.plan", work)
    first = Background(get, "first")
    try:
        assert left_its_block.wait(10)
        assert Background(get, "second").result() == (200, "False")
    finally:
        go_on.set()
    assert first.result() == (200, "True")
    assert get() == (200, "True")


def test_s25_a_request_that_fails_frees_the_lock(where, key, atomic_requests, monkeypatch):
    def work(request):
        with lock(key, backend=where.alias):
            where.write(key)
            if request.GET["name"] == "inside":
                raise ZeroDivisionError
        if request.GET["name"] == "after":
            raise ZeroDivisionError
        return "entered"

    monkeypatch.setattr(f"{__name__}.plan", work)
    for name in ("inside", "after", "inside"):
        assert Background(get, name).result()[0] == 500
        assert where.groups() == []
    assert Background(get, "well").result() == (200, "entered")
    assert where.groups() == [key]


# TestCase


def run_test_case(case):
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert result.testsRun
    for _, trace in result.errors + result.failures:
        pytest.fail(trace)


def test_s42_a_view_that_locks_is_called_twice_in_a_test_case(where, key, atomic_requests, monkeypatch):
    def work(request):
        with lock(key, backend=where.alias) as held:
            where.write(f"{key} {len(where.groups())}")
        assert not where.is_free(key)
        return held.fencing_token

    monkeypatch.setattr(f"{__name__}.plan", work)

    class Inner(TestCase):
        databases = {where.using}

        def call_twice(self):
            tokens = []
            for _ in range(2):
                response = self.client.get("/")
                assert response.status_code == 200
                tokens.append(int(response.content))
                assert where.is_free(key)
            assert tokens[0] < tokens[1]
            assert len(where.groups()) == 2

        def test_one(self):
            self.call_twice()

        def test_two(self):
            self.call_twice()

    run_test_case(Inner)
    assert where.groups() == []


def test_s42_blocks_and_transactions_of_a_test_case(where, key):
    class Inner(TestCase):
        databases = {where.using}

        def test_the_own_transaction_of_the_test_does_not_count(self):
            for _ in range(2):
                with lock(key, backend=where.alias):
                    where.write(f"{key} {len(where.groups())}")
                assert where.is_free(key)

        def test_that_of_the_code_counts(self):
            for _ in range(2):
                with transaction.atomic(where.using):
                    with transaction.atomic(where.using), lock(key, backend=where.alias) as held:
                        token = held.fencing_token
                    assert not where.is_free(key)
                    with lock(key, backend=where.alias) as held:
                        assert held.fencing_token == token
                    assert not where.is_free(key)
                assert where.is_free(key)

        def test_a_rollback_frees(self):
            with pytest.raises(ZeroDivisionError), transaction.atomic(where.using):
                with lock(key, backend=where.alias):
                    pass
                raise ZeroDivisionError
            with lock(key, backend=where.alias):
                pass

        def test_a_lock_registers_nothing_with_on_commit(self):
            with self.captureOnCommitCallbacks(using=where.using) as callbacks:
                with transaction.atomic(where.using):
                    with lock(key, backend=where.alias):
                        transaction.on_commit(lambda: None, using=where.using)
            assert len(callbacks) == 1

        def test_locks_cost_no_query_of_the_test(self):
            reset_queries()
            with self.assertNumQueries(0, using=where.using):
                with lock(key, backend=where.alias):
                    pass

    run_test_case(Inner)
    assert where.is_free(key)


# The connection


def test_s26_connections_that_end_with_each_request(where, key, atomic_requests, monkeypatch):
    seen = []

    def work(request):
        where.groups()
        seen.append(held.held)
        return not where.is_free(key)

    monkeypatch.setattr(f"{__name__}.plan", work)
    with mock.patch.dict(connections.settings[where.using], CONN_MAX_AGE=0):
        with lock(key, ttl=2.25, backend=where.alias) as held:
            for _ in range(3):
                assert get() == (200, "True")
            renewed(held)
            assert get() == (200, "True")
    assert seen == [True] * 4
    assert where.is_free(key)


def test_s26_the_pool_option_of_the_connection(postgres, key):
    pytest.importorskip("psycopg_pool", reason="needs the package psycopg-pool")
    place = Where("postgres_table", "postgres")
    connections.close_all()
    with mock.patch.dict(connections.settings["postgres"], OPTIONS={"pool": {"min_size": 1, "max_size": 2}}):
        try:
            with lock(key, ttl=2.25, backend=place.alias) as held:
                for _ in range(3):
                    place.groups()
                    connections["postgres"].close()
                    assert not place.is_free(key)
                renewed(held)
                assert held.held
                assert not place.is_free(key)
            with transaction.atomic("postgres"):
                with lock(key, backend=place.alias):
                    place.groups()
                assert not place.is_free(key)
            assert place.is_free(key)
        finally:
            connections["postgres"].close()
            connections["postgres"].close_pool()


# SQLite: the caller writes to the file that the lock file stands beside


TTL = 2.25


@pytest.mark.slow
@pytest.mark.parametrize("wrote", ["after", "before and after"])
def test_s45_a_write_transaction_longer_than_the_ttl(wrote, key):
    """Another thread takes locks all the time, and another process holds one by renewals."""
    stop, rounds, peer = threading.Event(), [], Peer.borrow()

    def take_locks():
        while not stop.is_set():
            with lock(f"{key} {len(rounds) % 3}", timeout=20, backend="sqlite"):
                rounds.append(1)

    peer.call(tasks.enter, "a", tasks.LockKey("name", (f"{key} of the peer",)), ttl=TTL, backend="sqlite")
    busy = Background(take_locks)
    try:
        with transaction.atomic():
            assert Group.objects.count() == 0  # has read, before others wrote to the lock file
            if "before" in wrote:
                Group.objects.create(name=f"{key} before")
            at_first = len(rounds)
            with lock(key, ttl=TTL, backend="sqlite") as held:
                renewed(held)
                held.check()
            with lock(f"{key} another", backend="sqlite"):
                pass
            time.sleep(TTL + 0.1)
            assert not Where("sqlite", "default").is_free(key)
            assert len(rounds) > at_first + 10, "lock traffic waited for the caller's transaction"
            if "after" in wrote:
                Group.objects.create(name=f"{key} after")
        eventually(lambda: Where("sqlite", "default").is_free(key))
        assert Group.objects.count() == (2 if wrote == "before and after" else 1)
        assert peer.call(tasks.is_lost, "a") is False
        peer.call(tasks.leave, "a")
    finally:
        stop.set()
        Group.objects.all().delete()
        peer.give_back()
    busy.result()


def test_s45_lock_traffic_writes_nothing_to_the_file_of_the_project(key):
    with default_connection.cursor() as cursor:
        version = cursor.execute("PRAGMA data_version").fetchone()
        for _ in range(10):
            with lock(key, backend="sqlite"):
                pass
        assert cursor.execute("PRAGMA data_version").fetchone() == version


@pytest.fixture
def alone(where, tmp_path):
    """The same in a database that no other connection has open; SQLite lets one write at a time."""
    if where.using == "postgres":
        yield where
        return
    path = tmp_path / "alone.sqlite3"
    shutil.copyfile(connections.settings["default"]["NAME"], path)
    with mock.patch.dict(connections.settings, alone={**connections.settings["default"], "NAME": str(path)}):
        yield Where(where.alias, "alone")
        connections["alone"].close()
        del connections["alone"]


def test_a_thread_that_ends_inside_its_transaction_leaves_neither_its_connection_nor_the_lock(alone):
    where, left = alone, []

    def enter():
        transaction.atomic(where.using).__enter__()
        with lock("left", backend=where.alias):
            where.write("left")
        left.append(weakref.ref(connections[where.using]))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()

    def gone():
        gc.collect()
        return left[0]() is None

    eventually(gone, what="the connection ends with its thread, and its transaction is rolled back")
    eventually(lambda: where.is_free("left"))
    assert where.groups() == []
