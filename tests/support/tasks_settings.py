"""Settings of the processes that queue and run Django's tasks: as `tests.settings`, with a task queue in SQLite."""

from importlib.util import find_spec

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES, INSTALLED_APPS, TEST_DIR

INSTALLED_APPS = [*INSTALLED_APPS, "django_tasks_db"]
if find_spec("django.tasks") is None:  # before Django 6.0
    INSTALLED_APPS = ["django_tasks", *INSTALLED_APPS]

DATABASES = {
    **DATABASES,
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(TEST_DIR / "tasks.sqlite3"),
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},  # several processes write
    },
    "tests": DATABASES["default"],  # whose locks the test's own process takes too
}

ANGEE_JOBS_LOCKS = {"default": {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"alias": "tests"}}}

_TASKS = "django.tasks" if find_spec("django.tasks") is not None else "django_tasks"
TASKS = {
    "default": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": []},
    "immediate": {"BACKEND": f"{_TASKS}.backends.immediate.ImmediateBackend"},
}
