"""Every backend against the model of tests/properties/model.py.

In the normal suite: a few examples, the same each time. To search for new failures, with many more steps:

    python -m pytest tests/properties/test_model.py --hypothesis-profile=thorough
"""

import contextlib
import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from angee_jobs.locks import held_locks
from angee_jobs.locks.testing.contract.peers import Peer
from tests.properties import model
from tests.properties.model_clients import Client, InProcess, InTask, InThread
from tests.properties.model_storage import (
    AdvisoryStorage,
    LocalStorage,
    PostgresStorage,
    RedisStorage,
    SqliteStorage,
    Storage,
)
from tests.support.servers import eventually

STORAGES: dict[str, type[Storage]] = {
    "local": LocalStorage,
    "sqlite": SqliteStorage,
    "postgres_table": PostgresStorage,
    "postgres_advisory": AdvisoryStorage,
    "redis": RedisStorage,
}
#: Set in tests/conftest.py: without the profile, Hypothesis would make a hundred examples.
THOROUGH = settings.default is not None and settings.default.max_examples > 100
CHECKS = list(HealthCheck)
#: A failure here is shown as it was drawn: to make it smaller can take minutes.
FEW = settings(
    max_examples=12, stateful_step_count=30, derandomize=True, deadline=None, database=None,
    suppress_health_check=CHECKS, phases=[Phase.generate], report_multiple_bugs=False,
)  # fmt: skip
MANY = settings(suppress_health_check=CHECKS, report_multiple_bugs=False)


@pytest.fixture
def storage(alias: str, as_in_production: None, request: pytest.FixtureRequest) -> Storage:
    made = STORAGES[alias]()
    if alias != "local" and hasattr(made.strategy, "server"):
        made.strategy.server = request.getfixturevalue("valkey" if alias == "redis" else "postgres")
    return made


@pytest.fixture
def clients(storage: Storage) -> Iterator[dict[str, object]]:
    alias = storage.alias
    with contextlib.ExitStack() as stack:
        other = InProcess(alias, Peer.borrow()) if storage.has("processes") else Client(alias)
        made = {"thread": Client(alias), "other thread": InThread(alias), "task": InTask(alias), "process": other}
        for client in made.values():
            stack.callback(client.close)
        yield made


@pytest.mark.timeout(0 if THOROUGH else 60)
def test_the_backend_does_as_the_model(storage: Storage, clients: dict[str, object]) -> None:
    machine = type("Machine", (model.LockMachine,), {"storage": storage, "clients": clients})
    run_state_machine_as_test(machine, settings=MANY if THOROUGH else FEW)

    def left() -> list[str]:
        gc.collect()  # Hypothesis keeps what it ran in cycles, and with it locks that were dropped
        names = [info.name for info in held_locks(backend=storage.alias)]
        found = [*(name for name in names if name.startswith("angee:model:")), *storage.strategy.leftovers()]
        return [line for line in found if "angee:" not in line or "angee:model:" in line]  # not those of other tests

    try:
        eventually(lambda: not left(), what="nothing is left over")
    except AssertionError as error:
        raise AssertionError(f"left over: {left()}") from error
