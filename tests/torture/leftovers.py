"""What is left at the storages when all workers are gone and every lease is over: nothing."""

from __future__ import annotations

import contextlib
from typing import Any

from tests.support.servers import eventually
from tests.torture.ground import BACKENDS, PLANTED, Ground


def leftovers(ground: Ground) -> dict[str, list[str]]:
    """What should not be there any more, after a reap, for each backend."""
    from angee_jobs.locks import held_locks, lock_backends, reap_expired_locks
    from angee_jobs.locks.operations import expired_locks

    found = {}
    for backend in ground.backends:
        reap_expired_locks(backend=backend)
        found[backend] = [f"{info.name} is still held: {info.holder}" for info in held_locks(backend=backend)]
        found[backend] += [f"{info.name} was not reaped" for info in expired_locks(backend=backend)]
    for backend in ground.backends:
        lock_backends.operations(backend).close()
    for server, look in {"postgres": _of_postgres, "valkey": _of_valkey}.items():
        backends = [each for each in ground.backends if (BACKENDS | PLANTED)[each] == server]
        if backends:
            found[backends[-1]] += look(ground.servers[server])
    return found


def _of_postgres(server: Any) -> list[str]:
    def sessions() -> list[str]:
        return [str(each) for each in server.sessions() if each.application_name.startswith("angee_jobs")]

    with contextlib.suppress(AssertionError):  # those of this process close in their own time
        eventually(lambda: not sessions(), 5.0)
    found = [f"a session is open: {each}" for each in sessions()]
    for granted in (True, False):
        if count := server.advisory_locks(granted):
            found.append(f"{count} advisory locks are {'held' if granted else 'waited for'}")
    [(rows,)] = server.query("SELECT count(*) FROM angee_jobs_sessionhold")
    if rows:
        found.append(f"{rows} notes of session locks are left")
    return found


def _of_valkey(server: Any) -> list[str]:
    with server.connect() as client:
        found = []
        for key in client.scan_iter("*"):
            what = key.decode(errors="replace")
            if what.endswith("token"):
                continue  # the last fencing token
            if "gone:" in what:
                if client.ttl(key) == -1:
                    found.append(f"the key {what} stays for ever")
            elif client.type(key) != b"zset" or client.zcard(key):
                found.append(f"the key {what} is left")
        subscribers = client.execute_command("PUBSUB", "NUMPAT")
        channels = client.pubsub_channels()
        if subscribers or channels:
            found.append(f"somebody is subscribed: {channels}")
    return found
