"""What is done to workers and servers, at random, from a seed. Everything is written down."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.support.servers import ServerError
from tests.torture.crew import Crew
from tests.torture.ground import BACKENDS, PLANTED, Ground
from tests.torture.log import Log, now
from tests.torture.worker import KEYS, key_of

#: Seconds between two faults of one backend, and between two that hit a server as a whole.
PAUSE, SERVER_PAUSE = (0.3, 1.2), (3.0, 6.0)
#: And where it is only about one kind of them.
OFTEN = (0.1, 0.5)

#: The faults of a backend, and how often each, among them.
OF_BACKENDS = {"kill": 3, "stop": 3, "short_stop": 1, "force": 2, "reap": 1}
#: What else is done to each by its server.
OF_SERVERS = {
    "sqlite": {},
    "postgres_table": {"terminate": 3, "silence": 2},
    "postgres_advisory": {"terminate_holder": 4, "terminate": 2, "silence": 2},
    "redis": {"disconnect": 3, "disconnect_all": 2, "silence_subscribers": 3},
}
#: What is done to the servers as a whole.
WHOLE_POSTGRES = {"restart_postgres": 2, "crash_postgres": 2, "pause_postgres": 2}
WHOLE_VALKEY = {"restart_valkey": 2, "crash_valkey": 2, "pause_valkey": 2, "fill_memory": 2}


class Nemesis:
    def __init__(self, ground: Ground, crew: Crew, log: Log, seed: str, ttl: float) -> None:
        self.ground = ground
        self.crew = crew
        self.log = log
        self.ttl = ttl
        self.random = random.Random(f"{seed}/nemesis")
        self._heap: list[tuple[float, int, Callable[[], Any]]] = []
        self._order = itertools.count()
        self._away: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._ending = False

    # When

    def later(self, seconds: float, what: Callable[[], Any]) -> None:
        heapq.heappush(self._heap, (now() + seconds, next(self._order), what))

    def begin(self, faults: dict[str, dict[str, int]] | None = None) -> None:
        """From now on, do everything; or only ``faults``, the kinds and their weights for each backend."""
        for backend in self.ground.backends:
            kinds = self._kinds(backend) if faults is None else faults[backend]
            if "clock" in kinds:
                self._again(self._clock, (1.0, 2.0))
            else:
                pause = PAUSE if faults is None else OFTEN
                self._again(lambda backend=backend, kinds=kinds: self._hit(backend, kinds), pause)
        if faults is not None:
            return
        for server in self.ground.servers:
            self._again(lambda server=server: self._hit_server(server), SERVER_PAUSE)
        if not self.crew.no_clock:
            self._again(self._clock, (1.5, 4.0))
        if self.ground.small_disk == "mounted":
            self._again(self._fill_disk, SERVER_PAUSE)

    def torment(self, seconds: float) -> None:
        """Do what is due for so long."""
        end = now() + seconds
        while (moment := now()) < end:
            if self._heap and self._heap[0][0] <= moment:
                heapq.heappop(self._heap)[2]()
            else:
                time.sleep(0.01)

    def _again(self, what: Callable[[], Any], pause: tuple[float, float]) -> None:
        def once() -> None:
            what()
            if not self._ending:
                self.later(self.random.uniform(*pause), once)

        self.later(self.random.uniform(*pause), once)

    def relent(self) -> None:
        """Undo what is to be undone, and do nothing more."""
        self._ending = True
        for pid in list(self.crew.stopped):
            self.crew.resume(pid)
        for _, _, what in sorted(self._heap):
            if getattr(what, "undoes", False):
                what()
        self._heap.clear()
        for thread in self._threads:
            thread.join(30)
        for server in self.ground.servers.values():
            server.heal()

    def _undo(self, seconds: float, what: Callable[[], Any]) -> None:
        def once() -> None:
            what()

        once.undoes = True  # type: ignore[attr-defined]
        self.later(seconds, once)

    def _choose(self, weights: dict[str, int]) -> str:
        return self.random.choices(list(weights), list(weights.values()))[0]

    def _kinds(self, backend: str) -> dict[str, int]:
        return OF_BACKENDS | OF_SERVERS[backend]

    def _hit(self, backend: str, kinds: dict[str, int]) -> None:
        kind = self._choose(kinds)
        if (BACKENDS | PLANTED)[backend] in self._away and kind not in ("kill", "stop", "short_stop"):
            return  # it would be waited for
        with contextlib.suppress(Exception):  # a server that is just being restarted
            getattr(self, f"_{kind}")(backend)

    def _hit_server(self, server: str) -> None:
        if server in self._away:
            return
        getattr(self, f"_{self._choose(WHOLE_POSTGRES if server == 'postgres' else WHOLE_VALKEY)}")()

    def _note(self, kind: str, since: float, **fields: Any) -> None:
        self.log.write("fault", kind=kind, t0=since, t1=now(), **fields)

    def _aside(self, what: Callable[[], Any]) -> None:
        """On a thread, since it may have to wait for a process that is stopped."""

        def safely() -> None:
            with contextlib.suppress(Exception):
                what()

        self._threads = [each for each in self._threads if each.is_alive()]
        if len(self._threads) < 8:
            thread = threading.Thread(target=safely, daemon=True)
            self._threads.append(thread)
            thread.start()

    # To processes

    def _kill(self, backend: str) -> None:
        pid = self.crew.pick(backend)
        index = None if pid is None else self.crew.kill(pid)
        if index is not None:
            self.later(self.random.uniform(0.0, 1.0), lambda: self.crew.spawn(backend, index))

    def _stop(self, backend: str) -> None:
        self._stop_for(backend, self.ttl * self.random.uniform(1.1, 2.0))

    def _short_stop(self, backend: str) -> None:
        self._stop_for(backend, self.ttl * self.random.uniform(0.1, 0.9))

    def _stop_for(self, backend: str, seconds: float) -> None:
        pid = self.crew.pick(backend)
        if pid is not None:
            self.crew.stop(pid)
            self._undo(seconds, lambda: self.crew.resume(pid))

    def _clock(self) -> None:
        self.crew.set_clock(self.random.choice([-3600, 0, 3600]))

    # By the package's own means

    def _force(self, backend: str) -> None:
        from angee_jobs.locks import force_release, lock_info

        key = key_of(backend, self.random.choice(KEYS[: self.crew.keys]))

        def work() -> None:
            info = lock_info(key, backend=backend)
            if info is None:
                return
            before, freed = now(), None
            try:
                freed = force_release(key, fencing_token=info.fencing_token, backend=backend)
            finally:  # a request without an answer may have been carried out
                fields = {"keys": [info.name], "token": info.fencing_token, "result": freed is True}
                if freed is not False:
                    self._note("force", before, backend=backend, **fields)

        self._aside(work)

    def _reap(self, backend: str) -> None:
        from angee_jobs.locks import reap_expired_locks

        def work() -> None:
            before = now()
            reap_expired_locks(backend=backend)
            self._note("reap", before, backend=backend)

        self._aside(work)

    # To PostgreSQL

    def _sessions(self, where: str) -> list[int]:
        rows = self.ground.servers["postgres"].query(
            "SELECT pid FROM pg_stat_activity AS a WHERE backend_type = 'client backend' AND datname = 'angee_tests'"
            f" AND pid <> pg_backend_pid() AND application_name LIKE 'angee_jobs%%' AND {where} ORDER BY pid",
            dbname="postgres",
        )
        return [pid for (pid,) in rows]

    def _end_session(self, where: str, kind: str, backend: str) -> None:
        from angee_jobs.locks.backends.advisory.sql import advisory_key
        from angee_jobs.locks.keys import as_lock_key

        pids = self._sessions(where)
        if not pids:
            return
        pid = self.random.choice(pids)
        server, before = self.ground.servers["postgres"], now()
        held = server.query(
            "SELECT (classid::bigint << 32) | objid::bigint FROM pg_locks"
            " WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND granted AND pid = %s",
            [pid],
        )
        names = [as_lock_key(key_of(backend, key)).name for key in KEYS]
        keys = [name for name in names if (advisory_key(name),) in held]
        try:
            server.query("SELECT pg_terminate_backend(%s, 5000)", [pid])
        finally:  # without an answer it may have been done as well
            self._note(kind, before, backend=backend, server="postgres", keys=keys)

    def _terminate_holder(self, backend: str) -> None:
        holds = "EXISTS (SELECT FROM pg_locks AS l WHERE l.pid = a.pid AND locktype = 'advisory' AND granted)"
        self._end_session(f"application_name = 'angee_jobs locks' AND {holds}", "terminate", backend)

    def _terminate(self, backend: str) -> None:
        which = "angee_jobs table" if backend == "postgres_table" else "angee_jobs locks"
        self._end_session(f"application_name = '{which}'", "terminate", backend)

    def _silence(self, backend: str) -> None:
        self._end_session("application_name = 'angee_jobs waiting'", "silence", backend)

    def _whole(self, server: str, kind: str, how: Callable[[Any], None]) -> None:
        before = now()
        self._away.add(server)
        try:
            how(self.ground.servers[server])
        except ServerError:  # on a machine with very much to do
            self.ground.servers[server].heal()
        self._away.discard(server)
        self._note(kind, before, server=server)

    def _restart_postgres(self) -> None:
        self._whole("postgres", "restart", lambda server: server.restart("fast"))

    def _crash_postgres(self) -> None:
        self._whole("postgres", "crash", lambda server: server.restart("immediate"))

    def _pause_postgres(self) -> None:
        self._pause("postgres")

    def _pause(self, name: str) -> None:
        server, before = self.ground.servers[name], now()
        self._away.add(name)
        server.pause()

        def resume() -> None:
            server.resume()
            self._away.discard(name)
            self._note("pause", before, server=name)

        self._undo(self.random.uniform(0.3, 1.6) * self.ttl, resume)

    # To Valkey

    def _disconnect(self, backend: str) -> None:
        before, server = now(), self.ground.servers["valkey"]
        clients = [each["id"] for each in server.clients()]
        if clients:
            with server.connect() as client:
                client.client_kill_filter(_id=self.random.choice(clients))
            self._note("disconnect", before, server="valkey", backend=backend)

    def _disconnect_all(self, backend: str) -> None:
        before = now()
        self.ground.servers["valkey"].terminate_all()
        self._note("disconnect all", before, server="valkey", backend=backend)

    def _silence_subscribers(self, backend: str) -> None:
        before = now()
        with self.ground.servers["valkey"].connect() as client:
            client.client_kill_filter(_type="pubsub")
        self._note("silence", before, server="valkey", backend=backend)

    def _restart_valkey(self) -> None:
        self._whole("valkey", "restart", lambda server: server.restart("fast"))

    def _crash_valkey(self) -> None:
        self._whole("valkey", "crash", lambda server: server.restart("immediate"))

    def _pause_valkey(self) -> None:
        self._pause("valkey")

    def _fill_memory(self) -> None:
        server, before = self.ground.servers["valkey"], now()
        self._away.add("valkey")

        def limit(size: int) -> None:
            with server.connect() as client:
                client.config_set("maxmemory", size)

        limit(1)

        def enough() -> None:
            limit(0)
            self._away.discard("valkey")
            self._note("no memory", before, server="valkey")

        self._undo(self.random.uniform(0.3, 1.2) * self.ttl, enough)

    # To the disk

    def _fill_disk(self) -> None:
        before = now()
        path = self.ground.directory / "sqlite" / "filler"
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as filler:
            for size in (65536, 4096, 512):
                with contextlib.suppress(OSError):
                    while True:
                        filler.write(os.urandom(size))

        def enough() -> None:
            path.unlink()
            self._note("full", before, backend="sqlite")

        self._undo(self.random.uniform(0.3, 1.0) * self.ttl, enough)
