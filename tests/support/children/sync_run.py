"""A run that the test kills."""

from django.test import override_settings

from tests.support.children import hear, say

SHORT = {"BACKEND": "angee_jobs.locks.TableLockBackend", "OPTIONS": {"alias": "default", "ttl": 2.25}}


def main(channel_id):
    from testproject.messaging.runs import recorded_run

    with override_settings(ANGEE_JOBS_LOCKS={"default": SHORT}):
        with recorded_run(int(channel_id)):
            say("running")
            hear()
