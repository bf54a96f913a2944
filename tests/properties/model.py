"""A model of locks that is simple enough to be right, and a state machine that compares every backend with it.

Hypothesis draws the steps: clients of four kinds (model_clients.py) and one transaction take, wait, extend, give
up, hand over and lose locks on a few keys, while the storage is tampered with. After each step all that can be seen
must be what the model says.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import Any, ClassVar

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from angee_jobs.locks import (
    Lock,
    LockBackendError,
    LockKey,
    LockLostError,
    LockNotAcquiredError,
    attach_lock,
    force_release,
    held_locks,
    lock,
    lock_backends,
    lock_info,
    reap_expired_locks,
    task_lock_is_held,
)
from angee_jobs.locks.operations import expired_locks
from angee_jobs.locks.waiting import waiters_of
from tests.properties.model_clients import LONG
from tests.properties.model_state import DETACHED, Belief, Held, Model
from tests.properties.model_storage import Storage
from tests.support.servers import eventually

#: The names of the clients; where a backend does not reach other processes, "process" is one more in this one.
CLIENTS = ("thread", "other thread", "task", "process")
TRANSACTION = "transaction"
#: How long somebody waits in vain, in seconds.
BRIEFLY = 0.05

clients_ = st.sampled_from(CLIENTS)
#: Two, so that a step meets what an earlier one did, and a mistake with names would show.
KEYS = (0, 1)
keys_ = st.sampled_from(KEYS)


class LockMachine(RuleBasedStateMachine):
    """One example. A test makes a subclass that names the storage and its clients."""

    storage: ClassVar[Storage]
    clients: ClassVar[dict[str, Any]]
    _numbers = itertools.count(1)

    def __init__(self) -> None:
        super().__init__()
        number = next(self._numbers)
        self.keys = [LockKey("model", (f"{number}", f"{index}")) for index in KEYS]
        self.model = Model()
        self.atomic: Any = None
        #: The owner ids that were valid once, and the last blocks' locks inside the transaction.
        self.used_up: dict[LockKey, str] = {}
        self.inside: dict[LockKey, Lock] = {}

    @property
    def alias(self) -> str:
        return self.storage.alias

    def is_lease(self) -> bool:
        return self.storage.leases

    def in_transaction(self) -> bool:
        return self.atomic is not None

    def mine(self) -> list[LockKey]:
        return [key for key in self.keys if key in self.model.holds]

    @initialize()
    def begin_with_nothing(self) -> None:
        names = {key.name for key in self.keys}
        assert not [info for info in held_locks(backend=self.alias) if info.name in names]

    # Taking.

    @rule(client=clients_, at=keys_)
    def acquire(self, client: str, at: int) -> None:
        key = self.keys[at]
        free = key not in self.model.holds
        assert task_lock_is_held(key, backend=self.alias) is not free
        token = self.clients[client].acquire(key)
        assert (token is not None) is free
        if token is not None:
            self.model.grant(client, key, token)

    @rule(client=clients_, at=keys_)
    def wait(self, client: str, at: int) -> None:
        key = self.keys[at]
        free = key not in self.model.holds
        try:
            token = self.clients[client].acquire(key, BRIEFLY)
        except LockBackendError:  # on a busy machine the server may take longer: nothing may come of it
            eventually(lambda: task_lock_is_held(key, backend=self.alias) is not free, what="the try is taken back")
            return
        assert (token is not None) is free
        if token is not None:
            self.model.grant(client, key, token)

    @rule(client=clients_, waiter=clients_, at=keys_, by_force=st.booleans())
    def hand_over(self, client: str, waiter: str, at: int, by_force: bool) -> None:
        """Somebody waits, and gets the lock when it is released."""
        key = self.keys[at]
        if not self.model.is_holder(client, key) or client == waiter:
            return
        tokens: list[int | None] = []
        thread = threading.Thread(target=lambda: tokens.append(self.clients[waiter].acquire(key, 20)), daemon=True)
        thread.start()
        if waiter != "process":
            room = waiters_of(lock_backends.operations(self.alias))
            eventually(lambda: key.name in room.queues, what="the waiter is in line")
        if by_force and self.can_be_forced(key):
            self.force_release(at)
        else:
            self.release(client, at)
        thread.join(25)
        assert len(tokens) == 1, "the waiter got an answer"
        self.model.grant(waiter, key, tokens[0])

    # Keeping and giving up.

    @rule(client=clients_, at=keys_)
    def extend(self, client: str, at: int) -> None:
        key = self.keys[at]
        assert self.clients[client].extend(key) is self.model.is_holder(client, key)
        self.is_told(client, key)

    @rule(client=clients_, at=keys_)
    def release(self, client: str, at: int) -> None:
        key = self.keys[at]
        holds = self.model.is_holder(client, key)
        assert self.clients[client].release(key) is holds
        if holds:
            self.model.end(key)
        self.is_told(client, key)

    @rule(client=clients_, at=keys_)
    def drop(self, client: str, at: int) -> None:
        """The lock is dropped with what it holds, which comes free soon."""
        key = self.keys[at]
        self.clients[client].drop(key)
        if self.model.is_holder(client, key):
            self.model.end(key)
            eventually(lambda: lock_info(key, backend=self.alias) is None, what="what was dropped comes free")
        self.model.beliefs[client, key] = Belief.NOTHING

    def is_told(self, client: str, key: LockKey) -> None:
        """A request about the hold was answered, so its client knows what became of it."""
        if self.model.belief(client, key) is Belief.STALE:
            self.model.beliefs[client, key] = Belief.LOST

    @rule(at=keys_)
    def force_release(self, at: int) -> None:
        key = self.keys[at]
        if not self.can_be_forced(key):
            return
        held = self.model.holds.get(key)
        assert force_release(key, reason="a test", backend=self.alias) is (held is not None)
        if held is not None:
            self.model.end(key, Belief.STALE if held.by == "process" else Belief.LOST)

    def can_be_forced(self, key: LockKey) -> bool:
        """Another process would be asked, and look up within a second: too long for a test."""
        return self.is_lease() or not self.model.is_holder("process", key)

    # Handing to another process.

    @rule(client=clients_, at=keys_)
    def detach(self, client: str, at: int) -> None:
        key = self.keys[at]
        try:
            owner_id = self.clients[client].detach(key)
        except ImproperlyConfigured:
            assert not self.is_lease()
            assert self.model.belief(client, key) in (Belief.HOLDS, Belief.STALE)
            return
        except LockLostError:
            assert not self.model.is_holder(client, key)
            self.is_told(client, key)
            return
        token = self.model.holds[key].token
        assert self.model.is_holder(client, key)
        self.model.end(key)
        self.model.holds[key] = Held(token, DETACHED, owner_id)

    @precondition(lambda self: self.is_lease())
    @rule(client=clients_, at=keys_)
    def attach(self, client: str, at: int) -> None:
        key = self.keys[at]
        held = self.model.holds.get(key)
        if held is None or held.by != DETACHED or self.model.belief(client, key) is Belief.HOLDS:
            return
        assert self.clients[client].attach(key, held.owner_id) == held.token
        self.used_up[key] = held.owner_id
        self.model.holds[key] = Held(held.token, client)
        self.model.beliefs[client, key] = Belief.HOLDS

    @precondition(lambda self: self.is_lease())
    @rule(at=keys_, other=keys_, owner_id=st.sampled_from(["", "used up", "of another key", "made up"]))
    def attach_in_vain(self, at: int, other: int, owner_id: str) -> None:
        key, elsewhere = self.keys[at], self.model.holds.get(self.keys[1 - at])
        if owner_id == "used up":
            owner_id = self.used_up.get(key, "none")
        elif owner_id == "of another key":
            owner_id = (elsewhere and elsewhere.owner_id) or "none"
        with pytest.raises(LockLostError if owner_id else ValueError):
            attach_lock(key, owner_id, backend=self.alias)

    # Losing.

    @precondition(lambda self: self.is_lease())
    @rule(at=keys_)
    def expire(self, at: int) -> None:
        """By the server's clock alone: the client believes in its hold."""
        key = self.keys[at]
        if key in self.model.holds:
            self.storage.expire(key)
            self.model.end(key, Belief.STALE)
            self.model.remains.add(key)

    @precondition(lambda self: self.is_lease())
    @rule(client=clients_, at=keys_)
    def pause(self, client: str, at: int) -> None:
        """The client was stopped until its lease was over, by any clock."""
        key = self.keys[at]
        if self.model.is_holder(client, key):
            self.expire(at)
        if self.model.belief(client, key) in (Belief.STALE, Belief.HOLDS):
            self.clients[client].pause(key)
            self.model.beliefs[client, key] = Belief.LOST

    @rule(at=keys_)
    def delete(self, at: int) -> None:
        """By hand, at the storage."""
        key = self.keys[at]
        if key in self.model.holds and (self.is_lease() or not self.model.is_holder("process", key)):
            self.storage.strategy.delete_hold(key)
            self.model.end(key, Belief.STALE)

    @precondition(lambda self: self.storage.has("empty"))
    @rule()
    def empty(self) -> None:
        """TRUNCATE, FLUSHALL."""
        self.storage.strategy.empty()
        for key in self.mine():
            self.model.end(key, Belief.STALE)
        self.model.remains.clear()

    @precondition(lambda self: self.storage.has("break_connections"))
    @rule()
    def lose_connections(self) -> None:
        """Those of all clients, ended by the server. Only session locks end with them."""
        if self.in_transaction() and self.storage.database != "default":
            return  # the transaction would go with them
        self.storage.strategy.break_connections()
        if not self.in_transaction():
            connections[self.storage.database].close()
        if not self.is_lease():
            for key in self.mine():
                self.model.end(key, Belief.STALE)
            for client in self.clients.values():
                client.notice()

    @rule()
    def reap(self) -> None:
        names = {key.name for key in self.model.remains}
        there = [info.name for info in expired_locks(backend=self.alias)]
        assert names == set(there) & {key.name for key in self.keys}
        assert reap_expired_locks(backend=self.alias) == len(there)
        self.model.remains.clear()

    # A transaction.

    @precondition(lambda self: not self.in_transaction())
    @rule()
    def begin(self) -> None:
        self.atomic = transaction.atomic(using=self.storage.database)
        self.atomic.__enter__()

    @precondition(lambda self: self.in_transaction())
    @rule(at=keys_)
    def enter_and_leave(self, at: int) -> None:
        """A block inside the transaction, which keeps its hold."""
        key = self.keys[at]
        before, belief = self.model.holds.get(key), self.model.belief(TRANSACTION, key)
        block = lock(key, ttl=LONG, auto_extend=False, backend=self.alias)
        try:
            with block:
                token = block.fencing_token
        except LockNotAcquiredError:
            assert before is not None and before.by != TRANSACTION
            with connections[self.storage.database].cursor() as cursor:
                cursor.execute("SELECT 1")  # the transaction can still be used
            return
        except LockLostError:
            assert belief is Belief.STALE
            self.model.beliefs[TRANSACTION, key] = Belief.LOST
            return
        old = self.inside.get(key)
        self.inside[key] = block
        if belief is Belief.HOLDS:
            assert before is not None and token == before.token, "the transaction's own hold"
        elif not (belief is Belief.STALE and old is not None and token == old.fencing_token):
            self.model.grant(TRANSACTION, key, token)

    @precondition(lambda self: self.in_transaction())
    @rule(commit=st.booleans())
    def commit_or_roll_back(self, commit: bool) -> None:
        atomic, self.atomic = self.atomic, None
        if commit:
            atomic.__exit__(None, None, None)
        else:
            error = RuntimeError("rolled back")
            atomic.__exit__(RuntimeError, error, None)
        for key in self.keys:
            if self.model.is_holder(TRANSACTION, key):
                self.model.end(key)
            self.model.beliefs.pop((TRANSACTION, key), None)
        self.inside.clear()

    # What must be so after each step.

    def is_vague(self, held: Held) -> bool:
        """Of a session lock in another process no more is known at first than that there is one."""
        return held.by == "process" and not self.is_lease()

    @invariant()
    def the_storage_agrees(self) -> None:
        for key in self.keys:
            held = self.model.holds.get(key)
            info = lock_info(key, backend=self.alias)
            assert (info is None) is (held is None)
            if info is not None and held is not None and not self.is_vague(held):
                assert info.fencing_token == held.token
            assert info is None or (info.name, info.owner_id) == (key.name, "***")
            assert task_lock_is_held(key, backend=self.alias) is (held is not None)

    @invariant()
    def the_list_agrees(self) -> None:
        names = {key.name for key in self.keys}
        listed = {info.name: info.fencing_token for info in held_locks(backend=self.alias) if info.name in names}
        for key, held in self.model.holds.items():
            token = listed.pop(key.name, None)
            assert token == held.token or (self.is_vague(held) and token is None)
        assert not listed

    @invariant()
    def the_clients_agree(self) -> None:
        for (client, key), belief in self.model.beliefs.items():
            if client == TRANSACTION:
                continue
            seen = self.clients[client].look(key)
            assert seen.held is seen.checked or belief is Belief.STALE
            assert seen.known is self.model.is_holder(client, key), "one holder, in which the storage believes too"
            if belief is Belief.STALE:
                assert seen.held is not seen.lost
            else:
                assert (seen.held, seen.lost) == (belief is Belief.HOLDS, belief is Belief.LOST)
            if belief is Belief.HOLDS:
                assert seen.token == self.model.holds[key].token

    def teardown(self) -> None:
        """Asserts nothing, since a step may have failed; the test looks at the end."""
        with contextlib.ExitStack() as stack:
            for client in self.clients.values():
                stack.callback(client.end)
            if self.atomic is not None:
                stack.callback(self.atomic.__exit__, RuntimeError, RuntimeError("rolled back"), None)
        for key, held in self.model.holds.items():
            if held.by == DETACHED:
                force_release(key, backend=self.alias)
