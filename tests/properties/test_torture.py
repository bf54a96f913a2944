"""The torture run in its short form, and the bugs that it has to find. The long form is `tox -e torture`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import require
from tests.torture.ground import BACKENDS, PLANTED, missing

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.once, pytest.mark.alone]


def torture(*words):
    """Run it in a process of its own, since it sets Django up for itself."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANGEE_JOBS_TEST_")}
    return subprocess.run(
        [sys.executable, "-m", "tests.torture", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


@pytest.mark.timeout(200)
def test_half_a_minute_of_everything_at_once():
    require("; ".join(missing(list(BACKENDS)).values()) or None)
    done = torture("--seconds", "30", "--json")
    assert done.returncode in (0, 1), done.stderr
    for backend, told in json.loads(done.stdout).items():
        assert told["violations"] == [], f"{backend}: {told}\n{done.stderr[-8000:]}"
        # It was a run that could have found something.
        assert told["figures"]["sections"] > 20, told
        assert sum(told["faults"].values()) > 10, told


@pytest.mark.timeout(200)
def test_planted_bugs_are_found():
    require("; ".join(missing(list(PLANTED)).values()) or None)
    done = torture("--seconds", "120", "--workers", "5", "--planted", *PLANTED)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-8000:]}"
    assert done.stdout.count("exclusion: ") + done.stdout.count("ownership: ") >= len(PLANTED) - 1
