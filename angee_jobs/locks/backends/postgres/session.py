"""A private session with PostgreSQL, driven below the driver's cursors, with a deadline for everything.

Neither Django's connection (its framework closes it, and a caller's transaction may be open on it) nor psycopg's
``execute`` (which waits for ever for a server that hangs) can carry a lock. So a :class:`Session` is a bare libpq
connection made from the alias's parameters, whose socket is waited for here.

An exception may strike in mid-query: the deadline's, or a signal handler's. The session then stays *busy*: the answer
is on its way. It is read before anything else is sent (:meth:`Session.drain`), since dropping the connection would
neither stop the request nor tell what became of it.

A signal handler that uses locks may interrupt a thread in the middle of a request and use the same session: it reads
the outer request's answer on the outer request's behalf, and the outer frame finds itself done.
"""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ... import clock, process
from .connecting import hosts_of, shares
from .errors import NoAnswer, SessionLost, operational_error
from .parameters import SESSION_DEFAULTS, database_name
from .sockets import wait_for
from .statements import PIPELINE_SYNC, Parameter, Request, Row, Statement, literally, message_of, rows_of

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn

#: How long a request waits before it looks whether a signal handler has read its answer for it, in seconds.
_SLICE_SECONDS = 0.05

# libpq's constants, here as integers so that this module can be imported without the driver.
_CONNECTION_BAD = 1
_POLLING_FAILED, _POLLING_READING, _POLLING_WRITING, _POLLING_OK = range(4)
_TRANSACTION_ACTIVE = 1


class Session:
    """One connection. Used by one thread at a time, which the owner of the session sees to.

    ``settings`` are made on the server's side for as long as the session lives, on a direct connection; where a
    pooler is in between, nothing is left on the server's connection, which may be another client's next.
    """

    def __init__(
        self,
        alias: str,
        deadline: float,
        settings: dict[str, str] | None = None,
        forced: dict[str, str] | None = None,
        **extra: str,
    ) -> None:
        """Connect, within the deadline.

        ``extra``: parameters for libpq where the user has not set them; ``forced``: also where they have.
        """
        self.alias = alias
        self.database = database_name(alias)
        self.generation = process.generation
        self.pending: Request | None = None
        self.direct = False
        #: The server's process at the time of connecting; behind a pooler it may change.
        self.server_pid = 0
        self.in_recovery = False
        self.notifications: list[tuple[str, str]] = []
        self._pgconn: PGconn | None = None
        #: The name of each statement that was used here before; empty until it was worth preparing.
        self._prepared: dict[Statement, bytes] = {}
        #: Whether several statements are sent as one request, and whether its end, a "sync", has been.
        self._pipelined = self._synced = False
        self._epoch = 0
        self._poll: Any = None
        self._prefix = b""
        _sessions[id(self)] = self
        try:
            self._connect_somewhere(deadline, settings or {}, extra, forced or {})
        except BaseException:
            self.close()
            raise

    def _connect_somewhere(
        self, deadline: float, settings: dict[str, str], extra: dict[str, str], forced: dict[str, str]
    ) -> None:
        """Connect to the first host that answers. Each has its share of the time, however silent it is."""
        failures: list[SessionLost | NoAnswer] = []
        hosts, role = hosts_of(self.alias, extra, forced, deadline)
        for host, host_deadline in shares(hosts, deadline):
            try:
                for address, limit in shares(host.addresses(host_deadline), host_deadline):
                    try:
                        self._connect(address, limit, settings, role)
                        return
                    except (SessionLost, NoAnswer) as error:
                        failures.append(error)
                        self._hang_up()
            except (SessionLost, NoAnswer) as error:
                failures.append(error)
        if len(failures) == 1 or all(isinstance(each, NoAnswer) for each in failures):
            raise failures[-1]
        raise SessionLost("; ".join(dict.fromkeys(map(str, failures))), sent=False) from failures[-1].__cause__

    def _connect(self, address: bytes, deadline: float, settings: dict[str, str], role: str | None) -> None:
        from psycopg import pq

        pgconn = self._pgconn = pq.PGconn.connect_start(address)
        while True:
            state = _POLLING_FAILED if pgconn.status == _CONNECTION_BAD else pgconn.connect_poll()
            if state == _POLLING_OK:
                break
            if state not in (_POLLING_READING, _POLLING_WRITING):
                raise SessionLost(message_of(pgconn), sent=False)
            reading = state == _POLLING_READING
            if not wait_for(pgconn.socket, deadline - clock.now(), reading=reading, writing=not reading):
                raise NoAnswer(sent=False)
        pgconn.nonblocking = 1
        self._set_up(pgconn, deadline, settings, role)

    def _set_up(self, pgconn: PGconn, deadline: float, settings: dict[str, str], role: str | None) -> None:
        """Find out whether this is a direct connection and make it ours, in one round trip."""
        version = pgconn.server_version
        wanted = {name: value for name, (value, since) in SESSION_DEFAULTS.items() if version >= since} | settings
        if role:
            wanted["role"] = role
        parameters: list[Parameter] = [pgconn.backend_pid]
        calls = []
        for name, value in wanted.items():
            parameters += [name, value]
            calls.append(f"set_config(${len(parameters) - 1}::text, ${len(parameters)}::text, false)")
        # libpq is told the server's process by its peer. Where that is not the server, it is a pooler.
        sql = (
            f"SELECT pg_backend_pid(), pg_is_in_recovery(), "
            f"CASE WHEN pg_backend_pid() = $1::int THEN concat({', '.join(calls)}) END"
        )
        try:
            [(pid, recovery, _)] = self.execute(Statement(sql), parameters, deadline)
        except NoAnswer:
            raise NoAnswer(sent=False) from None
        assert pid is not None
        self.server_pid = int(pid)
        self.in_recovery = recovery == b"t"
        self.direct = self.server_pid == pgconn.backend_pid
        if not self.direct:
            # Sent along with each statement, in one implicit transaction, after which nothing of it is left.
            self._prefix = (
                b"SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = 0; "
                b"SET LOCAL synchronous_commit = on; "
            )
            if role:
                from psycopg import pq

                self._prefix += b"SET LOCAL ROLE %s; " % bytes(pq.Escaping(pgconn).escape_identifier(role.encode()))

    # Requests.

    @property
    def open(self) -> bool:
        """Whether the connection was alive when it was used last; :meth:`look` asks the socket."""
        return self._pgconn is not None and self._pgconn.status != _CONNECTION_BAD

    @property
    def busy(self) -> bool:
        """Whether an answer is outstanding."""
        return self._pgconn is not None and self._pgconn.transaction_status == _TRANSACTION_ACTIVE

    @property
    def pending_owner(self) -> str | None:
        """Whose request is not answered yet: empty for one that is about no hold; None if there is none."""
        pending = self.pending
        return pending.owner if self.busy and pending is not None else None

    @property
    def waits_since(self) -> float | None:
        """Since when an answer is outstanding; None if there is none."""
        pending = self.pending
        return pending.since if self.busy and pending is not None else None

    def execute(
        self, statement: Statement, parameters: Sequence[Parameter], deadline: float, owner: str = ""
    ) -> list[Row]:
        """The rows of one statement. Raises SessionLost, NoAnswer, or psycopg's error if the server refused it."""
        if self.busy:
            try:
                self.drain(deadline)
            except NoAnswer:
                raise NoAnswer(sent=False) from None
            except SessionLost as error:
                raise SessionLost(str(error), sent=False) from error.__cause__
        if not self.look():
            raise SessionLost("the server has closed the connection", sent=False)
        request = Request(owner)
        outer, self.pending = self.pending, request
        self._send(statement, parameters, deadline)
        self._read(request, deadline)
        self.pending = outer
        return rows_of(request.results)

    def drain(self, deadline: float) -> None:
        """Read the answer to what was interrupted or not answered in time."""
        while self.busy:
            if self._pipelined and not self._synced:
                self._sync()  # interrupted before it: without a sync there would never be an answer
            request = self.pending
            if request is None or request.done:
                request = self.pending = Request()
            self._read(request, deadline)

    def look(self) -> bool:
        """Take what has come unasked: notifications, or the news that the connection is dead (False)."""
        pgconn = self._pgconn
        if pgconn is None or pgconn.status == _CONNECTION_BAD:
            return False
        try:
            while self._readable(0):
                pgconn.consume_input()
                if self.busy:
                    return True
                self._take_notifications(pgconn)
                if pgconn.status == _CONNECTION_BAD:
                    return False
        except operational_error():
            return False
        return True

    def _send(self, statement: Statement, parameters: Sequence[Parameter], deadline: float) -> None:
        pgconn = self._pgconn
        assert pgconn is not None
        values = [None if value is None else str(value).encode() for value in parameters]
        statements = [statement] if statement.after is None else [statement.after, statement]
        try:
            if not self.direct and self.server_pid:
                literals = [literally(pgconn, each.sql, each.picked(values)) for each in statements]
                pgconn.send_query(self._prefix + b"; ".join(literals))
                return
            if self._pipelined:  # interrupted before anything of it was sent
                self._leave_pipeline(pgconn)
            names = [self._name_prepared(pgconn, each, deadline) for each in statements]
            if len(statements) > 1:
                self._pipelined, self._synced = True, False
                pgconn.enter_pipeline_mode()
            for each, name in zip(statements, names, strict=True):
                if name:
                    pgconn.send_query_prepared(name, each.picked(values))
                else:
                    pgconn.send_query_params(each.sql, each.picked(values))
            if self._pipelined:
                self._sync()
        except NoAnswer:
            raise NoAnswer(sent=False) from None  # the statement was only being prepared
        except operational_error() as error:
            raise SessionLost(str(error), sent=True) from error

    def _name_prepared(self, pgconn: PGconn, statement: Statement, deadline: float) -> bytes:
        """The name under which the server has prepared the statement; empty the first time."""
        name = self._prepared.get(statement)
        if name is None:
            self._prepared[statement] = b""
            return b""
        if not name:  # the second time: worth preparing
            name = b"%s_%d" % (statement.name, self._epoch)
            request, self.pending = self.pending, Request()
            pgconn.send_prepare(name, statement.sql)
            self._read(self.pending, deadline)
            from psycopg.errors import DuplicatePreparedStatement

            try:
                rows_of(self.pending.results)
            except DuplicatePreparedStatement:  # interrupted just after it had been prepared
                pass
            self.pending = request
            self._prepared[statement] = name
        return name

    def _sync(self) -> None:
        assert self._pgconn is not None
        self._pgconn.pipeline_sync()
        self._synced = True

    def _leave_pipeline(self, pgconn: PGconn) -> None:
        pgconn.exit_pipeline_mode()
        self._pipelined = False

    def forget_prepared(self) -> bool:
        """The server has lost, or no longer wants, what was prepared. False if nothing was."""
        if not any(self._prepared.values()):
            return False
        self._prepared.clear()
        self._epoch += 1
        return True

    def _read(self, request: Request, deadline: float) -> None:
        """Wait for the whole answer. What comes is kept in ``request``, no matter which thread reads it."""
        pgconn = self._pgconn
        if pgconn is None:
            raise SessionLost("the session was closed", sent=True)
        try:
            while pgconn.flush():
                if not wait_for(pgconn.socket, deadline - clock.now(), writing=True):
                    raise NoAnswer(sent=True)
                pgconn.consume_input()
            while not request.done:
                if pgconn.is_busy():
                    left = deadline - clock.now()
                    if self._readable(left if left < _SLICE_SECONDS else _SLICE_SECONDS):
                        pgconn.consume_input()
                    elif left <= _SLICE_SECONDS and not request.done:
                        raise NoAnswer(sent=True)
                    continue
                result = pgconn.get_result()
                if result is not None and result.status != PIPELINE_SYNC:
                    request.results.append(result)
                elif not self._pipelined or pgconn.status == _CONNECTION_BAD:
                    request.done = True
                elif result is not None and pgconn.transaction_status != _TRANSACTION_ACTIVE:
                    self._leave_pipeline(pgconn)
                    request.done = True
        except operational_error() as error:
            raise SessionLost(str(error), sent=True) from error
        if pgconn.status == _CONNECTION_BAD:
            raise SessionLost(message_of(pgconn, request.results), sent=True)
        if pgconn.transaction_status > _TRANSACTION_ACTIVE:
            # No statement of ours opens a transaction; one of another would keep a snapshot and locks.
            raise SessionLost("the session is in a transaction", sent=True)
        self._take_notifications(pgconn)

    def _readable(self, seconds: float) -> bool:
        """Wait until something has come; False after ``seconds``."""
        # One object for all requests, but never two calls of it at once: a signal handler makes its own.
        poll, self._poll = self._poll, None
        if poll is None:
            assert self._pgconn is not None
            if not hasattr(select, "poll"):  # Windows
                return wait_for(self._pgconn.socket, seconds)
            poll = select.poll()
            poll.register(self._pgconn.socket, select.POLLIN)
        try:
            return bool(poll.poll(seconds * 1000 if seconds > 0 else 0))
        finally:
            self._poll = poll

    def _take_notifications(self, pgconn: PGconn) -> None:
        while (notification := pgconn.notifies()) is not None:
            self.notifications.append((notification.relname.decode(), notification.extra.decode()))

    def fileno(self) -> int:
        """The socket, for those who wait for notifications."""
        assert self._pgconn is not None
        return self._pgconn.socket

    # The end.

    def close(self) -> None:
        """Close the connection. A session that was inherited by a fork is the parent's, and is only forgotten."""
        process.check()
        _sessions.pop(id(self), None)
        self._hang_up()

    def _hang_up(self) -> None:
        pgconn, self._pgconn = self._pgconn, None
        self.pending, self._poll = None, None
        self._pipelined = False
        self._prepared.clear()
        if pgconn is not None and self.generation == process.generation:
            pgconn.finish()

    def _park(self) -> None:
        """In a forked child: let go of the parent's socket without a word to the server.

        Were it left open, the server would not see the parent's death as long as the child lives.
        """
        pgconn, self._pgconn = self._pgconn, None
        _parked.append(pgconn)
        try:
            fd = pgconn.socket if pgconn is not None else -1
        except Exception:  # still being connected, or dead
            return
        if fd >= 0:
            os.close(fd)  # first, so that there is a descriptor left for what takes its place
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != fd:
                os.dup2(nowhere, fd, inheritable=False)
                os.close(nowhere)


#: Every session of this process that is open, for the fork; and what a fork left, which must never be finalized.
_sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
_parked: list[object] = []


def _after_fork() -> None:
    for session in list(_sessions.values()):
        session._park()
    _sessions.clear()


process.on_fork(in_child=_after_fork)
