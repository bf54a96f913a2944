"""The held-locks page over the backends that need a server, with holders in other processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client, override_settings

from angee_jobs.locks import held_locks, lock_info
from angee_jobs.locks.backends.base import OPERATION_SECONDS
from tests.support.admin_page import URL, logged_in, names, page, release, targets, words
from tests.support.admin_page import no_users as users_go  # noqa: F401  a fixture
from tests.support.commands import execute
from tests.support.procs import Child, stopwatch
from tests.support.servers import PostgresServer, Server, ValkeyServer, eventually

pytestmark = [pytest.mark.once]

LOCKS = {
    "default": {"BACKEND": "angee_jobs.locks.LocalLockBackend"},
    "advisory": {"BACKEND": "angee_jobs.locks.PostgresAdvisoryLockBackend", "OPTIONS": {"alias": "postgres"}},
    "table": {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"alias": "postgres"}},
    "redis": {"BACKEND": "angee_jobs.locks.RedisLockBackend", "OPTIONS": {"cache": "redis"}},
}


@pytest.fixture(autouse=True)
def backends() -> Iterator[None]:
    with override_settings(ANGEE_JOBS_LOCKS=LOCKS):
        yield


@pytest.fixture(name="client")
def operator() -> Client:
    return logged_in("view_tasklock", "release_tasklock")


def holder(backend: str, *keys: str) -> Child:
    return Child("hold_locks", backend, *keys, env={"DJANGO_SETTINGS_MODULE": "tests.support.settings_admin_servers"})


@pytest.mark.parametrize("backend", ["advisory", "table", "redis"])
def test_a_hold_of_another_process_is_shown_and_released(
    client: Client, postgres: PostgresServer, valkey: ValkeyServer, backend: str
) -> None:
    with holder(backend, "billing-run", "other") as child:
        child.expect("held", 20)
        # The name of a session lock is published within about a second of its grant.
        here = f"?backend={backend}"
        eventually(lambda: sorted(names(page(client, here))) == ["angee:name:billing-run", "angee:name:other"], 10)
        html = page(client, f"{here}&q=billing-run")
        assert "cannot be asked" not in words(html)
        assert f"pid {child.pid}" in words(html)
        assert release(client, *targets(html)) == ["Released 1 lock by force."]
        assert lock_info("billing-run", backend=backend) is None

        def told() -> bool:
            child.send("lost?")
            return child.line() == "1 0"

        # A bare acquire() is not renewed, so the holder of a lease learns it by its release or the end of its lease.
        if backend == "advisory":
            eventually(told, 10)
        [entry] = LogEntry.objects.all()
        assert entry.object_repr == "angee:name:billing-run"
        release(client, *targets(page(client, here)))  # a lease of a killed holder stays for its ttl


def test_a_process_that_does_not_answer_loses_its_session_on_a_second_question(
    client: Client, postgres: PostgresServer, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("angee_jobs.locks.operations.OPERATION_SECONDS", min(OPERATION_SECONDS, 2.0))
    with holder("advisory", "stuck-1", "stuck-2", "innocent") as child:
        child.expect("held", 20)
        eventually(lambda: len(names(page(client, "?backend=advisory&q=name"))) == 3, 10)
        child.sigstop()
        chosen = targets(page(client, "?q=stuck"))
        data = {"lock": chosen, "confirmed": "yes", "reason": "the machine hangs"}
        response = client.post(URL + "release/", data)
        assert response.status_code == 200
        html = response.content.decode()
        text = words(html)
        assert "did not give them up when they were asked" in text
        assert "1 more lock would end with it:" in text and "angee:name:innocent" in text
        assert len(list(held_locks(backend="advisory"))) == 3, "nothing has ended yet"
        assert execute("release_lock", "stuck-1", "--backend", "advisory") == 4

        form: dict[str, Any] = {"lock": targets(html)}
        for field in ("reason", "back", "session"):
            [form[field]] = re.findall(rf'name="{field}" value="([^"]*)"', html)
        wrong = form | {"session": "1"}
        client.post(URL + "release/", wrong)
        assert len(list(held_locks(backend="advisory"))) == 3, "another session than the one that was shown"

        assert client.post(URL + "release/", form).status_code == 302
        eventually(lambda: not list(held_locks(backend="advisory")), 10)
        assert sorted(entry.object_repr for entry in LogEntry.objects.all()) == [
            "angee:name:innocent",
            "angee:name:stuck-1",
            "angee:name:stuck-2",
        ]
        child.sigcont()


@pytest.mark.parametrize("which", ["postgres", "valkey"])
def test_a_server_that_hangs_costs_the_page_little(
    client: Client, postgres: PostgresServer, valkey: ValkeyServer, which: str
) -> None:
    server: Server = {"postgres": postgres, "valkey": valkey}[which]
    page(client)
    server.pause()
    try:
        elapsed = stopwatch()
        html = page(client)
        took = elapsed()
    finally:
        server.resume()
    assert took < 12
    assert ("“redis” cannot be asked" if which == "valkey" else "“table” cannot be asked") in html
    eventually(lambda: "errornote" not in page(client), 20)
