"""An exception of a signal handler at every instruction of entering, leaving, committing and taking a lock again.

A signal arrives between any two instructions. Here a trace function raises in its stead, at each such instruction of
this package in turn, on the way of temporary locks and of a module's lock, which no garbage collection ends. The lock
comes free afterwards, whichever instruction it was, and is renewed no more.
"""

import contextlib
import dis
import gc
import sys
import threading
from pathlib import Path

import pytest
from django.db import transaction

import angee_jobs.locks
from angee_jobs.locks import Lock, lock, lock_info, task_lock
from angee_jobs.locks.renewal import renewer
from tests.support.servers import eventually

# What is struck while it is dropped, such as a generator, is only told.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
PACKAGE = str(Path(angee_jobs.locks.__file__).parent)


class Struck(Exception):
    """What the signal handler raises."""


class Striker:
    """Raises at one of the instructions of this package in this thread at which the interpreter looks for signals.

    It does so where a function begins, where a loop goes back, and after each call of a function that is written in C.
    """

    def __init__(self, at: int) -> None:
        self.left = at
        self.struck = False
        self._last: dict[int, str] = {}

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc):
        sys.settrace(None)

    def _call(self, frame, event, arg):
        self._last[id(frame.f_back)] = "a call of Python code"
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        self._strike()
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame, event, arg):
        if event == "return":
            self._last.pop(id(frame), None)
        if event == "opcode":
            opcode = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            last, self._last[id(frame)] = self._last.get(id(frame), ""), opcode
            if opcode == "JUMP_BACKWARD" or last.startswith("CALL"):
                self._strike()
        return self._opcode

    def _strike(self):
        self.left -= 1
        if self.left == 0:
            self.struck = True
            sys.settrace(None)
            raise Struck


def strike_everywhere(use, key, alias, step=1):
    """``use()`` once for each instruction of its way, struck there; the number of instructions."""
    at = 0
    while True:
        at += step
        with Striker(at) as striker:
            # The lock's own error is a loss that the strike caused; one of the interpreter's is a bug.
            with contextlib.suppress(Struck, angee_jobs.locks.LockError):
                use()
        if not striker.struck:
            return at
        gc.collect()  # ExitStack keeps an exception in a cycle, and so what it was calling
        what = f"struck at instruction {at}"
        eventually(lambda: lock_info(key, backend=alias) is None, 10, f"the lock comes free, {what}")
        eventually(lambda: not [each for each in list(renewer.holds) if each.name == lock(key).name], 10, what)


def sync_ways(key, alias):
    shared = lock(key, ttl=60, backend=alias)

    def temporary():
        with lock(key, ttl=60, backend=alias):
            pass

    def modules():
        with shared:
            pass

    def modules_on_a_stack():
        with contextlib.ExitStack() as stack:
            stack.enter_context(shared)

    def asked():
        with task_lock(key, ttl=60, backend=alias) as acquired:
            assert acquired

    def committed():
        with transaction.atomic(), shared:
            pass

    def rolled_back():
        with contextlib.suppress(ZeroDivisionError), transaction.atomic(), shared:
            raise ZeroDivisionError

    def taken_again():
        with transaction.atomic():
            with shared:
                pass
            with shared:
                pass

    return locals().values()


WAYS = [
    "temporary",
    "modules",
    "modules_on_a_stack",
    "asked",
    "committed",
    "rolled_back",
    "taken_again",
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
def test_struck_at_every_instruction_of_a_block(way):
    """Seen: a module's lock that was renewed for ever after a strike at the commit, or while it was taken again."""
    key = f"struck-{way}".replace("_", "-")
    use = next(each for each in sync_ways(key, "local") if getattr(each, "__name__", "") == way)
    assert strike_everywhere(use, key, "local") > 40


@pytest.mark.timeout(300)
def test_struck_at_every_instruction_of_a_detach():
    """Seen: a strike between the end of the hold and the request left the lock taken until its ttl."""
    key = "struck-detach"
    shared = lock(key, ttl=60, backend="local")

    def use():
        assert shared.acquire()
        try:
            shared.detach(ttl=0.05)  # the new owner never comes
        except BaseException:
            shared.release()
            raise

    assert strike_everywhere(use, key, "local") > 40


def test_a_strike_leaves_the_blocks_of_other_threads_alone():
    """Seen: ExitStack over a module's lock, struck on its way out, abandoned the block of another thread."""
    shared: Lock = lock("struck-others", ttl=60, backend="local")
    inside, go_on, held = threading.Event(), threading.Event(), []

    def other():
        with contextlib.ExitStack() as stack:
            mine = stack.enter_context(shared)
            inside.set()
            go_on.wait(60)
            held.append(mine.held)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)

    def refused():
        with contextlib.ExitStack() as stack:
            assert not stack.enter_context(task_lock("struck-others", backend="local"))
            shared.acquire()

    at = 0
    while True:
        at += 1
        with Striker(at) as striker, contextlib.suppress(Struck):
            refused()
        if not striker.struck:
            break
        assert shared.held
    go_on.set()
    thread.join(20)
    assert held == [True]
