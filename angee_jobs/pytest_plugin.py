"""The pytest plugin: no test leaves a lock held, and a test can have locks that stay in the process.

pytest loads it wherever this package is installed. At the end of each test it releases what the test left held, and
names that in a ``RuntimeWarning``.

For locks that are local to the process, with none held at the start, ask:

* for one test, by the fixture ``local_locks``;
* for a test, a class or a module, by the mark ``@pytest.mark.local_locks``;
* for all tests, by ``angee_jobs_local_locks = true`` in pytest's configuration.

Tests of ``unittest`` can use the mark and the option.
"""
# Imports nothing of the package before a test uses it: Django's settings may not be configured yet.

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

OPTION = "angee_jobs_local_locks"
MARK = "local_locks"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(OPTION, "Give each test locks that are local to the process, none of them held.", "bool", False)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}: give this test locks that are local to the process, none of them held")


@pytest.fixture
def local_locks() -> Iterator[None]:
    """Locks that are local to the process, none of them held; see angee_jobs.locks.testing.local_locks()."""
    from angee_jobs.locks.testing import local_locks

    with local_locks():
        yield


@pytest.fixture(autouse=True)
def _angee_jobs_left_locks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fixtures of a wider scope come before this one, so that what they hold stays held."""
    before = _left().live_holds() if _used() else set()
    yield
    if _used():
        _left().release_left(f"The test {request.node.nodeid}", before)


def _used() -> bool:
    """Whether anything has imported the locks; if not, nothing is held."""
    return "angee_jobs.locks.renewal" in sys.modules


def _left() -> Any:
    from angee_jobs.locks.testing import left

    return left


def pytest_sessionfinish() -> None:
    if _used():
        _left().release_left("The test run")


@pytest.fixture(autouse=True)
def _angee_jobs_local_locks(request: pytest.FixtureRequest, _angee_jobs_left_locks: None) -> None:
    if request.config.getini(OPTION) or request.node.get_closest_marker(MARK):
        request.getfixturevalue("local_locks")
