"""What the tests of the held-locks page have in common: backends, users, and reading the page."""

import contextlib
import json
import re
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.test import Client, override_settings

from angee_jobs.locks import (
    LocalLockBackend,
    Lock,
    LockKey,
    force_release,
    held_locks,
)

URL = "/admin/angee_jobs/tasklock/"
LOCKS = {
    "default": {"BACKEND": "angee_jobs.locks.LocalLockBackend"},
    "table": {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"alias": "other"}},
    "broken": {"BACKEND": "tests.support.admin_page.BrokenBackend"},
}


class BrokenBackend(LocalLockBackend):
    """Works until it is told to break."""

    error: Exception | None = None

    def list_held(self, deadline: float) -> Any:
        if self.error:
            raise self.error
        return super().list_held(deadline)

    def inspect(self, name: str, deadline: float) -> Any:
        if self.error:
            raise self.error
        return super().inspect(name, deadline)

    def inspect_many(self, names: Any, deadline: float) -> Any:
        if self.error:
            raise self.error
        return super().inspect_many(names, deadline)

    def force_release(self, name: str, deadline: float, fencing_token: int | None = None) -> Any:
        if self.error:
            raise self.error
        return super().force_release(name, deadline, fencing_token)


class TellsNothing:
    """A backend of somebody else, with the least that one must have."""

    cross_process = False

    def try_acquire(self, key: Any, *, timeout: Any = None) -> Any:
        return None

    def is_held(self, key: Any) -> bool:
        return True


@pytest.fixture(autouse=True)
def locks() -> Iterator[None]:
    with override_settings(ANGEE_JOBS_LOCKS=LOCKS):
        for info in held_locks(backend="table"):
            force_release(LockKey.parse(info.name), backend="table")
        yield
    BrokenBackend.error = None


def user_with(*permissions: str, superuser: bool = False) -> User:
    name = "root" if superuser else "-".join(permissions) or "nobody"
    user = User.objects.create(username=name, is_staff=True, is_superuser=superuser)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    return user


@pytest.fixture(autouse=True)
def no_users() -> Iterator[None]:
    yield
    LogEntry.objects.all().delete()
    User.objects.all().delete()


@pytest.fixture(name="client")
def operator() -> Client:
    """An operator who may do everything here."""
    return logged_in("view_tasklock", "release_tasklock")


def logged_in(*permissions: str, superuser: bool = False, **kwargs: Any) -> Client:
    client = Client(**kwargs)
    client.force_login(user_with(*permissions, superuser=superuser))
    return client


def page(client: Client, query: str = "") -> str:
    response = client.get(URL + query)
    assert response.status_code == 200
    return response.content.decode()


def words(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def targets(html: str) -> list[str]:
    return [unescape(value) for value in re.findall(r'name="lock" value="([^"]*)"', html)]


def names(html: str) -> list[str]:
    return [json.loads(target)[2] for target in targets(html)]


def release(client: Client, *chosen: str, reason: str = "host is gone", **more: str) -> list[str]:
    """Confirm at once; what the user is told."""
    data = {"lock": list(chosen), "confirmed": "yes", "reason": reason, **more}
    response = client.post(URL + "release/", data)
    assert response.status_code == 302
    told = [str(message) for message in get_messages(response.wsgi_request)]
    client.get(URL)
    return told


@contextlib.contextmanager
def held(*keys: Any, **kwargs: Any) -> Iterator[list[Lock]]:
    with contextlib.ExitStack() as stack:
        made = [Lock(key, **kwargs) for key in keys]
        for each in made:
            assert each.acquire()
            stack.callback(each.release)
        yield made
