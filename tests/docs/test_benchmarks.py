"""The benchmark's own arithmetic, its page, and that a lock which does not exclude makes a measurement void."""

import json
import math
from collections.abc import Iterator

import pytest

from benchmarks import chart, contenders, crew, measures, report, results
from benchmarks.contenders import Thieves, Void
from benchmarks.results import Series

pytestmark = pytest.mark.once


def series(**values: list[float]) -> Series:
    made = Series("block", "blocks/s")
    for name, each in values.items():
        made.values[f"sqlite/{name}"] = each
    return made


def test_ratio_is_taken_within_each_round() -> None:
    # The machine was ten times slower in the second round; the ratio of the medians would be 20.
    ratio = series(angee_jobs=[300.0, 30.0, 300.0], flexiq=[100.0, 10.0, 15.0]).ratio(
        "sqlite/angee_jobs", "sqlite/flexiq"
    )
    assert ratio.median == 3
    assert (ratio.low, ratio.high) == (3, 11.5)


def test_ratio_above_one_is_better_also_where_less_is_better() -> None:
    hand_over = Series("handover", "ms", more=False, values={"redis/angee_jobs": [2.0], "redis/flexiq": [60.0]})
    assert hand_over.ratios()["handover/redis/flexiq"].median == 30


def test_ratios_are_to_others_on_the_same_storage() -> None:
    made = series(angee_jobs=[4.0], flexiq=[1.0])
    made.values["redis/redis-py"] = [2.0]
    assert {name: ratio.median for name, ratio in made.ratios().items()} == {"block/sqlite/flexiq": 4}


def test_percentile() -> None:
    values = [float(value) for value in range(1, 101)]
    assert results.percentile(values, 50) == 50
    assert results.percentile(values, 99) == 99
    assert results.percentile([7.0], 99) == 7


def test_quartiles_of_few_rounds() -> None:
    assert results.quartiles([5.0]) == (5, 5)
    assert results.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2, 4)
    assert all(map(math.isnan, results.quartiles([])))


def test_overlap() -> None:
    assert not results.overlap([(2.0, 3.0), (0.0, 1.0), (1.0, 2.0)])
    assert results.overlap([(0.0, 2.0), (1.0, 1.5)])
    assert results.overlap([(0.0, 9.0), (1.0, 2.0), (3.0, 4.0)])


def test_fairness_of_somebody_who_never_came_in() -> None:
    assert results.fairness([4, 8]) == 2
    assert results.fairness([0, 8]) == math.inf


def test_ratio_that_fell_by_a_third() -> None:
    recorded = {"a": 3.0, "b": 3.0, "c": 3.0}
    assert results.fallen({"a": 2.01, "b": 1.99, "c": 9.0}, recorded) == {"b": (1.99, 3.0)}
    assert list(results.fallen({"a": 3.0, "b": 3.0}, recorded)) == ["c"]


def test_recorded_ratios_are_of_what_quick_measures() -> None:
    recorded = results.read_recorded()
    assert recorded
    for name in recorded:
        measure, storage, contender = name.split("/")
        assert measure in ("block", "pairs", "handover")
        assert f"{storage}/{contender}" in contenders.CONTENDERS


def test_values_survive_the_file() -> None:
    made = series(angee_jobs=[1.5], flexiq=[0.5])
    made.void["sqlite/bare"] = "why"
    assert results.from_json(json.loads(json.dumps(results.to_json([made], date="today")))) == [made]


def data(*made: Series) -> dict[str, object]:
    machine = {"processor": "a processor", "cores": 2, "system": "Linux 6", "load": 0.5}
    return results.to_json([*made], date="2030-01-01", seconds=100, machine=machine, versions={"Python": "3.13"})


def test_page() -> None:
    made = series(angee_jobs=[9000.0, 10000.0, 11000.0], flexiq=[3000.0, 2500.0, 2750.0])
    made.void["sqlite/bare"] = "sqlite/bare: refused k that nobody holds"
    page = report.page(data(made))
    assert "| storage | lock | blocks/s | quartiles | angee_jobs is better by | goal |" in page
    assert "| SQLite, lock table | **angee_jobs** | 10,000 | 9,500 to 10,500 |  |  |" in page
    assert "| SQLite, lock table | flexiq | 2,750 | 2,620 to 2,880 | 4 times (3.5 to 4) | 3 times |" in page
    assert "| SQLite, lock table | bare | void: refused k that nobody holds |" in page
    assert "a processor, 2 cores" in page


def test_page_in_the_repository_is_the_one_of_the_results() -> None:
    """Nobody has typed into it."""
    from benchmarks.__main__ import CHART, PAGE, RESULTS

    recorded = json.loads(RESULTS.read_text())
    assert PAGE.read_text() == report.page(recorded)
    assert CHART.read_text() == chart.chart(results.from_json(recorded))


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345.6, "12,300"), (999.9, "1,000"), (999.4, "999"), (0.01234, "0.0123"), (3.0, "3"), (math.inf, "-")],
)
def test_numbers(value: float, text: str) -> None:
    assert report.number(value) == text


def test_chart_has_a_bar_for_each() -> None:
    drawn = chart.chart([series(angee_jobs=[9.0], flexiq=[3.0], bare=[20.0])])
    assert drawn.count("<rect") == 3
    assert drawn.startswith("<svg ")


@pytest.fixture
def thieves(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[dict[str, list[crew.Worker]]]:
    """Eight processes whose lock lets everybody in."""
    monkeypatch.setenv("ANGEE_JOBS_BENCH_DIR", str(tmp_path))
    with crew.crew(["test/thieves"], each=8) as workers:
        yield workers


def test_lock_that_does_not_exclude_is_void(thieves: dict[str, list[crew.Worker]]) -> None:
    def say(text: str) -> None: ...

    for made in (
        measures.loops(thieves, ["block", "pairs", "threads", "refused", "asked"], 1, 0.01, say),
        measures.hand_over(thieves, 1, 2, say),
    ):
        for each in made:
            assert each.void, each.measure
            assert not each.values, each.measure


def test_two_inside_at_once_is_void(thieves: dict[str, list[crew.Worker]]) -> None:
    made = {name: Series(name, "") for name in ("polite", "polite_fair", "polite_p99")}
    with pytest.raises(Void, match="two processes were inside at once"):
        measures._contend(made, thieves["test/thieves"], "polite", 0.5)


def test_refusal_of_a_free_lock_is_void() -> None:
    class Never(Thieves):
        def take(self, key: str) -> None:
            return None

    with pytest.raises(Void, match="refused"):
        Never().pairs("k", 1)
    with pytest.raises(Void, match="took"):
        Thieves().refused("k", 1)
