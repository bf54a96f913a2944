"""Holds locks of one backend; says "held", and then after each word it hears which of them are lost."""

from angee_jobs.locks import Lock
from tests.support.children import hear, say


def main(backend: str, *keys: str) -> None:
    held = [Lock(key, ttl=60, backend=backend) for key in keys]
    assert all(each.acquire() for each in held)
    say("held")
    while hear() != "end":
        say(*(int(each.lost) for each in held))
