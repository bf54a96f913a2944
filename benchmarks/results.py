"""What was measured, and what follows from it: medians, spread, ratios, and whether they fell.

Measurements of one round are made one right after the other, so that whatever disturbs the machine hits all alike.
A ratio is therefore taken within each round, and the median of those is what counts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("recorded.json")
#: A ratio that is below this share of what was recorded has fallen.
FALLEN = 2 / 3


@dataclasses.dataclass
class Series:
    """One measure: a value for each round, by contender. ``more``: whether larger is better."""

    measure: str
    unit: str
    more: bool = True
    values: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    #: Why a contender has no values.
    void: dict[str, str] = dataclasses.field(default_factory=dict)

    def add(self, contender: str, value: float) -> None:
        self.values.setdefault(contender, []).append(value)

    def median(self, contender: str) -> float:
        return statistics.median(self.values[contender])

    def spread(self, contender: str) -> tuple[float, float]:
        """The first and the third quartile."""
        return quartiles(self.values[contender])

    def ratio(self, ours: str, theirs: str) -> Ratio:
        """How many times better ``ours`` is; below 1: worse."""
        pairs = list(zip(self.values[ours], self.values[theirs], strict=False))
        ratios = [mine / other if self.more else other / mine for mine, other in pairs if mine and other]
        return Ratio(statistics.median(ratios) if ratios else math.nan, *quartiles(ratios))

    def ratios(self) -> dict[str, Ratio]:
        """Of ours to each other contender on the same storage: by ``measure/storage/contender``."""
        found = {}
        for contender in self.values:
            storage, _, name = contender.rpartition("/")
            ours = f"{storage}/angee_jobs"
            if name != "angee_jobs" and ours in self.values:
                found[f"{self.measure}/{contender}"] = self.ratio(ours, contender)
        return found


@dataclasses.dataclass
class Ratio:
    median: float
    low: float
    high: float


def quartiles(values: list[float]) -> tuple[float, float]:
    if not values:
        return math.nan, math.nan
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that so many percent do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(len(ordered) * percent / 100) - 1))]


def overlap(spans: list[tuple[float, float]]) -> bool:
    """Whether two holders were inside at once. A span is from after the entry to before the release."""
    last = -math.inf
    for entered, left in sorted(map(tuple, spans)):
        if entered < last:
            return True
        last = left
    return False


def fairness(shares: list[int]) -> float:
    """The largest share over the smallest."""
    return max(shares) / min(shares) if min(shares) else math.inf


def fallen(measured: dict[str, float], recorded: dict[str, float]) -> dict[str, tuple[float, float]]:
    """The ratios that fell by a third or more: what they are and what was recorded. One that is missing has fallen."""
    found = {}
    for name, before in recorded.items():
        now = measured.get(name, math.nan)
        if not now >= before * FALLEN:
            found[name] = (now, before)
    return found


def to_json(series: list[Series], **about: Any) -> dict[str, Any]:
    return about | {"series": [dataclasses.asdict(each) for each in series]}


def from_json(data: dict[str, Any]) -> list[Series]:
    return [Series(**each) for each in data["series"]]


def all_ratios(series: list[Series]) -> dict[str, Ratio]:
    return {name: ratio for each in series for name, ratio in each.ratios().items()}


def read_recorded() -> dict[str, float]:
    return json.loads(RECORDED.read_text())["ratios"] if RECORDED.exists() else {}


def write_recorded(ratios: dict[str, float]) -> None:
    note = "Medians of a full run. --quick fails when one falls a third below. Written by --record."
    data = {"note": note, "ratios": {name: round(value, 2) for name, value in sorted(ratios.items())}}
    RECORDED.write_text(json.dumps(data, indent=1) + "\n")
