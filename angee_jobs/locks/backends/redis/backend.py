"""Leases on a Redis or Valkey server that the project has as a cache.

Every operation is one script of ``lua/``, which runs at the server in one piece. What is stored, below one prefix:

* ``hold:<name>``: one hold, a string; its form is explained in ``lua/acquire.lua``
* ``index``: a sorted set, the names of the holds by the time of their end, so that a list need not search the server
* ``token``: the last fencing token that was given out, one for all locks
* ``gone:<digest of an owner>``: a tombstone, for a minute. It refuses a late acquire by an owner that gave up, or
  whose hold has ended; see ``lua/release.lua``

The server knows the digest of an owner id only: to read it there, or in a slow log, is not enough to release a hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ... import clock, process
from ...errors import LockBackendError
from ...types import Seconds, lease_seconds
from ..base import ALONE, OPERATION_SECONDS, BaseLockBackend, Extension, Grant, Record, owner_digest
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
#: No number of a script has more digits.
_DIGITS = 20

_ACQUIRE = Script("acquire")
_EXTEND = Script("extend")
_RELEASE = Script("release")
_ADOPT = Script("adopt")
_INSPECT = Script("inspect")
_LIST_EXPIRED = Script("list_expired")
_SCAN_HELD = Script("scan_held")
_INSPECT_MANY = Script("inspect_many")
_REAP = Script("reap")
_FORCE_RELEASE = Script("force_release")
_REMAINING = Script("remaining")

_HEAD = 48
_HEAD_AND_OWNER = 112


def _digest(owner: str) -> bytes:
    return owner_digest(owner).encode()


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

    @classmethod
    def below(cls, prefix: str) -> _Keys:
        return cls(prefix, *(f"{prefix}{each}".encode() for each in ("hold:", "index", "token", "gone:", "free:")))


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

    def __init__(self, *, cache: str = "default", ttl: Seconds = 30) -> None:
        self.ttl = lease_seconds(ttl)
        self.cache = CacheAlias(cache)
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
        keys = (at.hold + lock, at.index, at.token, at.gone + digest)
        args = (lock, digest, _micros(ttl), holder.encode())
        self._note_unanswered(owner)
        try:
            reply, repeated = self.connections.run(_ACQUIRE, keys, args, deadline)
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
        return None if reply == 0 else self._grant(reply)

    def _note_unanswered(self, owner: str) -> None:
        self._unanswered[owner] = None
        if len(self._unanswered) > UNANSWERED_MOST:  # of a caller that never releases
            self._unanswered.pop(next(iter(list(self._unanswered))), None)

    def extend(self, extensions: Sequence[Extension], deadline: float) -> Collection[str]:
        if not extensions:
            return []
        at = self._keys()
        keys, args = [at.index], []
        for each in extensions:
            lock = each.name.encode()
            keys.append(at.hold + lock)
            args += [lock, _digest(each.owner), _micros(each.ttl)]
        reply, _ = self.connections.run(_EXTEND, keys, args, deadline)
        if not isinstance(reply, bytes) or len(reply) != len(extensions) or reply.strip(b"01"):
            raise self._odd(reply)
        return [each.owner for each, extended in zip(extensions, reply, strict=True) if extended == ord("1")]

    def release(self, name: str, owner: str, deadline: float) -> bool:
        digest, lock, at = _digest(owner), name.encode(), self._keys()
        keys = (at.hold + lock, at.index, at.gone + digest)
        gone_ms = GONE_MS if owner in self._unanswered else b"0"
        args = (lock, digest, at.channel + lock, gone_ms)
        reply, repeated = self.connections.run(_RELEASE, keys, args, deadline)
        self._unanswered.pop(owner, None)
        if reply == 0 and repeated:
            # Released by the first request, or lost before: neither may be claimed.
            raise LockBackendError(
                f"{self.cache} broke the connection during the release of {name}, which is free or was lost",
                name=name,
                uncertain=True,
            )
        released = self._number(reply) == 1
        self._until_tidy -= 1
        if self._until_tidy <= 0:
            self._until_tidy = TIDY_EVERY
            with contextlib.suppress(Exception):  # the release is done, and does not fail any more
                self.reap(LEFTOVER_SECONDS, TIDY_EVERY, min(deadline, clock.now() + TIDY_SECONDS))
        return released

    def adopt(self, name: str, owner: str, new_owner: str, ttl: float, holder: str, deadline: float) -> Grant | None:
        lock, at = name.encode(), self._keys()
        args = (lock, _digest(owner), _digest(new_owner), _micros(ttl), holder.encode())
        reply, _ = self.connections.run(_ADOPT, (at.hold + lock, at.index), args, deadline)
        return None if reply == 0 else self._grant(reply)

    def inspect(self, name: str, deadline: float) -> Record | None:
        reply, _ = self.connections.run(_INSPECT, (self._keys().hold + name.encode(),), (), deadline)
        return self._record_of(name, reply)

    def list_held(self, deadline: float) -> Iterator[Record]:
        for now, names, heads, holders in self._scan(deadline, holders=True):
            for name, head, holder in zip(names, heads, holders, strict=True):
                yield self._described(name, head, holder, now)

    def scan_held(self, fields: Sequence[str], deadline: float) -> Iterator[Sequence[tuple[Any, ...]]]:
        for now, names, heads, holders in self._scan(deadline, holders="holder" in fields):
            columns: list[Sequence[Any]] = [names]
            for field in fields:
                if field == "holder":
                    columns.append(holders)
                elif field == "acquired_at":
                    columns.append([int(head[32:]) / 1e6 for head in heads])
                elif field == "expires_in":
                    columns.append([(int(head[:16]) - now) / 1e6 for head in heads])
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
                raise self._odd(reply)
            now, looked_at = self._time(reply[0]), self._number(reply[1])
            flat, step = self._texts(reply[3]), 3 if holders else 2
            names, heads = flat[::step], flat[1::step]
            if len(flat) % step or not all(len(head) == _HEAD and head.isascii() and head.isdigit() for head in heads):
                raise self._odd(reply)
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
        locks, hold = [name.encode() for name in names], self._keys().hold
        reply, _ = self.connections.run(_INSPECT_MANY, [hold + lock for lock in locks], locks, deadline)
        return self._page(reply)[1]

    def list_expired(self, grace: float, deadline: float) -> Iterator[Record]:
        skip, at = 0, self._keys()
        while True:
            args = (_micros(grace), b"%d" % skip, b"%d" % PAGE, at.hold)
            reply, _ = self.connections.run(_LIST_EXPIRED, (at.index,), args, deadline)
            looked_at, records = self._page(reply)
            yield from records
            if self._number(looked_at) < PAGE:
                return
            skip += PAGE
            deadline = max(deadline, clock.now() + OPERATION_SECONDS)

    def reap(self, grace: float, batch_size: int, deadline: float) -> int:
        removed, at = 0, self._keys()
        while removed < batch_size:
            wanted = batch_size - removed
            args = (_micros(grace), b"%d" % wanted, at.hold)
            reply, _ = self.connections.run(_REAP, (at.index,), args, deadline, again=False)
            if not isinstance(reply, list) or len(reply) != 2:
                raise self._odd(reply)
            removed += self._number(reply[1])
            if self._number(reply[0]) < wanted:
                break
        return removed

    def force_release(self, name: str, deadline: float, fencing_token: int | None = None) -> Record | None:
        lock, at = name.encode(), self._keys()
        token = b"" if fencing_token is None else b"%016d" % fencing_token
        args = (lock, at.channel + lock, token)
        reply, _ = self.connections.run(_FORCE_RELEASE, (at.hold + lock, at.index), args, deadline, again=False)
        return self._record_of(name, reply)

    def remaining(self, name: str, deadline: float, places: int = ALONE) -> float | None:
        self.watcher.want(name)
        reply, _ = self.connections.run(_REMAINING, (self._keys().hold + name.encode(),), (), deadline)
        micros = self._number(reply)
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

    # Answers. What has another shape than the scripts give does not come from them.

    def _odd(self, reply: object) -> LockBackendError:
        return LockBackendError(f"{self.cache} gave an answer that means nothing: {reply!r:.100}", uncertain=True)

    def _number(self, reply: object) -> int:
        if not isinstance(reply, int):
            raise self._odd(reply)
        return reply

    def _grant(self, reply: object) -> Grant:
        if not isinstance(reply, bytes) or len(reply) != _HEAD or not reply.isdigit():
            raise self._odd(reply)
        return Grant(int(reply[16:32]), int(reply[32:]) / 1e6, int(reply[:16]) / 1e6)

    def _record_of(self, name: str, reply: object) -> Record | None:
        if reply == 0:
            return None
        if not isinstance(reply, list) or len(reply) != 2:
            raise self._odd(reply)
        return self._record(name, reply[1], self._time(reply[0]))

    def _page(self, reply: object) -> tuple[Any, list[Record]]:
        if not isinstance(reply, list) or len(reply) % 2 or not reply:
            raise self._odd(reply)
        now = self._time(reply[0])
        names = reply[2::2]
        if not all(isinstance(name, bytes) for name in names):
            raise self._odd(reply)
        pairs = zip(names, reply[3::2], strict=True)
        return reply[1], [self._record(name.decode(errors="replace"), hold, now) for name, hold in pairs]

    def _texts(self, reply: bytes) -> list[str]:
        try:
            texts = json.loads(reply.decode(errors="replace"))
        except (ValueError, RecursionError) as error:
            raise self._odd(reply) from error
        if not isinstance(texts, list) or not all(type(text) is str for text in texts):
            raise self._odd(reply)
        return texts

    def _time(self, reply: object) -> int:
        if not isinstance(reply, bytes) or not reply.isdigit() or len(reply) > _DIGITS:
            raise self._odd(reply)
        return int(reply)

    def _record(self, name: str, hold: object, now: int) -> Record:
        if not isinstance(hold, bytes) or not hold[:_HEAD].isdigit() or len(hold) < _HEAD_AND_OWNER:
            raise self._odd(hold)
        return self._described(name, hold[:_HEAD].decode(), hold[_HEAD_AND_OWNER:].decode(errors="replace"), now)

    def _described(self, name: str, head: str, holder: str, now: int) -> Record:
        expires, token, acquired = int(head[:16]), int(head[16:32]), int(head[32:])
        return Record(name, holder, acquired / 1e6, expires / 1e6, (expires - now) / 1e6, token)
