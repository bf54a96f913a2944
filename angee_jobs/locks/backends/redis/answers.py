"""What the scripts answer. What has another shape than they give does not come from them."""

from __future__ import annotations

import json
from typing import Any

from ...errors import LockBackendError
from ..base import Grant, Record
from .cache import CacheAlias

#: No number of a script has more digits.
DIGITS = 20
#: A hold begins with so many: its end, its token and when it was acquired; then comes the owner.
HEAD = 48
HEAD_AND_OWNER = 112


def member_place(member: str) -> int | None:
    """Of the id of a shared or placed hold, the number of its place."""
    return int(member) if member.isdecimal() and len(member) <= 4 else None


class Answers:
    """Reads the answers of one server."""

    def __init__(self, cache: CacheAlias) -> None:
        self.cache = cache

    def odd(self, reply: object) -> LockBackendError:
        return LockBackendError(f"{self.cache} gave an answer that means nothing: {reply!r:.100}", uncertain=True)

    def number(self, reply: object) -> int:
        if not isinstance(reply, int):
            raise self.odd(reply)
        return reply

    def grant(self, reply: object) -> Grant:
        if not isinstance(reply, bytes) or not HEAD <= len(reply) <= HEAD + 4 or not reply.isdigit():
            raise self.odd(reply)
        place = int(reply[48:]) if len(reply) > HEAD else None
        return Grant(int(reply[16:32]), int(reply[32:48]) / 1e6, int(reply[:16]) / 1e6, place)

    def record_of(self, name: str, reply: object) -> Record | None:
        if reply == 0:
            return None
        if not isinstance(reply, list) or len(reply) != 2:
            raise self.odd(reply)
        return self.record(name, reply[1], self.time(reply[0]))

    def page(self, reply: object) -> tuple[Any, list[Record]]:
        if not isinstance(reply, list) or len(reply) % 2 or not reply:
            raise self.odd(reply)
        now = self.time(reply[0])
        names = reply[2::2]
        if not all(isinstance(name, bytes) for name in names):
            raise self.odd(reply)
        pairs = zip(names, reply[3::2], strict=True)
        return reply[1], [self.record(name.decode(errors="replace"), hold, now) for name, hold in pairs]

    def texts(self, reply: bytes) -> list[str]:
        try:
            texts = json.loads(reply.decode(errors="replace"))
        except (ValueError, RecursionError) as error:
            raise self.odd(reply) from error
        if not isinstance(texts, list) or not all(type(text) is str for text in texts):
            raise self.odd(reply)
        return texts

    def time(self, reply: object) -> int:
        if not isinstance(reply, bytes) or not reply.isdigit() or len(reply) > DIGITS:
            raise self.odd(reply)
        return int(reply)

    def record(self, name: str, hold: object, now: int) -> Record:
        if not isinstance(hold, bytes) or not hold[:HEAD].isdigit() or len(hold) < HEAD_AND_OWNER:
            raise self.odd(hold)
        return self.described(name, hold[:HEAD].decode(), hold[HEAD_AND_OWNER:].decode(errors="replace"), now)

    def described(self, name: str, head: str, holder: str, now: int) -> Record:
        expires, token, acquired = int(head[:16]), int(head[16:32]), int(head[32:])
        name, _, member = name.partition("\x01")
        return Record(name, holder, acquired / 1e6, expires / 1e6, (expires - now) / 1e6, token, member_place(member))
