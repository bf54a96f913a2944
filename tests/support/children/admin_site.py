"""The admin on a port of its own, with users and locks as the test orders; for the tests in a browser.

Hears "hold BACKEND TTL AGE TASK NOTE KEY", "lost KEY" and "free"; says "port N PK" first.
"""

from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.db import connections
from django.test.testcases import LiveServerThread

from angee_jobs.locks import LocalLockBackend, Lock, holder
from angee_jobs.locks.errors import LockBackendError
from angee_jobs.locks.holder import current_task
from angee_jobs.locks.keys import parse_command_key
from tests.support.children import hear, say

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)


class StrictPolicy:
    """Middleware: what a careful project sends."""

    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request):
        response = self.get_response(request)
        response.headers["Content-Security-Policy"] = POLICY
        return response


class DownBackend(LocalLockBackend):
    def list_held(self, deadline):
        raise LockBackendError("The server of the cache 'sessions' cannot be reached: connection refused")


class LongRunning(LocalLockBackend):
    """Its holds began a while ago, so many seconds as `age` says; for pictures that look like life."""

    age = 0.0

    def acquire(self, name, owner, ttl, holder, deadline):
        grant = super().acquire(name, owner, ttl, holder, deadline)
        self._leases[name][0].acquired_at -= self.age
        return grant


def main() -> None:
    holder._host = "worker-3"
    settings.ALLOWED_HOSTS = ["*"]
    settings.MIDDLEWARE = [
        *settings.MIDDLEWARE[:1],
        "django.middleware.locale.LocaleMiddleware",
        *settings.MIDDLEWARE[1:],
        "django.middleware.csrf.CsrfViewMiddleware",
        "tests.support.children.admin_site.StrictPolicy",
    ]
    settings.ANGEE_JOBS_LOCKS = {
        "default": {"BACKEND": "angee_jobs.locks.LocalLockBackend"},
        "leases": {"BACKEND": "tests.support.children.admin_site.LongRunning"},
        "down": {"BACKEND": "tests.support.children.admin_site.DownBackend"},
    }
    User.objects.all().delete()
    for name, superuser in (("operator", True), ("viewer", False), ("nobody", False)):
        user = User(username=name, is_staff=True, is_superuser=superuser)
        user.set_password("secret")
        user.save()
    User.objects.get(username="viewer").user_permissions.set(Permission.objects.filter(codename="view_tasklock"))
    server = LiveServerThread("127.0.0.1", StaticFilesHandler, {})
    server.daemon = True
    server.start()
    server.is_ready.wait()
    if server.error:
        raise server.error
    say("port", server.port, User.objects.get(username="operator").pk)
    held: dict[str, Lock] = {}
    while (order := hear()) != "end":
        word, _, rest = order.partition(" ")
        if word == "hold":
            backend, ttl, age, task, note, key = rest.split("\t")
            LongRunning.age = float(age)
            token = current_task.set(task)
            held[key] = Lock(parse_command_key(key), ttl=float(ttl), note=note, backend=backend)
            say("held", held[key].acquire())
            current_task.reset(token)
        elif word == "lost":
            say("lost", held[rest].lost)
        elif word == "free":
            for lock in held.values():
                lock.release()
            held.clear()
            say("freed")
    server.terminate()
    User.objects.all().delete()
    connections.close_all()
