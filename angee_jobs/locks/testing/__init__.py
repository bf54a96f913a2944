"""Tools for tests: doubles for code that takes locks, and the contract suite that every lock backend passes.

To test code that takes locks, use :func:`local_locks`, :class:`LocalLocksMixin`, :func:`held_by_other`, :func:`lose`
and :func:`assert_locked`; see ``doubles.py``.

To test a backend, write a :class:`Strategy` for it and run :class:`LockContract` with that, under unittest or pytest::

    import unittest
    from angee_jobs.locks.testing import LockContract, Strategy

    class MyStrategy(Strategy):
        alias = "mine"                    # in ANGEE_JOBS_LOCKS
        lacks = {"break_connections": "there is no server"}

        def empty(self):
            MyStorage.clear()
        ...

    class TestMyBackend(LockContract, unittest.TestCase):
        strategy = MyStrategy()

The tests commit to the databases of ``strategy.databases``, as a project does. So under Django's test runner, use
``django.test.TransactionTestCase`` instead of ``unittest.TestCase``. The tests start other processes with the settings
module of this one, so ``DJANGO_SETTINGS_MODULE`` must name it.

The name of a test says what it promises. A test of a failure that users of other libraries reported has the number of
that failure in its name.
"""

from __future__ import annotations

from .contract.base import ContractCase, eventually
from .contract.errors import Broken, Secrecy
from .contract.exclusion import Clock, Crash, Exclusion, Ownership
from .contract.fencing import Fencing
from .contract.guard import Guard
from .contract.information import Information, Signals
from .contract.loss import Loss
from .contract.peers import Peer
from .contract.places import Places, PlacesElsewhere, PlacesInTransactions
from .contract.python import Python
from .contract.reaping import Reaping
from .contract.renewal import Renewal
from .contract.rollbacks import Rollbacks
from .contract.several import Several, SeveralInTransactions
from .contract.shared import SharedObject
from .contract.strategy import CAPABILITIES, Strategy
from .contract.transactions import Transactions
from .contract.waiting import Waiting
from .doubles import LocalLocksMixin, OtherHolder, assert_locked, held_by_other, local_locks, lose


class LockContract(
    Exclusion,
    Ownership,
    Crash,
    Clock,
    Renewal,
    Loss,
    Waiting,
    Fencing,
    Guard,
    Transactions,
    Rollbacks,
    Broken,
    Secrecy,
    Python,
    SharedObject,
    Places,
    PlacesInTransactions,
    PlacesElsewhere,
    Several,
    SeveralInTransactions,
    Information,
    Reaping,
    Signals,
):
    """Tests all promises of one backend."""


__all__ = [
    "CAPABILITIES",
    "ContractCase",
    "LocalLocksMixin",
    "LockContract",
    "OtherHolder",
    "Peer",
    "Strategy",
    "assert_locked",
    "eventually",
    "held_by_other",
    "local_locks",
    "lose",
]
