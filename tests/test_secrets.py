"""Owner ids are secret: whoever knows one can release the hold, so nobody may see one by accident."""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
from django.template.defaultfilters import pprint
from django.views.debug import ExceptionReporter

import angee_jobs.locks
from angee_jobs.locks import (
    Lock,
    LockBackendError,
    LockError,
    LockLostError,
    LockNotAcquiredError,
    attach_lock,
    clock,
    force_release,
    held_locks,
    lock,
    lock_backends,
    lock_info,
    reap_expired_locks,
    signals,
    task_lock_is_held,
)
from angee_jobs.locks import hold as hold_module
from angee_jobs.locks import policy as policy_module
from angee_jobs.locks.backends.base import Extension
from angee_jobs.locks.renewal import renewer
from tests.admin_page import URL, logged_in, no_users  # noqa: F401  (a fixture)
from tests.commands import execute
from tests.servers import PostgresServer, RespServer, eventually

PACKAGE = str(Path(angee_jobs.locks.__file__).parent)
KEY = "of secrets"


class Secrets:
    """Every owner id that was made, and whether a text has one in it."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def new(self) -> Any:
        made = _new_owner_id()
        self.ids.append(str(made))
        return made

    def in_text(self, text: str) -> list[str]:
        return [each for each in self.ids if each in text]


_new_owner_id = hold_module.new_owner_id


@pytest.fixture
def secrets() -> Iterator[Secrets]:
    found = Secrets()
    with (
        mock.patch.object(hold_module, "new_owner_id", found.new),
        mock.patch.object(policy_module, "new_owner_id", found.new),
    ):
        yield found
    assert found.ids, "the test has made holds"


class Kept(logging.Handler):
    """What was logged, as a formatter would write it, and with its arguments."""

    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts += [self.format(record), repr(record.args), repr(vars(record))]


@pytest.fixture
def logged() -> Iterator[Kept]:
    """All loggers at DEBUG, also the drivers'."""
    kept = Kept()
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in list(logging.root.manager.loggerDict))]
    loggers += [
        logging.getLogger(name) for name in ("psycopg", "psycopg.pool", "redis", "asyncio", "django.db.backends")
    ]
    before = [(each, each.level, each.disabled) for each in loggers]
    for each in loggers:
        each.setLevel(logging.DEBUG)
        each.disabled = False
        each.addHandler(kept)
    yield kept
    for each, level, disabled in before:
        each.setLevel(level)
        each.disabled = disabled
        each.removeHandler(kept)


def cycle(at: str, see: Callable[[object], None]) -> None:
    """Every verb, with success and without; ``see`` gets what comes of it, errors too."""

    def tried(call: Callable[[], object]) -> None:
        try:
            see(call())
        except Exception as error:
            see(error)

    first, second = lock(KEY, note="a note", backend=at), lock(KEY, backend=at)
    tried(first.acquire)
    tried(second.acquire)
    tried(lambda: second.acquire(0.05))
    tried(second.__enter__)
    for ask in (first.info, lambda: lock_info(KEY, backend=at), lambda: [*held_locks(backend=at)], first.extend):
        tried(ask)
    see([first, first._hold, Extension("a", first.owner_id or "", 1.0), vars(first), lock_backends[at], renewer.holds])
    detached = ""
    try:
        detached = first.detach()
    except Exception as error:
        see(error)
    tried(lambda: attach_lock(KEY, "nobody", backend=at))
    if detached:
        attached = attach_lock(KEY, str(detached), backend=at)
        see(attached)
        tried(lambda: attach_lock(KEY, str(detached), backend=at))
    tried(lambda: force_release(KEY, reason="a test", backend=at))
    tried(first.release)
    tried(first.check)
    tried(lambda: reap_expired_locks(backend=at))
    third = lock(KEY, hold_at_most=60, backend=at).__enter__()
    see(third)
    assert third._hold is not None
    renewer.lose(third._hold, "a test")
    tried(lambda: third.__exit__(None, None, None))
    tried(lambda: force_release(KEY, backend=at))
    tried(lambda: task_lock_is_held(KEY, backend=at))


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
        backend = lock_backends.verbs(alias)
        with mock.patch.object(backend, "release", side_effect=LockBackendError("the server is gone", uncertain=True)):
            given_up = lock(KEY, backend=alias)
            given_up.acquire()
            with contextlib.suppress(LockError):
                given_up.release()
            eventually(lambda: any("the server is gone" in text for text in logged.texts))
        eventually(lambda: not task_lock_is_held(KEY, backend=alias), what="the renewal thread releases it")
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
    """As Django's page for errors shows them, with an error raised in every function that a verb passes through."""
    seen: set[str] = set()
    leases = lock_backends.verbs(alias).leases
    at = {"backend": alias, "ttl": 60.0}
    verbs: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "acquire": (lambda: lock(KEY, **at), lambda made: made.acquire()),
        "extend": (lambda: _held(at), lambda made: made.extend()),
        "info": (lambda: _held(at), lambda made: made.info()),
        "release": (lambda: _held(at), lambda made: made.release()),
        "block": (lambda: lock(KEY, **at), _enter_and_leave),
    }
    if leases:
        verbs["detach"] = (lambda: _held(at), lambda made: made.detach())
        verbs["attach"] = (lambda: str(_held(at).detach()), lambda owner_id: attach_lock(KEY, owner_id, **at))
    functions: set[object] = set()
    for prepare, call in verbs.values():
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
    backend = lock_backends.verbs("local")
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
    if lock_backends.verbs(alias).leases:
        force_release(KEY, backend=alias)
    eventually(lambda: not task_lock_is_held(KEY, backend=alias))


# What is stored and sent.


def detached(at: str) -> str:
    first = lock(KEY, backend=at)
    assert first.acquire()
    return str(first.detach(60))


def is_of_no_use(stolen: str, at: str) -> None:
    """What a reader of the storage has found: nothing can be done with it here."""
    backend, name = lock_backends.verbs(at), f"angee:name:{KEY}"
    deadline = clock.now() + 5
    with pytest.raises(LockLostError):
        attach_lock(KEY, stolen, backend=at)
    assert backend.adopt(name, stolen, "heir", 60, "", deadline) is None
    assert not list(backend.extend([Extension(name, stolen, 60)], deadline))
    assert backend.release(name, stolen, deadline) is False
    assert task_lock_is_held(KEY, backend=at)


def test_the_lock_file_has_only_hashes(secrets: Secrets) -> None:
    owner_id = detached("sqlite")
    path = lock_backends["sqlite"].path()  # type: ignore[attr-defined]
    stored = b"".join(Path(path + suffix).read_bytes() for suffix in ("", "-wal") if Path(path + suffix).exists())
    assert f"angee:name:{KEY}".encode() in stored
    assert not [each for each in secrets.ids if each.encode() in stored]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        [(owner,)] = connection.execute("SELECT owner FROM lock WHERE name = ?", [f"angee:name:{KEY}"])
    is_of_no_use(owner, "sqlite")
    assert attach_lock(KEY, owner_id, backend="sqlite").release()


@pytest.mark.parametrize("at", ["postgres_table", "postgres_advisory"])
def test_postgresql_is_told_only_hashes(at: str, postgres: PostgresServer, secrets: Secrets) -> None:
    """Neither its tables, nor its activity, nor a log of every statement with its parameters."""
    for setting in ("log_statement = 'all'", "log_parameter_max_length = -1"):
        postgres.query(f"ALTER SYSTEM SET {setting}")
    postgres.query("SELECT pg_reload_conf()")
    start = len(postgres.log())
    try:
        eventually(lambda: postgres.query("SHOW log_statement") == [("all",)])
        activity: list[str] = []
        cycle(at, lambda value: activity.append(str(postgres.query("SELECT * FROM pg_stat_activity"))))
        owner_id = detached(at) if lock_backends.verbs(at).leases else ""
        tables = [str(postgres.query(f"SELECT * FROM {t}")) for t in ("angee_jobs_tasklock", "angee_jobs_sessionhold")]
        log = postgres.log()[start:]
    finally:
        postgres.query("ALTER SYSTEM RESET ALL")
        postgres.query("SELECT pg_reload_conf()")
    assert "angee_jobs" in log
    for text in [log, *activity, *tables]:
        assert not secrets.in_text(text)
    if owner_id:
        [(owner,)] = postgres.query("SELECT owner FROM angee_jobs_tasklock WHERE owner <> ''")
        is_of_no_use(owner, at)
        assert attach_lock(KEY, owner_id, backend=at).release()


def test_redis_is_told_only_hashes(valkey: RespServer, secrets: Secrets) -> None:
    """Neither its keys, nor MONITOR, nor its slow log."""
    heard: list[str] = []
    with valkey.connect() as client, valkey.connect() as watcher:
        client.config_set("slowlog-log-slower-than", 0)
        try:
            with watcher.monitor() as monitor:

                def listen() -> None:
                    while not heard or "that is all" not in heard[-1]:
                        heard.append(str(monitor.next_command()))

                thread = threading.Thread(target=listen, daemon=True)
                thread.start()
                cycle("redis", lambda value: None)
                owner_id = detached("redis")
                client.echo("that is all")
                thread.join(10)
                assert not thread.is_alive()
            slow = str(client.slowlog_get(1000))
        finally:
            client.config_set("slowlog-log-slower-than", 10000)
        prefix = lock_backends["redis"].prefix  # type: ignore[attr-defined]
        stored = {key: client.get(key) for key in client.keys("*") if client.type(key) == b"string"}
        hold = stored[f"{prefix}hold:angee:name:{KEY}".encode()]
        index = str(client.zrange(f"{prefix}index", 0, -1, withscores=True))
    assert "EVALSHA" in str(heard).upper()
    for text in [*heard, slow, str(stored), index]:
        assert not secrets.in_text(text)
    for stolen in (hold[48:112].decode(), hold.decode(), hold[:48].decode()):
        is_of_no_use(stolen, "redis")
    assert attach_lock(KEY, owner_id, backend="redis").release()


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
