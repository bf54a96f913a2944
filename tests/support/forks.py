"""Forked children of the test's own process."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any


class Forked:
    """A forked child that runs `function` and sends back what it returned or raised.

    Leaves by `os._exit()`, as multiprocessing and prefork pools do, unless `exit_` is another way to go.
    """

    def __init__(self, function: Callable[[], Any], exit_: Callable[[], Any] = lambda: os._exit(0)) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                os.close(reader)
                signal.alarm(0)
                try:
                    answer = (True, function())
                except BaseException:
                    answer = (False, traceback.format_exc())
                os.write(writer, pickle.dumps(answer))
                os.close(writer)
                exit_()
            except SystemExit:
                # A real interpreter's exit, without the part that belongs to pytest.
                import atexit

                with contextlib.suppress(BaseException):
                    _exit_functions(atexit)
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        self._reader = reader

    def result(self, within: float = 20.0) -> Any:
        """What the function returned; AssertionError if it failed or did not end."""
        deadline = time.monotonic() + within
        data = b""
        try:
            while True:
                ready, _, _ = select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    os.kill(self.pid, signal.SIGABRT)  # faulthandler shows where it hangs
                    self.wait()
                    raise AssertionError(f"the forked child hangs after {within:g} s")
                if not (piece := os.read(self._reader, 65536)):
                    break
                data += piece
        finally:
            os.close(self._reader)
        code = self.wait()
        assert data, f"the forked child ended with {code} and said nothing"
        good, answer = pickle.loads(data)
        assert good, f"in the forked child:\n{answer}"
        assert code == 0
        return answer

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _exit_functions(atexit: Any) -> None:
    """What the locks have registered, and nothing of the test suite's."""
    from angee_jobs.locks.renewal import renewer

    renewer.release_all()


def leave_as_a_program_does() -> None:
    sys.exit(0)
