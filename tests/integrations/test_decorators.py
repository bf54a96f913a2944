"""`@locked` written wrongly is an error where it is written, with what to write. It was a task that did nothing."""

import functools

import django
import pytest

from angee_jobs.locks import lock, task_lock_is_held
from angee_jobs.locks.misuse import check_function
from tests.support.servers import missing_packages, require

NEEDS_KEY = r"@locked needs the key of its lock: write @locked\(\"billing-run\"\), or @locked\(lambda"
BELOW = r"put @locked\(...\) directly above def"


@pytest.fixture(params=["celery", "django_tasks"])
def locked(request):
    if request.param == "celery":
        require(missing_packages("celery"))
        from angee_jobs.integrations.celery import locked
    else:
        need_tasks()
        from angee_jobs.integrations.django_tasks import locked
    return locked


def need_tasks():
    """Django's own tasks, or the backport."""
    if django.VERSION < (6, 0):
        require(missing_packages("django_tasks"))


@pytest.fixture(params=["celery", "django_tasks"])
def task(request):
    """What makes a task of a function."""
    if request.param == "celery":
        require(missing_packages("celery"))
        from celery import Celery

        return Celery("decorators", set_as_current=False).task
    need_tasks()
    try:
        from django.tasks import task
    except ImportError:  # before Django 6.0
        from django_tasks import task
    return task


def by_key(key):
    return key


def body(key):
    return key


def wrapped(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)

    return call


def test_without_a_key(locked):
    with pytest.raises(TypeError, match=NEEDS_KEY):

        @locked
        def plain(key):
            return "done"

    with pytest.raises(TypeError, match=NEEDS_KEY):

        @locked
        async def coroutine(key):
            return "done"

    with pytest.raises(TypeError, match=NEEDS_KEY):

        class Jobs:
            @locked
            def method(
                self,
                key,
            ):
                return "done"


def test_without_a_key_between_other_decorators(locked, task):
    with pytest.raises(TypeError, match=NEEDS_KEY):

        @task
        @locked
        @wrapped
        def never(key):
            return "done"


def test_without_a_key_above_a_task(locked, task):
    with pytest.raises(TypeError, match=NEEDS_KEY) as raised:
        locked(task(body))
    raised.match(BELOW)


def test_above_a_task(locked, task):
    with pytest.raises(TypeError, match=BELOW):
        locked("key")(task(body))
    with pytest.raises(TypeError, match=BELOW):
        locked(by_key)(task(body))


def test_where_lines_say_nothing_the_first_call_does(locked):
    """At a prompt, say: a decorator that has got an argument of the call in place of a function."""
    namespace = {"locked": locked}
    exec(compile("@locked\ndef job(key): ...", "<prompt>", "exec"), namespace)
    with pytest.raises(TypeError, match=NEEDS_KEY):
        namespace["job"]("an argument")


def test_keys_that_are_functions(locked):
    """Whatever stands near."""

    def local(key):
        def also(key):
            return locked(local)(body)

        return also if key == "also" else key

    class Keys:
        def method(self, key):
            return key

        @staticmethod
        def static(key):
            return key

    one = local; two = locked(lambda key: key)(body)  # fmt: skip  # noqa: E702
    functions = [by_key, wrapped(by_key), functools.partial(by_key), Keys().method, Keys.static, str, one]
    assert [locked(key)(body)("key") for key in functions] == ["key"] * len(functions)
    assert two("key") == "key"
    assert local("also")("key")("key") == "key"


def test_places_and_several_keys(locked):
    """The options of the queues' decorators are those of lock()."""

    @locked(lambda name: f"import-{name}", slots=2, on_refused="skip", backend="local")
    def placed(name):
        with lock("import-a", slots=2, backend="local") as held:
            return held.slot, placed("a")["refused"], placed("b")

    @locked(lambda one, other: [one, other], on_refused="skip", backend="local")
    def moved(one, other):
        return moved("c", one)

    with lock("import-b", slots=1, backend="local"), lock("import-b", slots=2, backend="local"):
        slot, refused, other = placed("a")
    assert (slot, refused, other["refused"]) == (1, "angee:name:import-a", "angee:name:import-b")
    assert moved("a", "b")["refused"] == "angee:name:a"
    assert not task_lock_is_held("c", backend="local")


def test_other_things_that_are_no_functions(locked):
    with pytest.raises(TypeError, match="got an object of type int"):
        locked("key")(5)


def test_actors_and_other_tasks_are_known():
    require(missing_packages("dramatiq") or missing_packages("huey"))
    import dramatiq
    from huey import MemoryHuey

    broker = dramatiq.brokers.stub.StubBroker() if hasattr(dramatiq, "brokers") else dramatiq.get_broker()
    for made in (dramatiq.actor(body, broker=broker), MemoryHuey().task()(body)):
        with pytest.raises(TypeError, match=BELOW):
            check_function(made)
