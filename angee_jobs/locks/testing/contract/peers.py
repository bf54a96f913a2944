"""Other processes for the contract suite.

A :class:`Peer` is a new interpreter with the settings of this one. It runs the functions that a test sends to it, one
after the other, in its main thread. The functions must be importable there; see ``tasks.py``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from . import tasks

_context = multiprocessing.get_context("spawn")

#: Peers that no test uses now. They are kept because starting one takes half a second.
_idle: list[Peer] = []


class Peer:
    """Another process, which runs the functions that a test sends to it.

    Example::

        peer = Peer.borrow()
        assert peer.call(tasks.acquire, "a", key, ttl=1)
        peer.kill()
        peer.give_back()
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._connection, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs, *_configuration()), daemon=True)
        self._special = environment is not None
        with mock.patch.dict(os.environ, environment or {}):
            self.process.start()
        theirs.close()
        self._waiting = False

    @classmethod
    def borrow(cls) -> Peer:
        """A running peer that holds no lock. Call :meth:`give_back` after use."""
        while _idle:
            peer = _idle.pop()
            if peer.process.is_alive():
                return peer
        return cls()

    def give_back(self) -> None:
        """Keep the process for the next test, or end it if it cannot be used any more."""
        if not self._waiting and not self._special and self.process.is_alive():
            with contextlib.suppress(Exception):
                self.call(tasks.reset, within=5)
                _idle.append(self)
                return
        self.end()

    @property
    def pid(self) -> int:
        """The number of the process."""
        assert self.process.pid is not None
        return self.process.pid

    def call(self, function: Callable[..., Any], *args: Any, within: float = 20.0, **kwargs: Any) -> Any:
        """Run ``function`` in the other process; return or raise what it returns or raises."""
        self.begin(function, *args, **kwargs)
        return self.result(within)

    def begin(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Start a call. Call :meth:`result` before you start the next one."""
        assert not self._waiting, "the result of the last call was not taken"
        self._connection.send((function, args, kwargs))
        self._waiting = True

    def result(self, within: float = 20.0) -> Any:
        """Return or raise what the started call returns or raises; AssertionError without an answer in time."""
        if not self._connection.poll(within):
            raise AssertionError(f"process {self.pid} gave no answer within {within:g} s")
        try:
            succeeded, value = self._connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(5)
            raise AssertionError(f"process {self.pid} ended with code {self.process.exitcode}") from None
        self._waiting = False
        if not succeeded:
            raise value
        return value

    def exit(self, within: float = 20.0) -> int | None:
        """Let the process end by itself, and wait for its end; the exit code."""
        self._connection.send(None)
        self.process.join(within)
        return self.process.exitcode

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end of the process."""
        self.process.kill()
        self.process.join(10)

    def stop(self) -> None:
        """Send SIGSTOP, and return when the process has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        """Send SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Kill the process if it still runs."""
        if self.process.is_alive():
            self.kill()
        self._connection.close()


def end_idle_peers() -> None:
    """End them at the end of a class of tests; without this they end with this process."""
    while _idle:
        _idle.pop().end()


def _configuration() -> tuple[dict[str, Any], Any]:
    """What a test run may have changed since it read the settings: names of test databases, overridden settings."""
    from django.conf import settings
    from django.db import connections

    names = {alias: connections.settings[alias]["NAME"] for alias in connections}
    return names, getattr(settings, "ANGEE_JOBS_LOCKS", None)


def _serve(connection: Connection, names: dict[str, Any], locks: Any) -> None:
    import django
    from django.conf import settings

    for alias, name in names.items():
        settings.DATABASES[alias]["NAME"] = name
    if locks is not None:
        settings.ANGEE_JOBS_LOCKS = locks
    django.setup()
    while True:
        try:
            message = connection.recv()
        except EOFError:  # the test run is gone
            return
        if message is None:
            return
        function, args, kwargs = message
        try:
            answer = (True, function(*args, **kwargs))
        except BaseException as error:
            answer = (False, error)
        try:
            connection.send(answer)
        except Exception:  # it cannot be pickled
            connection.send((False, RuntimeError(f"{type(answer[1]).__name__}: {answer[1]}")))
