"""System checks of ``ANGEE_JOBS_LOCKS``.

================  ==========================================================================================
id                what is wrong
================  ==========================================================================================
angee_jobs.E001   an entry cannot work: an unknown path, option, database or engine, or a time that cannot be
angee_jobs.E002   there is no ``"default"`` entry, which every lock uses that names no other
angee_jobs.E003   (``--database``) session locks over a transaction pooler
angee_jobs.E020   a Redis backend names a cache that does not exist, or is not a Redis cache
angee_jobs.E021   a Redis backend misses a package; the hint names the extra to install
angee_jobs.E022   the cache of a Redis backend is spread over several servers
angee_jobs.E023   (``--deploy``) the Redis server does not let its user run the scripts of the locks
angee_jobs.E030   a SQLite database has several names, or is mounted without its folder: users find no common lock file
angee_jobs.W001   (``--database``) a table of this app is missing where a lock backend needs it: run ``migrate``
angee_jobs.W002   without DEBUG, a backend that excludes no other process
angee_jobs.W003   a ttl that is too short to be kept, or so long that a dead holder blocks for hours
angee_jobs.W004   a backend on a database that mirrors another in tests, which usually is a read-only replica
angee_jobs.W006   django-tenants is installed, and a lock backend has no "NAMESPACE": tenants share their locks
angee_jobs.W005   a setting whose name is nearly ANGEE_JOBS_LOCKS, which is not set
angee_jobs.W020   (``--deploy``) the Redis server evicts locks when its memory is full
angee_jobs.W021   (``--deploy``) the Redis user may not publish or subscribe: waiters are woken up to 1 s late
angee_jobs.W022   (``--deploy``) the Redis server cannot be reached, or refuses the user, so nothing is known about it
angee_jobs.W030   a SQLite database is on a network file system, where other machines are not excluded
angee_jobs.W031   the folder of a SQLite database is not writable, where the lock file has to be made
================  ==========================================================================================

None of them needs a network, but those that are run with ``--database`` or ``--deploy``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured

from .locks.backends.base import BaseLockBackend
from .locks.conf import DEFAULT_ALIAS, SETTING, lock_backends
from .locks.process import in_test_run

#: A lease is renewed every third of its ttl: below this, a pause of a second loses it.
SHORT_TTL = 3.0
#: A holder that died keeps others out for its ttl.
LONG_TTL = 3600.0


HINT = f'Write {SETTING} as CACHES: {{"default": {{"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {{}}}}}}.'


def _backends() -> Iterator[BaseLockBackend]:
    """The backends that can be made and are of our kind; of the others :func:`check_lock_backends` tells."""
    return (backend for _, backend in _all_backends([]) if isinstance(backend, BaseLockBackend))


def _all_backends(problems: list[CheckMessage]) -> Iterator[tuple[str, Any]]:
    """The backends that can be made, by alias, also those of other people; the others add to ``problems``."""
    try:
        aliases = list(lock_backends)
    except ImproperlyConfigured as error:
        problems.append(Error(str(error), hint=f"Write {SETTING} as CACHES is written.", id="angee_jobs.E001"))
        return
    if DEFAULT_ALIAS not in aliases:
        problems.append(
            Error(
                f'{SETTING} has no "{DEFAULT_ALIAS}" entry.',
                hint=f'Name one of {", ".join(map(repr, aliases))} "{DEFAULT_ALIAS}", or add one.',
                id="angee_jobs.E002",
            )
        )
    for alias in aliases:
        try:
            backend = lock_backends[alias]
        except ImproperlyConfigured as error:
            what, _, hint = str(error).partition(". ")
            problems.append(Error(what, hint=hint or HINT, id="angee_jobs.E001"))
        else:
            yield alias, backend


@register
def check_lock_backends(**kwargs: Any) -> list[CheckMessage]:
    """What is wrong with the setting."""
    problems: list[CheckMessage] = []
    for alias, backend in _all_backends(problems):
        problems += _check_reach(alias, backend)
        if isinstance(backend, BaseLockBackend):
            problems += [*_check_ttl(backend), *_check_mirror(backend), *_check_tenants(backend), *backend.check()]
    return problems


@register
def check_setting_name(**kwargs: Any) -> list[CheckMessage]:
    """Whether the setting is there under a misspelt name, and so without effect."""
    if hasattr(settings, SETTING):
        return []
    names = [name for name in dir(settings) if name.isupper() and isinstance(getattr(settings, name, None), dict)]
    return [
        Warning(
            f"The setting {name} has no effect, and {SETTING} is not set.",
            hint=f'Write {SETTING}; or put "angee_jobs.W005" into SILENCED_SYSTEM_CHECKS if {name} is for another app.',
            id="angee_jobs.W005",
        )
        for name in difflib.get_close_matches(SETTING, names, n=3, cutoff=0.85)
    ]


def _check_reach(alias: str, backend: Any) -> Iterator[CheckMessage]:
    # A test run has DEBUG off, and often a database in memory: one process, so nothing is wrong.
    if settings.DEBUG or in_test_run() or getattr(backend, "cross_process", False):
        return
    yield Warning(
        f"The locks of {alias!r} ({type(backend).__name__}) exclude no other process, and without "
        f"DEBUG there usually are several: web workers, task workers, cron.",
        hint='Write "angee_jobs.locks.TableLockBackend", PostgresAdvisoryLockBackend or RedisLockBackend; or put '
        '"angee_jobs.W002" into SILENCED_SYSTEM_CHECKS if all runs in one process.',
        id="angee_jobs.W002",
    )


def _check_ttl(backend: BaseLockBackend) -> Iterator[CheckMessage]:
    if not backend.leases or SHORT_TTL <= backend.ttl <= LONG_TTL:
        return
    if backend.ttl < SHORT_TTL:
        why = f"a pause of {backend.ttl * 2 / 3:.2g} s, of the program or the server, loses a lock"
    else:
        why = "after a crash its lock stays taken for so long"
    yield Warning(
        f"The ttl of the lock backend {backend.alias!r} is {backend.ttl:g} s: {why}.",
        hint='Write "ttl": 30 into its OPTIONS. Leases are renewed, so the ttl need not be as long as the work; a lock '
        "that needs another one takes it as an argument.",
        id="angee_jobs.W003",
    )


def _check_tenants(backend: BaseLockBackend) -> Iterator[CheckMessage]:
    if backend.namespace or not apps.is_installed("django_tenants"):
        return
    yield Warning(
        f"The lock backend {backend.alias!r} has no namespace, so record 1 of one tenant and record 1 of another "
        f"share a lock.",
        hint='Write "NAMESPACE": "path.to.current_schema" beside its BACKEND, a callable that returns '
        'connection.schema_name; or put "angee_jobs.W006" into SILENCED_SYSTEM_CHECKS if no lock is of one tenant.',
        id="angee_jobs.W006",
    )


def _check_mirror(backend: BaseLockBackend) -> Iterator[CheckMessage]:
    databases: dict[str, Any] = settings.DATABASES
    database = databases.get(getattr(backend, "db_alias", ""), {})
    mirrored = (database.get("TEST") or {}).get("MIRROR")
    if not mirrored:
        return
    yield Warning(
        f"The lock backend {backend.alias!r} uses a database that is a mirror of {mirrored!r} in tests, and so most "
        f"likely a replica, on which no lock can be taken.",
        hint=f'Write "alias": {mirrored!r} into its OPTIONS.',
        id="angee_jobs.W004",
    )


@register(deploy=True)
def check_lock_servers(**kwargs: Any) -> list[CheckMessage]:
    """What is wrong with the servers, where they are to be asked."""
    problems: list[CheckMessage] = []
    for backend in _backends():
        problems += backend.check_deployment()
    return problems


@register(Tags.database)
def check_lock_databases(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """What is wrong with the databases, of those that the operator has named."""
    problems: list[CheckMessage] = []
    for backend in _backends():
        problems += backend.check_database(databases or [])
    return problems
