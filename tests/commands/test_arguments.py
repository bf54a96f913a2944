"""Arguments of the commands: a documented exit code, one line that says why, never a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

import pytest
from django.test import override_settings
from hypothesis import given
from hypothesis import strategies as st

from angee_jobs.locks import held_locks, lock
from tests.support.commands import LOCKS, execute
from tests.support.hostile import examples, texts

OPTIONS = {
    "list_locks": ["--backend", "--key", "--stale", "--format"],
    "reap_locks": ["--backend", "--grace", "--batch-size", "--dry-run", "--format"],
    "release_lock": ["--backend", "--reason", "--end-session", "--user"],
    "run_locked": ["--backend", "--timeout", "--ttl", "--on-refused", "--grace"],
}
#: What the help of each command says.
CODES = {
    "list_locks": {0, 1, 2},
    "reap_locks": {0, 1, 2},
    "release_lock": {0, 1, 2, 3, 4},
    "run_locked": {0, 2, 69, 75, 76, 78},
}


def possible(text: str) -> bool:
    """Whether an operating system can pass it; and it does not ask for help, or to wait for ever."""
    try:
        return b"\0" not in os.fsencode(text) and text not in ("-h", "inf") and not text.startswith("--h")
    except UnicodeEncodeError:
        return False


words = st.one_of(
    texts.filter(possible),
    st.sampled_from(["default", "local", "table", "json", "taken", "angee:name:taken", "-1", "1e308", "0.001", "--"]),
)


@pytest.fixture(autouse=True)
def locks() -> Iterator[None]:
    with override_settings(ANGEE_JOBS_LOCKS=LOCKS), lock("taken"), lock("taken", backend="local"):
        yield
    names = [info.name for alias in LOCKS for info in held_locks(backend=alias)]
    assert not names, "a command has left something behind"


def arguments(command: str) -> st.SearchStrategy[list[str]]:
    option = st.one_of(
        st.tuples(st.sampled_from(OPTIONS[command]), words).map(list),
        st.tuples(st.sampled_from(OPTIONS[command]), words).map(lambda pair: [f"{pair[0]}={pair[1]}"]),
        words.map(lambda word: [word]),
    )
    return st.lists(option, max_size=3).map(lambda parts: [word for part in parts for word in part])


def run(*words: str) -> tuple[int, str]:
    """The exit code, and what was written to either stream, which encode as those of a terminal do."""
    streams = io.BytesIO()
    out = io.TextIOWrapper(streams, "utf-8", errors="strict", write_through=True)
    err = io.TextIOWrapper(streams, "utf-8", errors="backslashreplace", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = execute(*words)
    return code, streams.getvalue().decode()


@pytest.mark.parametrize("command", ["list_locks", "reap_locks", "release_lock"])
def test_arguments(command: str) -> None:
    @examples(50)
    @given(given_=arguments(command))
    def check(given_: list[str]) -> None:
        code, text = run(command, *given_)
        assert code in CODES[command]
        assert "Traceback" not in text and (code == 0 or text.strip()), "it says what is wrong"

    check()


@pytest.mark.skipif(sys.platform == "win32", reason="run_locked needs signals")
def test_arguments_of_run_locked() -> None:
    """What does run is a program that does nothing."""

    @examples(20)
    @given(given_=arguments("run_locked"), key=words)
    def check(given_: list[str], key: str) -> None:
        given_ = [word for word in given_ if word != "--" and not word.startswith("--hold")]
        code, text = run("run_locked", *given_, "--timeout", "0.05", key, "--", "true")
        assert code in CODES["run_locked"] or (code in range(256) and "--on-refused" in " ".join(given_))
        assert "Traceback" not in text and (code == 0 or text.strip()), "it says what is wrong"

    check()
