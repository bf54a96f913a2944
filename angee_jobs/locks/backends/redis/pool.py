"""The connections of one backend: as many as there are requests at the same time.

They are the locks' own, not those of the cache's pool. So a lock never waits for the cache's traffic to end, and
nothing that the project does to its pool (limits, ``disconnect()``, closing at a request's end) touches one.

A connection is kept for the next request only when its last one was answered in full. Whatever else happened to it, be
it an exception of a signal handler at any instruction, ends it: a pending reply would be taken for the next one's.

No mutex guards any of this, since an exception of a signal handler might leave it locked. ``append``, ``pop`` and
``remove`` are one instruction each, and a connection that is in neither hand when an exception strikes is dropped, and
closed with it.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from ... import clock, process
from ...errors import LockBackendError
from .cache import CacheAlias
from .connection import Connection, ErrorReply, Garbled, Script, connect, driver_error

#: An idle connection is closed after so many seconds.
IDLE_SECONDS = 60.0
#: A caller whose own attempt to connect has failed looks this often whether it may still wait for another connection.
LOOK_SECONDS = 0.1
#: So many attempts to connect may be under way. Each has a thread, which the system's resolver can hold for long.
CONNECTING_MOST = 64
#: Replies that begin so come from a server that is not, or no longer, the one to talk to. Nothing was carried out.
_WRONG_SERVER = ("READONLY", "MASTERDOWN", "LOADING", "NOAUTH")


class _Caller:
    """A thread that waits for a connection."""

    __slots__ = ("answers", "left")

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[Connection | Exception] = queue.SimpleQueue()
        #: It does not wait any more.
        self.left = False


class Connections:
    """See the module."""

    def __init__(self, cache: CacheAlias) -> None:
        self._cache = cache
        self._reset()
        _instances.add(self)

    def _reset(self) -> None:
        """After a fork: drop the parent's. Their descriptors get closed, which does nothing to the parent."""
        self._idle: list[Connection] = []
        #: Who takes the next connection that is given back.
        self._waiting: collections.deque[_Caller] = collections.deque()
        #: What may be given back: every connection that was made for requests.
        self._made: list[weakref.ref[Connection]] = []
        self._connecting: list[_Caller] = []

    def close(self) -> None:
        """Close what is idle now."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def run(
        self, script: Script, keys: Sequence[bytes], args: Sequence[bytes], deadline: float, *, again: bool = True
    ) -> tuple[Any, bool]:
        """The script's answer, and whether it may have been run before, on a connection that broke.

        ``again`` allows that. LockBackendError if there is no answer, or it is an error.
        """
        reply, repeated = self.ask(script.request(keys, args), deadline, again=again)
        if type(reply) is ErrorReply and reply.code == "NOSCRIPT":
            # This server does not know the script; one that broke the connection before may have known it.
            request = script.request(keys, args, by_body=True)
            reply, repeated = self.ask(request, deadline, again=again, sent=repeated)
        if type(reply) is ErrorReply:
            message = f"{self._cache} refused to {script.name}: {reply}"
            raise LockBackendError(message, uncertain=repeated) from driver_error(reply)
        return reply, repeated

    def ask(self, request: bytes, deadline: float, *, again: bool = True, sent: bool = False) -> tuple[Any, bool]:
        """Like run(), for any request. An error reply is returned. ``sent``: the request may have been carried out."""
        process.check()  # a backend that a forked child has kept comes here without passing any other entry point
        started = clock.now()
        connection = self._take()
        is_new = False
        while True:
            if connection is None:
                connection = self._obtain(deadline, uncertain=sent)
                is_new = connection.used_at == 0.0
            repeated, sent = sent, True
            try:
                reply = connection.ask(request, deadline)
            except TimeoutError as error:
                connection.close(abort=True)
                if not is_new:
                    # Swallowed by something in between that has forgotten the connection, maybe. Those that have not
                    # answered since are as old: each would cost another timeout.
                    self._close_older(started)
                raise self._failed(f"gave no answer in time: {error}", uncertain=True) from error
            except (OSError, Garbled) as error:
                connection.close(abort=True)
                if is_new or not again or isinstance(error, Garbled):
                    raise self._failed(f"gave no answer: {error}", uncertain=True) from error
                connection = None  # it may have been dead for long: one more try, on another one
                continue
            except BaseException:
                connection.close(abort=True)
                raise
            if type(reply) is ErrorReply and reply.code in _WRONG_SERVER:
                connection.close()
                self.close()
                if not is_new:  # it was the right one when this connection was made
                    connection, sent = None, repeated
                    continue
            else:
                self._give_back(connection)
            return reply, repeated

    def _take(self) -> Connection | None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.usable():
                return connection
            connection.close()

    def _give_back(self, connection: Connection) -> None:
        while self._waiting:
            try:
                caller = self._waiting.popleft()
            except IndexError:  # another thread was faster
                break
            if not caller.left:
                caller.answers.put(connection)
                return
        idle = self._idle
        idle.append(connection)
        oldest = next(iter(idle), connection)
        if oldest.used_at < connection.used_at - IDLE_SECONDS:
            with contextlib.suppress(ValueError):  # another thread has taken it
                idle.remove(oldest)
                oldest.close()

    def _close_older(self, moment: float) -> None:
        idle = self._idle
        for connection in list(idle):
            if connection.used_at < moment:
                with contextlib.suppress(ValueError):
                    idle.remove(connection)
                    connection.close()

    # New connections.

    def open(self, deadline: float) -> Connection:
        """A new connection for the caller alone."""
        caller = _Caller()
        try:
            self._connect(caller, deadline)
            answer: Connection | Exception = caller.answers.get(timeout=max(0.001, deadline - clock.now()))
        except queue.Empty:
            answer = TimeoutError("not connected in time")
        finally:
            caller.left = True
        if isinstance(answer, Connection):
            return answer
        raise self._not_connected(answer)

    def _obtain(self, deadline: float, *, uncertain: bool) -> Connection:
        """A new connection, or one that another thread gives back meanwhile, whichever comes first.

        Where no new one is to be had (no descriptors, ports, threads or clients of the server are left, no name is
        resolved), the caller waits for one that is in use, as long as there is any. So that costs those who want more
        connections than there are, and no renewal fails for it.
        """
        caller = _Caller()
        error: Exception = TimeoutError("not connected in time")
        try:
            self._waiting.append(caller)
            connection = self._take()  # given back since the caller looked
            if connection is not None:
                return connection
            if len(self._connecting) < CONNECTING_MOST:
                self._connect(caller, deadline, shared=True)
            failed = False
            while (left := deadline - clock.now()) > 0 or not caller.answers.empty():
                try:
                    answer = caller.answers.get(timeout=max(0.001, min(left, LOOK_SECONDS)))
                except queue.Empty:
                    if failed and not self._in_use():
                        break
                    continue
                if isinstance(answer, Exception):
                    failed, error = True, answer
                    if isinstance(answer, ImproperlyConfigured) or not self._in_use():
                        break
                elif answer.usable():
                    return answer
                else:
                    answer.close()
                    self._waiting.append(caller)
        finally:
            caller.left = True
            with contextlib.suppress(ValueError):
                self._waiting.remove(caller)
        raise self._not_connected(error, uncertain=uncertain)

    def _in_use(self) -> bool:
        """Whether a request is under way on a connection that can be given back, or one has just been."""
        connections = [made() for made in list(self._made)]
        return any(connection is not None and not connection.closed for connection in connections)

    def _connect(self, caller: _Caller, deadline: float, *, shared: bool = False) -> None:
        """Answer ``caller`` with a new connection, or with the reason why there is none.

        Connecting is many steps (the look-up of the host, Sentinels, the files of TLS, the password), and not all of
        them know a deadline. So a thread does it, and a caller that has no time left leaves it alone: what it connects
        to after that serves the next request. It also imports the driver, where no signal handler's exception can
        leave a module half-imported.
        """
        idle = self._idle
        made, connecting = self._made, self._connecting

        def run() -> None:
            connecting.append(caller)  # here, where no signal handler's exception can leave it behind
            try:
                with process.importing:
                    pool = self._cache.pool()
                connection = connect(pool, deadline)
            except Exception as error:
                caller.answers.put(error)
                return
            finally:
                with contextlib.suppress(ValueError):
                    connecting.remove(caller)
            if shared:
                made.append(weakref.ref(connection, made.remove))
            if not caller.left:
                caller.answers.put(connection)
            elif self._idle is idle and (self._waiting or not idle):
                connection.used_at = clock.now()
                self._give_back(connection)
            else:  # close() was called meanwhile, or there are enough
                connection.close()

        if not process.start_thread(run, "angee-locks-connecting"):
            run()  # at the interpreter's exit, or the system's limit: with no limit to the look-up of the host

    # Errors.

    def _not_connected(self, error: Exception, *, uncertain: bool = False) -> Exception:
        if isinstance(error, ImproperlyConfigured):
            return error
        what = "cannot be reached in time"
        if type(error) is not TimeoutError:
            what = f"{refusal_of(error) or 'cannot be reached'}: {error}"
        failed = self._failed(what, uncertain=uncertain)
        failed.__cause__ = error
        return failed

    def _failed(self, what: str, *, uncertain: bool) -> LockBackendError:
        return LockBackendError(f"{self._cache} {what}", uncertain=uncertain)


def refusal_of(error: BaseException | None) -> str:
    """What a server that answered has refused, if the driver's ``error`` is about that."""
    exceptions: Any = sys.modules.get("redis.exceptions")
    if exceptions is None:  # the driver could not be imported
        return ""
    login = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError)
    if isinstance(error, login) or str(error).startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
        return "refused the login"
    if isinstance(error, exceptions.ResponseError) or "max number of clients" in str(error):
        return "refused the connection"
    return ""


_instances: weakref.WeakSet[Connections] = weakref.WeakSet()


def _reset_in_child() -> None:
    for connections in list(_instances):
        connections._reset()


process.on_fork(in_child=_reset_in_child)
