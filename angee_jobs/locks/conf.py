"""``ANGEE_JOBS_LOCKS``: which backend an alias means.

Looked up as in ``caches`` and ``tasks``, with one difference that matters: there is one instance per process and
alias, not one per thread, because the line of waiters and the lock connections are the process's. A forked child
makes its own, and so does a test that overrides the settings.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from . import process
from .backends.base import BaseLockBackend
from .backends.third_party import HandleBackend
from .errors import LockBackendError
from .types import LockBackend

SETTING = "ANGEE_JOBS_LOCKS"
DEFAULT_ALIAS = "default"
_BUILT_IN = "angee_jobs.locks."


def default_configuration() -> dict[str, Any]:
    """What serves without the setting: the best that the default database can do."""
    from django.db import connections

    connection: Any = connections["default"]
    if connection.vendor == "postgresql":
        path = "PostgresAdvisoryLockBackend"
    elif connection.vendor == "sqlite" and connection.is_in_memory_db():
        return {"BACKEND": _BUILT_IN + "LocalLockBackend"}
    else:
        path = "TableLockBackend"
    return {"BACKEND": _BUILT_IN + path, "OPTIONS": {"alias": "default"}}


def configuration() -> dict[str, Any]:
    """The setting, or what stands for it."""
    configured = getattr(settings, SETTING, None)
    if not configured:
        return {DEFAULT_ALIAS: default_configuration()}
    if not isinstance(configured, dict):
        raise ImproperlyConfigured(
            f"{SETTING} must be a dictionary of aliases, such as "
            f'{{"default": {{"BACKEND": "{_BUILT_IN}TableLockBackend"}}}}, not {type(configured).__name__}.'
        )
    return configured


def green_threads() -> str | None:
    """The library that has put green threads in the place of real ones in this process, or None."""
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None and gevent.is_module_patched("threading"):
        return "gevent"
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        return "eventlet"
    return None


def make_backend(alias: str, entry: Any) -> Any:
    """The instance that ``entry`` of the setting describes; ImproperlyConfigured says what to write instead."""
    where = f"{SETTING}[{alias!r}]"
    if not isinstance(entry, dict) or not isinstance(entry.get("BACKEND"), str):
        raise ImproperlyConfigured(
            f'{where} must be a dictionary with a "BACKEND", the dotted path of a class, such as '
            f'"{_BUILT_IN}TableLockBackend".'
        )
    unknown = set(entry) - {"BACKEND", "OPTIONS", "NAMESPACE"}
    if unknown:
        raise ImproperlyConfigured(
            f'{where} has unknown keys {sorted(unknown, key=repr)}; arguments of the backend go into its "OPTIONS".'
        )
    namespace = _namespace(where, entry.get("NAMESPACE", ""))
    options = entry.get("OPTIONS", {})
    if not isinstance(options, dict):
        raise ImproperlyConfigured(f'{where}["OPTIONS"] must be a dictionary, not {options!r}.')
    path = entry["BACKEND"]
    try:
        backend_class = import_string(path)
    except (ImportError, ValueError, TypeError) as error:  # the others for a path such as ".name"
        raise ImproperlyConfigured(
            f'{where}["BACKEND"]: {path!r} cannot be imported ({error}). The backends that come with this package '
            f"are {', '.join(repr(_BUILT_IN + name) for name in BUILT_IN)}."
        ) from error
    if not callable(backend_class):
        raise ImproperlyConfigured(f'{where}["BACKEND"]: {path!r} is not a class.')
    try:
        inspect.signature(backend_class).bind(**options)
    except TypeError as error:
        takes = [name for name in inspect.signature(backend_class).parameters if name != "self"]
        raise ImproperlyConfigured(
            f'{where}["OPTIONS"]: {error}. {path} takes {", ".join(takes) or "no options"}.'
        ) from error
    except ValueError:  # a class without a readable signature; its constructor decides
        pass
    ours = inspect.isclass(backend_class) and issubclass(backend_class, BaseLockBackend)
    if ours and (library := green_threads()):
        raise ImproperlyConfigured(
            f"{where}: {library} has replaced the threads of this process, and a lock is renewed on a real one: it "
            f"would be lost whenever the code that holds it does not yield. Run this code without monkey-patching, as "
            f"in Celery's prefork or threads pool, or with asyncio."
        )
    try:
        backend = backend_class(**options)
    except (ImproperlyConfigured, TypeError, ValueError) as error:
        raise ImproperlyConfigured(f'{where}["OPTIONS"]: {error}') from error
    except OSError as error:  # out of descriptors, while its modules are imported
        raise LockBackendError(f"The lock backend {alias!r} cannot be made now: {error}") from error
    if isinstance(backend, BaseLockBackend):
        backend.alias, backend.namespace = alias, namespace
    elif not (callable(getattr(backend, "try_acquire", None)) and callable(getattr(backend, "is_held", None))):
        raise ImproperlyConfigured(f"{where}: {path} has no try_acquire() and is_held(); see LockBackend.")
    return backend


def _namespace(where: str, value: Any) -> str | Callable[[], str]:
    """What "NAMESPACE" means: a plain text, or the dotted path of a callable."""
    if not isinstance(value, str):
        raise ImproperlyConfigured(f'{where}["NAMESPACE"] must be a string, not {value!r}.')
    if "." not in value:
        return value
    try:
        function = import_string(value)
    except (ImportError, ValueError) as error:
        raise ImproperlyConfigured(
            f'{where}["NAMESPACE"]: {value!r} cannot be imported ({error}). A dotted path names a callable; a plain '
            f"namespace has no dot in it."
        ) from error
    if not callable(function):
        raise ImproperlyConfigured(f'{where}["NAMESPACE"]: {value!r} is not callable.')

    def ask() -> str:
        answer = function()
        if not isinstance(answer, str):
            raise ImproperlyConfigured(f'{where}["NAMESPACE"]: {value} returned {answer!r}, which is not a string.')
        return answer

    return ask


#: The backends that come with this package, by their public names.
BUILT_IN = ("LocalLockBackend", "TableLockBackend", "PostgresAdvisoryLockBackend", "RedisLockBackend")


class LockBackendHandler:
    """``lock_backends["alias"]``, iteration over the aliases, ``all()``.

    Example::

        for alias in lock_backends:
            print(alias, lock_backends[alias].cross_process)
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._instances: dict[str, Any] = {}
        #: Those with the operations that policy needs, by their aliases.
        self.known: dict[str, BaseLockBackend] = {}
        self._mutex = threading.RLock()

    def __getitem__(self, alias: Any) -> LockBackend:
        """The backend of ``alias``; ImproperlyConfigured if the setting does not name it or cannot work."""
        try:
            return self._instances[alias]  # type: ignore[no-any-return]
        except (KeyError, TypeError):
            pass
        with self._mutex, process.importing:
            if isinstance(alias, str) and alias in self._instances:
                return self._instances[alias]  # type: ignore[no-any-return]
            configured = configuration()
            if not isinstance(alias, str) or alias not in configured:
                raise ImproperlyConfigured(
                    f"There is no lock backend {alias!r}: {SETTING} has {', '.join(map(repr, configured))}."
                )
            instance = self._instances[alias] = make_backend(alias, configured[alias])
            return instance  # type: ignore[no-any-return]

    def operations(self, alias: str) -> BaseLockBackend:
        """The same with the operations that policy needs, also where somebody else's backend lacks them."""
        try:
            return self.known[alias]
        except (KeyError, TypeError):
            backend = self[alias]
        if not isinstance(backend, BaseLockBackend):
            backend = HandleBackend(backend, alias)
            backend.namespace = _namespace(f"{SETTING}[{alias!r}]", configuration()[alias].get("NAMESPACE", ""))
        return self.known.setdefault(alias, backend)

    def __iter__(self) -> Iterator[str]:
        return iter(configuration())

    def all(self) -> list[LockBackend]:
        return [self[alias] for alias in self]

    def _setting_changed(self, *, setting: str, **kwargs: Any) -> None:
        # DATABASES and CACHES too, since a backend reads them when it is made. What is held goes on with the old
        # instance, which its holds keep.
        if setting in {SETTING, "DATABASES", "CACHES"}:
            old = list(self._instances.values())
            self._forget()
            for backend in old:
                if isinstance(backend, BaseLockBackend):
                    backend.close()


lock_backends = LockBackendHandler()
process.on_fork(in_child=lock_backends._forget)
setting_changed.connect(lock_backends._setting_changed)


def get_lock_backend(backend: str = DEFAULT_ALIAS) -> LockBackend:
    """The backend of an alias in ``ANGEE_JOBS_LOCKS``; ImproperlyConfigured if there is none.

    Example::

        get_lock_backend("leases").is_held("billing-run")
    """
    return lock_backends[backend]
