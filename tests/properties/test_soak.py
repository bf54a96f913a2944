"""How the soak tells growth from noise, and a moment of it. The hour is `python -m tests.torture.soak`."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torture.soak import growth, halves

ROOT = Path(__file__).parents[2]
MEMORY, ROWS, THREADS = ("sqlite", "memory, MiB"), ("postgres", "rows of tasklock"), ("redis", "threads")


def samples(figures):
    """An hour of samples, one a minute; ``figures`` is what each of them is at a minute."""
    return [(60.0 * minute, {name: at(minute) for name, at in figures.items()}) for minute in range(61)]


def test_what_is_flat_has_not_grown():
    flat = {
        MEMORY: lambda minute: 40.0 + 0.2 * (minute % 3),
        ROWS: lambda minute: 200 + minute % 40,
        THREADS: lambda minute: 7 + minute % 2,
    }
    assert growth(halves(samples(flat))) == []


def test_what_grows_during_the_warm_up_only_is_flat():
    assert growth(halves(samples({MEMORY: lambda minute: 20.0 + 2 * min(minute, 11)}))) == []


@pytest.mark.parametrize(
    "name", [MEMORY, ROWS, THREADS, ("valkey", "keys"), ("postgres", "sessions"), ("local", "Python objects")]
)
def test_what_grows_steadily_is_found(name):
    [text] = growth(halves(samples({name: lambda minute: 100 + 50 * minute})))
    assert text.startswith(f"{name[0]}: {name[1]} grew from ")


@pytest.mark.once
@pytest.mark.alone
@pytest.mark.timeout(120)
@pytest.mark.skipif(importlib.util.find_spec("psutil") is None, reason="needs the package psutil")
def test_a_moment_of_it_runs_without_an_error():
    options = ["local", "sqlite", "--minutes", "0.1", "--every", "0.5", "--pace", "0.2", "--keys", "50"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.torture.soak", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert "| `sqlite` | block " in done.stdout, done.stderr
    assert "error: " not in done.stdout, done.stdout
