"""Functions for the other processes of the contract suite. A test names each of their locks: its "slot"."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import random
import signal
import threading
import time
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from ... import clock, holder
from ...api import lock
from ...conf import lock_backends
from ...errors import LockBackendError, LockLostError
from ...keys import LockKey
from ...lock import Lock

_locks: dict[str, Lock] = {}
_undo: list[Callable[[], object]] = []


def reset() -> None:
    """Release everything, so that another test can use this process."""
    while _undo:
        _undo.pop()()
    for each in _locks.values():
        with contextlib.suppress(LockBackendError):
            each.release()
    _locks.clear()
    gc.collect()


def acquire(slot: str, key: LockKey, wait: float | None = None, **options: Any) -> bool:
    """Take a lock without a block."""
    _locks[slot] = made = lock(key, **options)
    return made.acquire(wait)


def enter(slot: str, key: LockKey, **options: Any) -> int | None:
    """Enter a block; the fencing token of its hold."""
    _locks[slot] = made = lock(key, **options)
    return made.__enter__().fencing_token


def leave(slot: str) -> None:
    _locks.pop(slot).__exit__(None, None, None)


def release(slot: str) -> bool:
    return _locks[slot].release()


def extend(slot: str, ttl: float | None = None) -> bool:
    return _locks[slot].extend(ttl)


def token(slot: str) -> int | None:
    return _locks[slot].fencing_token


def is_lost(slot: str) -> bool:
    return _locks[slot].lost


def acquire_and_release(key: LockKey, rounds: int, **options: Any) -> list[int | None]:
    """Take and release a lock ``rounds`` times; the fencing tokens."""
    tokens = []
    for _ in range(rounds):
        with lock(key, timeout=60, **options) as held:
            tokens.append(held.fencing_token)
    return tokens


def count(path: Path, key: LockKey, threads: int, **options: Any) -> None:
    """Let each thread add one to the number in a file: read it, sleep, write it."""
    errors: list[BaseException] = []

    def add_one() -> None:
        try:
            with lock(key, timeout=60, **options):
                number = int(path.read_text())
                time.sleep(0.001)
                path.write_text(str(number + 1))
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=add_one, daemon=True) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(90)
    if errors:
        raise errors[0]


def enter_at_random(folder: Path, key: LockKey, seed: int, rounds: int, slots: int, **options: Any) -> dict[str, Any]:
    """Enter as an exclusive, a shared or a placed holder; each leaves a file in ``folder`` while it is inside.

    Counted there, and not believed: what is wrong with who was inside together, how many entered of each kind, and how
    many placed ones there were together at most.
    """
    dice = random.Random(seed)
    wrong: list[str] = []
    entered = dict.fromkeys(("alone", "shared", "placed"), 0)
    most = 0
    kinds: dict[str, dict[str, Any]] = {"alone": {}, "shared": {"shared": True}, "placed": {"slots": slots}}
    for number in range(rounds):
        kind = dice.choices(list(kinds), [1, 3, 4])[0]
        mine = f"{kind}-{os.getpid()}-{threading.get_ident()}-{number}"
        try:
            with lock(key, timeout=30, **kinds[kind], **options):
                (folder / mine).touch()
                time.sleep(dice.uniform(0, 0.01))
                together = sorted(os.listdir(folder))  # of so few it is a look at one moment
                (folder / mine).unlink()
        except LockLostError as error:
            wrong.append(repr(error))
            continue
        entered[kind] += 1
        placed = sum(each.startswith("placed") for each in together)
        most = max(most, placed)
        alone = any(each.startswith("alone") for each in together)
        if placed > slots or (alone and len(together) > 1):
            wrong.append(f"inside together: {together}")
    return {"wrong": wrong, "entered": entered, "most": most}


def _patch(target: Any, name: str, value: Any) -> None:
    patcher = mock.patch.object(target, name, value)
    patcher.start()
    _undo.append(patcher.stop)


def pretend_to_be(host: str, pid: int) -> None:
    """Store the same holder with a hold as another process that calls this with the same arguments."""
    import socket

    _patch(socket, "gethostname", lambda: host)
    _patch(holder, "_host", host)
    _patch(holder, "os", types.SimpleNamespace(getpid=lambda: pid))


def says_who_it_is() -> str:
    """What this process stores with a hold to describe the holder."""
    return holder.describe_holder("")


def shift_clock(seconds: float) -> None:
    """Make this process believe that its clock is ``seconds`` ahead."""
    from django.utils import timezone

    real_time, real_ns, real_now = time.time, time.time_ns, timezone.now
    _patch(time, "time", lambda: real_time() + seconds)
    _patch(time, "time_ns", lambda: real_ns() + int(seconds * 1e9))
    _patch(timezone, "now", lambda: real_now() + timedelta(seconds=seconds))


def read_clock() -> float:
    return time.time()


def fail_to_release(alias: str, name: str) -> None:
    """Make every release of this lock fail in this process from now on."""
    backend = lock_backends.operations(alias)
    real = backend.release

    def release(asked: str, owner: str, deadline: float) -> bool:
        if asked == name:
            raise LockBackendError("the test does not let this lock be released", name=name)
        return real(asked, owner, deadline)

    _patch(backend, "release", release)


class Struck(Exception):
    """Raised by the signal handlers of these tests."""


def _strike(signum: int, frame: Any) -> None:
    raise Struck


def strike_when_waiting(key: LockKey, alias: str) -> None:
    """Raise :class:`Struck` in the main thread as soon as it waits for the lock."""
    previous = signal.signal(signal.SIGUSR1, _strike)
    _undo.append(lambda: signal.signal(signal.SIGUSR1, previous))
    backend, waits = lock_backends.operations(alias), threading.Event()
    real = backend.remaining

    def remaining(name: str, deadline: float, *places: int) -> float | None:
        if name == key.name:
            waits.set()
        return real(name, deadline, *places)

    _patch(backend, "remaining", remaining)

    def wait_and_strike() -> None:
        waits.wait(20)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=wait_and_strike, daemon=True).start()


def storm(key: LockKey, strikes: int, **options: Any) -> dict[str, Any]:
    """Take and free a lock while a signal handler raises at random instants, and another thread wants the lock too."""
    unexpected: list[str] = []
    stop = threading.Event()

    def contend() -> None:
        try:
            while not stop.is_set():
                with lock(key, timeout=20, **options):
                    pass
                stop.wait(0.003)
        except BaseException as error:
            unexpected.append(f"in the other thread: {error!r}")

    def one_round() -> float:
        started = clock.now()
        with lock(key, timeout=20, **options):
            pass
        return clock.now() - started

    usual = min(one_round() for _ in range(10))
    struck = rounds = 0
    faulthandler.dump_traceback_later(30)  # should it hang
    previous = signal.signal(signal.SIGALRM, _strike)
    contender = threading.Thread(target=contend, daemon=True)
    contender.start()
    limit = clock.now() + 20
    try:
        while struck < strikes and len(unexpected) < 5 and clock.now() < limit:
            rounds += 1
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, usual * 1.5))
                    one_round()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Struck:
                struck += 1
            except Exception as error:
                unexpected.append(f"in round {rounds}: {error!r}")
    finally:
        signal.signal(signal.SIGALRM, previous)
        stop.set()
        contender.join(30)
        faulthandler.cancel_dump_traceback_later()
    if contender.is_alive():
        unexpected.append("the other thread hangs")
    return {"struck": struck, "rounds": rounds, "unexpected": unexpected}


def fork_inside_a_block(key: LockKey, other: LockKey, ttl: float, **options: Any) -> dict[str, Any]:
    """Fork inside a block, for longer than its ttl; what the child and the parent saw."""
    seen: dict[str, Any] = {}
    with lock(key, ttl=ttl, **options) as held:
        mine = lock_backends.operations(options["backend"])
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            report: dict[str, Any] = {}
            code = 1
            try:
                report["held"] = held.held
                report["released"] = held.release()
                report["extended"] = held.extend()
                report["same instance"] = lock_backends.operations(options["backend"]) is mine
                report["second hold of the parent's key"] = lock(key, ttl=ttl, **options).acquire()
                with lock(other, ttl=ttl, timeout=10, **options) as own:
                    time.sleep(ttl * 1.1)
                    report["own lock renewed"] = own.held
                held.__exit__(None, None, None)
                del held
                gc.collect()
                atexit._run_exitfuncs()
                code = 0
            except BaseException as error:
                report["error"] = f"{type(error).__name__}: {error}"
            os.write(writer, repr(report).encode())
            os._exit(code)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            seen["child"] = pipe.read().decode()
        seen["exit code"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        seen["held by the parent"] = held.held
        seen["held at the backend"] = mine.is_held(key)
    return seen
