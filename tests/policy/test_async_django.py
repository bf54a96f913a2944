"""Coroutines inside Django: ASGI, and `async_to_sync` in a transaction."""

import asyncio
import threading
import uuid

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.core.asgi import get_asgi_application
from django.db import connections, transaction
from django.http import JsonResponse
from django.test import AsyncClient, Client, override_settings
from django.urls import path

from angee_jobs.locks import task_lock
from tests.support.aio import DEADLINE, is_free, make, new_key, nothing_left, run, until


class Meeting:
    """What a view and its test know of each other."""

    def __init__(self):
        self.alias = ""
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.inside = self.most = 0


meeting = Meeting()


async def count(request, key):
    async with make(key, meeting.alias, timeout=DEADLINE) as held:
        meeting.inside += 1
        meeting.most = max(meeting.most, meeting.inside)
        await asyncio.sleep(0.001)
        meeting.inside -= 1
        return JsonResponse({"token": held.fencing_token})


async def skip(request, key):
    async with task_lock(key, backend=meeting.alias) as acquired:
        return JsonResponse({"acquired": acquired})


async def hang(request, key):
    async with make(key, meeting.alias):
        meeting.entered.set()
        await asyncio.Event().wait()


def atomic(request, key):
    """A plain view in a transaction of its own, that calls a coroutine."""

    async def body():
        async with make(key, meeting.alias):
            pass

    async_to_sync(body)()
    meeting.entered.set()
    assert meeting.go_on.wait(DEADLINE)
    return JsonResponse({})


urlpatterns = [
    path("count/<key>", count),
    path("skip/<key>", skip),
    path("hang/<key>", hang),
    path("atomic/<key>", atomic),
]


@pytest.fixture(autouse=True)
def views(alias):
    global meeting
    meeting = Meeting()
    meeting.alias = alias
    with override_settings(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"]):
        yield


def test_async_views(alias):
    key = new_key()

    async def main():
        answers = await asyncio.gather(*(AsyncClient().get(f"/count/{key}") for _ in range(20)))
        tokens = [answer.json()["token"] for answer in answers]
        assert len(set(tokens)) == 20
        async with make(key, alias):
            assert (await AsyncClient().get(f"/skip/{key}")).json() == {"acquired": False}
        assert (await AsyncClient().get(f"/skip/{key}")).json() == {"acquired": True}

    run(main())
    assert meeting.most == 1
    nothing_left(key, alias)


def test_a_client_that_goes_away_in_the_body(alias):
    """An ASGI server cancels the view."""
    key = new_key()

    async def main():
        scope = {"type": "http", "method": "GET", "path": f"/hang/{key}", "headers": [], "query_string": b""}
        communicator = ApplicationCommunicator(get_asgi_application(), scope | {"http_version": "1.1"})
        await communicator.send_input({"type": "http.request", "body": b""})
        await until(meeting.entered.is_set, 10)
        await communicator.send_input({"type": "http.disconnect"})
        await communicator.wait(10)

    run(main())
    nothing_left(key, alias)


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_async_to_sync_inside_atomic(alias, ending):
    """The coroutine sees no transaction, but its caller has one: the lock is kept until that is over."""
    key = new_key()

    async def body():
        async with make(key, alias) as held:
            return held.fencing_token

    with pytest.raises(ZeroDivisionError) if ending == "rollback" else transaction.atomic():
        with transaction.atomic():
            first = async_to_sync(body)()
            assert not is_free(key, alias)
            assert async_to_sync(body)() == first  # the transaction's own hold, again
            assert not is_free(key, alias)
            if ending == "rollback":
                1 / 0  # noqa: B018
    nothing_left(key, alias)


def test_sync_to_async_with_its_own_transaction(alias):
    """The plain part runs in the thread that keeps the connections, and its transaction is over when it returns."""
    key = new_key()

    def plain():
        with transaction.atomic():
            with make(key, alias):
                pass
            assert not is_free(key, alias)

    async def main():
        await sync_to_async(plain)()
        assert await sync_to_async(is_free)(key, alias)
        async with make(key, alias):
            pass

    run(main())
    nothing_left(key, alias)


def test_plain_view_under_atomic_requests(alias):
    key = new_key()
    connections["default"].settings_dict["ATOMIC_REQUESTS"] = True
    try:
        with connections["default"].cursor():
            pass
        asked = threading.Thread(target=Client().get, args=[f"/atomic/{key}"])
        asked.start()
        assert meeting.entered.wait(10)
        assert not is_free(key, alias)
        meeting.go_on.set()
        asked.join(10)
        assert not asked.is_alive()
    finally:
        connections["default"].settings_dict["ATOMIC_REQUESTS"] = False
    nothing_left(key, alias)


def test_async_view_reaches_the_thread_of_its_caller(alias):
    """`async_to_sync` around a whole request, as the sync test client does with an async view."""
    key = new_key()
    assert Client().get(f"/skip/{key}").json() == {"acquired": True}
    with transaction.atomic():
        assert Client().get(f"/skip/{key}").json() == {"acquired": True}
        assert not is_free(key, alias)
    nothing_left(key, alias)


def test_two_aliases_at_once(alias):
    key = f"{new_key()}-{uuid.uuid4()}"
    with transaction.atomic("default"):
        with transaction.atomic("other"):

            async def body():
                async with make(key, alias):
                    pass

            async_to_sync(body)()
        assert not is_free(key, alias)
    nothing_left(key, alias)
