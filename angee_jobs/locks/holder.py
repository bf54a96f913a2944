"""Who holds a lock: what is stored of the thread that takes one, and how it is read."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
from contextvars import ContextVar

from .types import Holder

#: The task that runs now, as the integrations for Celery, django.tasks and others set it.
current_task: ContextVar[str] = ContextVar("angee_jobs_current_task", default="")

_host = socket.gethostname()


class _ThreadPart(threading.local):
    text = ""
    pid = 0
    ttl: float | None = None
    with_ttl = ""


_thread_part = _ThreadPart()


def describe_holder(note: str, ttl: float | None = None, places: int = 0) -> str:
    """The stored form of "this thread, now, with this note", of the length of the lease in seconds, and of the places.

    JSON, put together by hand from a part that is kept per thread: it is made for every acquire, and json.dumps
    alone would take a tenth of an acquire on SQLite.
    """
    prefix = _thread_part.text
    if _thread_part.pid != (pid := os.getpid()):
        prefix = json.dumps({"host": _host, "pid": pid, "thread": threading.current_thread().name})[:-1]
        _thread_part.text, _thread_part.pid, _thread_part.ttl = prefix, pid, None
    if ttl is not None:
        if ttl != _thread_part.ttl:
            _thread_part.with_ttl, _thread_part.ttl = f'{prefix}, "ttl": {ttl:g}', ttl
        prefix = _thread_part.with_ttl
    if places:  # ALONE is not told
        prefix += f', "places": {places}'
    task = current_task.get()
    if not task and not note:
        return prefix + "}"
    return f'{prefix}, "task": {json.dumps(task)}, "note": {json.dumps(note)}}}'


def describes_this_thread(holder: Holder) -> bool:
    return (holder.host, holder.pid, holder.thread) == (_host, os.getpid(), threading.current_thread().name)


def _without_surrogates(value: object) -> object:
    return value.encode(errors="surrogatepass").decode(errors="replace") if isinstance(value, str) else value


def parse_holder(text: str | None) -> Holder | None:
    """The inverse; None for what is not a holder, since rows can be edited by hand."""
    try:
        fields = json.loads(text or "")
        if "\\u" in (text or ""):  # a lone surrogate can be written so, and neither sent nor printed
            fields = {name: _without_surrogates(value) for name, value in fields.items()}
        pid, ttl = fields.get("pid"), fields.get("ttl")
        return Holder(
            host=str(fields["host"]),
            pid=int(pid) if pid is not None else None,
            thread=str(fields.get("thread", "")),
            task=str(fields.get("task", "")),
            note=str(fields.get("note", "")),
            places=places if type(places := fields.get("places", 0)) is int else 0,
            ttl=None if ttl is None or not math.isfinite(ttl) else float(ttl),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
