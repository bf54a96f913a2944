"""run_locked: what it prints, what it says about wrong usage, what its program finds in its environment."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from angee_jobs.locks import LockKey, force_release, lock
from angee_jobs.management.commands import run_locked
from tests.support.commands import configured, execute, is_free, manage
from tests.support.servers import eventually

ENVIRONMENT = "import json, os; print(json.dumps({n: v for n, v in os.environ.items() if n.startswith('ANGEE_LOCK_')}))"


@pytest.fixture(autouse=True)
def backends() -> Iterator[None]:
    with configured():
        yield
        assert is_free("job"), "every test leaves the lock free"


def test_options_of_the_program_belong_after_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute("run_locked", "job", "ls", "-l") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "unrecognized arguments: -l (write -- between the key and the program: run_locked KEY -- CMD ARGS)"
    )
    assert execute("run_locked", "--nonsense", "job", "--", "true") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("unrecognized arguments: --nonsense")


def test_the_program_finds_the_lock_in_its_environment() -> None:
    with lock("job") as before:
        pass
    again = [sys.executable, "manage.py", "run_locked", "--backend", "local", "other:%", "--"]
    inner = [sys.executable, "-c", ENVIRONMENT]
    done = manage("run_locked", "job", "--", *inner)
    found = json.loads(done.stdout)
    assert found.pop("ANGEE_LOCK_TOKEN").isdecimal() and before.fencing_token
    assert int(json.loads(done.stdout)["ANGEE_LOCK_TOKEN"]) > before.fencing_token
    assert found == {"ANGEE_LOCK_KEY": "angee:name:job", "ANGEE_LOCK_BACKEND": "default"}
    found = json.loads(manage("run_locked", "job", "--", *again, *inner).stdout)
    assert LockKey.parse(found["ANGEE_LOCK_KEY"]).parts == ("other:%",), "of the innermost"
    assert found["ANGEE_LOCK_BACKEND"] == "local"


def test_a_key_that_no_environment_can_hold() -> None:
    """Where the system cannot start the program, its lock is given up, and one line says why."""
    key = "job" + "\x01" * 60_000  # three characters each in its canonical name
    done = manage("run_locked", key, "--", "true")
    assert done.returncode == 126
    assert done.stderr.splitlines() == ["CommandError: true cannot be run: Argument list too long"]
    assert is_free(key)


def on_the_console(level: str) -> dict[str, object]:
    return {
        "version": 1,
        "handlers": {"console": {"class": "logging.StreamHandler"}},
        "root": {"handlers": ["console"], "level": level},
    }


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_a_refusal_that_is_no_error_is_not_logged_either(level: str) -> None:
    """With a project's log on the console, as many have it in a container, cron would send a mail each minute."""
    with lock("job"):
        for timeout in ([], ["--timeout", "0.3"]):
            args = ["run_locked", "--on-refused", "0", *timeout, "job", "--", "true"]
            done = manage(*args, ANGEE_JOBS_TEST_LOGGING=json.dumps(on_the_console(level)))
            assert done.returncode == 0
            assert "job" not in done.stdout + done.stderr
    done = manage("run_locked", "job", "--", "true", ANGEE_JOBS_TEST_LOGGING=json.dumps(on_the_console(level)))
    assert done.returncode == 0


@pytest.mark.parametrize(("ends", "code"), [(True, 7), (False, 76)])
def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: bool, code: int) -> None:
    """The program's end is seen all the same, and a loss stops it. It ran on without its lock."""
    there = tmp_path / "there"
    script = f"touch {there}; exit 7" if ends else f"touch {there}; exec sleep 60"
    monkeypatch.setattr(run_locked, "start_thread", lambda run, name: False)

    def lose() -> None:
        eventually(there.exists, 20)
        force_release("job")

    loser = threading.Thread(target=lose)
    if not ends:
        loser.start()
    assert execute("run_locked", "--ttl", "30", "job", "--", "sh", "-c", script) == code
    if not ends:
        loser.join(20)
