# ruff: noqa: PT009, PT027 -- run by Django's test runner
import threading
import time

from django.db import connection, transaction
from django.test import SimpleTestCase, TestCase, TransactionTestCase

from angee_jobs.locks import lock, lock_backends, locked, task_lock, task_lock_is_held
from angee_jobs.locks.testing import ContractCase
from shop.models import Order


class OrdersTest(TestCase):
    """Each test takes the same lock: one that leaked from another would be refused."""

    def order_twice(self):
        tokens = [int(self.client.get("/order").content) for _ in range(2)]
        self.assertLess(*tokens)
        self.assertEqual(Order.objects.count(), 2)
        self.assertFalse(task_lock_is_held("orders"))

    def test_one(self):
        self.order_twice()

    def test_two(self):
        self.order_twice()

    def test_a_refusal(self):
        with lock("orders"):
            with task_lock("orders", timeout=1.5) as acquired:
                self.assertIs(acquired, False)

    def test_a_rollback(self):
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            with lock("orders"):
                raise ZeroDivisionError
        with lock("orders"):
            pass


class MoreOrdersTest(OrdersTest):
    """For another process, with --parallel."""


class TransactionsTest(TransactionTestCase):
    def setUp(self):
        self.refused = []

    def try_elsewhere(self):
        with task_lock("orders") as acquired:
            self.refused.append(not acquired)
        connection.close()

    def elsewhere_is_refused(self):
        thread = threading.Thread(target=self.try_elsewhere)
        thread.start()
        thread.join(20)
        return self.refused.pop()

    def test_until_the_commit(self):
        with transaction.atomic():
            with lock("orders", ttl=2.25) as held:
                Order.objects.create(number=1)
            if held.expires_at is not None:
                ContractCase.is_renewed(held)
            self.assertTrue(self.elsewhere_is_refused())
        self.assertFalse(self.elsewhere_is_refused())

    def test_a_waiting_thread(self):
        @locked("orders", timeout=20)
        def work():
            done.append(Order.objects.count())
            connection.close()

        done = []
        with lock("orders"):
            thread = threading.Thread(target=work)
            thread.start()
            time.sleep(0.2)
        thread.join(20)
        self.assertEqual(done, [0])


class NoDatabaseTest(SimpleTestCase):
    """Locks are no queries of a test: they may be taken where the database may not be used."""

    def test_a_lock(self):
        with lock("orders") as held:
            self.assertTrue(held.held)
        self.assertFalse(lock_backends["default"].is_held("orders"))
