"""The example of a dashboard in testproject: a run that is marked as running, and whose process died."""

import pytest
from django.contrib.admin.sites import site
from django.test import override_settings

from testproject.messaging.models import Channel, SyncRun
from testproject.messaging.runs import is_stalled, mark_stalled, recorded_run
from tests.support.procs import Child
from tests.support.servers import eventually


@pytest.fixture
def channel():
    channel = Channel.objects.create(name="inbox", mailbox="")
    yield channel
    channel.delete()


def test_alive_then_stalled(channel):
    with Child("sync_run", channel.pk) as child:
        child.expect("running", timeout=20)
        run = SyncRun.objects.get(channel=channel)
        assert is_stalled(run) is False
        assert mark_stalled([run]) == 0
        with recorded_run(channel.pk) as refused:
            assert refused is None
        child.sigkill()
    eventually(lambda: is_stalled(run), 10, "the lock of the dead process comes free")
    # A later run has the lock: the dead one's row does not come alive by it.
    with recorded_run(channel.pk) as second:
        assert is_stalled(second) is False
        assert is_stalled(run) is True
        assert mark_stalled(SyncRun.objects.filter(channel=channel)) == 1
    run.refresh_from_db()
    second.refresh_from_db()
    assert (run.state, second.state) == ("stalled", "finished")
    assert is_stalled(run) is False


def test_failed(channel):
    with pytest.raises(KeyError):
        with recorded_run(channel.pk):
            raise KeyError
    assert SyncRun.objects.get(channel=channel).state == "failed"


def test_only_where_locks_reach_other_processes(channel):
    run = SyncRun.objects.create(channel=channel, fencing_token=1)
    assert is_stalled(run) is True
    with override_settings(ANGEE_JOBS_LOCKS={"default": {"BACKEND": "angee_jobs.locks.LocalLockBackend"}}):
        assert is_stalled(run) is None
        assert mark_stalled([run]) == 0


def test_admin(channel):
    page = site._registry[SyncRun]
    dead = SyncRun.objects.create(channel=channel, fencing_token=1)
    with recorded_run(channel.pk) as run:
        assert page.alive(run) is True
    assert page.alive(run) is None
    assert page.alive(dead) is False


def test_a_run_that_ended_between_two_looks(channel):
    """The row was read before its run ended, and the lock is looked at afterwards."""
    with recorded_run(channel.pk) as run:
        before = SyncRun.objects.get(pk=run.pk)
    assert is_stalled(before) is False
