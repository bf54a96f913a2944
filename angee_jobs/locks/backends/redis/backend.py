"""Leases on a Redis or Valkey server that the project has as a cache.

Every operation is one script of ``lua/``, which runs at the server in one piece. What is stored, below one prefix:

* ``hold:<name>``: one hold, a string; its form is explained in ``lua/acquire.lua``. Shared and placed holds have more
  such strings, ``members:<name>`` and, for a while, ``wanted:<name>``: see ``lua/members.lua``
* ``index``: a sorted set, the names of the holds by the time of their end, so that a list need not search the server
* ``token``: the last fencing token that was given out, one for all locks
* ``gone:<digest of an owner>``: a tombstone, for a minute. It refuses a late acquire by an owner that gave up, or
  whose hold has ended; see ``lua/release.lua``

The server knows the digest of an owner id only: to read it there, or in a slow log, is not enough to release a hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ... import clock, process
from ...errors import LockBackendError
from ...types import Seconds, lease_seconds
from ..base import (
    ALONE,
    MOST_PLACES,
    OPERATION_SECONDS,
    SHARED,
    WANTED_SECONDS,
    BaseLockBackend,
    Extension,
    Grant,
    Record,
    extend_each_kind,
    is_member,
    owner_digest,
    places_of,
)
from .answers import HEAD, Answers, member_place
from .cache import CacheAlias
from .connection import Script
from .pool import Connections
from .watcher import Watcher

if TYPE_CHECKING:
    from django.core.checks import CheckMessage

#: A request that was given up may still be carried out for so long, in milliseconds. Generous: it is about one that
#: lies in the server's buffers, and may be read after one that was sent later.
GONE_MS = b"60000"
#: So many unanswered requests are remembered. Each is released soon, so there are never many.
UNANSWERED_MOST = 10_000
#: How many holds one page of a list has.
PAGE = 500
#: How many holds a scan looks at in one request, which takes the server a few milliseconds.
SCAN = 1000
#: For projects without a reaper: each so many releases remove what crashed holders left so many seconds ago.
LEFTOVER_SECONDS = 24 * 3600.0
TIDY_EVERY = 1000
#: How long that may keep a release from returning.
TIDY_SECONDS = 0.5

_ACQUIRE = Script("acquire", "token")
_EXTEND = Script("extend")
_RELEASE = Script("release")
_ADOPT = Script("adopt")
_INSPECT = Script("inspect")
_LIST_EXPIRED = Script("list_expired")
_SCAN_HELD = Script("scan_held")
_INSPECT_MANY = Script("inspect_many", "members")
_REAP = Script("reap")
_FORCE_RELEASE = Script("force_release")
_REMAINING = Script("remaining", "members")
_JOIN = Script("join", "members", "token")
_LEAVE = Script("leave", "members")
_EXTEND_MEMBERS = Script("extend_members", "members")
_ADOPT_MEMBER = Script("adopt_member", "members")
_FORCE_LEAVE = Script("force_leave", "members")

#: What stands in place of the owner where the key has shared or placed holds, and between its name and the id of one.
_GATE = b"-" * 64
_MEMBER = b"\x01"


def _digest(owner: str) -> bytes:
    return owner_digest(owner).encode()


def _is_shared(owner: str) -> bytes:
    return b"1" if places_of(owner) == SHARED else b"0"


def _micros(seconds: float) -> bytes:
    return b"%d" % int(seconds * 1e6)


@dataclasses.dataclass(frozen=True, slots=True)
class _Keys:
    """What the server's keys begin with, or are."""

    prefix: str
    hold: bytes
    index: bytes
    token: bytes
    gone: bytes
    channel: bytes
    members: bytes
    wanted: bytes

    @classmethod
    def below(cls, prefix: str) -> _Keys:
        kinds = ("hold:", "index", "token", "gone:", "free:", "members:", "wanted:")
        return cls(prefix, *(f"{prefix}{each}".encode() for each in kinds))


class RedisLockBackend(BaseLockBackend):
    """Leases on the server of ``cache``, an alias of ``CACHES``; ``ttl`` is the length of a lease in seconds.

    The cache may be one of django-redis or Django's own, on a single server (or the primary that Sentinels name):
    Redis 5 or newer, or Valkey. Waiters are woken by a release. What a fail-over or an eviction means for a lock is
    in the documentation.

    Example::

        ANGEE_JOBS_LOCKS = {
            "default": {
                "BACKEND": "angee_jobs.locks.RedisLockBackend",
                "OPTIONS": {"cache": "default", "ttl": 60},
            },
        }
    """

    most_places = MOST_PLACES

    def __init__(self, *, cache: str = "default", ttl: Seconds = 30) -> None:
        self.ttl = lease_seconds(ttl)
        self.cache = CacheAlias(cache)
        self.answers = Answers(self.cache)
        self.connections = Connections(self.cache)
        self.watcher = Watcher(self.connections, self.cache.prefix)
        self._known_keys: _Keys | None = None
        self._until_tidy = TIDY_EVERY
        #: The owners whose request to acquire has not been answered, or not at the first time: it may still come.
        self._unanswered: dict[str, None] = {}

    @property
    def prefix(self) -> str:
        return self._keys().prefix

    def _keys(self) -> _Keys:
        """Made once. In a test run the prefix is looked at each time, since the test database is made at some time."""
        keys = self._known_keys
        if keys is None or process.in_test_run():
            prefix = self.cache.prefix()
            if keys is None or keys.prefix != prefix:
                keys = self._known_keys = _Keys.below(prefix)
        return keys

    # The operations.

    def acquire(self, name: str, owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        digest, lock, at = _digest(owner), name.encode(), self._keys()
        script, keys = _ACQUIRE, [at.hold + lock, at.index, at.token, at.gone + digest]
        args = [lock, digest, _micros(ttl), holder.encode()]
        if is_member(owner):
            script = _JOIN
            keys += [at.members + lock, at.wanted + lock]
            args += [b"%d" % places_of(owner), at.hold + lock + _MEMBER]
        self._note_unanswered(owner)
        try:
            reply, repeated = self.connections.run(script, keys, args, deadline)
        except LockBackendError as error:
            if not error.uncertain:
                self._unanswered.pop(owner, None)
            raise
        if repeated and reply == 0:
            # The first request may still lie in something between us and the server, and would be granted once the
            # lock is free: to an owner that does not exist any more, and for a whole ttl.
            self.release(name, owner, deadline)
            return None
        if not repeated:
            self._unanswered.pop(owner, None)
        return None if reply == 0 else self.answers.grant(reply)

    def _note_unanswered(self, owner: str) -> None:
        self._unanswered[owner] = None
        if len(self._unanswered) > UNANSWERED_MOST:  # of a caller that never releases
            self._unanswered.pop(next(iter(list(self._unanswered))), None)

    def extend(self, extensions: Sequence[Extension], deadline: float) -> Collection[str]:
        return extend_each_kind(
            extensions,
            lambda batch: self._extend(_EXTEND, batch, deadline),
            lambda batch: self._extend(_EXTEND_MEMBERS, batch, deadline),
        )

    def _extend(self, script: Script, batch: Sequence[Extension], deadline: float) -> Collection[str]:
        at = self._keys()
        keys, args = [at.index], []
        for each in batch:
            lock = each.name.encode()
            keys.append(at.hold + lock)
            args += [lock, _digest(each.owner), _micros(each.ttl)]
            if script is _EXTEND_MEMBERS:
                keys.append(at.members + lock)
                args += [_is_shared(each.owner), at.hold + lock + _MEMBER]
        reply, _ = self.connections.run(script, keys, args, deadline)
        if not isinstance(reply, bytes) or len(reply) != len(batch) or reply.strip(b"01"):
            raise self.answers.odd(reply)
        return [each.owner for each, extended in zip(batch, reply, strict=True) if extended == ord("1")]

    def release(self, name: str, owner: str, deadline: float) -> bool:
        digest, lock, at = _digest(owner), name.encode(), self._keys()
        script, keys = _RELEASE, [at.hold + lock, at.index, at.gone + digest]
        gone_ms = GONE_MS if owner in self._unanswered else b"0"
        args = [lock, digest, at.channel + lock, gone_ms]
        if is_member(owner):
            script = _LEAVE
            keys += [at.members + lock, at.wanted + lock]
            args += [_is_shared(owner), at.hold + lock + _MEMBER]
        reply, repeated = self.connections.run(script, keys, args, deadline)
        self._unanswered.pop(owner, None)
        if reply == 0 and repeated:
            # Released by the first request, or lost before: neither may be claimed.
            raise LockBackendError(
                f"{self.cache} broke the connection during the release of {name}, which is free or was lost",
                name=name,
                uncertain=True,
            )
        released = self.answers.number(reply) == 1
        self._until_tidy -= 1
        if self._until_tidy <= 0:
            self._until_tidy = TIDY_EVERY
            with contextlib.suppress(Exception):  # the release is done, and does not fail any more
                self.reap(LEFTOVER_SECONDS, TIDY_EVERY, min(deadline, clock.now() + TIDY_SECONDS))
        return released

    def adopt(self, name: str, owner: str, new_owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        lock, at = name.encode(), self._keys()
        script, keys = _ADOPT, [at.hold + lock, at.index]
        args = [lock, _digest(owner), _digest(new_owner), _micros(ttl), holder.encode()]
        if is_member(owner):
            script = _ADOPT_MEMBER
            keys.append(at.members + lock)
            args += [_is_shared(owner), at.hold + lock + _MEMBER]
        reply, _ = self.connections.run(script, keys, args, deadline)
        return None if reply == 0 else self.answers.grant(reply)

    def inspect(self, name: str, deadline: float) -> Record | None:
        reply, _ = self.connections.run(_INSPECT, (self._keys().hold + name.encode(),), (), deadline)
        if isinstance(reply, list) and len(reply) == 2 and isinstance(reply[1], bytes) and reply[1][48:112] == _GATE:
            return next(iter(self.inspect_many([name], deadline)), None)
        return self.answers.record_of(name, reply)

    def list_held(self, deadline: float) -> Iterator[Record]:
        for now, names, heads, holders in self._scan(deadline, holders=True):
            for name, head, holder in zip(names, heads, holders, strict=True):
                yield self.answers.described(name, head, holder, now)

    def scan_held(self, fields: Sequence[str], deadline: float) -> Iterator[Sequence[tuple[Any, ...]]]:
        for now, names, heads, holders in self._scan(deadline, holders="holder" in fields):
            columns: list[Sequence[Any]] = [[name.partition("\x01")[0] for name in names]]
            for field in fields:
                if field == "holder":
                    columns.append(holders)
                elif field == "acquired_at":
                    columns.append([int(head[32:]) / 1e6 for head in heads])
                elif field == "expires_in":
                    columns.append([(int(head[:16]) - now) / 1e6 for head in heads])
                elif field == "place":
                    columns.append([member_place(name.partition("\x01")[2]) for name in names])
                else:
                    columns.append([int(head[16:32]) for head in heads])
            yield [*zip(*columns, strict=True)]

    def _scan(
        self, deadline: float, *, holders: bool
    ) -> Iterator[tuple[int, Sequence[str], Sequence[str], Sequence[str]]]:
        """Read holds in parts: the time, names, heads, and the holders if they are wanted.

        In the order of their ends, so that those that have ended need not be passed. A hold only ever moves further on
        meanwhile, so none is left out. Each part begins with the end of the last one, since many may end at once.
        """
        at = self._keys()
        seen: set[str] = set()
        what = b"holder" if holders else b""
        since, most = b"", SCAN
        while True:
            args = (since, b"%d" % most, at.hold, what)
            reply, _ = self.connections.run(_SCAN_HELD, (at.index,), args, deadline)
            if not isinstance(reply, list) or len(reply) != 4 or not all(isinstance(part, bytes) for part in reply[2:]):
                raise self.answers.odd(reply)
            now, looked_at = self.answers.time(reply[0]), self.answers.number(reply[1])
            flat, step = self.answers.texts(reply[3]), 3 if holders else 2
            names, heads = flat[::step], flat[1::step]
            if len(flat) % step or not all(len(head) == HEAD and head.isascii() and head.isdigit() for head in heads):
                raise self.answers.odd(reply)
            texts = flat[2::step] if holders else [""] * len(names)
            fresh = [at for at, name in enumerate(names) if name not in seen]
            if len(fresh) < len(names):
                names, heads, texts = ([column[at] for at in fresh] for column in (names, heads, texts))
            seen.update(names)
            yield now, names, heads, texts
            if looked_at < most:
                return
            most = 2 * most if reply[2] == since else SCAN
            since = reply[2]
            deadline = max(deadline, clock.now() + OPERATION_SECONDS)

    def inspect_many(self, names: Sequence[str], deadline: float) -> list[Record]:
        at, locks = self._keys(), [name.encode() for name in names]
        keys = [key for lock in locks for key in (at.hold + lock, at.members + lock)]
        args = [arg for lock in locks for arg in (lock, at.hold + lock + _MEMBER)]
        reply, _ = self.connections.run(_INSPECT_MANY, keys, args, deadline)
        return self.answers.page(reply)[1]

    def list_expired(self, grace: float, deadline: float) -> Iterator[Record]:
        skip, at = 0, self._keys()
        while True:
            args = (_micros(grace), b"%d" % skip, b"%d" % PAGE, at.hold)
            reply, _ = self.connections.run(_LIST_EXPIRED, (at.index,), args, deadline)
            looked_at, records = self.answers.page(reply)
            yield from records
            if self.answers.number(looked_at) < PAGE:
                return
            skip += PAGE
            deadline = max(deadline, clock.now() + OPERATION_SECONDS)

    def reap(self, grace: float, batch_size: int, deadline: float) -> int:
        removed, at = 0, self._keys()
        while removed < batch_size:
            wanted = batch_size - removed
            args = (_micros(grace), b"%d" % wanted, at.hold, at.members)
            reply, _ = self.connections.run(_REAP, (at.index,), args, deadline, again=False)
            if not isinstance(reply, list) or len(reply) != 2:
                raise self.answers.odd(reply)
            removed += self.answers.number(reply[1])
            if self.answers.number(reply[0]) < wanted:
                break
        return removed

    def force_release(self, name: str, deadline: float, fencing_token: int | None = None) -> Record | None:
        lock, at = name.encode(), self._keys()
        token = b"" if fencing_token is None else b"%016d" % fencing_token
        args = (lock, at.channel + lock, token)
        keys: tuple[bytes, ...] = (at.hold + lock, at.index)
        reply, _ = self.connections.run(_FORCE_RELEASE, keys, args, deadline, again=False)
        if reply == 1:
            more = (*args, at.hold + lock + _MEMBER)
            keys = (*keys, at.members + lock, at.wanted + lock)
            reply, _ = self.connections.run(_FORCE_LEAVE, keys, more, deadline, again=False)
            if isinstance(reply, list) and len(reply) == 3 and isinstance(reply[1], bytes):
                return self.answers.record(reply[1].decode(errors="replace"), reply[2], self.answers.time(reply[0]))
        return self.answers.record_of(name, reply)

    def remaining(self, name: str, deadline: float, places: int = ALONE) -> float | None:
        self.watcher.want(name)
        lock, at = name.encode(), self._keys()
        word = min(WANTED_SECONDS, deadline - clock.now())
        args = (b"%d" % places, b"%d" % max(1, int(word * 1000)))
        keys = (at.hold + lock, at.members + lock, at.wanted + lock)
        reply, _ = self.connections.run(_REMAINING, keys, args, deadline)
        micros = self.answers.number(reply)
        return micros / 1e6 if micros > 0 else None

    def wait_for_change(self, seconds: float) -> Collection[str] | None:
        return self.watcher.wait(seconds)

    def stop_watching(self) -> None:
        self.watcher.stop()

    def close(self) -> None:
        self.connections.close()

    # System checks.

    def check(self) -> list[CheckMessage]:
        from .checks import check_configuration

        return check_configuration(self)

    def check_deployment(self) -> list[CheckMessage]:
        from .checks import check_server

        return check_server(self)
