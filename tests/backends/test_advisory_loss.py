"""Session locks are lost with their session, and kept through whatever does not end it."""

import time

import pytest

from angee_jobs.locks.backends.advisory import sql as pg_advisory
from angee_jobs.locks.backends.advisory.sql import advisory_key, halves
from angee_jobs.locks.backends.postgres.statements import Statement
from angee_jobs.locks.errors import LockBackendError
from tests.support.advisory import (
    NAME,
    _backend,
    _nothing_left,
    acquire,
    alias,
    backend,
    locks,
    other,
    session_of,
    watch,
)
from tests.support.pg_helpers import (
    alias_with,
    database_defaults,
    give_up,
    in_production,
    within,
)
from tests.support.servers import eventually

__all__ = ["_nothing_left", "alias", "backend", "in_production", "other"]


@pytest.mark.parametrize("how", ["terminate_all", "restart", "kill"])
def test_the_death_of_the_session_ends_all_holds(backend, postgres, how):
    holds = [(f"angee:name:{number}", acquire(backend, f"angee:name:{number}")[0]) for number in range(5)]
    assert len(watch(backend, *holds)) == 5
    getattr(postgres, how)()
    postgres.start()
    eventually(lambda: not watch(backend, *holds), timeout=4)
    assert backend.release(*holds[0], within()) is False  # and no driver's error
    assert acquire(backend, holds[1][0])[1]
    assert not watch(backend, *holds)
    assert backend.release(*holds[1], within()) is False  # that one is another's by now
    assert backend.inspect(holds[1][0], within())


def test_an_idle_timeout_of_the_server_does_not_end_a_hold(postgres, in_production):
    with database_defaults(postgres, idle_session_timeout="1s"):
        for backend in _backend("postgres"):
            owner, _ = acquire(backend)
            time.sleep(1.1)
            assert watch(backend, (NAME, owner)) == {owner}
            assert backend.release(NAME, owner, within())


def test_the_servers_side_notices_a_host_that_vanished(server_dir, in_production):
    from tests.support.servers import PostgresServer, free_port

    with PostgresServer(server_dir, port=free_port(), tcp=True) as server:
        with alias_with(HOST="127.0.0.1", PORT=str(server.port)) as alias:
            from tests.conftest import migrate

            migrate(alias)
            for backend in _backend(alias):
                acquire(backend)
                session = session_of(backend)
                for name, value in pg_advisory.SERVER_SETTINGS.items():
                    [(setting,)] = session.execute(
                        Statement("SELECT setting FROM pg_settings WHERE name = $1"), [name], within()
                    )
                    assert setting == value.encode()


def test_a_server_that_hangs(backend, other, postgres):
    owner, _ = acquire(backend)
    kept, _ = acquire(backend, "angee:name:kept")
    with postgres.hanging():
        for call in (
            lambda: acquire(backend, "angee:name:new", owner="late", seconds=0.3),
            lambda: backend.release(NAME, owner, within(0.3)),
            lambda: backend.inspect("angee:name:third", within(0.3)),
        ):
            started = time.monotonic()
            with pytest.raises(LockBackendError):
                call()
            assert time.monotonic() - started < 2.3
        started = time.monotonic()
        assert watch(backend, ("angee:name:kept", kept)) == {kept}
        assert time.monotonic() - started < 3
    give_up(backend, "angee:name:new", "late")
    give_up(backend, NAME, owner)
    assert watch(backend, ("angee:name:kept", kept)) == {kept}  # nothing was dropped
    assert acquire(other, "angee:name:kept")[1] is None
    assert acquire(other)[1]
    assert locks(postgres) == sorted(halves(advisory_key(name)) for name in ("angee:name:kept", NAME))
