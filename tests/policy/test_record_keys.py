"""Keys of records and instances: each spelling of a record's primary key is one lock."""

import uuid
import warnings
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from django.apps import apps
from django.core.exceptions import AppRegistryNotReady
from django.db import models
from django.utils.functional import SimpleLazyObject
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy

from angee_jobs.locks.keys import (
    LockKey,
    instance_lock_key,
    record_lock_key,
)
from tests.support.key_models import (
    Abstract,
    Colour,
    GiftOrder,
    Label,
    Line,
    Number,
    Order,
    Parcel,
    Purpose,
    Reversed,
    Stamped,
    UrgentOrder,
    VeryUrgentOrder,
    registry,
)


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models above are installed, and nothing else is."""
    monkeypatch.setattr("django.apps.apps", registry)


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


@pytest.mark.usefixtures("shop")
def test_a_misspelt_label_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Seen: a task that locked "messaging.Chanel" ran beside all that locked "messaging.Channel", in silence."""
    for pk in (1, 2):
        assert record_lock_key("shop.Ordre", pk, "sync").name == f"angee:record:shop.Ordre:{pk}:sync"
    record_lock_key("shop.Xylophone", 1, "sync")
    record_lock_key("elsewhere.Ordre", 1, "sync")  # of an app that this process need not have
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(",")[0] for text in told] == [
        f"record_lock_key('shop.{name}'" for name in ("Ordre", "Xylophone")
    ]
    assert told[0].endswith("Did you mean shop.Order?")
    assert "Did you mean" not in told[1]


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
