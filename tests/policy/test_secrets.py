"""Owner ids are secret: whoever knows one can release the hold, so nobody may see one by accident."""

from __future__ import annotations

import ast
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
from django.template.defaultfilters import pprint
from django.views.debug import ExceptionReporter

from angee_jobs.locks import (
    Lock,
    LockBackendError,
    LockError,
    LockNotAcquiredError,
    attach_lock,
    force_release,
    lock,
    lock_backends,
    signals,
    task_lock_is_held,
)
from tests.support.admin_page import URL, logged_in, no_users  # noqa: F401  (a fixture)
from tests.support.commands import execute
from tests.support.secret_ids import KEY, PACKAGE, Kept, Secrets, cycle, everything_logged, made_ids  # noqa: F401  (fixtures)
from tests.support.servers import eventually


def shown(value: object) -> str:
    """All that printing a value in some way can show."""
    texts = [repr(value), pprint(value)]
    if isinstance(value, BaseException):
        texts += [str(value), repr(vars(value)), repr(getattr(value, "__notes__", "")), shown_page(value)]
        texts += [shown(value.__cause__)] if value.__cause__ else []
    elif value is not None and not isinstance(value, str):
        texts.append(str(value))
    return "\n".join(texts)


def shown_page(error: BaseException) -> str:
    reporter = ExceptionReporter(None, type(error), error, error.__traceback__)
    frames = [frame for frame in reporter.get_traceback_frames() if frame["filename"].startswith(PACKAGE)]
    return pprint([frame["vars"] for frame in frames])


def test_nothing_that_is_printed_or_logged_tells_one(alias: str, secrets: Secrets, logged: Kept) -> None:
    told: list[str] = []

    def receive(**arguments: object) -> None:
        told.append(shown(arguments))

    names = ("lock_acquired", "lock_refused", "lock_released", "lock_lost", "locks_reaped")
    for name in names:
        getattr(signals, name).connect(receive)
    try:
        cycle(alias, lambda value: told.append(shown(value)))
        backend = lock_backends.operations(alias)
        with mock.patch.object(backend, "release", side_effect=LockBackendError("the server is gone", uncertain=True)):
            given_up = lock(KEY, backend=alias)
            given_up.acquire()
            with contextlib.suppress(LockError):
                given_up.release()
            eventually(lambda: any("the server is gone" in text for text in logged.texts))
        eventually(lambda: not task_lock_is_held(KEY, backend=alias), 15, "the renewal thread releases it")
    finally:
        for name in names:
            getattr(signals, name).disconnect(receive)
    assert told and logged.texts
    for text in [*told, *logged.texts]:
        assert not secrets.in_text(text), text[:2000]


class Struck(Exception):
    pass


def struck(before: set[object], call: Callable[[], object]) -> Struck | None:
    """Run ``call``, and raise at the entry of the first function of the package that is not in ``before`` yet."""

    def trace(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code not in before:
            before.add(code)
            raise Struck

    tracer = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Struck as error:
        return error
    except LockError:
        pass
    finally:
        sys.settrace(tracer)
    return None


def frames_of(error: BaseException) -> Iterator[tuple[str, dict[str, Any]]]:
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        # Whose caller has the text in a variable of its own; it is hidden by the first statement.
        inside = traceback.tb_next is not None and traceback.tb_next.tb_frame.f_code.co_filename.startswith(PACKAGE)
        first = code.co_name == "attach_lock" and not inside
        if code.co_filename.startswith(PACKAGE) and not first:
            yield f"{code.co_filename}:{code.co_name}", dict(traceback.tb_frame.f_locals)
        traceback = traceback.tb_next


def look_at(error: BaseException, secrets: Secrets) -> set[str]:
    seen = set()
    for where, variables in frames_of(error):
        seen.add(where)
        for name, value in variables.items():
            assert not secrets.in_text(pprint(value)), f"{where}: {name}"
    return seen


def test_no_variable_of_a_traceback_tells_one(alias: str, as_in_production: None, secrets: Secrets) -> None:
    """As Django's page for errors shows them, with an error raised in every function that an operation passes."""
    seen: set[str] = set()
    leases = lock_backends.operations(alias).leases
    at = {"backend": alias, "ttl": 60.0}
    operations: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "acquire": (lambda: lock(KEY, **at), lambda made: made.acquire()),
        "extend": (lambda: _held(at), lambda made: made.extend()),
        "info": (lambda: _held(at), lambda made: made.info()),
        "release": (lambda: _held(at), lambda made: made.release()),
        "block": (lambda: lock(KEY, **at), _enter_and_leave),
    }
    if leases:
        operations["detach"] = (lambda: _held(at), lambda made: made.detach())
        operations["attach"] = (lambda: str(_held(at).detach()), lambda owner_id: attach_lock(KEY, owner_id, **at))
    functions: set[object] = set()
    for prepare, call in operations.values():
        while True:
            subject = prepare()
            error = struck(functions, lambda: call(subject))  # noqa: B023
            if error is None:
                break
            seen |= look_at(error, secrets)
            error = subject = None  # with its frames, to which a session may belong
            _free(alias)
        subject = None
        _free(alias)
    assert len(seen) > 10, "many functions were seen"


def test_the_whole_page_of_an_error_tells_none(secrets: Secrets) -> None:
    backend = lock_backends.operations("local")
    with mock.patch.object(backend, "acquire", side_effect=RuntimeError("a bug")):
        with pytest.raises(RuntimeError) as caught:
            lock(KEY, backend="local").acquire()
    reporter = ExceptionReporter(None, caught.type, caught.value, caught.tb)
    for text in (reporter.get_traceback_html(), reporter.get_traceback_text()):
        assert "a bug" in text and not [each for each in secrets.ids if each in text.partition("Settings")[0]]


def _held(options: dict[str, Any]) -> Lock:
    made = lock(KEY, **options)
    assert made.acquire(5)
    return made


def _enter_and_leave(made: Lock) -> None:
    with made:
        pass


def _free(alias: str) -> None:
    if lock_backends.operations(alias).leases:
        force_release(KEY, backend=alias)
    eventually(lambda: not task_lock_is_held(KEY, backend=alias))


def test_page_and_commands_show_none(secrets: Secrets, capsys: pytest.CaptureFixture[str]) -> None:
    client = logged_in("view_tasklock", "release_tasklock")
    with lock(KEY, backend="local"), lock(KEY, backend="sqlite") as held:
        texts = [client.get(URL).content.decode()]
        chosen = json.dumps(["sqlite", held.fencing_token, held.name])
        texts.append(client.post(URL + "release/", {"lock": chosen}).content.decode())
        for words in (
            ["list_locks"],
            ["list_locks", "--format=json"],
            ["run_locked", KEY, "--backend=local", "--", "true"],
        ):
            execute(*words)
        with pytest.raises(LockNotAcquiredError) as refused, lock(KEY, backend="sqlite"):
            pass
        texts += [str(refused.value), repr(refused.value.holder)]
    captured = capsys.readouterr()
    assert held.name in texts[0] + captured.out
    for text in [*texts, captured.out, captured.err]:
        assert not secrets.in_text(text)


def test_owner_ids_are_compared_in_constant_time() -> None:
    """Where they are compared in Python: a comparison by == tells by its time how much of a guess was right."""
    #: Which request is whose, among those of this process.
    exempt = {"_is_about"}
    found = []
    for path in Path(PACKAGE).rglob("*.py"):
        if "testing" in path.parts:
            continue
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name not in exempt:
                for node in ast.walk(function):
                    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
                        if any(
                            ast.unparse(side).endswith(("owner", "owner_id")) for side in (node.left, *node.comparators)
                        ):
                            found.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert not found
