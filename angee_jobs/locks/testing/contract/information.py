"""Who holds what, and the signals."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

from ...api import lock, task_lock
from ...backends.base import OPERATION_SECONDS, BaseLockBackend
from ...clock import now
from ...errors import LockNotAcquiredError
from ...operations import (
    force_release,
    held_locks,
    lock_info,
    task_lock_is_held,
    task_locks_are_cross_process,
)
from ...types import LockBackend, LockHandle
from . import tasks
from .base import KEPT, LONG, ContractCase, eventually


class Information(ContractCase):
    def test_the_backend_says_whether_it_reaches_other_processes(self) -> None:
        says = task_locks_are_cross_process(backend=self.alias)
        self.assertIs(type(says), bool)
        self.assertEqual(says, "processes" not in self.strategy.lacks)

    def test_is_held_agrees_with_a_try(self) -> None:
        def agree(expected: bool) -> None:
            self.assertIs(task_lock_is_held(self.key, backend=self.alias), expected)
            self.assertIs(self.backend.is_held(self.key), expected)
            self.assertIs(self.is_free(), not expected)

        agree(False)
        held = self.lock(ttl=KEPT)
        held.acquire()
        agree(True)
        held.release()
        agree(False)
        if "leases" in self.strategy.lacks:
            return
        held.acquire()
        agree(True)
        eventually(lambda: held.lost)
        eventually(lambda: not self.backend.is_held(self.key))  # its holder gives a lease up a moment before the server
        agree(False)

    def test_the_holder_is_known(self) -> None:
        self.needs("listing")
        before = time.time()
        with self.lock(note="the note: äöü \"'\\ 😀") as held:
            info = lock_info(self.key, backend=self.alias)
            assert info is not None
            assert info.holder is not None
            self.assertEqual(info.name, self.key.name)
            self.assertEqual(info.backend, self.alias)
            self.assertEqual(info.owner_id, "***")
            self.assertEqual(info.holder.pid, os.getpid())
            self.assertEqual(info.holder.thread, threading.current_thread().name)
            self.assertTrue(info.holder.host)
            self.assertEqual(info.holder.note, "the note: äöü \"'\\ 😀")
            self.assertIn(str(os.getpid()), str(info.holder))
            self.assertEqual(info.fencing_token, held.fencing_token)
            assert info.acquired_at is not None
            self.assertIsNotNone(info.acquired_at.utcoffset(), "times are aware")
            self.assertLess(abs(info.acquired_at.timestamp() - before), 5)
            assert held.acquired_at is not None
            self.assertLess(abs((held.acquired_at - info.acquired_at).total_seconds()), 0.5)
            if "leases" in self.strategy.lacks:
                self.assertIsNone(info.expires_at)
                self.assertIsNone(held.expires_at)
            else:
                assert info.expires_at is not None
                assert held.expires_at is not None
                self.assertLess(abs((info.expires_at - held.expires_at).total_seconds()), 1)
                self.assertLess(abs(info.expires_at.timestamp() - time.time()), LONG + 1)
            own = held.info()
            assert own is not None
            self.assertEqual(own.owner_id, held.owner_id)
            self.assertEqual(own.name, self.key.name)
        self.assertIsNone(lock_info(self.key, backend=self.alias))
        self.assertIsNone(held.info())

    def test_held_locks_lists_exactly_what_is_held(self) -> None:
        self.needs("listing")
        keys = [self.new_key() for _ in range(5)]
        holds = [self.lock(key, ttl=5) for key in keys]
        for each in holds:
            each.acquire()

        def listed() -> set[str]:
            infos = [info for info in held_locks(backend=self.alias) if info.name in {key.name for key in keys}]
            self.assertEqual(len(infos), len({info.name for info in infos}))
            return {info.name for info in infos}

        self.assertEqual(listed(), {key.name for key in keys})
        for each in holds[:2]:
            each.release()
        self.assertEqual(listed(), {key.name for key in keys[2:]})
        for each in holds[2:]:
            each.release()
        self.assertEqual(listed(), set())

    def test_a_hold_of_another_process_is_known(self) -> None:
        self.needs("listing")
        peer = self.peer()
        peer.call(tasks.enter, "a", self.key, ttl=LONG, note="over there", backend=self.alias)
        info = lock_info(self.key, backend=self.alias)
        assert info is not None
        assert info.holder is not None
        self.assertEqual((info.holder.pid, info.holder.note), (peer.pid, "over there"))
        peer.call(tasks.leave, "a")

    def test_the_protocols(self) -> None:
        self.assertIsInstance(self.backend, LockBackend)
        handle = self.backend.try_acquire(self.key)
        self.assertIsInstance(handle, LockHandle)
        assert handle is not None
        self.assertTrue(self.backend.is_held(self.key))
        self.assertIsNone(self.backend.try_acquire(self.key))
        self.assertIsNone(self.backend.try_acquire(self.key, timeout=timedelta(milliseconds=100)))
        handle.release()
        self.assertFalse(self.backend.is_held(self.key))

    def test_force_release(self) -> None:
        self.needs("listing", "leases")
        self.assertIs(force_release(self.key, backend=self.alias), False)
        held = self.lock()
        held.acquire()
        with self.assertLogs("angee_jobs", "WARNING") as logged:
            self.assertIs(force_release(self.key, reason="the test said so", user="somebody", backend=self.alias), True)
        for word in (self.key.name, "the test said so", "somebody"):
            self.assertTrue(any(word in line for line in logged.output))
        self.assertFalse(task_lock_is_held(self.key, backend=self.alias))
        newer = self.lock()
        self.assertTrue(newer.acquire())
        self.assertIs(held.release(), False)
        self.assertTrue(held.lost)
        self.assertTrue(newer.release())

    def test_force_release_of_one_hold_leaves_the_next_one_alone(self) -> None:
        self.needs("listing", "fencing")
        older, newer = self.lock(ttl=5), self.lock(ttl=5)
        older.acquire()
        token = older.fencing_token
        older.release()
        newer.acquire()
        self.assertIsNone(self.backend.force_release(self.key.name, now() + OPERATION_SECONDS, fencing_token=token))
        self.assertIs(force_release(self.key, fencing_token=token, backend=self.alias), False)
        self.assert_held()
        self.assertTrue(newer.extend())
        self.assertIs(force_release(self.key, fencing_token=newer.fencing_token, backend=self.alias), True)
        self.assert_free()

    def test_force_release_by_a_token_races_with_the_holders(self) -> None:
        self.needs("listing", "fencing")
        stop = threading.Event()
        self.addCleanup(stop.set)
        tokens: list[int] = []
        ended: set[int] = set()
        freed: set[int] = set()

        def hold() -> int:
            rounds = 0
            each = self.lock()
            while rounds < 2 or not stop.is_set():
                self.assertTrue(each.acquire(20))
                token = each.fencing_token
                assert token is not None
                tokens.append(token)
                if not each.release():
                    ended.add(token)
                rounds += 1
            return rounds

        holder = self.in_background(hold)
        eventually(lambda: bool(tokens))
        limit = now() + 0.4
        while now() < limit:
            token = tokens[-1]
            record = self.backend.force_release(self.key.name, now() + OPERATION_SECONDS, fencing_token=token)
            if record is not None:
                self.assertEqual(record.fencing_token, token)
                freed.add(token)
        stop.set()
        self.assertGreater(holder.result(), 1)
        self.assertEqual(ended, freed, "a hold was ended that nobody had named")

    def test_what_a_scan_tells_is_what_the_list_tells(self) -> None:
        self.needs("listing")
        fields = ("fencing_token", "holder", "acquired_at")
        if self.backend.scan_held(fields, now() + OPERATION_SECONDS) is None:
            self.skipTest("the backend has no scan_held()")
        holds = [self.lock(self.new_key(), ttl=5, note="ä") for _ in range(5)]
        for each in holds:
            each.acquire()
        names = {each.key.name for each in holds}
        listed = {each.name: each for each in self.backend.list_held(now() + OPERATION_SECONDS) if each.name in names}
        self.assertEqual(listed.keys(), names)
        for wanted in (fields, ("holder",), ()):
            scan = self.backend.scan_held(wanted, now() + OPERATION_SECONDS)
            assert scan is not None
            rows = {row[0]: row[1:] for rows in scan for row in rows if row[0] in names}
            expected = {name: tuple(getattr(each, field) for field in wanted) for name, each in listed.items()}
            self.assertEqual(rows, expected)
        holds[0].release()
        found = self.backend.inspect_many([*names, self.new_key().name], now() + OPERATION_SECONDS)
        self.assertEqual({each.name for each in found}, names - {holds[0].key.name})
        for record in found:
            self.assertEqual(record.fencing_token, listed[record.name].fencing_token)
            self.assertEqual(record.holder, listed[record.name].holder)


class Signals(ContractCase):
    def test_acquired_and_released(self) -> None:
        with self.hear("lock_acquired", "lock_released", "lock_lost", "lock_refused") as heard:
            with self.lock() as held:
                token = held.fencing_token
        self.assertEqual([name for name, _ in heard], ["lock_acquired", "lock_released"])
        for _, arguments in heard:
            self.assertEqual(arguments["key"], self.key)
            self.assertEqual(arguments["backend"], self.alias)
            self.assertIs(arguments["sender"], type(self.backend))
            self.assertEqual(arguments["fencing_token"], token)
            self.assertIs(arguments["thread"], threading.current_thread())
        self.assertGreaterEqual(heard[0][1]["waited"], 0)
        self.assertGreaterEqual(heard[1][1]["held_for"], 0)

    def test_s40_a_refusal_is_logged_and_told_with_the_holder(self) -> None:
        def refused_by_block() -> None:
            with self.assertRaises(LockNotAcquiredError), lock(self.key, timeout=1.5, backend=self.alias):
                pass

        def refused_by_task_lock() -> None:
            with task_lock(self.key, timeout=1.5, backend=self.alias) as acquired:
                self.assertIs(acquired, False)

        for refused in (refused_by_block, refused_by_task_lock):
            with (
                self.subTest(refused.__name__),
                self.lock(note="the one inside"),
                self.hear("lock_refused") as heard,
                self.assertLogs("angee_jobs", "INFO") as logged,
                self.patient_look(),
            ):
                refused()
                [(_, arguments)] = heard
                self.assertEqual(arguments["key"], self.key)
                self.assertEqual(arguments["backend"], self.alias)
                self.assertGreaterEqual(arguments["waited"], 0.2)
                self.assertIs(arguments["thread"], threading.current_thread())
                lines = [line for line in logged.output if self.key.name in line]
                self.assertTrue(lines)
                if type(self.backend).inspect is not BaseLockBackend.inspect and "listing" not in self.strategy.lacks:
                    self.assertEqual(arguments["holder"].holder.note, "the one inside")
                    self.assertEqual(arguments["holder"].owner_id, "***")
                    self.assertTrue(any(str(os.getpid()) in line and "the one inside" in line for line in lines))
