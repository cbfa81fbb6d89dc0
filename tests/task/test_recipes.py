"""The recipes in the docs do what they say: their code is run as it stands there."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Retry
from django.db import transaction

from django_singletask import LockConflict, SingletonTask, TaskLock
from tests.deadline import wait_for
from tests.deliveries import held_by, receive
from tests.guides import blocks

ACCOUNTS = ["account:1", "account:2"]

pytestmark = pytest.mark.usefixtures("on_redis")


@pytest.fixture
def recipes() -> Iterator[SimpleNamespace]:
    """Give what the page defines. In ``names``, a test can say what the work is."""
    with Celery("recipes", set_as_current=False, broker="memory://") as app:

        @app.task(base=SingletonTask, shared=False)
        def rebuild_index(full=False):
            return f"rebuilt, {full=}"

        names: dict[str, Any] = {
            "__name__": "recipes",
            "shared_task": functools.partial(app.task, shared=False),
            "rebuild_index": rebuild_index,
            "SingletonTask": SingletonTask,
            "Celery": functools.partial(Celery, set_as_current=False),
        }
        code = [*blocks("guides/outside-tasks.rst"), *blocks("faq.rst")]
        # Only Django 6.0 has django.tasks.
        exec("\n".join(block for block in code if "django.tasks" not in block), names)
        yield SimpleNamespace(names=names, **names)


def held(*names):
    return [TaskLock(name).locked() for name in names]


class TestSeveralLocks:
    def test_all_are_held_while_the_body_runs(self, recipes):
        recipes.names["move"] = lambda source, target, amount: held(*ACCOUNTS)
        assert recipes.transfer(2, 1, 10) == [True, True]
        assert held(*ACCOUNTS) == [False, False]

    def test_a_name_that_occurs_twice_is_one_lock(self, recipes):
        recipes.names["move"] = lambda source, target, amount: held("account:1")
        assert recipes.transfer(1, 1, 10) == [True]

    def test_if_one_is_held_none_is_kept(self, recipes, take):
        recipes.names["TaskLock"] = lambda name, wait: TaskLock(name)
        take("account:2")
        with pytest.raises(LockConflict, match="account:2"):
            recipes.transfer(1, 2, 10)
        assert held(*ACCOUNTS) == [False, True]

    def test_transfers_in_both_directions_all_end(self, recipes):
        moved = []
        recipes.names["move"] = lambda *transfer: moved.append(transfer)
        pairs = [(1, 2), (2, 1)] * 5
        threads = [threading.Thread(target=recipes.transfer, args=(*p, 1)) for p in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted((source, target) for source, target, _amount in moved) == sorted(pairs)


@pytest.mark.django_db(transaction=True)
class TestUntilCommit:
    @pytest.fixture(autouse=True)
    def work(self, recipes):
        recipes.names["write_invoices"] = lambda customer_id: held("customer:7")

    def test_a_transaction_inside_the_lock(self, recipes):
        assert recipes.bill(7) == [True]
        assert held("customer:7") == [False]

    def test_the_lock_is_held_until_the_transaction_around_it_commits(self, recipes):
        with transaction.atomic():
            assert recipes.bill_here(7) == [True]
            assert held("customer:7") == [True]
        assert held("customer:7") == [False]

    def test_without_a_transaction_around_it_the_lock_is_held_during_the_work(self, recipes):
        assert recipes.bill_here(7) == [True]
        assert held("customer:7") == [False]

    def test_an_error_frees_the_lock_at_once(self, recipes):
        with transaction.atomic():
            with suppress(ZeroDivisionError), recipes.locked_until_commit("customer:7"):
                raise ZeroDivisionError
            assert held("customer:7") == [False]

    def test_after_a_later_rollback_the_lock_ends_by_itself(self, recipes, settings):
        settings.SINGLETASK_LOCK_TIMEOUT = 2
        with suppress(ZeroDivisionError), transaction.atomic():
            recipes.bill_here(7)
            raise ZeroDivisionError
        assert held("customer:7") == [True]
        wait_for(lambda: held("customer:7") == [False], "the lease ends")

    @pytest.mark.only_all("it waits for the end of a lease")
    def test_control_a_lock_that_is_referred_to_outlives_a_rollback(self):
        lock = TaskLock("customer:7", timeout=2)
        with suppress(ZeroDivisionError), transaction.atomic():
            lock.acquire()
            transaction.on_commit(lock.release)
            raise ZeroDivisionError
        ends = time.monotonic() + lock.remaining()
        wait_for(lambda: time.monotonic() > ends, "the lease would have ended")
        assert lock.release()

    def test_a_lock_that_is_held_is_a_conflict(self, recipes, take):
        take("customer:7")
        with pytest.raises(LockConflict, match="customer:7"):
            recipes.bill_here(7)


@pytest.mark.parametrize("name", ["rebuild_now", "rebuild_index_anyway"])
def test_the_bare_body_runs_beside_the_holder(recipes, name):
    with recipes.rebuild_index.lock(full=True):
        assert getattr(recipes, name)() == "rebuilt, full=True"


def test_a_new_call_cancels_the_run_that_holds_the_lock(recipes, monkeypatch):
    revoked = []
    monkeypatch.setattr(
        recipes.render.app.control, "revoke", lambda *args, **options: revoked.append(args)
    )
    with held_by("the old run", task=recipes.render), pytest.raises(Retry):
        receive(recipes.render, "a", {}, task_id="the new call")
    assert revoked == [("the old run",)]


def test_the_ported_lock_of_redis_py_runs_its_work_locked_or_not_at_all(take):
    [block] = [block for block in blocks("guides/coming-from.rst") if "cache.lock" in block]
    ported = block.partition("# after\n")[2]
    runs: list[bool] = []
    work = {"TaskLock": TaskLock, "sync": lambda: runs.extend(held("sync"))}
    exec(ported, work)
    take("sync")
    exec(ported, work)
    assert runs == [True]
