"""Says back what it hears, until it hears "end"; the example of a child process."""

import os
import time

from django.conf import settings

from tests.support.children import hear, say


def main(*args: str) -> None:
    say("ready", os.getpid(), *args)
    while (line := hear()) != "end":
        say("heard", line)
    say("bye")


def where() -> None:
    say(settings.SETTINGS_MODULE, settings.DATABASES["default"]["NAME"])


def fail() -> None:
    raise ValueError("on purpose")


def fork() -> None:
    """Leave a process behind that outlives this one."""
    if os.fork() == 0:
        say("forked", os.getpid())
        hear()


def clocks() -> None:
    say(time.time(), time.monotonic())
