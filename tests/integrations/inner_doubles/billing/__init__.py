from angee_jobs.locks import LockBackendError, lock, task_lock
from angee_jobs.locks.backends.base import BaseLockBackend


class Unreachable(BaseLockBackend):
    """Session locks on a server that is not there."""

    leases = False

    def acquire(self, *args, **kwargs):
        raise LockBackendError("no server")

    inspect = acquire


SENT = []


def send(bill):
    SENT.append(bill)


def run_billing(backend="default"):
    with lock("billing-run", backend=backend) as held:
        for bill in range(3):
            held.check()
            send(bill)


def run_if_free():
    with task_lock("billing-run") as acquired:
        if acquired:
            send(0)
        return acquired
