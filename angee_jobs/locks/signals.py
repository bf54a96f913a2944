"""Signals that tell an application, or its metrics, what happens to its locks.

=================  =================================================================  ==========================
signal             arguments, besides ``sender`` (the backend's class)                sent in
=================  =================================================================  ==========================
lock_acquired      ``key``, ``backend``, ``fencing_token``, ``waited``                the caller's thread
lock_refused       ``key``, ``backend``, ``waited``, ``holder``                       the caller's thread
lock_released      ``key``, ``backend``, ``fencing_token``, ``held_for``              the caller's thread
lock_lost          ``key``, ``backend``, ``fencing_token``, ``held_for``, ``reason``  a dispatcher thread
locks_reaped       ``backend``, ``count``                                             the caller's thread
=================  =================================================================  ==========================

``key`` is the :class:`~angee_jobs.locks.LockKey`, ``backend`` the alias in ``ANGEE_JOBS_LOCKS``, ``waited`` and
``held_for`` are seconds, ``holder`` is a :class:`~angee_jobs.locks.LockInfo` or None. A release that waited for the
caller's transaction is told in the thread that ended the transaction. A receiver is a plain function; one that raises
is logged and changes nothing about the lock, and one that is slow delays its caller by its own time and nobody else.

Example::

    @receiver(lock_refused)
    def count_refusal(sender, key, backend, **kwargs):
        REFUSALS.labels(namespace=key.namespace, backend=backend).inc()
"""

from __future__ import annotations

from typing import Any

from django.dispatch import Signal

from .log import logger

lock_acquired = Signal()
lock_refused = Signal()
lock_released = Signal()
lock_lost = Signal()
locks_reaped = Signal()


def tell(signal: Signal, sender: type, **arguments: Any) -> None:
    """Send ``signal`` to its receivers; one that raises an exception is logged and the next one still hears it."""
    try:
        answers = signal.send_robust(sender, **arguments)
    except Exception:  # of Django's own: an async receiver cannot be waited for in a coroutine's thread
        logger.exception("Receivers of a lock signal could not be called: in a coroutine, only plain functions can")
        return
    for receiver, answer in answers:
        if isinstance(answer, Exception):
            logger.error("A receiver of a lock signal failed: %r", receiver, exc_info=answer)
