"""Models for the tests of keys, in a registry of their own: no other test sees them, and they need no tables."""

import enum
import sys
import uuid
from typing import Any

from django.apps import AppConfig
from django.apps.registry import Apps
from django.db import models


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


# Values that are no plain str or int.


class Colour(str, enum.Enum):  # noqa: UP042 - str() of this kind gives "Colour.RED"
    RED = "red"


class Purpose(models.TextChoices):
    SYNC = "sync"


class Number(int, enum.Enum):
    ONE = 1
