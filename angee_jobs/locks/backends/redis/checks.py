"""What ``manage.py check`` says of a Redis backend: of the settings always, of the server with ``--deploy`` only."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from django.core.checks import CheckMessage, Error, Warning

from ... import clock
from ...errors import LockBackendError
from .connection import ErrorReply, pack

if TYPE_CHECKING:
    from .backend import RedisLockBackend

#: How long the server may take for all questions, in seconds.
PATIENCE = 5.0
_PROBE = "angee:check:probe"


def check_configuration(backend: RedisLockBackend) -> list[CheckMessage]:
    problem = backend.cache.problem()
    if problem is None:
        return []
    return [Error(f"The lock backend {backend.alias!r}: {problem.text}", hint=problem.hint, id=problem.id)]


def check_server(backend: RedisLockBackend) -> list[CheckMessage]:
    if backend.cache.problem() is not None:
        return []  # told by check()
    deadline = clock.now() + PATIENCE
    where = f"The lock backend {backend.alias!r}"
    try:
        return [*_check_scripts(backend, where, deadline), *_check_rest(backend, where, deadline)]
    except LockBackendError as error:
        hint = "Run the check where the server can be reached; nothing is known about it now."
        if _refused(error):
            hint = (
                "The server answered, and let nobody in: look at the user and the password in LOCATION. A user with an "
                "ACL needs +auth +hello +client|setinfo, and +select where the URL names a database."
            )
        return [Warning(f"{where}: {error}", hint=hint, id="angee_jobs.W022")]


def _refused(error: LockBackendError) -> bool:
    """Whether the driver met an answer that says no, instead of silence."""
    from redis.exceptions import AuthenticationError, ResponseError

    return isinstance(error.__cause__, AuthenticationError | ResponseError)


def _check_scripts(backend: RedisLockBackend, where: str, deadline: float) -> list[CheckMessage]:
    """Take a lock, and give it up."""
    owner = secrets.token_hex(16)
    name = f"{_PROBE}:{owner[:8]}"
    try:
        try:
            backend.acquire(name, owner, 1.0, "", deadline)
        finally:
            backend.release(name, owner, deadline)
    except LockBackendError as error:
        if _refused(error):
            return [
                Error(
                    f"{where}: {error}",
                    hint="Locks need EVAL, EVALSHA and the commands of their scripts. With an ACL, give the user "
                    "+@scripting +@string +@sortedset +del +exists +time and its keys; the documentation has the line.",
                    id="angee_jobs.E023",
                )
            ]
        raise
    return []


def _check_rest(backend: RedisLockBackend, where: str, deadline: float) -> list[CheckMessage]:
    problems: list[CheckMessage] = []
    policy = _eviction_policy(backend, deadline)
    if policy.startswith("allkeys-"):
        problems.append(
            Warning(
                f"{where}: the server evicts any key when its memory is full ({policy}), locks too.",
                hint="Set maxmemory-policy to noeviction or one of volatile-*, which leave locks alone, or use "
                "another server for locks.",
                id="angee_jobs.W020",
            )
        )
    if _refuses_channels(backend, deadline):
        problems.append(
            Warning(
                f"{where}: the user may not use the channels of the locks, so that a waiter learns of a release up "
                f"to a second late.",
                hint=f"Give the user +publish +subscribe +unsubscribe +ping &{backend.prefix}free:* in the ACL.",
                id="angee_jobs.W021",
            )
        )
    return problems


def _eviction_policy(backend: RedisLockBackend, deadline: float) -> str:
    """Empty if the server does not tell: managed ones often have no CONFIG, but an INFO."""
    reply, _ = backend.connections.ask(pack(b"CONFIG", b"GET", b"maxmemory-policy"), deadline)
    if isinstance(reply, list) and len(reply) == 2 and isinstance(reply[1], bytes):
        return reply[1].decode(errors="replace")
    reply, _ = backend.connections.ask(pack(b"INFO", b"memory"), deadline)
    if isinstance(reply, bytes):
        for line in reply.decode(errors="replace").splitlines():
            if line.startswith("maxmemory_policy:"):
                return line.partition(":")[2]
    return ""


def _refuses_channels(backend: RedisLockBackend, deadline: float) -> bool:
    channel = backend.watcher.channel(_PROBE)
    replies: list[Any] = [backend.connections.ask(pack(b"PUBLISH", channel, b""), deadline)[0]]
    wire = backend.connections.open(deadline)  # of its own: subscribed, it is of no other use
    try:
        wire.send(pack(b"SUBSCRIBE", channel), deadline)
        replies.append(wire.read(deadline))
    except OSError as error:
        raise LockBackendError(f"{backend.cache} gave no answer: {error}") from error
    finally:
        wire.close()
    return any(isinstance(reply, ErrorReply) for reply in replies)
