"""What the tests of the PostgreSQL backends share."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any
from unittest import mock

import pytest
from django.conf import settings
from django.db import connections

from angee_jobs.locks import clock, lock_backends
from angee_jobs.locks.backends.postgres import pool as pg_pool
from angee_jobs.locks.backends.postgres.pool import Pool
from angee_jobs.locks.backends.postgres.session import Session
from angee_jobs.locks.backends.postgres.statements import Statement
from angee_jobs.locks.errors import LockBackendError
from tests.support.servers import eventually

SECONDS = 5.0

ECHO = Statement("SELECT $1::text, pg_backend_pid()")
SLEEP = Statement("SELECT pg_sleep($1::float8), 'slept'")
WAIT = Statement("SELECT pg_advisory_xact_lock(7), 'waited'")


def within(seconds: float = SECONDS) -> float:
    """A deadline."""
    return clock.now() + seconds


@contextlib.contextmanager
def sessions_stay(*lock_aliases: str) -> Iterator[None]:
    """Between requests, as they do outside of a test run; those of these lock backends until the end of the block."""
    with mock.patch.object(pg_pool, "in_test_run", return_value=False):
        try:
            yield
        finally:
            for alias in lock_aliases:
                lock_backends.operations(alias).close()


@pytest.fixture
def in_production() -> Iterator[None]:
    """The sessions of every backend on PostgreSQL stay open."""
    with sessions_stay(*(alias for alias in settings.ANGEE_JOBS_LOCKS if alias.startswith("postgres"))):
        yield


@contextlib.contextmanager
def alias_with(name: str = "special", base: str = "postgres", **changes: Any) -> Iterator[str]:
    """A database alias like `base` with other settings."""
    connections.settings[name] = connections.settings[base] | changes
    try:
        yield name
    finally:
        with contextlib.suppress(AttributeError):
            connections[name].close()
            del connections[name]
        del connections.settings[name]


@contextlib.contextmanager
def database_defaults(server: Any, **settings: str) -> Iterator[None]:
    """What an administrator has made the default of the test database."""
    server.query("SELECT 1")
    for name, value in settings.items():
        server.query(f"ALTER DATABASE angee_tests SET {name} = '{value}'", dbname="postgres")
    try:
        yield
    finally:
        server.query("ALTER DATABASE angee_tests RESET ALL", dbname="postgres")


class Interrupt(Exception):
    """What a signal handler raises."""


def _is_of_the_collector(code: CodeType) -> bool:
    """What is raised in what the garbage collector calls is dropped, and pytest and hypothesis listen to that."""
    file = os.path.basename(code.co_filename)
    weak = file in ("_weakrefset.py", "weakref.py") and code.co_name in ("_remove", "remove")
    return weak or code.co_name == "__del__" or "hypothesis" in code.co_filename


@contextlib.contextmanager
def interrupted_after(seconds: float, handler: Callable[[], object] | None = None) -> Iterator[None]:
    """Raise Interrupt at whatever instruction the block is in after `seconds`, or call `handler` there."""

    def strike(signum: int, frame: object) -> None:
        if handler is not None:
            handler()
        elif frame is not None and _is_of_the_collector(frame.f_code):
            signal.setitimer(signal.ITIMER_REAL, 0.0001)
        else:
            raise Interrupt

    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)


def give_up(backend: Any, name: str, owner: str, seconds: float = 10.0) -> None:
    """What the renewal thread does with an acquire whose outcome is unknown."""
    limit = clock.now() + seconds
    while True:
        try:
            backend.release(name, owner, clock.now() + 1.0)
            return
        except LockBackendError:
            if clock.now() > limit:
                raise
            threading.Event().wait(0.02)


def in_threads(count: int, work: Callable[[int], object]) -> list[Any]:
    """The results of `work(0)` ... `work(count - 1)`, all at once; the first error is raised."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=[number], daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.fixture
def session(postgres: Any) -> Iterator[Session]:
    session = Session("postgres", within())
    yield session
    session.close()


@pytest.fixture
def pool(postgres: Any, in_production: None) -> Iterator[Pool]:
    pool = Pool("postgres", 4)
    yield pool
    for slot in pool.slots:
        slot.drop()


@contextlib.contextmanager
def held_up(postgres: Any) -> Iterator[Any]:
    """Nobody who asks to WAIT gets an answer before the end of the block, or of the connection that it yields."""
    with postgres.connect() as stranger:
        stranger.execute("SELECT pg_advisory_lock(7)")
        yield stranger


def ended_in_mid_query(postgres: Any, pid: int, stranger: Any) -> threading.Thread:
    """A thread that ends the session ``pid`` as soon as it WAITs, and then lets others have what it waited for."""

    def end() -> None:
        eventually(lambda: postgres.advisory_locks(granted=False), 10)
        postgres.terminate(pid)
        stranger.close()

    thread = threading.Thread(target=end)
    thread.start()
    return thread
