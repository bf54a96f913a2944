"""A duplicate of an `OnceTask` in a chain, a group, a chord: it ends like any other task there, and nothing hangs.

Most tests hold the task's lock themselves, so that its message is a duplicate. With `raise_on_duplicate` the
duplicate fails, and what follows it does as after any failure; without, it succeeds with an answer for its value.
"""

import pytest

pytest.importorskip("celery")

from celery import chain, chord, group
from celery.exceptions import ChordError

from angee_jobs.integrations.celery import DuplicateResult, DuplicateTaskError
from angee_jobs.locks import LockBackendError, force_release, lock_backends
from tests.support.celery_workers import is_free, make, new_key
from tests.support.servers import eventually

pytestmark = pytest.mark.parametrize("fails", [True, False], ids=["fails", "answers"])


class Canvas:
    """The tasks, on the queue of a worker."""

    def __init__(self, queue, fails):
        self.queue = queue
        self.tasks = queue.canvas
        self.name = queue.shared_worker()
        self.fails = fails
        self.key = new_key()
        self.once = self.tasks.once[fails]

    def on(self, signature):
        return signature.set(queue=self.name)

    def duplicate(self, *args):
        return self.on(self.once.si(self.key, *args))

    def step(self, value):
        return self.on(self.tasks.step.si(value))

    def lock(self):
        return make(self.once.lock_key([self.key], {}))

    def is_duplicate(self, result):
        """Whether it ended as a duplicate."""
        value = result.get(timeout=20, propagate=False)
        if self.fails:
            return result.state == "FAILURE" and isinstance(value, DuplicateTaskError)
        return result.state == "SUCCESS" and self.is_answer(value)

    def is_answer(self, value):
        return set(value) == {"refused", "held_by"} and value["refused"] == self.lock().name

    def ran(self):
        return not self.queue.silent(self.key)


@pytest.fixture
def canvas(celery_queue, fails):
    return Canvas(celery_queue, fails)


@pytest.mark.parametrize("before", [0, 1])
def test_in_a_chain(canvas, before):
    """As its first task, and after another one, which has succeeded and stays so."""
    steps = [canvas.step("before")] * before
    with canvas.lock():
        result = chain(*steps, canvas.duplicate(), canvas.step("after"))()
        if canvas.fails:
            with pytest.raises(DuplicateTaskError):
                result.get(timeout=20)
        else:
            assert result.get(timeout=20) == "after"
        assert canvas.is_duplicate(result.parent)
        assert not before or result.parent.parent.get(timeout=20) == "before"
    assert not canvas.ran()


def test_as_the_last_of_a_chain(canvas):
    with canvas.lock():
        result = chain(canvas.step("before"), canvas.duplicate())()
        assert canvas.is_duplicate(result)
        assert result.parent.get(timeout=20) == "before", "stored after the next task was queued"
        if canvas.fails:
            expected = f"[{result.id}] raised expected: DuplicateTaskError("
            eventually(lambda: expected in canvas.queue.log_of(canvas.name), what="one line in the worker's log")
    assert not canvas.ran()


def test_twice_in_a_chain(canvas):
    """The first one is over when the second is queued."""
    result = chain(canvas.duplicate(), canvas.duplicate("again"))()
    assert result.get(timeout=20) == "again"


def test_in_a_group(canvas):
    """All of the group are queued, and each has a result."""
    with canvas.lock():
        result = group(canvas.step(1), canvas.duplicate(), canvas.step(2), canvas.duplicate())()
        first, one, second, other = result.results
        assert [first.get(timeout=20), second.get(timeout=20)] == [1, 2]
        assert canvas.is_duplicate(one)
        assert canvas.is_duplicate(other)
    assert not canvas.ran()


def test_in_the_header_of_a_chord(canvas):
    with canvas.lock():
        header = [canvas.step(1), canvas.duplicate(), chain(canvas.step(2), canvas.duplicate())]
        result = chord(header)(canvas.on(canvas.tasks.collect.s()))
        if canvas.fails:
            with pytest.raises((ChordError, DuplicateTaskError), match="queued or runs already"):
                result.get(timeout=20)
        else:
            first, *others = result.get(timeout=20)
            assert first == 1
            assert all(map(canvas.is_answer, others))
    assert not canvas.ran()


def test_as_the_body_of_a_chord(canvas):
    with canvas.lock():
        result = chord([canvas.step(1), canvas.step(2)])(canvas.duplicate())
        assert canvas.is_duplicate(result)
    assert not canvas.ran()


def test_linked_to_a_task(canvas):
    """The task has succeeded, whatever its callback is."""
    with canvas.lock():
        result = canvas.step("done").apply_async(link=canvas.duplicate())
        assert result.get(timeout=20) == "done"
        [child] = result.children
        assert canvas.is_duplicate(child)
        assert result.state == "SUCCESS"


def test_with_a_callback_of_its_own(canvas):
    """The caller is told, or the callback is: the callback is never dropped without a word."""
    told = canvas.on(canvas.tasks.told.s(canvas.key))
    with canvas.lock():
        if canvas.fails:
            with pytest.raises(DuplicateTaskError):
                canvas.duplicate().apply_async(link=told)
        else:
            result = canvas.duplicate().apply_async(link=told)
            assert not isinstance(result, DuplicateResult)
            assert canvas.is_duplicate(result)
            said, value = canvas.queue.heard(canvas.key)
            assert said == "linked"
            assert canvas.key in value


def test_errbacks_of_a_chain(canvas):
    failed = canvas.on(canvas.tasks.failed.s(canvas.key))
    with canvas.lock():
        result = chain(canvas.step("before"), canvas.duplicate()).apply_async(link_error=failed)
        assert canvas.is_duplicate(result)
        if canvas.fails:
            assert canvas.queue.heard(canvas.key) == ["errback"]
    assert not canvas.ran()


def test_replaced_by_a_duplicate(canvas):
    with canvas.lock():
        result = canvas.on(canvas.tasks.replaced.si(canvas.key, canvas.fails)).apply_async()
        assert canvas.is_duplicate(result)
    assert not canvas.ran()


def test_replaced_by_a_group_with_a_duplicate(canvas):
    with canvas.lock():
        result = canvas.on(canvas.tasks.replaced_by_a_group.si(canvas.key, canvas.fails)).apply_async()
        if canvas.fails:
            with pytest.raises((ChordError, DuplicateTaskError), match="queued or runs already"):
                result.get(timeout=20)
        else:
            refused, other = result.get(timeout=20)
            assert canvas.is_answer(refused)
            assert other == "done"


def test_replaced_by_itself(canvas):
    """The lock goes on to the task that takes the id over."""
    task = canvas.tasks.pages[canvas.fails]
    result = canvas.on(task.si(canvas.key, 1)).apply_async()
    assert result.get(timeout=20) == "last page"
    assert [canvas.queue.heard(canvas.key) for _ in range(3)] == [["page", "1"], ["page", "2"], ["page", "3"]]
    assert is_free(task.lock_key([canvas.key, 1], {}))


def test_retried_after_its_lock_was_lost_to_another(canvas):
    """It was rejected, and had no result ever."""
    task = canvas.tasks.waits[canvas.fails]
    key = task.lock_key([canvas.key], {})
    result = canvas.on(task.si(canvas.key)).apply_async()
    assert canvas.queue.heard(canvas.key) == ["in", "0"]
    assert force_release(key, backend="sqlite")
    with make(key):
        canvas.queue.go(canvas.key)
        value = result.get(timeout=20, propagate=False)
        assert (result.state == "FAILURE") is canvas.fails
        assert isinstance(value, DuplicateTaskError) if canvas.fails else value["refused"] == key.name
    assert not canvas.ran()


def test_in_a_map(canvas):
    """Each call of a map takes the lock; it was called as a plain function, beside the one that runs."""
    other = new_key()
    elements = canvas.on(canvas.once.map([other, canvas.key]))
    assert elements.apply_async().get(timeout=20) == ["done", "done"]
    assert canvas.queue.heard(canvas.key) == ["ran"]
    with canvas.lock():
        result = elements.apply_async()
        value = result.get(timeout=20, propagate=False)
        if canvas.fails:
            assert isinstance(value, DuplicateTaskError)
        else:
            assert value[0] == "done"
            assert canvas.is_answer(value[1])
    assert not canvas.ran()
    assert is_free(canvas.once.lock_key([other], {}))


def test_chunks(canvas):
    with canvas.lock():
        chunks = canvas.once.chunks([[new_key()], [canvas.key]], 1).group()
        first, second = group(map(canvas.on, chunks.tasks))().results
        assert first.get(timeout=20) == ["done"]
        value = second.get(timeout=20, propagate=False)
        assert isinstance(value, DuplicateTaskError) if canvas.fails else canvas.is_answer(value[0])


def test_of_a_holder_that_is_no_task(canvas):
    """A result that nobody will store is not waited for."""
    with canvas.lock():
        if canvas.fails:
            with pytest.raises(DuplicateTaskError) as raised:
                canvas.duplicate().apply_async()
            assert raised.value.task_id is None
        else:
            result = canvas.duplicate().apply_async()
            assert isinstance(result, DuplicateResult)
            assert result.ready()
            assert result.state == "FAILURE"
            with pytest.raises(DuplicateTaskError, match="queued or runs already"):
                result.get(timeout=20)


def test_locks_that_cannot_be_asked(canvas, monkeypatch):
    """In a canvas the message goes out without its lock, which the worker then takes, or fails to take."""

    def acquire(*args):
        raise LockBackendError("on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(lock_backends.operations("sqlite"), "acquire", acquire)
        result = group(canvas.step(1), canvas.duplicate())()
    assert result.get(timeout=20) == [1, "done"]
    eventually(lambda: is_free(canvas.once.lock_key([canvas.key], {})))
