"""What gives no answer: name servers, files on dead mounts, the first of several hosts."""

import os
import socket
import threading
import time

import pytest

from angee_jobs.locks.backends.postgres import connecting
from angee_jobs.locks.backends.postgres.errors import NoAnswer, SessionLost
from angee_jobs.locks.backends.postgres.session import Session
from tests.support.children.silent_names import NAME_SERVER
from tests.support.pg_helpers import ECHO, alias_with, within
from tests.support.procs import Child
from tests.support.servers import PostgresServer, free_port


@pytest.fixture
def silent_port():
    """Of a host that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("backend", ["PostgresAdvisoryLockBackend", "TableLockBackend"])
def test_a_silent_name_server_stops_no_other_thread(postgres, tmp_path, backend):
    with Child("silent_names", tmp_path, backend) as child:
        for _ in range(3):
            line = child.line(40)
            if line.startswith("impossible"):
                pytest.skip(f"no name server can be put at {NAME_SERVER}: {line}")
            assert line.startswith("failed")
            assert 0.8 < float(line.split()[1]) < 2.5
        assert float(child.expect("longest")) < 0.7


def test_a_file_that_cannot_be_read_stops_nothing(postgres, tmp_path, monkeypatch):
    """As on a dead mount: whoever opens this waits until somebody writes into it."""
    os.mkfifo(tmp_path / "services")
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    with alias_with(OPTIONS={"service": "lockservice"}) as alias:
        for number in range(connecting.THREADS + 2):
            started = time.monotonic()
            with pytest.raises(NoAnswer):
                Session(alias, within(0.1))
            assert time.monotonic() - started < 1.5
            assert len(connecting._under_way) == min(number + 1, connecting.THREADS)
        writer = os.open(tmp_path / "services", os.O_WRONLY)
        os.write(writer, f"[lockservice]\nport={postgres.port}\n".encode() * 10)
        os.close(writer)
        limit = within(10)
        while connecting._under_way and time.monotonic() < limit:
            time.sleep(0.01)
        assert not connecting._under_way


def test_a_password_that_is_long_in_the_making(postgres):
    made = threading.Event()

    def password():
        made.wait(20)
        return "secret"

    with alias_with(OPTIONS={"password": password}) as alias:
        started = time.monotonic()
        with pytest.raises(NoAnswer):
            Session(alias, within(0.3))
        assert time.monotonic() - started < 2
        made.set()
        Session(alias, within()).close()


def test_no_thread_for_the_look_up(postgres, monkeypatch):
    """As at the interpreter's exit on Python 3.12 and later, when leases are released."""
    monkeypatch.setattr(connecting.process, "start_thread", lambda run, name: False)
    Session("postgres", within()).close()


# Several hosts.


def test_the_second_host_is_tried_when_the_first_is_silent(postgres, silent_port):
    hosts = {"HOST": f"127.0.0.1,{postgres.directory}", "PORT": f"{silent_port},{postgres.port}"}
    with alias_with(**hosts) as alias:
        started = time.monotonic()
        session = Session(alias, within(2))
        assert session.execute(ECHO, ["x"], within())[0][0] == b"x"
        assert 0.5 < time.monotonic() - started < 1.9
        session.close()


def test_all_hosts_are_silent(postgres, silent_port):
    with alias_with(HOST="127.0.0.1,127.0.0.1", PORT=str(silent_port)) as alias:
        started = time.monotonic()
        with pytest.raises(NoAnswer):
            Session(alias, within(0.6))
        assert 0.5 < time.monotonic() - started < 2.6


def test_each_host_that_fails_is_named(postgres, tmp_path, silent_port):
    hosts = {"HOST": f"127.0.0.1,{tmp_path},nowhere.invalid", "PORT": str(silent_port), "OPTIONS": {}}
    with alias_with(**hosts) as alias, pytest.raises(SessionLost) as caught:
        Session(alias, within(1))
    for what in ("no answer in time", str(tmp_path), "nowhere.invalid"):
        assert what in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere.invalid", "a..b", "x" * 300, "ü.invalid"])
def test_the_second_host_is_tried_when_the_first_has_no_address(postgres, name):
    with alias_with(HOST=f"{name},{postgres.directory}", PORT=str(postgres.port)) as alias:
        Session(alias, within(10)).close()


def test_hosts_of_a_service_and_of_the_environment(postgres, silent_port, tmp_path, monkeypatch):
    hosts = {"host": f"127.0.0.1,{postgres.directory}", "port": f"{silent_port},{postgres.port}"}
    (tmp_path / "services").write_text(
        "[another]\nhost=wrong\n# a comment\n[lockservice]\n" + "".join(f"{k}={v}\n" for k, v in hosts.items())
    )
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    with alias_with(HOST="", PORT="", OPTIONS={"service": "lockservice"}) as alias:
        Session(alias, within(1)).close()
    for keyword, value in hosts.items():
        monkeypatch.setenv(f"PG{keyword.upper()}", value)
    with alias_with(HOST="", PORT="") as alias:
        Session(alias, within(1)).close()


def test_hosts_and_ports_that_do_not_match_are_refused(postgres):
    with alias_with(HOST=f"{postgres.directory},{postgres.directory}", PORT="1,2,3") as alias:
        with pytest.raises(SessionLost, match="match"):
            Session(alias, within())


def test_target_session_attrs(postgres, server_dir):
    """Where libpq would look for one host among several, it does so now one host at a time."""
    with PostgresServer(server_dir, port=free_port()) as standby:
        standby.query("SELECT 1")
        standby.stop()
        (standby.data / "standby.signal").touch()
        standby.start()
        hosts = {"HOST": f"{standby.directory},{postgres.directory}", "PORT": f"{standby.port},{postgres.port}"}
        for wanted, in_recovery in (
            ("any", True), ("read-write", False), ("primary", False), ("standby", True), ("prefer-standby", True),
        ):  # fmt: skip
            with alias_with(**hosts, OPTIONS={"target_session_attrs": wanted}) as alias:
                session = Session(alias, within())
                assert session.in_recovery is in_recovery, wanted
                session.close()
        standby.stop()
        with alias_with(**hosts, OPTIONS={"target_session_attrs": "prefer-standby"}) as alias:
            session = Session(alias, within())
            assert not session.in_recovery
            session.close()
        with alias_with(**hosts, OPTIONS={"target_session_attrs": "standby"}) as alias:
            with pytest.raises(SessionLost, match="standby"):
                Session(alias, within())


def test_load_balancing_over_hosts_goes_on(postgres, silent_port, monkeypatch):
    orders = set()
    monkeypatch.setattr(connecting.random, "shuffle", lambda items: (orders.add(len(items)), items.reverse()))
    hosts = {"HOST": f"{postgres.directory},127.0.0.1", "PORT": f"{postgres.port},{silent_port}"}
    with alias_with(**hosts, OPTIONS={"load_balance_hosts": "random"}) as alias:
        Session(alias, within(2)).close()
    assert orders == {2}
