"""The one spelling of a task's arguments, from which the key of a task that is unique on them is made."""

from __future__ import annotations

import json
from collections.abc import Set
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.db.models import Model

from ..locks.keys import _written

#: Equal values are spelled in one way, different ones differently.
_AS_TEXT = (date, time, timedelta, Decimal, UUID, bytes)


def canonical(value: Any) -> str:
    """``value`` as JSON. TypeError, with what to pass instead, for what is not always spelled alike.

    A fallback to ``str()`` would let two tasks with one set in at once, since its order differs between processes,
    and refuse a task for a record because of another record of that name.
    """
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(element) for element in value]
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        # A number is a text in the JSON of a message, too: the worker finds the key that the caller has found.
        return {key if isinstance(key, str) else str(int(key)): _plain(element) for key, element in value.items()}
    if isinstance(value, _AS_TEXT):
        try:
            return _written(value)
        except ValueError as error:  # a Decimal that is not a number
            raise TypeError(str(error)) from error
    raise TypeError(_what_to_pass(value))


def _what_to_pass(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, Set):
        return f"the elements of a {kind} have no fixed order: pass a sorted list"
    if isinstance(value, Model):
        return f"two {kind} instances may look alike: pass the primary key"
    if isinstance(value, dict):
        return "the keys of a dict must be str or int"
    return f"a {kind} has no text that tells it from all others: pass a str, a number, a date or a list of such"
