"""The clients of the model-based tests (tests/properties/model.py): four kinds that lock in their own ways.

Whatever its kind, a client has one :class:`Lock` for each key, which some of them share, and the same few operations.
It runs in the calling thread, in a thread of its own, as coroutines, or in another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from angee_jobs.locks import (
    Lock,
    LockKey,
    LockLostError,
    LockNotAcquiredError,
    attach_lock,
    clock,
    held_locks,
    lock,
)
from angee_jobs.locks.testing.contract.peers import Peer

#: A lease that nothing renews or ends during a test, in seconds.
LONG = 600.0


class Look(NamedTuple):
    """What a lock says of its hold, without asking the storage and (``known``) after asking it."""

    held: bool
    lost: bool
    checked: bool
    known: bool
    token: int | None


class Client:
    """In the calling thread."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.locks: dict[LockKey, Lock] = {}

    def lock(self, key: LockKey) -> Lock:
        if key not in self.locks:
            self.locks[key] = lock(key, ttl=LONG, backend=self.alias)
        return self.locks[key]

    def acquire(self, key: LockKey, wait: float | None = None) -> int | None:
        """The fencing token; None if refused."""
        mine = self.lock(key)
        return mine.fencing_token if mine.acquire(wait) else None

    def release(self, key: LockKey) -> bool:
        return self.lock(key).release()

    def extend(self, key: LockKey) -> bool:
        return self.lock(key).extend(LONG)

    def detach(self, key: LockKey) -> str:
        return self.lock(key).detach(LONG)

    def attach(self, key: LockKey, owner_id: str) -> int | None:
        self.locks[key] = attached = attach_lock(key, owner_id, ttl=LONG, backend=self.alias)
        return attached.fencing_token

    def drop(self, key: LockKey) -> None:
        """Nobody has the lock any more."""
        self.locks.pop(key, None)

    def pause(self, key: LockKey) -> None:
        """As if the process had been stopped until the lease was over, by its clock."""
        hold = self.lock(key)._hold
        assert hold is not None
        hold.deadline = clock.now()

    def look(self, key: LockKey) -> Look:
        mine = self.lock(key)
        return self._look(mine, mine.info())

    def _look(self, mine: Lock, info: Any) -> Look:
        assert info is None or (info.owner_id, info.fencing_token) == (mine.owner_id, mine.fencing_token)
        held = mine.held  # before `lost`, which may be found out in between, but not the other way round
        try:
            mine.check()
            checked = True
        except Exception:
            checked = False
        lost = mine.lost
        if held and lost:  # it was found out in between
            held = mine.held
        return Look(held, lost, checked, info is not None, mine.fencing_token)

    def notice(self) -> None:
        """Use the connection, and so find out that it is dead."""
        list(held_locks(backend=self.alias))

    def end(self) -> None:
        """Give up everything."""
        for mine in self.locks.values():
            mine.release()
        self.locks.clear()

    def close(self) -> None:
        """Nobody needs this client any more."""


_shared: dict[tuple[str, LockKey, float | None], Lock] = {}


class Sharing(Client):
    """Enters a lock object that other clients use too, and keeps what that yields."""

    def shared(self, key: LockKey, wait: float | None) -> Lock:
        return _shared.setdefault((self.alias, key, wait), lock(key, ttl=LONG, timeout=wait, backend=self.alias))

    def leave(self, key: LockKey) -> None:
        held = self.locks[key]
        with contextlib.suppress(LockLostError):
            held.__exit__(None, None, None)

    def drop(self, key: LockKey) -> None:
        if key in self.locks:
            self.leave(key)
        super().drop(key)


class InThread(Sharing):
    """In a thread of its own: no lock belongs to the thread that took it."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._thread = ThreadPoolExecutor(1)

    def close(self) -> None:
        self._thread.shutdown()

    def acquire(self, key: LockKey, wait: float | None = None) -> int | None:
        try:
            self.locks[key] = self._thread.submit(self.shared(key, wait).__enter__).result()
        except LockNotAcquiredError:
            return None
        return self.locks[key].fencing_token

    def release(self, key: LockKey) -> bool:
        released = self._thread.submit(super().release, key).result()
        self._thread.submit(self.leave, key).result()
        return released

    def extend(self, key: LockKey) -> bool:
        return self._thread.submit(super().extend, key).result()


class InTask(Sharing):
    """As coroutines on an event loop."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def acquire(self, key: LockKey, wait: float | None = None) -> int | None:
        async def enter() -> Lock:
            return await self.shared(key, wait).__aenter__()

        try:
            self.locks[key] = self._run(enter())
        except LockNotAcquiredError:
            return None
        return self.locks[key].fencing_token

    def release(self, key: LockKey) -> bool:
        released = self._run(self.lock(key).arelease())
        self.leave(key)
        return released

    def extend(self, key: LockKey) -> bool:
        return self._run(self.lock(key).aextend(LONG))

    def look(self, key: LockKey) -> Look:
        mine = self.lock(key)
        return self._look(mine, self._run(mine.ainfo()))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


class InProcess:
    """In another process, which has the same operations."""

    def __init__(self, alias: str, peer: Peer) -> None:
        self.alias = alias
        self._peer = peer

    def close(self) -> None:
        self._peer.give_back()

    def __getattr__(self, operation: str) -> Any:
        if operation.startswith("_"):
            raise AttributeError(operation)
        return lambda *args: self._peer.call(perform, self.alias, operation, *args)


_clients: dict[str, Client] = {}


def perform(alias: str, operation: str, *args: Any) -> Any:
    """What the other process does."""
    if alias not in _clients:
        _clients[alias] = Client(alias)
    answer = getattr(_clients[alias], operation)(*args)
    return str(answer) if isinstance(answer, str) else answer
