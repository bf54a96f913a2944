"""Locks inside the queues that people run. Each module needs its queue's package, and is imported only by its users.

``running_task`` names the task that a lock's holder is; for Celery and ``django.tasks`` it happens by itself, for
other queues their how-to says where to put it.
"""

from __future__ import annotations

from .names import running_task

__all__ = ["running_task"]
