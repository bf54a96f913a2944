# ruff: noqa: PT009, PT027 -- run by Django's test runner and by pytest
from unittest import mock

from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.test import TestCase, TransactionTestCase

import billing
from angee_jobs.locks import (
    LocalLockBackend,
    LockLostError,
    LockNotAcquiredError,
    get_lock_backend,
    lock,
    task_lock_is_held,
)
from angee_jobs.locks.testing import LocalLocksMixin, assert_locked, held_by_other, lose
from billing.models import Bill


class BillingTests:
    def setUp(self):
        self.assertIsInstance(get_lock_backend(), LocalLockBackend)
        billing.SENT.clear()

    def test_is_locked(self):
        with assert_locked("billing-run"):
            billing.run_billing()
        self.assertEqual(billing.SENT, [0, 1, 2])

    def test_every_alias_is_local(self):
        with assert_locked("billing-run", backend="elsewhere"):
            billing.run_billing("elsewhere")
        with self.assertRaises(ImproperlyConfigured), lock("billing-run", backend="elsewhere") as held:
            held.detach()

    def test_sends_under_the_lock(self):
        with mock.patch("billing.send", side_effect=lambda bill: self.assertTrue(task_lock_is_held("billing-run"))):
            billing.run_billing()

    def test_leaves_it_to_the_other(self):
        with held_by_other("billing-run"):
            self.assertFalse(billing.run_if_free())
            with self.assertRaises(LockNotAcquiredError):
                billing.run_billing()
        self.assertEqual(billing.SENT, [])
        self.assertTrue(billing.run_if_free())

    def test_stops_when_the_lock_is_lost(self):
        send = mock.Mock(side_effect=lambda bill: lose("billing-run"))
        with mock.patch("billing.send", send), self.assertRaises(LockLostError):
            billing.run_billing()
        send.assert_called_once_with(0)

    def test_a_lock_that_is_left_over(self):
        self.left_over()

    def test_another_lock_that_is_left_over(self):
        self.left_over()

    def left_over(self):
        global leaked
        leaked = lock("billing-run")
        self.assertTrue(leaked.acquire())

    def test_until_the_commit(self):
        with transaction.atomic():
            with lock("billing-run"):
                Bill.objects.create(number=1)
            self.assertTrue(task_lock_is_held("billing-run"))
        self.assertFalse(task_lock_is_held("billing-run"))


class InTestCase(LocalLocksMixin, BillingTests, TestCase):
    pass


class InTransactionTestCase(LocalLocksMixin, BillingTests, TransactionTestCase):
    pass
