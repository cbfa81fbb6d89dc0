"""Fencing tokens: the number of an acquisition, and the late write that it stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from django_singletask import LockError, LockLost, TaskLock
from tests import inside
from tests.deadline import wait_for
from tests.testapp.models import Account

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("on_redis")]


def test_each_acquisition_gets_a_greater_number() -> None:
    numbers = []
    for _ in range(3):
        with TaskLock("nightly") as lock:
            numbers.append(lock.fencing_token())
    assert sorted(set(numbers)) == numbers
    assert numbers[-1] < 2**63


def test_one_acquisition_has_one_number() -> None:
    with TaskLock("nightly") as lock:
        assert lock.fencing_token() == lock.fencing_token()


def test_an_object_that_is_used_again_gets_a_new_number() -> None:
    lock = TaskLock("nightly")
    with lock:
        first = lock.fencing_token()
    with lock:
        assert lock.fencing_token() > first


def test_a_lock_that_is_not_held_has_none() -> None:
    with pytest.raises(LockError, match="acquire"):
        TaskLock("nightly").fencing_token()


@pytest.mark.parametrize("fetched", [True, False])
def test_a_lost_lock_has_none(fetched: bool) -> None:
    with TaskLock("nightly", renew=False, timeout=30) as lock:
        if fetched:
            lock.fencing_token()
        with inside.later(31), pytest.raises(LockLost):
            lock.fencing_token()


@pytest.mark.usefixtures("no_renewal_thread")
@pytest.mark.parametrize("fetched", [True, False])
def test_a_retaken_lock_has_none(fetched: bool, empty_cache: Callable[[str], None]) -> None:
    """Another run may have held it in between, with a number of its own."""
    with TaskLock("nightly") as lock:
        if fetched:
            lock.fencing_token()
        empty_cache("redis")
        lock.extend()
        assert not lock.lost
        with pytest.raises(LockLost):
            lock.fencing_token()


def test_a_lock_that_another_has_by_now_is_lost(take: Callable[..., TaskLock]) -> None:
    with TaskLock("nightly") as lock:
        lock.clear()
        take()
        with pytest.raises(LockLost):
            lock.fencing_token()
        assert lock.lost


@pytest.mark.usefixtures("no_renewal_thread")
def test_an_entry_that_the_cache_forgot_is_found_missing(
    empty_cache: Callable[[str], None],
) -> None:
    with TaskLock("nightly") as lock:
        empty_cache("redis")
        with pytest.raises(LockLost):
            lock.fencing_token()
        assert lock.owned()  # the renewal that this led to took it again


@pytest.mark.usefixtures("no_renewal_thread")
def test_no_number_is_drawn_before_it_is_known_that_the_lock_was_retaken(
    empty_cache: Callable[[str], None], settings: Any
) -> None:
    """Negative control: without the wait for a renewal this draws the greatest number."""
    settings.SINGLETASK_HISTORY = "off"  # else the threads would open connections
    retaken, go_on = threading.Event(), threading.Event()
    drawn: list[object] = []

    def draw() -> None:
        try:
            drawn.append(lock.fencing_token())
        except LockLost as error:
            drawn.append(error)

    def extend() -> None:
        store = inside.store_of("redis")  # of this thread
        renew = store.renew

        def renew_slowly(*request: Any) -> Any:
            outcome = renew(*request)
            retaken.set()
            go_on.wait(20)
            return outcome

        store.renew = renew_slowly
        lock.extend()

    with TaskLock("nightly") as lock:
        empty_cache("redis")
        slow = threading.Thread(target=extend)
        slow.start()
        assert retaken.wait(20)
        body = threading.Thread(target=draw)
        body.start()
        body.join(0.2)
        go_on.set()
        slow.join()
        body.join()
    assert isinstance(drawn[0], LockLost)


@pytest.mark.parametrize(
    ("cache_alias", "guard"),
    [("redis", "guarded"), ("db_postgres", "guarded"), ("redis", "unguarded")],
    indirect=["cache_alias"],
)
@pytest.mark.django_db(transaction=True)
def test_the_late_write_of_a_stopped_holder_is_refused_where_it_is_guarded(
    cache_alias: str, guard: str
) -> None:
    """``unguarded`` is the negative control: there the late write destroys the newer one."""
    Account.objects.all().delete()
    Account.objects.create(balance=100)
    holder = subprocess.Popen(
        [sys.executable, "-m", "tests.late_writer", guard],
        cwd=ROOT,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "SINGLETASK_TEST_CACHE": cache_alias,
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        late = int(holder.stdout.readline())
        lock = TaskLock("account")
        wait_for(lock.acquire, "the lease of the stopped process ends")
        token = lock.fencing_token()
        assert token > late
        assert Account.objects.filter(fence__lt=token).update(balance=200, fence=token) == 1
        holder.send_signal(signal.SIGCONT)
        written = int(holder.communicate(timeout=20)[0])
        lock.release()
    finally:
        holder.kill()
        holder.wait()
    balance = Account.objects.get().balance
    assert (written, balance) == ((0, 200) if guard == "guarded" else (1, 101))
