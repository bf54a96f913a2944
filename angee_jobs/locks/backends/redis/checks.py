"""What ``manage.py check`` says of a Redis backend: of the settings always, of the server with ``--deploy`` only."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from django.core.checks import CheckMessage, Error, Warning

from ... import clock
from ...errors import LockBackendError
from .connection import ErrorReply, Garbled, pack
from .pool import refusal_of

if TYPE_CHECKING:
    from .backend import RedisLockBackend

#: How long the server may take for all questions, in seconds.
TIMEOUT = 5.0
_PROBE = "angee:check:probe"
_RIGHTS = (
    "Locks need EVAL, EVALSHA and the commands of their scripts. With an ACL, give the user "
    "+@scripting +@string +@sortedset +del +exists +time and its keys; the documentation has the line."
)
_LOGIN = (
    "The server answered, and let nobody in: look at the user and the password in LOCATION. A user with an "
    "ACL needs +auth +hello +client|setinfo, and +select where the URL names a database."
)
#: What to do about an error reply, by its first word, where that is not about the user's rights.
_REMEDIES = {
    "MOVED": "The server is a node of a Redis Cluster, which moves keys between its nodes, and a lock must stay on "
    "one. Give locks a cache of their own on a server outside of the cluster.",
    "CLUSTERDOWN": "The server is a node of a Redis Cluster that is not whole, and a lock must stay on one server. "
    "Give locks a cache of their own on a server outside of the cluster.",
    "READONLY": "The server is a replica, and locks are written on the primary: name that one in LOCATION, first if "
    "there are several, or let Sentinels name it (django-redis' SentinelConnectionFactory).",
    "MASTERDOWN": "The server is a replica that has lost its primary: name the primary in LOCATION.",
    "OOM": "The server's memory is full, so that no lock can be taken, while locks that are held are still renewed "
    "and released. Raise its maxmemory, remove what fills it, or give locks a server of their own.",
    "MISCONF": "The server cannot save its data, and accepts no writes until it can: its log says why (often a full "
    "disk or a directory that it may not write). If it has nothing but locks: stop-writes-on-bgsave-error no.",
    "NOREPLICAS": "The server accepts writes only with enough replicas (min-replicas-to-write): bring them back, or "
    "lower that number.",
    "LOADING": "The server has just started and is reading its data: run the check again soon.",
    "BUSY": "A script of another client has kept the server busy for seconds: SCRIPT KILL ends it.",
    "NOAUTH": _LOGIN,
    "WRONGPASS": _LOGIN,
    "WRONGTYPE": "Something else has written to the keys of the locks: delete what has the prefix that the message "
    "names, or give the cache of the locks a KEY_PREFIX of its own.",
}


def check_configuration(backend: RedisLockBackend) -> list[CheckMessage]:
    problem = backend.cache.problem()
    if problem is None:
        return []
    return [Error(f"The lock backend {backend.alias!r}: {problem.text}", hint=problem.hint, id=problem.id)]


def check_server(backend: RedisLockBackend) -> list[CheckMessage]:
    if backend.cache.problem() is not None:
        return []  # told by check()
    deadline = clock.now() + TIMEOUT
    where = f"The lock backend {backend.alias!r}"
    try:
        return _check_scripts(backend, where, deadline) or _check_rest(backend, where, deadline)
    except LockBackendError as error:
        hint = "Run the check where the server can be reached; nothing is known about it now."
        if "max number of clients" in str(error):
            hint = "The server has as many clients as its maxclients allows: raise that, or close some of them."
        elif refusal_of(error.__cause__):
            hint = _remedy(error, _LOGIN)
        return [Warning(f"{where}: {error}", hint=hint, id="angee_jobs.W022")]


def _remedy(error: LockBackendError, otherwise: str) -> str:
    """What to do about the error reply that is its cause."""
    return _REMEDIES.get(str(error.__cause__).partition(" ")[0], otherwise)


def _check_scripts(backend: RedisLockBackend, where: str, deadline: float) -> list[CheckMessage]:
    """Take a lock, look whether it is listed, and release it."""
    owner = secrets.token_hex(16)
    name = f"{_PROBE}:{owner[:8]}"
    listed: object = None
    try:
        try:
            if backend.acquire(name, owner, 1.0, "", deadline) is not None:
                index = f"{backend.prefix}index".encode()
                listed, _ = backend.connections.ask(pack(b"ZREM", index, name.encode()), deadline)
        finally:
            backend.release(name, owner, deadline)
    except LockBackendError as error:
        if f"{backend.cache} refused to " in str(error):  # not the login, nor the connection
            return [Error(f"{where}: {error}", hint=_remedy(error, _RIGHTS), id="angee_jobs.E023")]
        raise
    if listed == 1:
        return []
    hint = _REMEDIES["WRONGTYPE"] if isinstance(listed, ErrorReply) and listed.code == "WRONGTYPE" else _RIGHTS
    message = f"{where}: locks can be taken, but cannot be listed or reaped by {backend.prefix}index"
    return [
        Error(f"{message}: {listed}" if isinstance(listed, ErrorReply) else message, hint=hint, id="angee_jobs.E023")
    ]


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
    connection = backend.connections.open(deadline)  # of its own: subscribed, it is of no other use
    try:
        connection.send(pack(b"SUBSCRIBE", channel), deadline)
        replies.append(connection.read(deadline))
    except (OSError, Garbled) as error:
        raise LockBackendError(f"{backend.cache} gave no answer: {error}") from error
    finally:
        connection.close()
    return any(isinstance(reply, ErrorReply) for reply in replies)
