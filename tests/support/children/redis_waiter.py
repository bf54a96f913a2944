"""Processes that use the Redis backend while the test does something to them, or to the server."""

import os
import random
import signal
import sys
import time

from angee_jobs.locks import LockBackendError, lock, lock_backends, task_lock
from angee_jobs.locks.clock import now
from angee_jobs.locks.hold import new_owner_id
from tests.support.children import hear, say


def main(backend: str, key: str) -> None:
    """Takes the lock whenever it is told to, and says how long that took."""
    say("ready")
    while (line := hear()) != "end":
        timeout = float(line)
        say("waiting")
        with lock(key, timeout=timeout, backend=backend):
            say("acquired", time.time())
            hear("release")
            before = time.time()
        say("released", before)


class Interrupted(Exception):
    pass


def interrupts(backend: str, seconds: str) -> None:
    """Locks and unlocks while a signal handler raises at random instants."""
    armed = False

    def handler(signum: int, frame: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Interrupted

    key = f"interrupted-{os.getpid()}"
    lock(key, backend=backend)
    signal.signal(signal.SIGALRM, handler)
    instants = random.Random(os.getpid())
    until = time.monotonic() + float(seconds)
    interrupted = entered = 0
    while time.monotonic() < until:
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, instants.uniform(0.00001, 0.003))
            for _ in range(100):  # not for ever: Python drops what is raised in a finalizer
                # Refused until the renewal thread has given up what an interrupted try was granted.
                with task_lock(key, ttl=60, backend=backend) as acquired:
                    entered += acquired
        except Interrupted:
            interrupted += 1
        except LockBackendError as error:
            if not isinstance(error.__context__, Interrupted):
                raise
        finally:
            armed = False
    operations = lock_backends.operations(backend)
    deadline = time.monotonic() + 10
    while operations.is_held(key) and time.monotonic() < deadline:
        time.sleep(0.01)
    say("done", interrupted, entered, int(operations.is_held(key)), len(operations.connections._idle))


def forks(backend: str, key: str) -> None:
    """Forks inside a block: the child takes other locks, and ends in every way."""
    operations = lock_backends.operations(backend)
    with lock(key, backend=backend, ttl=3) as held:
        operations.remaining("angee:name:other", time.clock_gettime(time.CLOCK_BOOTTIME) + 5)
        for how in ("exit", "_exit", "block"):
            pid = os.fork()
            if pid == 0:
                assert lock_backends.operations(backend) is not operations
                assert operations.connections._idle == []
                assert not lock(key, backend=backend).acquire()
                with lock("the child's", timeout=5, backend=backend):
                    pass
                if how == "_exit":
                    os._exit(0)
                elif how == "exit":
                    sys.exit(0)
                else:
                    break
            _, status = os.waitpid(pid, 0)
            say("child", how, os.waitstatus_to_exitcode(status))
            held.check()
            held.extend()
            assert not lock(key, backend=backend).acquire()
    if pid != 0:
        say("free", int(not operations.is_held(key)))
        with lock(key, backend=backend):
            say("again")


def silent_names(folder: str) -> None:
    """In a mount namespace of its own, where the name server never answers: what becomes of this process meanwhile."""
    import socket
    import threading

    from django.conf import settings

    from tests.support.children.silent_names import NAME_SERVER, silence

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        try:
            silent.bind((NAME_SERVER, 53))
            problem = silence(folder)
        except OSError as error:
            problem = str(error)
        if problem:
            say("impossible", problem)
            return
        settings.CACHES["silent"] = settings.CACHES["redis"] | {"LOCATION": "redis://redis.angee.test:6379"}
        settings.ANGEE_JOBS_LOCKS["silent"] = {
            "BACKEND": "angee_jobs.locks.RedisLockBackend",
            "OPTIONS": {"cache": "silent"},
        }
        longest, over = 0.0, threading.Event()

        def tick() -> None:
            nonlocal longest
            last = time.monotonic()
            while not over.wait(0.01):
                now = time.monotonic()
                longest, last = max(longest, now - last), now

        ticking = threading.Thread(target=tick)
        with lock(f"kept-{os.getpid()}", ttl=2, backend="redis") as held:
            ticking.start()
            for _ in range(3):
                started = time.monotonic()
                try:
                    lock("names", backend="silent").acquire(timeout=1)
                except LockBackendError:
                    say("failed", f"{time.monotonic() - started:.2f}")
            over.set()
            ticking.join()
            say("longest", f"{longest:.2f}")
            say("kept", int(held.held))


def without_descriptors(seconds: str) -> None:
    """Holds a lease, and lets six threads lock other keys, while no descriptor is to be had."""
    import threading

    operations = lock_backends.operations("redis")
    failed: list[str] = []
    done = [0] * 6
    over = threading.Event()

    def work(number: int) -> None:
        while not over.is_set():
            try:
                with lock(f"free-{os.getpid()}-{number}", backend="redis"):
                    done[number] += 1
            except Exception as error:
                failed.append(repr(error))

    with lock(f"kept-{os.getpid()}", ttl=3, backend="redis") as held:
        operations.is_held("warm")
        fillers = []
        try:
            while True:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        time.sleep(float(seconds))
        over.set()
        for thread in threads:
            thread.join(20)
        kept = held.held and held.extend()
        for each in fillers:
            os.close(each)
        say("kept", int(kept))
        say("least", min(done))
        say("failed", len(failed), *failed[:1])


def forks_in_c(key: str) -> None:
    """Forks without Python's knowledge, with a backend and its connections; parent and child use it at once."""
    import ctypes

    from angee_jobs.locks.clock import now

    operations = lock_backends.operations("redis")
    fork = ctypes.PyDLL(None).fork
    assert operations.acquire(key, "the parent's", 60.0, "{}", now() + 5) is not None
    operations.remaining(key, now() + 5)
    operations.wait_for_change(5.0)
    subscriber = operations.watcher._connection.sock.fileno()
    children, inherited = [], list(operations.connections._idle)
    assert inherited
    for number in range(2):
        pid = fork()
        if pid == 0:
            code = 1
            try:
                assert operations.inspect(key, now() + 5).name == key
                assert not any(each in inherited for each in operations.connections._idle), "the parent's is used"
                use(operations, key, f"{key}-child-{number}")
                assert operations.acquire(key, "the child's", 60.0, "{}", now() + 5) is None
                operations.remaining(key, now() + 5)
                assert operations.wait_for_change(5.0) is None
                operations.stop_watching()
                code = 0
            except BaseException as error:
                say("child failed", repr(error))
            finally:
                os._exit(code)
        children.append(pid)
    use(operations, key, f"{key}-parent")
    for pid in children:
        say("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    assert operations.watcher._connection.sock.fileno() == subscriber
    operations.wait_for_change(0.1)
    assert operations.watcher._connection is not None, "the parent's subscription was broken"
    say("released", int(operations.release(key, "the parent's", now() + 5)))


def use(operations: object, held: str, own: str) -> None:
    """Each answer is checked: one that was another's would be of another kind, or of another name."""
    from angee_jobs.locks.clock import now

    for _ in range(200):
        assert operations.acquire(own, own, 60.0, "{}", now() + 5) is not None
        assert operations.inspect(own, now() + 5).name == own
        assert operations.inspect(held, now() + 5).name == held
        assert operations.release(own, own, now() + 5) is True


def members(folder: str, name: str, seed: str, ttl: str, dies: str) -> None:
    """Enters at random as each kind of holder, by the backend's operations alone.

    Leaves a file in ``folder`` while it is inside, and looks who else is. One that dies is killed inside.
    """
    backend, dice = lock_backends.operations("redis"), random.Random(int(seed))
    entered, wrong = dict.fromkeys(("alone", "shared", "placed"), 0), set()
    until = time.monotonic() + (dice.uniform(0.5, 2.0) if dies == "True" else 60.0)
    while not os.path.exists(os.path.join(folder, "end")):
        kind = dice.choices(list(entered), [1, 3, 6])[0]
        owner = new_owner_id({"alone": 0, "shared": -1, "placed": 3}[kind])
        if backend.acquire(name, owner, float(ttl), "{}", now() + 5) is None:
            if kind == "alone":
                backend.remaining(name, now() + 0.05)
            time.sleep(dice.uniform(0, 0.01))
            continue
        mine = f"{kind}-{os.getpid()}"
        open(os.path.join(folder, mine), "w").close()
        together = [each for each in os.listdir(folder) if each != "end"]
        if len(together) > 1 and any(each.startswith("alone") for each in together):
            wrong.add("+".join(together))
        if sum(each.startswith("placed") for each in together) > 3:
            wrong.add("+".join(together))
        entered[kind] += 1
        if time.monotonic() > until:
            os.unlink(os.path.join(folder, mine))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(dice.uniform(0, 0.01))
        os.unlink(os.path.join(folder, mine))
        if not backend.release(name, owner, now() + 5):
            wrong.add(f"lost-{kind}")
    say("done", ",".join(map(str, entered.values())), *wrong)
