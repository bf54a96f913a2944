"""What people read: errors and log lines."""

import pytest

from angee_jobs.locks import (
    LockNotAcquiredError,
    force_release,
    lock,
)


def test_what_a_note_says_does_nothing_to_a_terminal_or_a_log(caplog):
    held = lock("noted", note="a\n\x1b[31mb")
    assert held.acquire()
    with pytest.raises(LockNotAcquiredError) as refused, lock("noted"):
        pytest.fail("two holders")
    assert str(refused.value.holder.holder).isprintable()
    assert str(refused.value).isprintable()
    assert force_release("noted", reason="c\nd\x1b", user="e\nf")
    assert [record.getMessage() for record in caplog.records if not record.getMessage().isprintable()] == []
    assert "reason: c\\x0ad\\x1b" in caplog.text


def test_s40_the_error_of_a_refusal_names_the_holder(key):
    with lock(key, note="nightly run", backend="local"):
        with pytest.raises(LockNotAcquiredError) as caught, lock(key, backend="local"):
            pytest.fail("two holders")
    text = str(caught.value)
    assert key in text
    assert "nightly run" in text
