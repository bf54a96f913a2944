"""Keys of locks, and the one canonical name each of them has.

What is decided here, and nowhere else:

- how a key is spelled as a string (`LockKey.name`), so that two different keys never
  share a name and every name can be stored, sent and printed;
- which spellings of a model label and of a primary key are one record
  (`record_lock_key`);
- what a plain `str` means as a key (`as_lock_key`).

Names are compared between processes, releases and machines: a change of the spelling
lets two holders in while an upgrade is rolled out. The golden values in the tests are
there to stop it.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import re
import reprlib
import sys
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from math import isfinite
from typing import TYPE_CHECKING, Any
from uuid import UUID

from .log import logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.apps import AppConfig
    from django.db.models import Field, Model

PREFIX = "angee:"
#: How names begin that stand in the namespace of a backend's alias: no piece of a key comes so early.
SCOPED = "angee@"

# What a piece may not contain as it is: the separator, the escape character, what
# PostgreSQL cannot store (NUL), what breaks a log line or a terminal (the other control
# characters), and what UTF-8 cannot encode (lone surrogates).
_SPECIAL = re.compile("[%:\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_ESCAPES = re.compile("(?:%[0-9A-F]{2})+")


@dataclass(frozen=True, slots=True, init=False)
class LockKey:
    """What a lock is about: a namespace and one or more parts, none of them empty.

    >>> LockKey("import", ("mailbox", "a:b")).name
    'angee:import:mailbox:a%3Ab'

    Pieces are `str` and any character is allowed in them, at any length. Case and
    Unicode normalisation are kept, so `"A"` and `"a"` are two keys.

    Raises `TypeError` for a piece that is not a `str` or parts that are not a tuple
    (a lone `str` would otherwise be taken apart into its letters), `ValueError` for an
    empty piece or no parts at all.
    """

    namespace: str
    parts: tuple[str, ...]
    scope: str = field(default="", repr=False)
    """The `"NAMESPACE"` of the backend's alias, where it has one: `angee@tenant:import:mailbox:1`."""
    name: str = field(init=False, repr=False, compare=False)
    """The canonical name: a different one for every key. See `parse` for the inverse."""

    def __init__(self, namespace: str, parts: tuple[str, ...], scope: str = "") -> None:
        if not isinstance(parts, tuple):
            raise TypeError(
                f"The parts of a LockKey must be a tuple of str, such as ('a',), "
                f"not {_shown(parts)} ({type(parts).__name__})."
            )
        if not parts:
            raise ValueError("A LockKey needs at least one part: parts is ().")
        pieces = (namespace, *parts)
        for piece in pieces:  # every lock passes here: plain pieces are not copied
            if type(piece) is not str or not piece:
                pieces = tuple(_text(piece, "A piece of a LockKey") for piece in pieces)
                break
        object.__setattr__(self, "namespace", pieces[0])
        object.__setattr__(self, "parts", pieces[1:])
        if _SPECIAL.search("".join(pieces)):
            pieces = tuple(_SPECIAL.sub(_escape, piece) for piece in pieces)
        object.__setattr__(self, "scope", scope)
        prefix = PREFIX if not scope else f"{SCOPED}{_SPECIAL.sub(_escape, _text(scope, 'The scope of a LockKey'))}:"
        object.__setattr__(self, "name", prefix + ":".join(pieces))

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, name: str) -> LockKey:
        """The key whose canonical name is `name`: `LockKey.parse(key.name) == key`.

        >>> LockKey.parse("angee:import:mailbox:a%3Ab").parts
        ('mailbox', 'a:b')

        Raises `ValueError` for everything that is not exactly the name of some key
        (another prefix, `%3a` for `%3A`, an escape that was not needed), because a
        name that is nearly right would be a lock of its own; `TypeError` for a `name`
        that is not a `str`.
        """
        text = _text(name, "The name of a lock")
        if not text.startswith((PREFIX, SCOPED)):
            raise ValueError(f"The name of a lock begins with {PREFIX!r}: {_shown(text)}.")
        try:
            first, *pieces = (_ESCAPES.sub(_unescape, piece) for piece in text.split(":"))
            namespace, *parts = pieces
            key = cls(namespace, tuple(parts), first.removeprefix(SCOPED) if text.startswith(SCOPED) else "")
        except ValueError as error:
            raise ValueError(f"{_shown(text)} is not the name of a lock: {error}") from error
        if key.name != text:
            raise ValueError(f"{_shown(text)} is not the name of a lock: its canonical spelling is {_shown(key.name)}.")
        return key


def as_lock_key(key: LockKey | str) -> LockKey:
    """The key that is meant wherever a key is accepted.

    >>> as_lock_key("billing-run").name
    'angee:name:billing-run'

    A plain `str` that begins with `angee:` is refused with `ValueError`: it looks like
    a canonical name, but would be the name of quite another lock. An empty one is a
    `ValueError` too, anything but `LockKey` and `str` a `TypeError`.
    """
    if isinstance(key, LockKey):
        return key
    if type(key) is str and len(key) < 200:
        return _key_of_text(key)
    return _as_lock_key(key)


def _as_lock_key(key: object) -> LockKey:
    if not isinstance(key, str):
        raise TypeError(f"A lock key must be a LockKey or a str, not {_shown(key)} ({type(key).__name__}).")
    if key.startswith(PREFIX):
        raise ValueError(
            f"A plain str key must not begin with {PREFIX!r}: {_shown(key)}. "
            f"For a canonical name, use LockKey.parse(name)."
        )
    return LockKey("name", (_text(key, "A lock key"),))


#: A project has few plain keys, and each lock on one asks again. Not for long ones, which would fill the memory.
_key_of_text = functools.lru_cache(1024)(_as_lock_key)


def lock_name(key: LockKey | str) -> str:
    """The canonical name of `key`; raises what `as_lock_key` raises."""
    return key.name if isinstance(key, LockKey) else as_lock_key(key).name


def parse_command_key(text: str) -> LockKey:
    """The key that somebody typed: a canonical name, or else a plain string.

    >>> parse_command_key("angee:name:billing-run") == parse_command_key("billing-run")
    True

    Raises `ValueError` for an empty text, or one that begins with `angee:` or `angee@`
    and is not the canonical name of a key.
    """
    return LockKey.parse(text) if text.startswith((PREFIX, SCOPED)) else as_lock_key(text)


def name_digest(name: str) -> str:
    """A name of any length in 64 hexadecimal digits, for columns and indexes with a limit.

    SHA-256, because a shorter or weaker hash would let two keys meet by chance or on
    purpose.
    """
    return hashlib.sha256(name.encode()).hexdigest()


def record_lock_key(model_label: str | type[Model], pk: object, purpose: str) -> LockKey:
    """The key for one purpose on one record of a model.

    >>> record_lock_key("messaging.Channel", 42, "sync").name
    'angee:record:messaging.Channel:42:sync'

    A label that names an installed model, in any case, becomes the label of its concrete
    model, so that a proxy's records are the very records of the model behind it; a
    multi-table child keeps its own label. A model class does as well. A label of no
    installed model stays as it is; if its app is installed, a warning is logged once,
    since most likely it is misspelt, and its locks exclude nothing.

    The `pk` is read as the model's primary key field reads it, so that `1` and `"1"`,
    or two spellings of a UUID, are one record. A composite key is a tuple or list with
    one value for each field. Without an installed model, values are `str`, `int` or
    `UUID`.

    Raises `ValueError` for a key that is not set (`None`, or empty), that the field
    cannot read, or that has too few or too many values; `TypeError` for values of a type
    that the field would have to guess at (`True`, `1.5`, `b"1"`, an instance);
    `AppRegistryNotReady` before `django.setup()` has loaded the models, when a label
    could not be told from its canonical spelling.
    """
    label, fields = _concrete(model_label)
    values = pk if isinstance(pk, (tuple, list)) else (pk,)
    if fields is None:
        fields = [None] * len(values)
    elif isinstance(pk, (tuple, list)) != (len(fields) > 1):
        needed = f"a tuple of {len(fields)} values" if len(fields) > 1 else "one value"
        raise ValueError(f"The primary key of {label} is {needed}, not {_shown(pk)}.")
    if not values or len(values) != len(fields):
        needed = f"{len(fields)} values" if fields else "at least one value"
        raise ValueError(f"The primary key of {label} has {needed}: not {_shown(pk)}.")
    texts = map(_pk_text, [label] * len(fields), fields, values)
    return LockKey("record", (label, *texts, _text(purpose, "The purpose of a key")))


def instance_lock_key(instance: Model, purpose: str) -> LockKey:
    """The key for one purpose on this record: `record_lock_key` of its label and pk.

    >>> instance_lock_key(channel, "sync").name
    'angee:record:messaging.Channel:42:sync'

    Raises `TypeError` for what is not an instance of a model, `ValueError` for an
    instance whose primary key is not set yet.
    """
    from django.db.models import Model

    if not isinstance(instance, Model):
        raise TypeError(
            f"instance_lock_key() takes an instance of a model, not {_shown(instance)} ({type(instance).__name__})."
        )
    pk = instance.pk
    if any(map(_is_unset, pk if isinstance(pk, tuple) else (pk,))):
        raise ValueError(f"This {instance._meta.label} has no primary key yet ({_shown(pk)}): save it first.")
    return record_lock_key(instance._meta.label, pk, purpose)


def _concrete(model_label: str | type[Model]) -> tuple[str, Sequence[Field[Any, Any] | None] | None]:
    """The canonical label, and the fields of the primary key if the model is installed."""
    from django.apps import apps
    from django.core.exceptions import AppRegistryNotReady
    from django.db.models import Model

    if isinstance(model_label, type) and issubclass(model_label, Model):
        if model_label._meta.abstract:
            raise ValueError(f"{model_label._meta.label} is an abstract model: it has no records.")
        model_label = model_label._meta.label
    label = _text(model_label, "The model label of a key")
    try:
        apps.check_models_ready()
    except AppRegistryNotReady as error:
        raise AppRegistryNotReady(
            f"record_lock_key({_shown(label)}, ...) needs the models to be loaded: call "
            f"it after django.setup(), not while apps and models are being imported."
        ) from error
    app_label, _, model_name = label.lower().partition(".")
    try:
        model = apps.get_model(label)
    except (LookupError, ValueError):
        installed = {config.label.lower(): config for config in apps.get_app_configs()}.get(app_label)
        if installed is None:
            return label, None
        if model_name not in installed.models:
            _warn_of_label(label, installed)
            return label, None
        model = installed.models[model_name]
    meta = model._meta.concrete_model._meta
    return meta.label, list(meta.pk_fields)


@functools.lru_cache(1024)  # once for each label
def _warn_of_label(label: str, app: AppConfig) -> None:
    names = {model.__name__: model._meta.label for model in app.get_models()}
    close = difflib.get_close_matches(label.partition(".")[2], names, n=1)
    logger.warning(
        "record_lock_key(%s, ...): the app is installed, and has no such model. This lock excludes only holders that "
        "write the label in the same way.%s",
        _shown(label),
        f" Did you mean {names[close[0]]}?" if close else "",
    )


def _pk_text(label: str, pk_field: Field[Any, Any] | None, value: object) -> str:
    """One value of a primary key, in the one spelling that its field gives it."""
    from django.core.exceptions import ValidationError
    from django.db.models import Model
    from django.utils.functional import Promise

    what = f"The primary key of {label}"
    if _is_unset(value):
        raise ValueError(f"{what} is not set: {_shown(value)}.")
    if isinstance(value, Model):
        raise TypeError(
            f"{what} must be a value, not an instance of {value._meta.label}: give its pk, or call instance_lock_key()."
        )
    plain = str(value) if isinstance(value, Promise) else value  # gettext_lazy() and its kind
    # A field turns nearly anything into an integer or a text: 1.5, True, b"1", an expression.
    # That is the key of some other record, so only these are converted; other values are
    # taken where the field keeps their type.
    fits = isinstance(plain, (str, int, UUID)) and not isinstance(plain, bool)
    try:
        if pk_field is not None:
            read = pk_field.to_python(plain)
            fits = fits or isinstance(read, type(plain))
            plain = pk_field.get_prep_value(read)  # unwraps what a custom field made of it
        text = _written(plain) if fits else ""
    except (ValidationError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"{what} cannot be {_shown(value)} ({type(value).__name__}).") from error
    if not fits:
        raise TypeError(f"{what} must be given as str, int or UUID, not as {type(value).__name__}: {_shown(value)}.")
    if not text:
        raise ValueError(f"{what} must not be empty: {_shown(value)}.")
    return text


def _written(value: object) -> str:
    """A value as text: equal values in one way, different ones differently."""
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, UUID, timedelta)):
        return str(value)
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float) and isfinite(value):
        return repr(value + 0.0)  # no -0.0
    # Decimal.normalize() would round to the current context. The limit keeps 1E999999999 small.
    if isinstance(value, Decimal) and abs(value.adjusted()) < 1000:
        text = format(value or Decimal(), "f")
        return text.rstrip("0").rstrip(".") if "." in text else text
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC).isoformat()
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    raise ValueError(f"{_shown(value)} has no one spelling as text")


def _is_unset(value: object) -> bool:
    # An unsaved instance whose key has a db_default carries an expression for a key.
    return value is None or hasattr(value, "resolve_expression")


def _text(value: object, what: str) -> str:
    """`value` as a plain `str`: of a `str` subclass (an enum, safe HTML) its bare text."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {_shown(value)} ({type(value).__name__}).")
    if not value:
        raise ValueError(f"{what} must not be empty: ''.")
    return str.__str__(value)


def _escape(match: re.Match[str]) -> str:
    encoded = match[0].encode("utf-8", "surrogatepass")
    return "".join(f"%{byte:02X}" for byte in encoded)


def _unescape(match: re.Match[str]) -> str:
    encoded = bytes.fromhex(match[0].replace("%", ""))
    return encoded.decode("utf-8", "surrogatepass")


class _Repr(reprlib.Repr):
    """Values in error messages: short, and without running code of others.

    The `repr()` of a `QuerySet` runs its query, that of an instance may.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = 80  # characters

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, str):
            return self.repr_str(str.__str__(x), level)
        if type(x).__module__.partition(".")[0] in sys.stdlib_module_names:
            return super().repr_instance(x, level)
        return f"<{type(x).__qualname__} object>"


def _shown(value: object) -> str:
    try:
        return _Repr().repr(value)
    except ValueError:  # an int with more digits than Python prints
        return f"<{type(value).__qualname__} object>"
