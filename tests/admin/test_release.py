"""Who may see the page of held locks, and release by force from it."""

import json
import threading

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from angee_jobs.locks import held_locks, lock, lock_backends, lock_info
from angee_jobs.locks.backends.table import TableLockBackend
from angee_jobs.locks.errors import LockBackendError
from tests.support.admin_page import (  # noqa: F401  fixtures
    URL,
    BrokenBackend,
    held,
    locks,
    logged_in,
    names,
    no_users,
    operator,
    page,
    release,
    targets,
    words,
)

# Who may


def test_permissions() -> None:
    with held("billing-run"):
        for permissions in ((), ("release_tasklock",)):
            stranger = logged_in(*permissions)
            assert stranger.get(URL).status_code == 403
            assert stranger.post(URL + "release/", {}).status_code == 403
        viewer = logged_in("view_tasklock")
        html = page(viewer)
        assert "billing-run" in html and "Release selected" not in html and not targets(html)
        chosen = json.dumps(["default", None, "angee:name:billing-run"])
        data = {"lock": chosen, "confirmed": "yes", "reason": "x"}
        assert viewer.post(URL + "release/", data).status_code == 403
        assert lock_info("billing-run") is not None
        nobody = Client()
        assert nobody.get(URL).status_code == 302 and nobody.post(URL + "release/", data).status_code == 302


def test_csrf() -> None:
    strict = logged_in("view_tasklock", "release_tasklock", enforce_csrf_checks=True)
    with held("billing-run"):
        data = {"lock": targets(page(strict)), "confirmed": "yes", "reason": "x"}
        assert strict.post(URL + "release/", data).status_code == 403
        assert lock_info("billing-run") is not None


def test_there_is_no_page_of_a_row_and_nothing_to_add() -> None:
    root = logged_in(superuser=True)
    for path in ("add/", "1/", "1/change/", "1/delete/", "1/history/"):
        assert root.get(URL + path).status_code == 404
    assert "Held locks" in page(root) or "Locks" in root.get("/admin/").content.decode()


# Release by force


def test_release_is_confirmed_told_and_logged(client: Client) -> None:
    with held("alpha", ttl=60) as [mine], held("beta", backend="table"), held("gamma"):
        html = page(client, "?o=key")
        confirmation = client.post(URL + "release/", {"lock": targets(html)[:2], "back": "?o=key&evil=//x"})
        text = words(confirmation.content.decode())
        assert "Are you sure" in text and "Their holders are not stopped." in text
        assert "alpha" in text and "beta" in text and "gamma" not in text
        assert len(list(held_locks())) == 2, "nothing happened yet"

        data = {
            "lock": targets(html)[:2],
            "confirmed": "yes",
            "reason": " worker-3  is off\n",
            "back": "?o=key&evil=//x",
        }
        response = client.post(URL + "release/", data)
        assert response.headers["Location"] == f"{URL}?o=key", "back to the place, and nowhere else"
        assert [info.name for info in held_locks()] == ["angee:name:gamma"]
        assert list(held_locks(backend="table")) == []
        assert mine.lost and mine.release() is False
    entries = LogEntry.objects.order_by("object_repr")
    assert [entry.object_repr for entry in entries] == ["angee:name:alpha", "angee:name:beta"]
    assert {entry.user.username for entry in entries} == {"view_tasklock-release_tasklock"}
    assert all(entry.change_message.endswith(": worker-3 is off") for entry in entries)
    root = logged_in(superuser=True)
    assert root.get("/admin/").status_code == 200, "the list of recent actions copes with the entry"


@pytest.mark.parametrize("backend", ["default", "table"])
def test_each_of_several_holders_is_shown_and_released_by_itself(client: Client, backend: str) -> None:
    mine = [lock("import", slots=3, backend=backend, note=f"note-{number}") for number in range(3)]
    mine.append(lock("import", shared=True, backend=backend, note="a reader"))
    for each in mine:
        assert each.acquire()
    html = page(client, "?o=since")
    text = words(html)
    for number, each in enumerate(mine[:3]):
        assert f"place {number + 1} of 3" in text and f"note-{number}" in text and str(each.fencing_token) in text
    assert "shared" in text and "a reader" in text
    second = targets(html)[1]
    assert "note-1" in words(client.post(URL + "release/", {"lock": second}).content.decode())
    release(client, second)
    assert [each.extend() for each in mine] == [True, False, True, True]
    for each in mine:
        each.release()


def test_a_reason_is_needed(client: Client) -> None:
    with held("billing-run"):
        data = {"lock": targets(page(client)), "confirmed": "yes", "reason": "  "}
        response = client.post(URL + "release/", data)
        assert response.status_code == 200 and "Say why" in response.content.decode()
        assert lock_info("billing-run") is not None


def test_a_lock_that_is_gone(client: Client) -> None:
    with held("billing-run"):
        chosen = targets(page(client))
    text = words(client.post(URL + "release/", {"lock": chosen}).content.decode())
    assert "These holds are over already" in text and "Yes, release" not in text
    [told] = release(client, *chosen)
    assert "was not released: that hold was over already" in told
    assert not LogEntry.objects.exists()


def test_the_next_hold_is_left_alone(client: Client) -> None:
    with held("billing-run"):
        chosen = targets(page(client))
    with held("billing-run"):
        text = words(client.post(URL + "release/", {"lock": chosen}).content.decode())
        assert "the lock has another holder now" in text
        [told] = release(client, *chosen)
        assert "was not released" in told
        assert lock_info("billing-run") is not None


def test_a_backend_that_dies_between_page_and_action(client: Client) -> None:
    with held("one", "two", backend="broken"), held("three"):
        chosen = targets(page(client))
        BrokenBackend.error = LockBackendError("The server is down")
        text = words(client.post(URL + "release/", {"lock": chosen}).content.decode())
        assert "“broken” cannot be asked: The server is down" in text and "three" in text
        told = release(client, *chosen)
        assert len(told) == 2 and "The server is down" in told[0] and told[1] == "Released 1 lock by force."
        BrokenBackend.error = None
        assert len(list(held_locks(backend="broken"))) == 2


@pytest.mark.parametrize(
    "nonsense",
    ["", "x", "[]", "{}", "[1, 2, 3]", '["default", 1, "nonsense"]', '["nowhere", 1, "angee:name:a"]', "[" * 5000],
)
def test_nonsense_instead_of_a_lock(client: Client, nonsense: str) -> None:
    assert release(client, nonsense) == ["What was selected is not from this page, or its backend is gone."]


def test_odd_requests(client: Client) -> None:
    assert client.get(URL + "release/").status_code == 302
    assert release(client) == ["Select the locks to release first; none was."]
    many = [json.dumps(["default", 1, f"angee:name:{number}"]) for number in range(101)]
    assert release(client, *many) == ["At most 100 locks can be released at once."]


def test_waiters_of_this_process_hear_of_it(client: Client) -> None:
    with held("billing-run", ttl=60, backend="table"):
        got = threading.Event()

        def wait() -> None:
            with lock("billing-run", timeout=20, backend="table"):
                got.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        release(client, *targets(page(client)))
        assert got.wait(10)
        waiter.join(10)


def test_backends_are_what_they_say() -> None:
    assert isinstance(lock_backends["table"], TableLockBackend)
