"""Tasks for chains, groups and chords; the workers of `celery_app` import this module too."""

import json

from celery import group

from tests.support.children.celery_app import Once, app
from tests.support.children.talk import tell, wait_for_go


class Answers(Once):
    abstract = True
    raise_on_duplicate = False


def both(function):
    """The task with a base that fails a duplicate, and with one that answers it."""

    def named(base, name):
        return app.task(base=base, bind=True, name=f"tests.canvas.{name}", unique_on=["key"], max_retries=3)(function)

    return {True: named(Once, f"{function.__name__}_fails"), False: named(Answers, f"{function.__name__}_answers")}


@both
def once(self, key, value="done"):
    tell(key, "ran")
    return value


@both
def waits(self, key):
    """Wait for the test, then retry once."""
    tell(key, "in", self.request.retries)
    wait_for_go(key)
    if not self.request.retries:
        raise self.retry(countdown=0)
    return "done"


@both
def pages(self, key, page):
    """Go on with the next page, under the id and the lock of this one."""
    tell(key, "page", page)
    if page < 3:
        raise self.replace(self.si(key, page + 1).set(queue=self.request.delivery_info["routing_key"]))
    return "last page"


@app.task(name="tests.canvas.step")
def step(value):
    return value


@app.task(name="tests.canvas.collect")
def collect(values):
    return values


@app.task(name="tests.canvas.told")
def told(value, key):
    tell(key, "linked", json.dumps(value).replace(" ", ""))


@app.task(name="tests.canvas.failed")
def failed(task_id, key):
    tell(key, "errback")


@app.task(name="tests.canvas.replaced", bind=True)
def replaced(self, key, fails):
    raise self.replace(once[fails].si(key).set(queue=self.request.delivery_info["routing_key"]))


@app.task(name="tests.canvas.replaced_by_a_group", bind=True)
def replaced_by_a_group(self, key, fails):
    queue = self.request.delivery_info["routing_key"]
    both_of_them = group(once[fails].si(key).set(queue=queue), once[fails].si(f"{key}-2").set(queue=queue))
    raise self.replace(both_of_them | collect.s().set(queue=queue))
