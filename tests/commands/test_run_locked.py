"""run_locked: programs under a lock, as cron starts them on several hosts; real processes and signals."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from django.test import override_settings

from angee_jobs.locks import Lock, force_release, lock
from angee_jobs.management.commands import run_locked
from angee_jobs.management.commands.run_locked import FORWARDED
from tests.support.commands import Running, alive, configured, execute, is_free, manage
from tests.support.procs import stopwatch
from tests.support.servers import PostgresServer, eventually

#: Says what it is, and what it got, and ends only when it has to.
PATIENT = """
import os, signal, sys, time
for name in sys.argv[1].split(","):
    signal.signal(getattr(signal, name), lambda number, frame: print(f"got {signal.Signals(number).name}", flush=True))
print(f"pid={os.getpid()}", flush=True)
print("ready", flush=True)
while True:
    time.sleep(60)
"""
#: Ends on SIGTERM with a code of its own.
POLITE = "trap 'echo bye; exit 5' TERM; echo ready; while :; do sleep 0.05; done"


def patient(signals: str = "SIGTERM") -> list[str]:
    return [sys.executable, "-c", PATIENT, signals]


@pytest.fixture(autouse=True)
def backends() -> Iterator[None]:
    with configured():
        yield
        assert is_free("job"), "every test leaves the lock free"


# Exit codes


def test_the_programs_own_exit_code_and_output() -> None:
    done = manage("run_locked", "job", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert manage("run_locked", "job", "--", "true").returncode == 0
    assert is_free("job")


def test_a_program_that_is_killed_by_a_signal() -> None:
    assert manage("run_locked", "job", "--", "sh", "-c", "kill -KILL $$").returncode == 128 + signal.SIGKILL


def test_arguments_go_over_as_they_are() -> None:
    done = manage("run_locked", "job", "--", "printf", "%s.", "-v", "--", "--settings=x", "a b", "")
    assert (done.returncode, done.stdout) == (0, "-v.--.--settings=x.a b..")


@pytest.mark.once
def test_a_program_that_cannot_be_run(tmp_path: Path) -> None:
    done = manage("run_locked", "job", "--", str(tmp_path / "nothing"))
    assert done.returncode == 127 and "No such file" in done.stderr
    (tmp_path / "text").write_text("no program")
    done = manage("run_locked", "job", "--", str(tmp_path / "text"))
    assert done.returncode == 126 and "Permission denied" in done.stderr


@pytest.mark.once
def test_signals_that_python_ignores_are_not_ignored_in_the_program() -> None:
    done = manage("run_locked", "job", "--", "sh", "-c", "trap; grep SigIgn /proc/$$/status")
    mask = int(done.stdout.split()[-1], 16)
    assert not mask & (1 << (signal.SIGPIPE - 1))


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("job",),
        ("job", "--"),
        ("job", "--", ""),
        ("angee:nonsense", "--", "true"),
        ("--ttl", "0", "job", "--", "true"),
        ("--timeout", "-1", "job", "--", "true"),
        ("--timeout", "nan", "job", "--", "true"),
        ("--hold-at-least", "soon", "job", "--", "true"),
        ("--on-refused", "256", "job", "--", "true"),
        ("--on-refused", "-1", "job", "--", "true"),
        ("--backend", "nowhere", "job", "--", "true"),
        ("--nonsense", "job", "--", "true"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert execute("run_locked", *args) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_wrong_usage_in_a_process_of_its_own() -> None:
    done = manage("run_locked", "--ttl", "soon", "job", "--", "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "manage.py run_locked: error: argument --ttl: 'soon' is not a number of seconds that can be\n"


@pytest.mark.parametrize(
    "setting",
    [
        "nonsense",
        {"default": "nonsense"},
        {"default": {"BACKEND": "no.such.Backend"}},
        {"default": {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"alias": "nowhere"}}},
    ],
)
def test_a_wrong_configuration_is_one_line_and_exit_code_78(setting: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with override_settings(ANGEE_JOBS_LOCKS=setting):
        assert execute("run_locked", "job", "--", "echo", "ran") == 78
    printed = capfd.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


@pytest.mark.once
def test_what_only_a_lease_can_do_is_wrong_usage_of_a_session_lock(
    postgres: PostgresServer, capfd: pytest.CaptureFixture[str]
) -> None:
    advisory = {"BACKEND": "angee_jobs.locks.PostgresAdvisoryLockBackend", "OPTIONS": {"alias": "postgres"}}
    with override_settings(ANGEE_JOBS_LOCKS={"default": advisory}):
        assert execute("run_locked", "--hold-at-least", "60", "job", "--", "echo", "ran") == 2
    printed = capfd.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1


@pytest.mark.once
def test_a_backend_that_cannot_be_used() -> None:
    done = manage("run_locked", "--backend", "down", "job", "--", "echo", "ran", ANGEE_JOBS_TEST_DOWN="1")
    assert (done.returncode, done.stdout) == (69, "")
    [line] = done.stderr.splitlines()
    assert "The lock backend 'down' cannot be used" in line


# Refused, and waiting


@pytest.mark.once
def test_refused() -> None:
    with lock("job", note="nightly"):
        done = manage("run_locked", "job", "--", "echo", "ran")
        assert (done.returncode, done.stdout) == (75, "")
        [line] = done.stderr.splitlines()
        assert "is taken, held by" in line and "nightly" in line
        done = manage("run_locked", "--on-refused", "0", "job", "--", "echo", "ran")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), "cron sends no mail about it"
        assert manage("run_locked", "--on-refused", "42", "job", "--", "true").returncode == 42
        assert manage("run_locked", "--timeout", "0.3", "job", "--", "true").returncode == 75


@pytest.mark.once
def test_so_many_programs_run_at_once() -> None:
    with lock("job", slots=2):
        assert manage("run_locked", "--slots", "2", "job", "--", "echo", "ran").stdout == "ran\n"
        assert manage("run_locked", "--slots", "1", "job", "--", "echo", "ran").returncode == 75
        assert manage("run_locked", "job", "--", "echo", "ran").returncode == 75
        assert manage("run_locked", "--shared", "job", "--", "echo", "ran").stdout == "ran\n"
    assert manage("run_locked", "--slots", "0", "job", "--", "true").returncode == 2
    assert manage("run_locked", "--slots", "2", "--shared", "job", "--", "true").returncode == 2


@pytest.mark.once
def test_waits_for_the_lock() -> None:
    holder = Lock("job", ttl=60)
    assert holder.acquire()
    with Running("run_locked", "--timeout", "30", "job", "--", "echo", "ran") as command:
        time.sleep(1)
        assert command.process.poll() is None and not command.lines
        holder.release()
        command.says("ran")
        assert command.wait() == 0


@pytest.mark.once
def test_a_signal_ends_the_wait() -> None:
    with lock("job"), Running("run_locked", "--timeout", "inf", "job", "--", "echo", "ran") as command:
        eventually(lambda: _is_in_line(command.process.pid), 20)
        command.process.send_signal(signal.SIGTERM)
        assert command.wait() == 128 + signal.SIGTERM
        assert not command.lines


def _handles(pid: int, signum: int) -> bool:
    [caught] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(caught.split()[1], 16) & (1 << (signum - 1)))


def _is_in_line(pid: int) -> bool:
    """Whether it waits for the lock: with that, and not before, the threads of the locks begin."""
    return _handles(pid, signal.SIGTERM) and len(os.listdir(f"/proc/{pid}/task")) > 1


def test_a_signal_while_the_handlers_are_being_set() -> None:
    @contextlib.contextmanager
    def struck(program: Any) -> Iterator[None]:
        raise run_locked._Stopped(signal.SIGTERM)
        yield

    with mock.patch.object(run_locked._Program, "forwarding", struck):
        assert execute("run_locked", "job", "--", "true") == 128 + signal.SIGTERM
    assert is_free("job")


@pytest.mark.once
def test_holds_at_least_so_long() -> None:
    elapsed = stopwatch()
    assert manage("run_locked", "--hold-at-least", "4", "job", "--", "true").returncode == 0
    assert not is_free("job") or elapsed() > 4
    eventually(lambda: is_free("job"), 10)


# Signals


@pytest.mark.once
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"])
def test_signals_are_forwarded(name: str) -> None:
    with Running("run_locked", "job", "--", *patient(name)) as command:
        command.says("ready")
        for _ in range(2):
            command.lines.clear()
            command.process.send_signal(getattr(signal, name))
            command.says(f"got {name}")
        assert not is_free("job"), "the program decides"
        command.process.send_signal(signal.SIGTERM if name != "SIGTERM" else signal.SIGINT)
        code = command.wait()
        assert code == 128 + (signal.SIGTERM if name != "SIGTERM" else signal.SIGINT)


@pytest.mark.once
def test_what_nohup_has_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a child has that from its parent
    try:
        command = Running("run_locked", "job", "--", *patient("SIGHUP,SIGUSR1"))
    finally:
        signal.signal(signal.SIGHUP, before)
    with command:
        command.says("ready")
        command.process.send_signal(signal.SIGHUP)
        command.process.send_signal(signal.SIGUSR1)
        command.says("got SIGUSR1")
        assert "got SIGHUP" not in command.lines
        command.process.send_signal(signal.SIGTERM)
        assert command.wait() == 128 + signal.SIGTERM


@pytest.mark.once
def test_the_program_ends_as_it_likes_on_sigterm() -> None:
    with Running("run_locked", "job", "--", "sh", "-c", POLITE) as command:
        command.says("ready")
        command.process.send_signal(signal.SIGTERM)
        command.says("bye")
        assert command.wait() == 5


# The lock is lost


@pytest.mark.once
def test_a_lost_lock_stops_the_program() -> None:
    with Running("run_locked", "--ttl", "2.5", "job", "--", "sh", "-c", POLITE) as command:
        command.says("ready")
        assert force_release("job")
        command.says("bye")
        assert command.wait() == 76
        assert "was lost before it was released" in command.errors()


@pytest.mark.once
def test_a_program_that_ignores_sigterm_is_killed() -> None:
    with Running("run_locked", "--ttl", "2.5", "--grace", "2", "job", "--", *patient()) as command:
        pid = command.value("pid")
        command.says("ready")
        assert force_release("job")
        command.says("got SIGTERM")
        assert command.wait() == 76
        assert not alive(pid)


@pytest.mark.once
def test_what_the_program_started_is_stopped_too() -> None:
    script = f'{sys.executable} -c "$0" SIGTERM & wait'
    args = ("--ttl", "2.5", "--grace", "2", "job", "--", "sh", "-c", script, PATIENT)
    with Running("run_locked", *args) as command:
        pid = command.value("pid")
        command.says("ready")
        assert force_release("job")
        command.says("got SIGTERM")
        assert command.wait() == 76
        eventually(lambda: not alive(pid))


@pytest.mark.once
def test_a_lock_that_was_lost_is_told_when_the_program_is_done_first(tmp_path: Path) -> None:
    # Stopped past the end of its lease, as by a laptop's lid; the program ends meanwhile.
    end = tmp_path / "end"
    script = f'echo pid=$$; echo ready; while [ ! -e "{end}" ]; do sleep 0.05; done'
    with Running("run_locked", "--ttl", "1", "job", "--", "sh", "-c", script) as command:
        pid = command.value("pid")
        command.says("ready")
        command.process.send_signal(signal.SIGSTOP)
        eventually(lambda: is_free("job"), 10)
        end.touch()
        eventually(lambda: not alive(pid))
        command.process.send_signal(signal.SIGCONT)
        assert command.wait() == 76


@pytest.mark.once
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_the_program_does_not_outlive_run_locked() -> None:
    with Running("run_locked", "--ttl", "1", "job", "--", *patient("SIGUSR1")) as command:
        pid = command.value("pid")
        command.says("ready")
        command.process.kill()
        eventually(lambda: not alive(pid))
        eventually(lambda: is_free("job"), 10)


# Concurrency


@pytest.mark.once
@pytest.mark.timeout(180)
def test_several_hosts_at_once(tmp_path: Path) -> None:
    """Whoever runs, runs alone: each reads a counter, sleeps on it and writes it."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    script = f'n=$(cat "{counter}"); sleep 0.02; echo $((n + 1)) > "{counter}"'
    commands = [Running("run_locked", "--timeout", "60", "job", "--", "sh", "-c", script) for _ in range(8)]
    try:
        assert [command.wait(90) for command in commands] == [0] * 8
    finally:
        for command in commands:
            command.__exit__()
    assert counter.read_text().strip() == "8"


@pytest.mark.timeout(240)
@pytest.mark.once
def test_a_signal_at_any_instant_leaves_nothing_behind() -> None:
    """Before the lock is taken, while the program starts, while it runs, while it ends."""
    chance, rounds = random.Random(6), 25
    for number in range(rounds):
        with Running("run_locked", "--ttl", "30", "job", "--", "sh", "-c", "echo pid=$$; exec sleep 0.1") as command:
            eventually(lambda command=command: _handles(command.process.pid, FORWARDED[-1]), 20)
            time.sleep((number + chance.random()) / rounds * 0.25)
            _terminate(command.process.pid)
            # A signal that comes last of all ends the process itself, as it would any other.
            assert command.wait() in {128 + signal.SIGTERM, -signal.SIGTERM, 0}, command.errors()
            assert is_free("job"), "the lock was given up, not left to run out"
            pids = [int(line.removeprefix("pid=")) for line in command.lines]
            assert not any(map(alive, pids)), "the program has ended"


def _terminate(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
