"""For pytest: locks that stay in the process and are clean for each test, where that is asked for.

Loaded by pytest wherever this package is installed, and does nothing until it is asked: by the fixture
``local_locks``, by the mark ``@pytest.mark.local_locks`` on a test, a class or a module, or for all tests by
``angee_jobs_local_locks = true`` in pytest's configuration. Tests of ``unittest`` may use the mark and the option.

Imports nothing of the package before a test asks, since Django's settings are not there yet.
"""

from __future__ import annotations

from collections.abc import Iterator

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
def _angee_jobs_local_locks(request: pytest.FixtureRequest) -> None:
    if request.config.getini(OPTION) or request.node.get_closest_marker(MARK):
        request.getfixturevalue("local_locks")
