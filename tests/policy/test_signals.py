"""The recipes for metrics in docs/operations.md, run as they stand there; and what slow or failing receivers may do."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.dispatch import Signal
from django.test import override_settings

from angee_jobs.locks import (
    Lock,
    LockKey,
    LockLostError,
    LockNotAcquiredError,
    force_release,
    held_locks,
    lock,
    lock_acquired,
    lock_info,
    lock_lost,
    lock_refused,
    lock_released,
    reap_expired_locks,
    record_lock_key,
    task_lock,
)
from angee_jobs.locks import locks_reaped as reaped
from tests.support.procs import stopwatch
from tests.support.servers import eventually, missing_packages, require

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
SIGNALS = (lock_acquired, lock_refused, lock_released, lock_lost, reaped)


@pytest.fixture(autouse=True)
def one_local_backend() -> Iterator[None]:
    with override_settings(ANGEE_JOBS_LOCKS={"default": {"BACKEND": "angee_jobs.locks.LocalLockBackend"}}):
        yield
        gc.collect()
        assert list(held_locks()) == []


@pytest.fixture
def connect() -> Iterator[Any]:
    """Connect receivers for the time of the test."""
    connected: list[tuple[Signal, Any]] = []

    def to(signal: Signal, receiver: Any) -> None:
        signal.connect(receiver)
        connected.append((signal, receiver))

    yield to
    for signal, receiver in connected:
        signal.disconnect(receiver)


def recipe(heading: str) -> dict[str, Any]:
    """Run the code below a heading of the documentation; its names."""
    section = OPERATIONS.read_text().split(f"### {heading}\n")[1]
    [code] = re.findall(r"```python\n(.*?)```", section.split("\n### ")[0].split("\n## ")[0], re.DOTALL)
    names: dict[str, Any] = {"__name__": f"recipe_{heading.lower()}"}
    exec(compile(code, f"{OPERATIONS} ({heading})", "exec"), names)
    return names


def disconnect(names: dict[str, Any]) -> None:
    for signal in SIGNALS:
        for value in names.values():
            if callable(value) and not isinstance(value, Signal):
                signal.disconnect(value)


def use_locks() -> None:
    """12 acquired, 12 of them released or lost, 1 refused, 1 lost; ten records, two purposes, two namespaces."""
    for pk in range(10):
        with lock(record_lock_key("shop.Order", pk, "invoice")):
            pass
    with lock("billing-run"), pytest.raises(LockNotAcquiredError), lock("billing-run"):
        pass
    told = threading.Event()
    lost = Lock(record_lock_key("shop.Order", 1, "ship"))
    lock_lost.connect(hear := lambda **kwargs: told.set())
    assert lost.acquire()
    assert force_release(record_lock_key("shop.Order", 1, "ship"))
    assert told.wait(10)
    lock_lost.disconnect(hear)


def test_prometheus() -> None:
    require(missing_packages("prometheus_client"))
    from prometheus_client import REGISTRY

    names = recipe("Prometheus")
    try:
        use_locks()
        value = REGISTRY.get_sample_value
        invoice = {"backend": "default", "namespace": "record", "purpose": "invoice"}
        ship, plain = invoice | {"purpose": "ship"}, {"backend": "default", "namespace": "name", "purpose": ""}
        assert value("angee_locks_acquired_total", invoice) == 10
        assert value("angee_locks_hold_seconds_count", invoice) == 10
        assert value("angee_locks_wait_seconds_count", plain) == 1
        assert value("angee_locks_refused_total", plain) == 1
        assert value("angee_locks_lost_total", ship) == 1
        assert value("angee_locks_hold_seconds_count", ship) == 1
        for metric in names["ACQUIRED"].collect():
            assert len({tuple(sample.labels.items()) for sample in metric.samples}) == 3, "ids make no labels"
    finally:
        disconnect(names)


def test_opentelemetry() -> None:
    require(missing_packages("opentelemetry") or missing_packages("opentelemetry.sdk"))
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))
    names = recipe("OpenTelemetry")
    try:
        use_locks()
        data = reader.get_metrics_data()
        assert data is not None
        [resource] = data.resource_metrics
        [scope] = resource.scope_metrics
        points: dict[str, dict[tuple[str, str], Any]] = {
            metric.name: {
                (point.attributes["lock.namespace"], point.attributes["lock.purpose"]): point
                for point in metric.data.data_points
            }
            for metric in scope.metrics
        }
        acquired = {labels: point.value for labels, point in points["angee.locks.acquired"].items()}
        assert acquired == {("record", "invoice"): 10, ("record", "ship"): 1, ("name", ""): 1}
        assert points["angee.locks.refused"][("name", "")].value == 1
        assert points["angee.locks.lost"][("record", "ship")].value == 1
        assert points["angee.locks.wait"][("record", "invoice")].count == 10
        assert points["angee.locks.hold"][("record", "ship")].count == 1
    finally:
        disconnect(names)


def test_arguments_of_the_signals(connect: Any) -> None:
    heard: list[tuple[Signal, dict[str, Any]]] = []

    def hear(signal: Signal, **arguments: Any) -> None:
        heard.append((signal, {name: type(value).__name__ for name, value in arguments.items() if name != "sender"}))

    for signal in SIGNALS:
        connect(signal, hear)
    use_locks()
    reap_expired_locks()
    of = dict(heard)
    common = {"key": "LockKey", "backend": "str"}
    assert of[lock_acquired] == common | {"fencing_token": "int", "waited": "float"}
    assert of[lock_refused] == common | {"waited": "float", "holder": "LockInfo"}
    assert of[lock_released] == common | {"fencing_token": "int", "held_for": "float"}
    eventually(lambda: lock_lost in dict(heard))
    assert dict(heard)[lock_lost] == common | {"fencing_token": "int", "held_for": "float", "reason": "str"}
    assert of[reaped] == {"backend": "str", "count": "int"}


def test_failing_receivers_break_nothing(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(**kwargs: Any) -> None:
        raise RuntimeError("on purpose")

    for signal in SIGNALS:
        connect(signal, fail)
    use_locks()
    reap_expired_locks()
    assert lock_info("billing-run") is None
    assert "A receiver of a lock signal failed" in caplog.text


@pytest.mark.slow
def test_a_slow_receiver_delays_its_caller_alone(connect: Any) -> None:
    """Longer than the ttl: the lock is renewed meanwhile, and others get theirs at once."""
    slow = "slow"

    def sleep(key: LockKey, **kwargs: Any) -> None:
        if key.parts[0] == slow:
            time.sleep(3.0)

    for signal in (lock_acquired, lock_refused, lock_released):
        connect(signal, sleep)
    inside = threading.Event()

    def hold() -> None:
        with lock(slow, ttl=2.5) as held:
            inside.set()
            held.check()

    holder = threading.Thread(target=hold)
    elapsed = stopwatch()
    holder.start()
    eventually(lambda: lock_info(slow) is not None)
    before = stopwatch()
    with lock("quick"):
        pass
    assert before() < 2.6, "another key does not wait for the receiver"
    assert inside.wait(10)
    holder.join(10)
    assert 6.0 <= elapsed() < 12.0
    assert lock_info(slow) is None, "it was free before the receiver of its release was done"


def test_a_release_is_told_when_the_lock_is_free(connect: Any) -> None:
    taken: list[bool] = []

    def take(key: LockKey, **kwargs: Any) -> None:
        if not taken:
            taken.append(True)
            with task_lock(key) as acquired:
                taken[0] = acquired

    connect(lock_released, take)
    with lock("billing-run"):
        pass
    assert taken == [True]


def test_a_slow_receiver_of_a_loss_delays_nobody(connect: Any) -> None:
    go_on, heard = threading.Event(), []

    def wait(key: LockKey, **kwargs: Any) -> None:
        heard.append(key.parts[0])
        assert go_on.wait(20)

    connect(lock_lost, wait)
    try:
        with pytest.raises(LockLostError), lock("first"):
            assert force_release("first")
        elapsed = stopwatch()
        with lock("kept", ttl=2.5) as kept:
            with pytest.raises(LockLostError), lock("second"):
                assert force_release("second")
            assert elapsed() < 10
            before = kept.expires_at
            eventually(lambda: kept.expires_at > before, what="it is still renewed")
            kept.check()
    finally:
        go_on.set()
    eventually(lambda: heard == ["first", "second"])


class _SoftTimeLimit(BaseException):
    """What a signal handler may raise in the middle of a receiver."""


@pytest.mark.parametrize("number", range(50))
def test_an_exception_that_passes_through_a_receiver_leaves_no_lock(connect: Any, number: int) -> None:
    signal = (lock_acquired, lock_released)[number % 2]

    def strike(**kwargs: Any) -> None:
        raise _SoftTimeLimit

    connect(signal, strike)
    with pytest.raises(_SoftTimeLimit), lock("billing-run"):
        assert signal is lock_released
    signal.disconnect(strike)
    eventually(lambda: lock_info("billing-run") is None)


def test_an_async_receiver_breaks_nothing(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    heard = []

    async def hear(**kwargs: Any) -> None:
        heard.append(kwargs["key"].parts[0])

    connect(lock_acquired, hear)
    with lock("plain"):
        pass
    assert heard == ["plain"]

    async def main() -> None:
        async with lock("in a coroutine"):
            pass

    asyncio.run(main())
    assert lock_info("in a coroutine") is None
    assert "only plain functions can" in caplog.text


def test_a_receiver_that_would_end_the_process_does_not_silence_the_next_loss(connect: Any) -> None:
    heard = []

    def leave(**kwargs: Any) -> None:
        if "brief" in kwargs["key"].name:  # and not what an earlier test has left
            heard.append(kwargs["key"])
        raise SystemExit(1)

    connect(lock_lost, leave)
    for number in (1, 2):
        brief = lock(f"brief {number}", ttl=0.05)
        assert brief.acquire()
        eventually(lambda number=number: len(heard) == number, 5)
