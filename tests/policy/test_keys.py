"""Keys: two different ones never share a name, two spellings of one record always do."""

import copy
import dataclasses
import enum
import itertools
import pickle
import sys
import unicodedata
import uuid
import warnings
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from django.apps import AppConfig, apps
from django.apps.registry import Apps
from django.core.exceptions import AppRegistryNotReady
from django.db import models
from django.utils.functional import SimpleLazyObject
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from angee_jobs.locks.keys import (
    LockKey,
    as_lock_key,
    instance_lock_key,
    lock_name,
    name_digest,
    parse_command_key,
    record_lock_key,
)

# -- Models. In a registry of their own: no other test sees them, and they need no tables.


class ShopConfig(AppConfig):
    label = "shop"
    path = "."


class MixedCaseConfig(AppConfig):
    label = "MixedCase"
    path = "."


registry = Apps([ShopConfig("shop", sys.modules[__name__]), MixedCaseConfig("mixed", sys.modules[__name__])])


class InShop:
    app_label = "shop"
    apps = registry


class Reversed:
    """What a custom field may make of a value."""

    def __init__(self, text: str) -> None:
        self.text = text


class ReversedField(models.CharField):  # type: ignore[type-arg]
    def to_python(self, value: Any) -> Any:
        return value if isinstance(value, Reversed) else Reversed(str(value)[::-1])

    def get_prep_value(self, value: Any) -> Any:
        return value.text[::-1]


class Order(models.Model):
    number = models.CharField(max_length=10)

    class Meta(InShop):
        pass

    def __str__(self) -> str:
        raise AssertionError("an error message must not run code that may query")


class UrgentOrder(Order):
    class Meta(InShop):
        proxy = True


class VeryUrgentOrder(UrgentOrder):
    class Meta(InShop):
        proxy = True


class GiftOrder(Order):
    card = models.CharField(max_length=10)

    class Meta(InShop):
        pass


class Abstract(models.Model):
    class Meta(InShop):
        abstract = True


class Parcel(models.Model):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)

    class Meta(InShop):
        pass


class Label(models.Model):
    parcel = models.OneToOneField(Parcel, models.CASCADE, primary_key=True)

    class Meta(InShop):
        pass


class Line(models.Model):
    pk = models.CompositePrimaryKey("order_id", "parcel_id")
    order = models.ForeignKey(Order, models.CASCADE)
    parcel = models.ForeignKey(Parcel, models.CASCADE)

    class Meta(InShop):
        pass


class Stamped(models.Model):
    id = models.IntegerField(primary_key=True, db_default=7)

    class Meta(InShop):
        pass


class Thing(models.Model):
    class Meta(InShop):
        app_label = "MixedCase"


def model_with(name: str, field: "models.Field[Any, Any]") -> None:
    """A model `name` whose primary key is `field`."""
    meta = type("Meta", (InShop,), {})
    type(name, (models.Model,), {"__module__": __name__, "id": field, "Meta": meta})


model_with("Text", models.CharField(max_length=50, primary_key=True))
model_with("Day", models.DateField(primary_key=True))
model_with("Moment", models.DateTimeField(primary_key=True))
model_with("Price", models.DecimalField(max_digits=40, decimal_places=3, primary_key=True))
model_with("Ratio", models.FloatField(primary_key=True))
model_with("Span", models.DurationField(primary_key=True))
model_with("Hash", models.BinaryField(primary_key=True))
model_with("Flag", models.BooleanField(primary_key=True))
model_with("Address", models.GenericIPAddressField(primary_key=True))
model_with("Custom", ReversedField(max_length=50, primary_key=True))


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models above are installed, and nothing else is."""
    monkeypatch.setattr("django.apps.apps", registry)


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


class Colour(str, enum.Enum):  # noqa: UP042 - str() of this kind gives "Colour.RED"
    RED = "red"


class Purpose(models.TextChoices):
    SYNC = "sync"


class Number(int, enum.Enum):
    ONE = 1


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


# -- Records


def test_a_record_of_a_model_that_is_not_installed() -> None:
    key = record_lock_key("elsewhere.Channel", 42, "sync")
    assert key.name == "angee:record:elsewhere.Channel:42:sync"
    assert key == LockKey("record", ("elsewhere.Channel", "42", "sync"))
    assert record_lock_key("elsewhere.Channel", "42", "sync") == key
    assert record_lock_key("elsewhere.Channel", "42:sync", "x").name == "angee:record:elsewhere.Channel:42%3Async:x"
    assert record_lock_key("elsewhere.channel", 42, "sync") != key
    for label in ("channel", "a.b.c", ".", "auth", "auth.", ".User", "auth.Nothing", "auth.User.x"):
        assert record_lock_key(label, 42, "sync").parts == (label, "42", "sync")


@pytest.mark.parametrize(
    ("pk", "parts"),
    [
        (-1, ("-1",)),
        (Number.ONE, ("1",)),
        (Colour.RED, ("red",)),
        (mark_safe("<b>"), ("<b>",)),
        (gettext_lazy("text"), ("text",)),
        (uuid.UUID(int=5), ("00000000-0000-0000-0000-000000000005",)),
        pytest.param("x" * 10_000, ("x" * 10_000,), id="long"),
        ((1, "2"), ("1", "2")),
        ([1, "2"], ("1", "2")),
    ],
)
def test_values_without_a_model(pk: object, parts: tuple[str, ...]) -> None:
    key = record_lock_key("elsewhere.Channel", pk, Purpose.SYNC)
    assert key.parts == ("elsewhere.Channel", *parts, "sync")
    assert {type(part) for part in key.parts} == {str}


@pytest.mark.parametrize("label", ["auth.User", "auth.user", "AUTH.USER", "Auth.uSER", mark_safe("auth.User")])
def test_labels_in_any_case(label: str) -> None:
    assert record_lock_key(label, "1", "sync").name == "angee:record:auth.User:1:sync"


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    ("label", "canonical"),
    [
        ("shop.order", "shop.Order"),
        ("Shop.Order", "shop.Order"),
        ("shop.UrgentOrder", "shop.Order"),
        ("SHOP.VERYURGENTORDER", "shop.Order"),
        ("shop.GiftOrder", "shop.GiftOrder"),  # a table of its own, so records of its own
        ("mixedcase.thing", "MixedCase.Thing"),
        ("MixedCase.THING", "MixedCase.Thing"),
        (Order, "shop.Order"),
        (UrgentOrder, "shop.Order"),
        (VeryUrgentOrder, "shop.Order"),
        (GiftOrder, "shop.GiftOrder"),
    ],
)
def test_a_label_becomes_that_of_the_concrete_model(label: Any, canonical: str) -> None:
    for pk in (1, "1", " 1 ", "01", Number.ONE):
        assert record_lock_key(label, pk, "sync").name == f"angee:record:{canonical}:1:sync"


UUID_TEXT = "12345678-1234-5678-90ab-1234567890ab"


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    ("label", "spellings", "text"),
    [
        ("shop.Parcel", [UUID_TEXT, UUID_TEXT.upper(), UUID_TEXT.replace("-", ""), uuid.UUID(UUID_TEXT)], UUID_TEXT),
        ("shop.Label", [UUID_TEXT.upper(), uuid.UUID(UUID_TEXT)], UUID_TEXT),  # its parcel's key
        ("shop.Text", ["01"], "01"),
        ("shop.Text", [1, "1"], "1"),
        ("shop.Text", [Colour.RED, "red"], "red"),
        ("shop.Text", ["A:%\n"], "A:%\n"),
        ("shop.Day", ["2024-02-01", "2024-2-1", date(2024, 2, 1)], "2024-02-01"),
        (
            "shop.Moment",
            [
                "2024-02-01T12:00:00Z",
                "2024-02-01 13:00+01:00",
                datetime(2024, 2, 1, 12, tzinfo=UTC),
                datetime(2024, 2, 1, 7, tzinfo=timezone(timedelta(hours=-5))),
            ],
            "2024-02-01T12:00:00+00:00",
        ),
        ("shop.Price", ["1.50", "1.5", Decimal("1.5"), Decimal("1.500")], "1.5"),
        ("shop.Price", [100, "100", "1E+2", Decimal("100.00")], "100"),
        ("shop.Price", [0, "-0.00"], "0"),
        ("shop.Price", ["1234567890123456789012345678901.25"], "1234567890123456789012345678901.25"),
        ("shop.Ratio", [1, "1", 1.0], "1.0"),
        ("shop.Ratio", [0.0, -0.0, "-0"], "0.0"),
        ("shop.Span", [timedelta(hours=25), "1 01:00:00", "P1DT1H"], "1 day, 1:00:00"),
        ("shop.Hash", [b"\x00\xff", memoryview(b"\x00\xff"), bytearray(b"\x00\xff"), "AP8="], "00ff"),
        ("shop.Flag", [True, "True", "1", 1], "True"),
        ("shop.Address", ["::1", "0:0:0:0:0:0:0:1"], "::1"),
        ("shop.Custom", ["abc", Reversed("cba")], "abc"),
    ],
)
def test_spellings_of_one_key(label: str, spellings: list[object], text: str) -> None:
    for pk in spellings:
        assert record_lock_key(label, pk, "sync") == LockKey("record", (label, text, "sync"))


@pytest.mark.usefixtures("shop")
def test_decimals_are_not_rounded() -> None:
    digits = "1234567890" * 4
    names = {record_lock_key("shop.Price", digits + last, "sync").name for last in "12"}
    assert len(names) == 2


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize("label", ["shop.Line", "SHOP.LINE", Line])
def test_a_composite_key_has_a_part_per_field(label: Any) -> None:
    name = f"angee:record:shop.Line:5:{UUID_TEXT}:sync"
    for pk in ((5, uuid.UUID(UUID_TEXT)), ["5", UUID_TEXT.upper()]):
        assert record_lock_key(label, pk, "sync").name == name
    assert instance_lock_key(Line(order_id=5, parcel_id=uuid.UUID(UUID_TEXT)), "sync").name == name


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    ("label", "pk", "error", "words"),
    [
        # not set
        ("shop.Order", None, ValueError, "primary key of shop.Order is not set: None"),
        ("no.Model", None, ValueError, "primary key of no.Model is not set: None"),
        ("shop.Order", "", ValueError, "cannot be ''"),
        ("shop.Text", "", ValueError, "must not be empty: ''"),
        ("no.Model", "", ValueError, "must not be empty: ''"),
        ("shop.Hash", b"", ValueError, "must not be empty: b''"),
        ("shop.Order", models.F("id"), ValueError, "not set: <F object>"),
        ("no.Model", models.Value(1), ValueError, "not set: <Value object>"),
        # not readable
        ("shop.order", "abc", ValueError, "primary key of shop.Order cannot be 'abc'"),
        ("shop.Order", "1.5", ValueError, "cannot be '1.5'"),
        pytest.param("shop.Order", "9" * 10_000, ValueError, "cannot be '9999", id="long str"),
        pytest.param("shop.Order", 10**10_000, ValueError, "cannot be <int object>", id="long int"),
        pytest.param("no.Model", 10**10_000, ValueError, "cannot be <int object>", id="long int, no model"),
        ("shop.Parcel", "12345", ValueError, "cannot be '12345'"),
        ("shop.Day", "2024-02-31", ValueError, "cannot be '2024-02-31'"),
        ("shop.Day", 5, ValueError, "cannot be 5"),
        ("shop.Ratio", float("nan"), ValueError, "cannot be nan"),
        ("shop.Ratio", "inf", ValueError, "cannot be 'inf'"),
        ("shop.Price", "NaN", ValueError, "cannot be 'NaN'"),
        ("shop.Price", Decimal("Infinity"), ValueError, "cannot be Decimal('Infinity')"),
        ("shop.Price", "1E+999999999", ValueError, "cannot be '1E+999999999'"),
        # guesses
        ("shop.Order", True, TypeError, "not as bool: True"),
        ("shop.Order", 1.5, TypeError, "not as float: 1.5"),
        ("shop.Order", 1.0, TypeError, "not as float: 1.0"),
        ("shop.Order", b"1", TypeError, "not as bytes: b'1'"),
        ("shop.Order", Decimal("1.5"), TypeError, "not as Decimal: Decimal('1.5')"),
        ("shop.Text", True, TypeError, "not as bool: True"),
        ("shop.Text", b"1", TypeError, "not as bytes: b'1'"),
        ("shop.Text", object, TypeError, "not as type: <class 'object'>"),
        ("shop.Text", date(2024, 2, 1), TypeError, "not as date: datetime.date(2024, 2, 1)"),
        ("shop.Text", {"id": 1}, TypeError, "not as dict: {'id': 1}"),
        ("shop.Price", 1.1, TypeError, "not as float: 1.1"),
        ("no.Model", True, TypeError, "not as bool: True"),
        ("no.Model", 1.5, TypeError, "not as float: 1.5"),
        ("no.Model", float("nan"), TypeError, "not as float: nan"),
        ("no.Model", b"1", TypeError, "not as bytes: b'1'"),
        ("no.Model", object(), TypeError, "not as object: <object object"),
        ("no.Model", Reversed("x"), TypeError, "not as Reversed: <Reversed object>"),
        ("shop.Order", Order(pk=1), TypeError, "an instance of shop.Order: give its pk, or call instance_lock_key"),
        ("shop.Text", Order(pk=1), TypeError, "an instance of shop.Order"),
        ("no.Model", Order(pk=1), TypeError, "an instance of shop.Order"),
        # composite
        ("shop.Line", (1,), ValueError, "primary key of shop.Line has 2 values: not (1,)"),
        ("shop.Line", (1, 2, 3), ValueError, "has 2 values: not (1, 2, 3)"),
        ("shop.Line", (), ValueError, "has 2 values: not ()"),
        ("shop.Line", 1, ValueError, "is a tuple of 2 values, not 1"),
        ("shop.Line", None, ValueError, "is a tuple of 2 values, not None"),
        ("shop.Line", "12", ValueError, "is a tuple of 2 values, not '12'"),
        ("shop.Line", (None, UUID_TEXT), ValueError, "is not set: None"),
        ("shop.Line", (1, None), ValueError, "is not set: None"),
        ("shop.Line", (1, "x"), ValueError, "cannot be 'x'"),
        ("shop.Order", (1,), ValueError, "is one value, not (1,)"),
        ("shop.Order", [Order(pk=1)], ValueError, "is one value, not [<Order object>]"),
        ("no.Model", (), ValueError, "has at least one value: not ()"),
        ("no.Model", (1, None), ValueError, "is not set: None"),
        ("no.Model", (1, ""), ValueError, "must not be empty: ''"),
        ("no.Model", ((1, 2), 3), TypeError, "not as tuple: (1, 2)"),
        # labels
        ("", 1, ValueError, "model label of a key must not be empty: ''"),
        (None, 1, TypeError, "model label of a key must be a str, not None (NoneType)"),
        (int, 1, TypeError, "must be a str, not <class 'int'> (type)"),
        (Order(pk=1), 1, TypeError, "must be a str, not <Order object> (Order)"),
        (Abstract, 1, ValueError, "shop.Abstract is an abstract model"),
    ],
)
def test_bad_records(label: Any, pk: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        record_lock_key(label, pk, "sync")
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("purpose", "error", "words"),
    [
        ("", ValueError, "purpose of a key must not be empty: ''"),
        (None, TypeError, "purpose of a key must be a str, not None (NoneType)"),
        (5, TypeError, "purpose of a key must be a str, not 5 (int)"),
    ],
)
def test_bad_purposes(purpose: Any, error: type[Exception], words: str) -> None:
    for make in (lambda: record_lock_key("no.Model", 1, purpose), lambda: instance_lock_key(Order(pk=1), purpose)):
        with pytest.raises(error) as caught:
            make()
        assert words in str(caught.value)


@pytest.mark.parametrize("label", ["auth.User", "no.Model"])
def test_before_the_models_are_loaded(monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    monkeypatch.setattr(apps, "models_ready", False)
    with pytest.raises(AppRegistryNotReady, match=rf"{label}.*django\.setup\(\)"):
        record_lock_key(label, 1, "sync")


# -- Instances


@pytest.mark.usefixtures("shop")
def test_the_key_of_an_instance_is_that_of_its_record() -> None:
    assert instance_lock_key(Order(pk=5), "sync").name == "angee:record:shop.Order:5:sync"
    assert instance_lock_key(Order(pk="5"), "sync") == record_lock_key("shop.order", 5, "sync")
    assert instance_lock_key(VeryUrgentOrder(pk=5), "sync") == record_lock_key("shop.Order", 5, "sync")
    assert instance_lock_key(Order.from_db("default", ["id"], [5]), "sync").parts[1] == "5"  # number is deferred
    assert instance_lock_key(SimpleLazyObject(lambda: Order(pk=5)), "sync").parts[1] == "5"  # type: ignore[arg-type]
    parcel = Parcel()  # has its key before it is saved
    assert instance_lock_key(parcel, "sync").parts == ("shop.Parcel", str(parcel.pk), "sync")
    assert instance_lock_key(Label(parcel=parcel), "sync").parts == ("shop.Label", str(parcel.pk), "sync")


@pytest.mark.usefixtures("shop")
def test_a_child_and_its_parent_are_two_records() -> None:
    gift = GiftOrder(order_ptr_id=5, id=5)
    assert instance_lock_key(gift, "sync").name == "angee:record:shop.GiftOrder:5:sync"
    assert record_lock_key("shop.GiftOrder", "5", "sync") == instance_lock_key(gift, "sync")
    assert record_lock_key("shop.Order", "5", "sync") != instance_lock_key(gift, "sync")


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    ("instance", "label"),
    [
        (Order(), "shop.Order"),
        (VeryUrgentOrder(), "shop.VeryUrgentOrder"),
        (GiftOrder(), "shop.GiftOrder"),
        (Label(), "shop.Label"),
        (Line(), "shop.Line"),
        (Line(order_id=1), "shop.Line"),
        (Stamped(), "shop.Stamped"),
    ],
)
def test_an_unsaved_instance(instance: models.Model, label: str) -> None:
    with pytest.raises(ValueError, match=rf"This {label} has no primary key yet \(.+\): save it first"):
        instance_lock_key(instance, "sync")


@pytest.mark.parametrize("value", [None, 5, "shop.Order", Order, object(), [Order(pk=1)], apps])
def test_what_is_not_an_instance(value: Any) -> None:
    with pytest.raises(TypeError, match="takes an instance of a model") as caught:
        instance_lock_key(value, "sync")
    assert type(value).__name__ in str(caught.value)


@pytest.mark.usefixtures("shop")
def test_a_naive_time_is_read_as_django_reads_it() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        naive = record_lock_key("shop.Moment", datetime(2024, 2, 1, 12), "sync")
    assert [str(warning.message) for warning in caught if "naive datetime" in str(warning.message)]
    assert naive.parts[1].endswith("+00:00")
