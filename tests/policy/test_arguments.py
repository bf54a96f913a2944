"""Keys, owner ids, times, notes, settings and aliases of any value: a documented error, and nothing acquired."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from hypothesis import given
from hypothesis import strategies as st

from angee_jobs.checks import check_lock_backends, check_lock_databases
from angee_jobs.locks import (
    LockError,
    LockKey,
    LockLostError,
    attach_lock,
    force_release,
    held_locks,
    lock,
    lock_backends,
    lock_info,
    reap_expired_locks,
    record_lock_key,
    task_lock,
    task_lock_is_held,
)
from angee_jobs.locks.conf import BUILT_IN, configuration
from tests.support.hostile import anything, examples, texts, times

DOCUMENTED = (TypeError, ValueError)


def names(alias: str) -> list[str]:
    return sorted(info.name for info in held_locks(backend=alias))


@pytest.mark.parametrize("at", ["local", "sqlite"])
def test_keys(at: str) -> None:
    before = set(names(at))

    @examples(60)
    @given(key=st.one_of(anything, texts))
    def check(key: Any) -> None:
        try:
            with lock(key, backend=at) as held:
                assert LockKey.parse(held.name) == held.key
                assert task_lock_is_held(key, backend=at)
                assert lock_info(key, backend=at) is not None
        except DOCUMENTED:
            for ask in (task_lock_is_held, lock_info, force_release):
                with pytest.raises(DOCUMENTED):
                    ask(key, backend=at)
        assert set(names(at)) <= before  # what earlier tests have left may end meanwhile

    check()


@examples(60)
@given(namespace=anything, parts=anything, label=texts, pk=anything, purpose=texts)
def test_pieces_of_keys(namespace: Any, parts: Any, label: str, pk: Any, purpose: str) -> None:
    for make in (lambda: LockKey(namespace, parts), lambda: record_lock_key(label, pk, purpose)):
        try:
            key = make()
        except DOCUMENTED:
            continue
        assert LockKey.parse(key.name) == key
        key.name.encode()


@pytest.mark.parametrize("at", ["local", "sqlite", "postgres_table", "redis"])
def test_owner_ids(at: str, request: pytest.FixtureRequest) -> None:
    """Only the one that detach() returned attaches."""
    if at in ("postgres_table", "redis"):
        request.getfixturevalue("postgres" if at == "postgres_table" else "valkey")
    with lock("hostile owner", backend=at) as first:
        owner_id = first.detach()

    @examples(25)
    @given(wrong=st.one_of(anything, texts, st.sampled_from([owner_id.upper() + "0", owner_id[:-1], owner_id + " "])))
    def check(wrong: Any) -> None:
        with pytest.raises((LockLostError, *DOCUMENTED)) as caught:
            attach_lock("hostile owner", wrong, backend=at)
        assert isinstance(caught.value, LockLostError) is (isinstance(wrong, str) and wrong != "")

    try:
        check()
        assert attach_lock("hostile owner", owner_id, backend=at).release()
    finally:
        force_release("hostile owner", backend=at)


@examples(150)
@given(
    options=st.dictionaries(
        st.sampled_from(["timeout", "ttl", "hold_at_least", "hold_at_most"]), times, min_size=1, max_size=2
    ),
    bare=times,
)
def test_times(options: dict[str, Any], bare: Any) -> None:
    try:
        made = lock("hostile times", backend="local", **options)
    except DOCUMENTED:
        for other in (lambda: task_lock("hostile times", backend="local", **options),):
            with pytest.raises(DOCUMENTED):
                other()
        return
    for call in (
        lambda: made.acquire(bare),
        lambda: made.extend(bare),
        lambda: made.detach(bare),
        lambda: attach_lock("hostile times", "x", ttl=bare, backend="local"),
        lambda: reap_expired_locks(grace=bare, backend="local"),
    ):
        try:
            call()
        except (*DOCUMENTED, LockError):
            pass
    made.release()
    force_release("hostile times", backend="local")


@pytest.mark.parametrize("at", ["local", "sqlite"])
def test_notes(at: str) -> None:
    """Of whatever a note is made, the list can be read and printed."""

    @examples(60)
    @given(note=anything)
    def check(note: Any) -> None:
        try:
            with lock("hostile note", note=note, backend=at):
                info = lock_info("hostile note", backend=at)
                assert info is not None
                str(info.holder).encode()
        except DOCUMENTED:
            assert lock_info("hostile note", backend=at) is None

    check()


@examples(60)
@given(alias=anything)
def test_aliases(alias: Any) -> None:
    if isinstance(alias, str) and alias in lock_backends:
        return
    for use in (
        lambda: lock("a", backend=alias).acquire(),
        lambda: task_lock("a", backend=alias).__enter__(),
        lambda: lock_info("a", backend=alias),
        lambda: list(held_locks(backend=alias)),
        lambda: reap_expired_locks(backend=alias),
        lambda: force_release("a", backend=alias),
        lambda: attach_lock("a", "b", backend=alias),
    ):
        with pytest.raises(ImproperlyConfigured):
            use()


PATHS = [
    *(f"angee_jobs.locks.{name}" for name in BUILT_IN),
    "builtins.dict",
    "a.b",
    ".a",
    "..a.b",
    "a..",
    "",
    ".",
    "é.é",
]
entries = st.one_of(
    anything,
    st.fixed_dictionaries(
        {"BACKEND": st.one_of(st.sampled_from(PATHS), texts)},
        optional={
            "OPTIONS": st.one_of(
                anything,
                st.dictionaries(st.sampled_from(["alias", "ttl", "cache", "x"]), anything, max_size=2),
            ),
            "ALIAS": anything,
            5: anything,
        },
    ),
)


aliases = st.one_of(st.just("default"), texts, st.integers(), st.none(), st.tuples(st.integers()))


@examples(250)
@given(setting=st.one_of(anything, st.dictionaries(aliases, entries, max_size=2)))
def test_settings(setting: Any) -> None:
    """Either it works, or the check and the first use say what is wrong with it."""
    with override_settings(ANGEE_JOBS_LOCKS=setting):
        found = [*check_lock_backends(), *check_lock_databases(databases=[])]
        assert all(isinstance(each, CheckMessage) for each in found)
        for each in found:
            str(each).encode(errors="backslashreplace")
        try:
            aliases = list(configuration())
        except ImproperlyConfigured:
            assert found
            return
        for alias in aliases:
            try:
                backend = lock_backends[alias]
            except ImproperlyConfigured:
                assert found
                continue
            try:
                lock("hostile settings", backend=backend if not isinstance(alias, str) else alias).acquire()
            except (LockError, ImproperlyConfigured):
                pass


@pytest.mark.parametrize("alias", ["default", "sqlite"])
def test_a_fencing_token_that_can_be_none_is_told_before_any_request(alias):
    held = lock("named", backend=alias)
    assert held.acquire()
    for odd in ("5", 1.0, True, object()):
        with pytest.raises(TypeError, match="fencing_token must be an int"):
            force_release("named", fencing_token=odd, backend=alias)
    for nobodys in (2**70, 0, -1, held.fencing_token + 1):
        assert force_release("named", fencing_token=nobodys, backend=alias) is False
    assert held.release()
