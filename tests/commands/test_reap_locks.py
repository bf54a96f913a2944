"""reap_locks as cron runs it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from angee_jobs.locks import lock
from tests.support.commands import argv, configured, environment, is_free, leave_expired, manage, run


@pytest.fixture(autouse=True)
def backends() -> Iterator[None]:
    with configured():
        yield


def test_reap_locks() -> None:
    run("reap_locks")
    leave_expired("one", "two", "three")
    with lock("live"):
        assert "Would remove 3 expired locks of 'default'" in run("reap_locks", dry_run=True)
        assert "Removed 0 expired locks of 'default'" in run("reap_locks", grace=3600, verbosity=2)
        assert "Removed 3 expired locks of 'default'" in run("reap_locks", batch_size=2)
        done = manage("reap_locks", "--backend", "default", "--format", "json")
        assert done.returncode == 0 and done.stderr == ""
        result = json.loads(done.stdout)
        assert result["removed"] == 0 and result["backends"] == {"default": 0}
        assert not is_free("live")


def test_reap_locks_reports_a_backend_that_is_down() -> None:
    run("reap_locks")
    leave_expired("one")
    done = manage("reap_locks", "--format", "json", ANGEE_JOBS_TEST_DOWN="1")
    assert done.returncode == 1
    assert json.loads(done.stdout)["backends"]["default"] == 1, "the others were reaped"
    [line] = done.stderr.splitlines()
    assert "The lock backend 'down' was not reaped" in line


@pytest.mark.timeout(180)
def test_reaping_twice_at_once_counts_each_once() -> None:
    run("reap_locks")
    for _ in range(5):
        keys = [f"run-{number}" for number in range(40)]
        with lock("live"):
            leave_expired(*keys)
            processes = [subprocess.Popen(**_reaper()) for _ in range(2)]
            results = [json.loads(process.communicate(timeout=40)[0]) for process in processes]
            assert [process.returncode for process in processes] == [0, 0]
            assert sum(result["removed"] for result in results) == len(keys)
            assert not is_free("live")


def _reaper() -> dict[str, Any]:
    args = argv("reap_locks", "--backend", "default", "--format", "json", "--batch-size", "7")
    return {"args": args, "env": environment(), "stdout": subprocess.PIPE, "stdin": subprocess.DEVNULL}


def test_reaping_again_and_again_while_locks_come_and_go() -> None:
    """Each expired hold is counted once, whatever order names come in, and no live one is touched."""
    run("reap_locks")
    left = 0
    for number in range(50):
        leave_expired(f"{number * 37 % 50:02}-over")
        with lock(f"{number:02}-live"):
            left += 1
            if number % 3 == 2:
                assert f"Removed {left} expired" in run("reap_locks", batch_size=2)
                left = 0
            assert not is_free(f"{number:02}-live")


def test_says_as_much_as_it_is_asked_to() -> None:
    """Nothing where there was nothing, or cron would send a mail each time; -v 0 and -v 2 as in other commands."""
    run("reap_locks", verbosity=0)
    assert run("reap_locks") == ""
    assert "Removed 0 expired locks of 'default'" in run("reap_locks", verbosity=2)
    assert "Would remove 0 expired locks of 'default'" in run("reap_locks", dry_run=True)
    leave_expired("one")
    assert run("reap_locks").splitlines() == ["Removed 1 expired lock of 'default'."]
    leave_expired("one")
    assert run("reap_locks", verbosity=0) == ""
    assert json.loads(run("reap_locks", verbosity=0, format="json"))["removed"] == 0
