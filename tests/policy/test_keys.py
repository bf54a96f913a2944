"""Keys: two different ones never share a name."""

import copy
import dataclasses
import itertools
import pickle
import unicodedata
from typing import Any

import pytest
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from angee_jobs.locks.keys import (
    LockKey,
    as_lock_key,
    lock_name,
    name_digest,
    parse_command_key,
)
from tests.support.key_models import Colour, Order, Purpose

# -- Names

# Never change these: while an upgrade is rolled out, old and new code must mean the same lock.
GOLDEN = [
    ("billing", ("run",), "angee:billing:run"),
    ("record", ("messaging.Channel", "42", "sync"), "angee:record:messaging.Channel:42:sync"),
    ("a:b", ("c",), "angee:a%3Ab:c"),
    ("a", ("b:c", "%"), "angee:a:b%3Ac:%25"),
    ("a", ("%3A",), "angee:a:%253A"),
    ("a", ("\x00\t\n\x1f\x7f\x80\x9f",), "angee:a:%00%09%0A%1F%7F%C2%80%C2%9F"),
    ("a", ("\x20~\xa0\xad\u2028",), "angee:a:\x20~\xa0\xad\u2028"),
    ("a", ("\ud800", "\udfff"), "angee:a:%ED%A0%80:%ED%BF%BF"),
    ("a", ("\ud83d\ude00", "😀"), "angee:a:%ED%A0%BD%ED%B8%80:😀"),
    ("Ä", ("é e\u0301", "?/#&+"), "angee:Ä:é e\u0301:?/#&+"),
]


@pytest.mark.parametrize(("namespace", "parts", "name"), GOLDEN)
def test_golden_names(namespace: str, parts: tuple[str, ...], name: str) -> None:
    key = LockKey(namespace, parts)
    assert key.name == str(key) == lock_name(key) == name
    assert LockKey.parse(name) == key


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("angee:name:billing-run", "034713678d70d0ea04e360e2e6d2824630553e150369da8c67ec491a0d26b68e"),
        ("angee:record:messaging.Channel:42:sync", "34b62edebdafc1cbf55cd0798340bad4711d288b663f2facabae8e5a05022b44"),
        ("angee:name:é😀", "564879702d0581774ba20a46a61c2829a97d7ce3a9c4ad0cbb34bb41d8cc585b"),
        pytest.param(
            "angee:name:" + "x" * 10_000, "40cd444c9a028a61c81b6004dc08ac3ee87d7f6f9b06e7540c382e1f099a998f", id="long"
        ),
    ],
)
def test_golden_digests(name: str, digest: str) -> None:
    assert name_digest(name) == digest


pieces = st.text(st.characters() | st.sampled_from(":%\x00\n\x7f\x9f\ud800\udfff😀"), min_size=1)
keys = st.builds(LockKey, pieces, st.lists(pieces, min_size=1, max_size=4).map(tuple))


@given(keys)
@settings(deadline=None)
def test_a_name_can_be_stored_and_parsed(key: LockKey) -> None:
    assert LockKey.parse(key.name) == key
    assert not any(unicodedata.category(char) in ("Cc", "Cs") for char in key.name)
    assert name_digest(key.name) == name_digest(key.name.encode().decode())


@given(keys, keys)
@settings(deadline=None)
def test_keys_are_equal_exactly_when_their_names_are(one: LockKey, other: LockKey) -> None:
    assert (one == other) is (one.name == other.name)


def test_no_two_keys_of_the_risky_characters_share_a_name() -> None:
    texts = ["".join(chars) for length in (1, 2, 3) for chars in itertools.product(":%3A", repeat=length)]
    arguments: list[tuple[str, tuple[str, ...]]] = [(one, (other,)) for one in texts for other in texts]
    arguments += [(one, (other, third)) for one in texts[:20] for other in texts[:20] for third in texts]
    assert len({LockKey(*pair).name for pair in arguments}) == len(arguments)


TOKENS = ["angee:", ":", "a", "%", "%3A", "%3a", "%25", "%41", "%C3%A9", "%ED%A0%80", "%C0%80", "\x00", "é", "\ud800"]


@given(st.lists(st.sampled_from(TOKENS), max_size=6).map("".join) | st.text())
@settings(deadline=None)
@example("angee:a:%ED%A0%BD%ED%B8%80")
def test_parse_takes_canonical_names_only(text: str) -> None:
    try:
        key = LockKey.parse(text)
    except ValueError:
        return
    assert key.name == text


@pytest.mark.parametrize(
    "text",
    [
        "billing-run",
        "angee",
        "angee:",
        "angee:a",
        "angee:a:",
        "angee::a",
        "angee:a::b",
        "angee:a:b:",
        "Angee:a:b",
        " angee:a:b",
        "angee:a:b%3ac",  # lower-case digits
        "angee:a:%41",  # an escape that was not needed
        "angee:a:%C3%A9",
        "angee:a:%",  # no escape at all
        "angee:a:%3",
        "angee:a:%G0",
        "angee:a:%FF",  # no UTF-8
        "angee:a:%C2",
        "angee:a:%C0%80",  # overlong
        "angee:a:%E0%80%BA",
        "angee:a:%F4%90%80%80",  # beyond Unicode
        "angee:a:b\n",
        "angee:a:\ud800",
    ],
)
def test_parse_refuses_what_is_not_a_name(text: str) -> None:
    with pytest.raises(ValueError, match="name of a lock") as caught:
        LockKey.parse(text)
    assert repr(text) in str(caught.value)


def test_parse_names_the_prefix() -> None:
    with pytest.raises(ValueError, match="begins with 'angee:': 'billing-run'"):
        LockKey.parse("billing-run")
    for value in (None, 5, b"angee:a:b"):
        with pytest.raises(TypeError, match=f"must be a str, not {value!r}"):
            LockKey.parse(value)  # type: ignore[arg-type]


def test_names_that_differ_little() -> None:
    long = "x" * 10_000
    names = {
        LockKey(*arguments).name
        for arguments in [
            ("a", ("b", "c")),
            ("a", ("bc",)),
            ("a", ("b:c",)),
            ("a:b", ("c",)),
            ("a", ("b", "C")),
            ("a", (long,)),
            ("a", (long + "x",)),
            ("a", (long[:-1] + "X",)),
            ("a", ("é",)),
            ("a", ("e\u0301",)),
            ("a", ("b ",)),
            ("a", ("b",)),
        ]
    }
    assert len(names) == 12
    assert len({name_digest(name) for name in names}) == 12


# -- LockKey as a value


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        dataclasses.replace,
        *(lambda key, p=p: pickle.loads(pickle.dumps(key, p)) for p in range(2, pickle.HIGHEST_PROTOCOL + 1)),
    ],
)
def test_a_copy_is_the_same_key(copied: Any) -> None:
    key = LockKey("a", ("b:", "\ud800"))
    assert copied(key) == key
    assert copied(key).name == key.name
    assert {key: 1}[copied(key)] == 1


def test_a_key_is_frozen() -> None:
    key = LockKey("a", ("b",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        key.namespace = "c"  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        key.extra = 1  # type: ignore[attr-defined]
    assert repr(key) == "LockKey(namespace='a', parts=('b',))"
    assert dataclasses.replace(key, parts=("c",)).name == "angee:a:c"


class Pair(tuple[str, ...]):
    __slots__ = ()


def test_subclasses_of_str_and_tuple_become_plain() -> None:
    key = LockKey(Purpose.SYNC, Pair((Colour.RED, mark_safe("<b>"))))
    assert key == LockKey("sync", ("red", "<b>"))
    assert key.name == "angee:sync:red:<b>"
    assert type(key.parts) is tuple
    assert {type(piece) for piece in (key.namespace, *key.parts, key.name)} == {str}
    assert {type(piece) for piece in as_lock_key(mark_safe("x")).parts} == {str}


@pytest.mark.parametrize(
    ("namespace", "parts", "error", "words"),
    [
        ("", ("a",), ValueError, "must not be empty: ''"),
        ("a", ("",), ValueError, "must not be empty: ''"),
        ("a", ("b", ""), ValueError, "must not be empty: ''"),
        ("a", (mark_safe(""),), ValueError, "must not be empty: ''"),
        ("a", (), ValueError, "at least one part: parts is ()"),
        ("a", "bcd", TypeError, "must be a tuple of str, such as ('a',), not 'bcd' (str)"),
        ("a", ["b"], TypeError, "must be a tuple of str, such as ('a',), not ['b'] (list)"),
        ("a", None, TypeError, "must be a tuple of str, such as ('a',), not None (NoneType)"),
        ("a", (1,), TypeError, "must be a str, not 1 (int)"),
        ("a", ("b", None), TypeError, "must be a str, not None (NoneType)"),
        ("a", (b"b",), TypeError, "must be a str, not b'b' (bytes)"),
        ("a", (gettext_lazy("b"),), TypeError, "must be a str"),  # its text differs by language
        (5, ("a",), TypeError, "must be a str, not 5 (int)"),
        (None, ("a",), TypeError, "must be a str, not None (NoneType)"),
    ],
)
def test_bad_pieces(namespace: Any, parts: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        LockKey(namespace, parts)
    assert words in str(caught.value)


# -- Plain strings


def test_a_plain_string_is_a_key_of_the_namespace_name() -> None:
    key = LockKey("name", ("billing: run",))
    assert as_lock_key("billing: run") == key
    assert as_lock_key(key) is key
    assert lock_name("billing: run") == key.name == "angee:name:billing%3A run"
    assert as_lock_key("Angee:x") == LockKey("name", ("Angee:x",))


@pytest.mark.parametrize("function", [as_lock_key, lock_name])
@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ("angee:name:x", ValueError, "begin with 'angee:': 'angee:name:x'. For a canonical name, use LockKey.parse"),
        ("angee:", ValueError, "'angee:'"),
        (mark_safe("angee:x"), ValueError, "'angee:x'"),
        ("", ValueError, "must not be empty: ''"),
        (None, TypeError, "must be a LockKey or a str, not None (NoneType)"),
        (42, TypeError, "must be a LockKey or a str, not 42 (int)"),
        (b"x", TypeError, "must be a LockKey or a str, not b'x' (bytes)"),
        (("a", "b"), TypeError, "must be a LockKey or a str, not ('a', 'b') (tuple)"),
        (Order(), TypeError, "must be a LockKey or a str, not <Order object> (Order)"),
    ],
)
def test_bad_keys(function: Any, value: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        function(value)
    assert words in str(caught.value)


def test_commands_take_names_and_plain_strings() -> None:
    assert parse_command_key("angee:a:b%3A") == LockKey("a", ("b:",))
    assert parse_command_key("a:b") == LockKey("name", ("a:b",))
    for text in ("", "angee:", "angee:a:%3a"):
        with pytest.raises(ValueError, match=repr(text)):
            parse_command_key(text)


@pytest.mark.parametrize("value", ["angee:" + "x" * 10_000, "angee:x:" + "%" * 10_000], ids=["plain", "escaped"])
def test_messages_stay_short(value: str) -> None:
    for function in (as_lock_key, LockKey.parse):
        with pytest.raises(ValueError, match="angee:x") as caught:
            function(value)
        assert len(str(caught.value)) < 400
