"""For pytest: a test leaves no lock held; and where that is asked for, locks stay in the process.

Loaded by pytest wherever this package is installed. What a test left held is released at its end, and a
``RuntimeWarning`` names it.

Locks stay in the process, and are clean for each test, by the fixture ``local_locks``, by the mark
``@pytest.mark.local_locks`` on a test, a class or a module, or for all tests by ``angee_jobs_local_locks = true`` in
pytest's configuration. Tests of ``unittest`` may use the mark and the option.

Imports nothing of the package before a test uses it, since Django's settings are not there yet.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

OPTION = "angee_jobs_local_locks"
MARK = "local_locks"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(OPTION, "Locks of angee_jobs are local to the process and clean for each test.", "bool", False)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}: locks of angee_jobs are local to the process and clean for this test")


@pytest.fixture
def local_locks() -> Iterator[None]:
    """Locks local to the process and clean for this test; see angee_jobs.locks.testing.local_locks()."""
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
