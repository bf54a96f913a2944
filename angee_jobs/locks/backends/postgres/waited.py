"""The keys that waiters of this process wait for, as the server's notifications name them."""

from __future__ import annotations

from collections.abc import Iterable

from ... import clock

#: A key is forgotten when its waiters have not asked about it for this many seconds. They ask once a second.
WAITED_SECONDS = 5.0


class Waited:
    """The name of each key. Any thread may use it at any time: each step on the dictionary is atomic.

    Only time takes a key out, and not the end of all waits: a waiter that has just come would lose its key.
    """

    def __init__(self) -> None:
        self._keys: dict[str, tuple[str, float]] = {}
        self._next_look = 0.0

    def add(self, key: str, name: str) -> None:
        now = clock.now()
        self._keys[key] = name, now
        if now >= self._next_look:
            self._next_look = now + WAITED_SECONDS
            for old, (_, asked) in self._keys.copy().items():
                if asked < now - WAITED_SECONDS:
                    self._keys.pop(old, None)

    def names(self, keys: Iterable[str]) -> list[str]:
        """The names of those ``keys`` that are waited for."""
        return [entry[0] for key in keys if (entry := self._keys.get(key)) is not None]

    def recent(self) -> dict[str, str]:
        """All names that are waited for now, by their keys."""
        since = clock.now() - WAITED_SECONDS
        return {key: name for key, (name, asked) in self._keys.copy().items() if asked >= since}
