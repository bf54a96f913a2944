"""System checks of ``ANGEE_JOBS_LOCKS``.

================  ==========================================================================================
id                what is wrong
================  ==========================================================================================
angee_jobs.E001   an entry cannot work: an unknown path, option or database, or a time that cannot be
angee_jobs.E002   there is no ``"default"`` entry, which every lock uses that names no other
angee_jobs.E020   a Redis backend names a cache that does not exist, or is not a Redis cache
angee_jobs.E021   a Redis backend misses a package; the hint names the extra to install
angee_jobs.E022   the cache of a Redis backend is spread over several servers
angee_jobs.E023   (``--deploy``) the Redis server does not let its user run the scripts of the locks
angee_jobs.W001   a table of this app is missing in a database that a lock backend uses: run ``migrate``
angee_jobs.W020   (``--deploy``) the Redis server evicts locks when its memory is full
angee_jobs.W021   (``--deploy``) the Redis user may not publish or subscribe: waiters are woken up to 1 s late
angee_jobs.W022   (``--deploy``) the Redis server cannot be reached, so nothing is known about it
================  ==========================================================================================

None of them needs a network, but those that are run with ``--database`` or ``--deploy``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, register
from django.core.exceptions import ImproperlyConfigured

from .locks.backends.base import BaseLockBackend
from .locks.conf import DEFAULT_ALIAS, SETTING, lock_backends


def _backends(problems: list[CheckMessage]) -> Iterator[BaseLockBackend]:
    """The backends that can be made; the others add to ``problems``."""
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
            problems.append(Error(what, hint=hint or None, id="angee_jobs.E001"))
        else:
            if isinstance(backend, BaseLockBackend):
                yield backend


@register
def check_lock_backends(**kwargs: Any) -> list[CheckMessage]:
    """What is wrong with the setting."""
    problems: list[CheckMessage] = []
    for backend in _backends(problems):
        problems += backend.check()
    return problems


@register(deploy=True)
def check_lock_servers(**kwargs: Any) -> list[CheckMessage]:
    """What is wrong with the servers, where they are to be asked."""
    problems: list[CheckMessage] = []
    for backend in _backends([]):
        problems += backend.check_deployment()
    return problems


@register(Tags.database)
def check_lock_databases(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """What is wrong with the databases, of those that the operator has named."""
    problems: list[CheckMessage] = []
    for backend in _backends([]):
        problems += backend.check_database(databases or [])
    return problems
