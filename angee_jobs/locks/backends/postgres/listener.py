"""Waiting for notifications of PostgreSQL on a session of its own."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Collection

from ... import clock, process
from ...errors import LockBackendError
from .errors import NoAnswer, SessionLost, driver_error
from .session import Session
from .statements import Statement

#: How long connecting may take, in seconds.
CONNECT_SECONDS = 5.0


class Listener:
    """LISTENs on one channel for one thread at a time; any other thread may :meth:`stop` it."""

    def __init__(self, alias: str, channel: str, *, through_pooler: bool = False) -> None:
        self.alias = alias
        self.through_pooler = through_pooler
        self._listen = Statement(f"LISTEN {channel}")
        self._reset()

    def _reset(self) -> None:
        self.generation = process.generation
        self._in_use = threading.Lock()
        self._stop = False
        self._session: Session | None = None
        # Open as long as the listener lives: whoever rings must not meet somebody else's file with the same number.
        self._ear, self._bell = socket.socketpair()
        self._bell.setblocking(False)

    def wait(self, seconds: float) -> Collection[str] | None:
        """The payloads of the notifications that came within ``seconds``; None: some may have been missed.

        LockBackendError if there is no connecting.
        """
        if self.generation != process.generation:
            self._reset()
        try:
            with self._in_use:
                return self._wait(seconds)
        except (SessionLost, NoAnswer) as error:
            self._drop()
            raise LockBackendError(
                f"The session that listens on the database {self.alias!r} failed: {error}"
            ) from driver_error(error)
        finally:
            if self._stop:
                self.stop()

    def _wait(self, seconds: float) -> Collection[str] | None:
        session = self._session
        if session is not None and not session.look():
            self._drop()
            session = None
        if session is None:
            deadline = clock.now() + CONNECT_SECONDS
            session = self._session = Session(self.alias, deadline, fallback_application_name="angee_jobs waiting")
            if not session.direct and not self.through_pooler:
                # It would be the server's connection that listens, whoever is its next client.
                self._drop()
                raise LockBackendError(f"Nothing can be heard through the pooler in front of {self.alias!r}")
            session.execute(self._listen, (), deadline)
            return None  # what was sent before now has not been heard
        end = clock.now() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(session.fileno(), selectors.EVENT_READ)
            selector.register(self._ear, selectors.EVENT_READ)
            while not session.notifications and (left := end - clock.now()) > 0:
                ready = [key.fileobj for key, _ in selector.select(left)]
                if self._ear in ready:
                    self._ear.recv(4096)
                    return ()
                if ready and not session.look():
                    raise SessionLost("the server has closed the connection", sent=False)
        heard, session.notifications = session.notifications, []
        return [payload for _, payload in heard]

    def stop(self) -> None:
        """Close the session, and let :meth:`wait` return at once. It may be called again later."""
        if self.generation != process.generation:
            return
        self._stop = True
        if self._in_use.acquire(blocking=False):
            try:
                self._stop = False
                self._drop()
            finally:
                self._in_use.release()
        else:  # whoever is in there closes it
            with contextlib.suppress(OSError):
                self._bell.send(b"x")

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
