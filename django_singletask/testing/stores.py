"""The contract of a store as tests, to run on a store of your own with pytest.

The page "Add a store" of the documentation explains each promise.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import pairwise
from typing import Any, TypeVar
from unittest import mock

import pytest
from django.core.cache import caches
from django.test import override_settings

from django_singletask import clock, stores
from django_singletask.exceptions import LockUnavailable
from django_singletask.holder import Holder
from django_singletask.locks.keys import LATEST, QUEUED, name_key
from django_singletask.stores import close_stores, get_store
from django_singletask.stores.base import CannotList, Entry, Outcome, Slots, Store
from django_singletask.stores.epoch import Forgotten
from django_singletask.stores.keys import EPOCH, FENCE, LONGEST_KEY, MAX_KEY, marker_key

__all__ = ["StoreContract"]

T = TypeVar("T")

TRUST = 0.99
"""The part of a lease that its holder trusts; see :mod:`django_singletask.locks.lease`."""
ROUNDING = 0.002
"""Seconds by which a store may shorten a lease besides."""
GIVE_UP = 30.0
"""Seconds after which a process or thread that waits for the others has failed."""
WORKERS = 4
"""Processes, or threads, that do the same at the same moment."""
ROUNDS = 25
MARK = b"file"


def _value(who: str) -> bytes:
    """Return the bytes of a holder; they differ for each ``who``."""
    fields = {
        "token": who.encode().hex().zfill(32),
        "name": "tests",
        "host": "tests",
        "pid": 1,
        "timeout": 60,
    }
    return Holder.from_dict(fields).encode()


A, B, C, D = map(_value, "abcd")
LOCK = name_key("feeds.tasks.import_feed(feed_id=7)")
KEY = LOCK.key
ODD = [
    b"1",
    b"a\r\nb\tc",
    b"' \" \\ % %s ? ; -- {} $1 \\u0000",
    b"VALUE x 0 3\r\nEND\r\n",
    b"x" * 10_000,
]
"""Values that a store must keep as they are. All are ASCII."""


def _key(name: str) -> str:
    return name_key(name).key


def _in_threads(work: Callable[[int, threading.Barrier], T]) -> list[T]:
    """Call ``work(number, barrier)`` in several threads; the barrier breaks if one fails."""
    barrier = threading.Barrier(WORKERS)

    def run(number: int) -> T:
        try:
            return work(number, barrier)
        except BaseException:
            barrier.abort()
            raise
        finally:
            close_stores()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that they meet in the middle of a request
    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            futures = [pool.submit(run, number) for number in range(WORKERS)]
    finally:
        sys.setswitchinterval(interval)
    errors = [*filter(None, [future.exception() for future in futures])]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return [future.result() for future in futures]


def _in_processes(
    work: Callable[[int, threading.Barrier], T], meanwhile: Callable[[], object] = int
) -> list[T]:
    """Call ``work(number, barrier)`` in several forked processes; call ``meanwhile`` here."""
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(WORKERS)

    def run(number: int, results: Any) -> None:
        # What the parent made is not collected here, since that would copy its whole memory.
        gc.freeze()
        try:
            result = work(number, barrier)
            close_stores()
            gc.collect()
            results.send((result, ""))
        except BaseException:
            barrier.abort()
            results.send((None, traceback.format_exc()))
        # Nothing of the test runner may end in a child.
        os._exit(0)

    pipes = [fork.Pipe(duplex=False) for _ in range(WORKERS)]
    processes = [fork.Process(target=run, args=(n, pipes[n][1])) for n in range(WORKERS)]
    with warnings.catch_warnings():
        # Other threads of this process have no part in what the children do.
        warnings.simplefilter("ignore", DeprecationWarning)
        for process in processes:
            process.start()
    try:
        meanwhile()
    finally:
        nothing = None, f"A process did not answer within {GIVE_UP} s."
        ended: list[Any] = []
        for process, (reader, _) in zip(processes, pipes, strict=True):
            ended.append(reader.recv() if reader.poll(GIVE_UP) else nothing)
            process.kill()  # if it has not ended by now
            process.join()
    errors = [error for _, error in ended if error]
    assert not errors, min(errors, key=lambda error: "BrokenBarrierError" in error)
    return [result for result, _ in ended]


class StoreContract:
    """The tests of one store. Subclass it in a module of tests, and say what the store can do.

    Each test empties the cache before and after it, so it needs a cache of its own.
    """

    alias = ""
    """The alias in ``CACHES``. Two stores of that alias are two clients of the same entries."""
    lists = True
    """Whether ``entries()`` lists the locks; otherwise it raises ``CannotList``."""
    fences = True
    """Whether ``fence()`` draws tokens; otherwise it raises ``NotImplementedError``."""
    forgets = False
    """Whether the cache can lose its locks under running holders; equal to the store's own."""
    tells_remaining = True
    """Whether an entry tells what is left of its lease; otherwise it is None."""
    between_processes = True
    """Whether other processes see the entries."""
    on_one_host = False
    """Whether all processes are on one host, so that its clock may end the leases."""
    ends_within = 15.0
    """Seconds after the end of a lease within which the entry is gone."""

    def open_store(self) -> Store:
        """Return a new store; override it if settings alone do not make one."""
        return stores.open_store(self.alias)

    def empty(self) -> None:
        """Remove all entries, as a flush or a restart of the cache does."""
        caches[self.alias].clear()

    def broken(self) -> AbstractContextManager[object] | None:
        """Return a context in which the cache cannot be used, or None: that is not tested."""
        return None

    @pytest.fixture(autouse=True)
    def prepare(self) -> Iterator[None]:
        """Open the store for a test; a subclass may override this, to use other fixtures."""
        with self.prepared():
            yield

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Empty the cache, and let each thread and process open a store of its own."""
        stores.open_with(lambda alias: self.open_store())
        try:
            with override_settings(SINGLETASK_TESTING=True):
                self.empty()
                yield
                self.empty()
        finally:
            stores.open_with(None)

    @property
    def store(self) -> Store:
        """The store of this thread and process."""
        return get_store(self.alias)

    def value(self, key: str = KEY) -> bytes | None:
        entry = self.store.read(key)
        return None if entry is None else entry.value

    def take(self, value: bytes, mark: bytes = b"", keys: int = 3) -> object:
        """Take one of up to three slots; return its key, or the bytes of the entries by key."""
        slots = Slots(LOCK.slots(keys), min(keys, 3), mark)
        taken = self.store.take(slots, value, 60, heeds_epoch=False)
        return taken if isinstance(taken, str) else {key: taken[key].value for key in taken}

    def eventually(self, condition: Callable[[], T]) -> T:
        """Return the first true result; fail if a lease that has ended goes on."""
        until = time.monotonic() + self.ends_within
        while not (result := condition()):
            assert time.monotonic() < until, f"a lease did not end within {self.ends_within} s"
            time.sleep(0.01)
        return result

    def _race(self, work: Callable[[int, threading.Barrier], T]) -> Iterator[list[T]]:
        """Yield the results of threads, and then those of processes."""
        yield _in_threads(work)
        if self.between_processes and hasattr(os, "fork"):
            self.empty()
            yield _in_processes(work)

    # What it says of itself

    def test_it_says_what_it_can_do(self) -> None:
        store = self.store
        assert isinstance(store, Store)
        assert store.forgets is self.forgets
        assert store.batch >= 1
        assert isinstance(store.family, str)
        assert isinstance(store.places, frozenset)
        assert all(isinstance(place, str) for place in store.places)
        assert store.place

    # Taking

    def test_add_takes_a_free_lock(self) -> None:
        assert self.store.insert(KEY, A, 60)
        assert self.value() == A
        assert self.store.add(_key("another"), A, 60) is None
        assert self.value(_key("another")) == A

    def test_add_leaves_a_held_lock_and_returns_its_entry(self) -> None:
        self.store.add(KEY, A, 60)
        assert not self.store.insert(KEY, B, 60)
        blocker = self.store.add(KEY, B, 60)
        assert blocker is not None
        assert blocker.value == A
        assert self.value() == A

    def test_add_sent_twice_is_one_acquisition(self) -> None:
        """The first reply was lost."""
        self.store.add(KEY, A, 60)
        assert self.store.add(KEY, A, 60) is None
        assert self.value() == A

    def test_take_returns_the_key_or_the_entry(self) -> None:
        for heeds_epoch in (True, False):
            key = _key(f"heeds_epoch={heeds_epoch}")
            assert self.store.take(Slots((key,)), A, 60, heeds_epoch=heeds_epoch) == key
            blocker = self.store.take(Slots((key,)), B, 60, heeds_epoch=heeds_epoch)
            assert isinstance(blocker, dict)
            assert [(key, entry.value) for key, entry in blocker.items()] == [(key, A)]

    def test_take_that_finds_its_own_bytes_has_taken(self) -> None:
        self.store.add(KEY, A, 60)
        assert self.store.take(Slots((KEY,)), A, 60, heeds_epoch=True) == KEY

    def test_of_several_that_take_a_free_lock_one_gets_it(self) -> None:
        def take(number: int, barrier: threading.Barrier) -> list[bool]:
            won = []
            for turn in range(ROUNDS):
                barrier.wait(GIVE_UP)
                won.append(self.store.add(_key(f"{turn}"), _value(f"{number}"), 60) is None)
            return won

        for results in self._race(take):
            assert [sum(turn) for turn in zip(*results, strict=True)] == [1] * ROUNDS
            for turn in range(ROUNDS):
                [winner] = [number for number in range(WORKERS) if results[number][turn]]
                assert self.value(_key(f"{turn}")) == _value(f"{winner}")

    def test_of_several_that_take_an_expired_lock_one_gets_it(self) -> None:
        keys = [_key(f"{turn}") for turn in range(ROUNDS)]

        def take(number: int, barrier: threading.Barrier) -> list[bool]:
            for key in keys:
                self.store.add(key, D, 0.1)
            barrier.wait(GIVE_UP)
            won = []
            for key in keys:
                blocker: Entry | None = Entry(D, None)
                while blocker is not None and blocker.value == D:
                    blocker = self.store.add(key, _value(f"{number}"), 60)
                won.append(blocker is None)
            return won

        for results in self._race(take):
            assert [sum(turn) for turn in zip(*results, strict=True)] == [1] * ROUNDS

    def test_of_several_that_replace_an_entry_one_does(self) -> None:
        def replace(number: int, barrier: threading.Barrier) -> list[bool]:
            done = []
            for turn in range(ROUNDS):
                self.store.add(_key(f"{turn}"), D, 60)
                barrier.wait(GIVE_UP)
                done.append(self.store.replace(_key(f"{turn}"), D, _value(f"{number}"), 60))
            return done

        for results in self._race(replace):
            assert [sum(turn) for turn in zip(*results, strict=True)] == [1] * ROUNDS

    def test_several_take_turns(self) -> None:
        """With a fencing token for each turn, where the store has them."""
        key = _key("turns")

        def work(number: int, barrier: threading.Barrier) -> list[tuple[float, float, int]]:
            value, runs = _value(f"{number}"), list[tuple[float, float, int]]()
            barrier.wait(GIVE_UP)
            while len(runs) < ROUNDS and not barrier.broken:
                if self.store.add(key, value, 60) is not None:
                    continue
                began = clock.now()
                token = (self.store.fence(key, value) or 0) if self.fences else 0
                assert self.store.renew(key, value, 60) is Outcome.OK
                ended = clock.now()
                assert self.store.release(key, value) is Outcome.OK
                runs.append((began, ended, token))
            return runs

        for results in self._race(work):
            runs = sorted(run for result in results for run in result)
            for (_, ended, token), (began, _, next_token) in pairwise(runs):
                assert ended <= began, "two had the lock at the same time"
                assert not self.fences or token < next_token

    # The lease

    def test_a_lock_is_free_when_its_lease_has_ended(self) -> None:
        self.store.add(KEY, A, 0.2)
        assert self.value() == A
        assert self.eventually(lambda: self.store.add(KEY, B, 60) is None)
        assert self.store.release(KEY, A) is Outcome.TAKEN
        assert self.store.renew(KEY, A, 60) is Outcome.TAKEN
        assert not self.store.clear(KEY, A, 60)
        assert self.value() == B

    def test_no_lease_ends_while_its_holder_trusts_it(self) -> None:
        """From before the request, whichever clock ends the lease."""
        trusted = {}
        for lease in (0.1, 0.3, 0.7, 1.2):
            trusted[_key(f"{lease}")] = clock.now() + lease * TRUST - ROUNDING
            self.store.add(_key(f"{lease}"), A, lease)
        renewed = _key("renewed")
        self.store.add(renewed, A, 60)
        trusted[renewed] = clock.now() + 0.5 * TRUST - ROUNDING
        self.store.renew(renewed, A, 0.5)

        def all_have_ended() -> bool:
            for key in [*trusted]:
                if self.store.add(key, B, 60) is None:
                    assert clock.now() >= trusted.pop(key), "a lease ended too early"
            return not trusted

        self.eventually(all_have_ended)

    def test_a_lease_does_not_depend_on_the_clock_of_a_host(self) -> None:
        if self.on_one_host or not self.between_processes:
            pytest.skip("all processes have one clock")
        now = time.time
        with mock.patch.object(time, "time", side_effect=lambda: now() - 3600):
            self.store.add(KEY, A, 60)
        with mock.patch.object(time, "time", side_effect=lambda: now() + 3600):
            assert self.value() == A
            blocker = self.store.add(KEY, B, 60)
        assert blocker is not None
        assert blocker.remaining is None or 50 < blocker.remaining < 60.01

    def test_a_renewed_lock_outlives_its_first_lease(self) -> None:
        other = _key("not renewed")
        self.store.add(KEY, A, 0.2)
        self.store.add(other, A, 0.2)
        assert self.store.renew(KEY, A, 60) in {Outcome.OK, Outcome.RETAKEN}
        self.eventually(lambda: self.value(other) is None)
        assert self.value() == A

    def test_a_changed_entry_has_the_new_lease(self) -> None:
        replaced, renewed = _key("replaced"), _key("renewed")
        for key in (replaced, renewed):
            self.store.add(key, A, 60)
        assert self.store.replace(replaced, A, B, 0.2)
        assert self.store.renew(renewed, A, 0.2) is Outcome.OK
        self.eventually(lambda: self.value(replaced) is None)
        self.eventually(lambda: self.value(renewed) is None)

    def test_an_entry_says_what_is_left_of_its_lease(self) -> None:
        self.store.add(KEY, A, 60)
        for entry in (self.store.read(KEY), self.store.add(KEY, B, 60)):
            assert entry is not None
            if not self.tells_remaining:
                assert entry.remaining is None
            else:
                assert entry.remaining is not None
                assert 50 < entry.remaining < 60.01

    def test_a_lease_may_be_very_short_and_30_days_long(self) -> None:
        self.store.add(_key("short"), A, 0.001)
        self.store.add(KEY, A, 30 * 24 * 60 * 60)
        assert self.value() == A
        assert self.store.renew(KEY, A, 30 * 24 * 60 * 60) is Outcome.OK
        self.eventually(lambda: self.value(_key("short")) is None)
        assert self.value() == A

    # Whose entry it is

    def test_the_owner_is_checked_by_all_bytes(self) -> None:
        self.store.add(KEY, A, 60)
        others = [A[:-1], A + b" ", b" " + A, A[:-1] + b"]", b"[" + A[1:], A.replace(b"61", b"62")]
        for other in others:
            assert self.store.release(KEY, other) is Outcome.TAKEN, other
            assert self.store.renew(KEY, other, 0.1) is Outcome.TAKEN, other
            assert self.store.change(KEY, other, B, 60) is Outcome.TAKEN, other
            assert not self.store.replace(KEY, other, B, 60), other
            assert not self.store.clear(KEY, other, 60), other
            if self.fences:
                assert self.store.fence(KEY, other) is None, other
            assert self.value() == A

    def test_release_frees_the_lock_at_once(self) -> None:
        self.store.add(KEY, A, 60)
        assert self.store.release(KEY, A) is Outcome.OK
        assert self.store.read(KEY) is None
        assert self.store.add(KEY, B, 60) is None

    def test_release_of_a_missing_entry_says_that_it_is_gone(self) -> None:
        assert self.store.release(KEY, A) is Outcome.GONE
        self.store.add(KEY, A, 60)
        self.store.release(KEY, A)
        assert self.store.release(KEY, A) is Outcome.GONE
        assert self.store.change(KEY, A, A, None) is Outcome.GONE

    def test_release_may_leave_other_bytes_for_a_while(self) -> None:
        self.store.add(KEY, A, 60)
        assert self.store.release(KEY, A, B, clock.now() + 60) is Outcome.OK
        assert self.value() == B
        assert self.store.release(KEY, B, C, clock.now() - 1) is Outcome.OK
        assert self.value() is None

    def test_replace_changes_the_entry_that_is_there(self) -> None:
        self.store.add(KEY, A, 0.5)
        assert self.store.replace(KEY, A, B, 60)
        assert self.value() == B
        assert self.store.release(KEY, A) is Outcome.TAKEN

    def test_replace_changes_no_other_entry(self) -> None:
        assert not self.store.replace(KEY, A, B, 60)
        assert self.store.read(KEY) is None
        self.store.add(KEY, C, 60)
        assert not self.store.replace(KEY, A, B, 60)
        assert self.value() == C

    def test_replace_sent_twice_is_one_change(self) -> None:
        """The first reply was lost."""
        self.store.add(KEY, A, 60)
        for _ in range(2):
            assert self.store.change(KEY, A, B, 60) is Outcome.OK
        assert self.store.replace(KEY, A, B, 60)
        assert self.value() == B

    def test_a_deletion_that_finds_the_new_bytes_deletes_them(self) -> None:
        self.store.add(KEY, B, 60)
        assert self.store.change(KEY, B, B, None) is Outcome.OK
        assert self.value() is None

    # Renewing

    def test_renewal_says_what_it_found(self) -> None:
        held, others, missing, cleared = map(_key, ("held", "others", "missing", "cleared"))
        for key, value in ((held, A), (others, B), (cleared, A)):
            self.store.add(key, value, 60)
        self.store.clear(cleared, A, 60)
        keys = (held, others, missing, cleared)
        assert self.store.renew_many([(key, A, 60) for key in keys]) == [
            Outcome.OK,
            Outcome.TAKEN,
            Outcome.RETAKEN,
            Outcome.GONE,
        ]
        assert [self.value(key) for key in keys] == [A, B, A, None]

    def test_renewal_takes_a_missing_lock_again(self) -> None:
        assert self.store.renew(KEY, A, 60) is Outcome.RETAKEN
        assert self.value() == A
        assert self.store.add(KEY, B, 60) is not None

    def test_a_change_takes_no_missing_lock(self) -> None:
        assert self.store.change(KEY, A, A, 60) is Outcome.GONE
        assert self.value() is None

    def test_renewals_at_the_same_moment_take_a_missing_lock_again(self) -> None:
        def renew(number: int, barrier: threading.Barrier) -> list[Outcome]:
            outcomes = []
            for turn in range(ROUNDS):
                barrier.wait(GIVE_UP)
                outcomes.append(self.store.renew(_key(f"{turn}"), A, 60))
            return outcomes

        outcomes = {outcome for result in _in_threads(renew) for outcome in result}
        assert outcomes <= {Outcome.OK, Outcome.RETAKEN}

    # Clearing

    def test_clear_frees_the_lock_of_this_value_only(self) -> None:
        assert not self.store.clear(KEY, A, 60)
        self.store.add(KEY, A, 60)
        assert not self.store.clear(KEY, B, 60)
        assert self.value() == A
        assert self.store.clear(KEY, A, 60)
        assert self.store.add(KEY, C, 60) is None

    def test_renewal_after_clear_does_not_take_the_lock_again(self) -> None:
        self.store.add(KEY, A, 60)
        assert self.store.clear(KEY, A, 60)
        assert self.store.renew(KEY, A, 60) is Outcome.GONE
        assert self.store.read(KEY) is None
        assert self.store.renew(KEY, B, 60) is Outcome.RETAKEN  # the marker is not for this one
        assert self.store.renew(KEY, A, 60) is Outcome.TAKEN

    def test_the_marker_of_clear_is_there_before_the_entry_is_gone(self) -> None:
        change, outcomes, store = self.store.change, [], self.store

        def change_and_renew(key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
            outcome = change(key, old, new, lease)
            if lease is None:
                outcomes.append(store.renew(key, A, 60))
            return outcome

        store.add(KEY, A, 60)
        with mock.patch.object(store, "change", change_and_renew):
            assert store.clear(KEY, A, 60)
        assert outcomes == [Outcome.GONE]
        assert self.value() is None

    def test_the_marker_ends_with_its_lease(self) -> None:
        self.store.add(KEY, A, 60)
        self.store.clear(KEY, A, 0.1)
        self.eventually(lambda: self.store.renew(KEY, A, 60) is Outcome.RETAKEN)

    def test_an_entry_that_something_else_wrote_can_be_cleared(self) -> None:
        self.store.add(KEY, b"not a holder", 60)
        assert self.store.clear(KEY, b"not a holder", 60)
        assert self.store.read(KEY) is None

    # Slots

    def test_each_take_of_a_slot_gets_another_until_all_are_held(self) -> None:
        holders = {self.take(value): value for value in (A, B, C)}
        assert set(holders) == set(LOCK.slots(3))
        assert self.take(D) == holders
        assert {key: self.value(str(key)) for key in holders} == holders

    def test_a_slot_that_was_given_back_is_free(self) -> None:
        keys = [self.take(value) for value in (A, B, C)]
        assert self.store.release(str(keys[1]), B) is Outcome.OK
        assert self.take(D) == keys[1]

    def test_no_slot_is_taken_beside_an_entry_with_the_mark(self) -> None:
        own = A.replace(b"tests", b"a file")
        for number in (3, 5):  # the fifth is beyond those that may be taken
            key = LOCK.slots()[number - 1]
            self.store.add(key, own, 60)
            assert self.take(B, MARK, keys=5) == {key: own}
            other = self.take(B, keys=5)
            assert other in LOCK.slots(3)
            self.store.release(str(other), B)
            self.store.release(key, own)

    def test_several_share_two_slots(self) -> None:
        def work(number: int, barrier: threading.Barrier) -> list[tuple[float, int]]:
            value, changes = _value(f"{number}"), list[tuple[float, int]]()
            barrier.wait(GIVE_UP)
            while len(changes) < ROUNDS and not barrier.broken:
                if isinstance(key := self.take(value, keys=2), str):
                    changes.append((clock.now(), 1))
                    time.sleep(0.001)
                    assert self.store.renew(key, value, 60) is Outcome.OK
                    changes.append((clock.now(), -1))
                    assert self.store.release(key, value) is Outcome.OK
            return changes

        for results in self._race(work):
            changes = sorted(change for result in results for change in result)
            assert max(sum(by for _, by in changes[:n]) for n in range(len(changes))) <= 2

    # Reading and listing

    def test_the_entries_of_several_keys_are_read_in_their_order(self) -> None:
        first, second, third = LOCK.slots(3)
        self.store.add(third, C, 60)
        self.store.add(first, A, 60)
        entries = self.store.read_many((first, second, third))
        assert [(key, entry.value) for key, entry in entries.items()] == [(first, A), (third, C)]
        assert self.store.read_many(()) == {}

    def test_entries_lists_the_locks_that_are_held(self) -> None:
        queued = LOCK.beside(QUEUED, "a task").key
        slot = LOCK.slots(2)[1]
        keys = [_key("one"), _key("order:cleared"), _key("ein Schlüssel"), slot, queued]
        for key in keys:
            self.store.add(key, A, 60)
        self.store.add(KEY, B, 60)
        self.store.release(KEY, B)
        self.store.add(_key("cleared"), B, 60)
        self.store.clear(_key("cleared"), B, 60)
        self.store.add(_key("expired"), B, 0.01)
        self.store.add(marker_key(slot, B), b"1", 60)
        self.store.add(LOCK.beside(LATEST, "a task").key, b"1", 60)
        if self.fences:
            self.store.fence(_key("one"), A)
        self.store.look()
        with suppress(NotImplementedError):  # the cache may be for locks only
            caches[self.alias].set("something_else", "of the same cache")
        if not self.lists:
            with pytest.raises(CannotList):
                list(self.store.entries())
            return
        self.eventually(lambda: self.value(_key("expired")) is None)
        entries = dict(self.store.entries())
        # A worker that another test has started may hold the lock of its sweep.
        entries = {key: entries[key] for key in entries if "django_singletask.sweep" not in key}
        assert sorted(entries) == sorted(keys)
        assert {entry.value for entry in entries.values()} == {A}
        if self.tells_remaining:
            assert all(50 < (entry.remaining or 0) < 60.01 for entry in entries.values())

    def test_purge_deletes_no_live_entry(self) -> None:
        self.store.add(KEY, A, 60)
        last = (self.store.fence(KEY, A) or 0) if self.fences else 0
        assert self.store.purge() >= 0
        assert self.value() == A
        assert not self.fences or (self.store.fence(KEY, A) or 0) > last

    # Keys and values

    def test_keys_that_differ_in_one_character_are_two_locks(self) -> None:
        # No two keys differ only in case, since each ends in a digest.
        keys = [KEY, KEY[:-1], f"{KEY}#2", f"{KEY}#3", KEY[:-1] + "_", KEY[1:]]
        for number, key in enumerate(keys):
            assert self.store.add(key, _value(f"{number}"), 60) is None, key
        for number, key in enumerate(keys):
            assert self.value(key) == _value(f"{number}"), key

    def test_the_longest_key_is_an_entry_of_its_own(self) -> None:
        rest = MAX_KEY - len(self.store.make_key(LONGEST_KEY).encode())
        keys = [f"{LONGEST_KEY}{'y' * (rest - 1)}{end}" for end in "12"]
        for key, value in zip(keys, (A, B), strict=True):
            assert self.store.add(key, value, 60) is None
        assert [self.value(key) for key in keys] == [A, B]
        assert self.store.renew(keys[0], A, 60) is Outcome.OK
        assert self.store.release(keys[0], A) is Outcome.OK
        assert [self.value(key) for key in keys] == [None, B]

    def test_the_marker_of_the_longest_key_works(self) -> None:
        key = name_key("n" * 255).slots()[-1]
        self.store.add(key, A, 60)
        assert self.store.clear(key, A, 60)
        assert self.store.renew(key, A, 60) is Outcome.GONE

    def test_values_are_kept_byte_by_byte(self) -> None:
        for odd in ODD:
            assert self.store.add(KEY, odd, 60) is None, odd
            assert self.value() == odd
            assert self.store.change(KEY, odd + b" ", B, 60) is Outcome.TAKEN, odd
            assert self.store.replace(KEY, odd, A, 60), odd
            assert self.store.replace(KEY, A, odd, 60), odd
            assert self.store.renew(KEY, odd, 60) is Outcome.OK, odd
            assert self.store.release(KEY, odd) is Outcome.OK, odd

    # Fencing tokens

    def _fence(self, value: bytes) -> int:
        number = self.store.fence(KEY, value)
        assert isinstance(number, int)
        return number

    def _set_last(self, number: int) -> bool:
        """Make this the last fencing token, if the store keeps it as :class:`Store` does."""
        entry = self.store.read(FENCE)
        return entry is not None and self.store.replace(FENCE, entry.value, b"%d" % number, 60)

    def test_each_fencing_token_is_greater_than_all_before(self) -> None:
        if not self.fences:
            self.store.add(KEY, A, 60)
            with pytest.raises(NotImplementedError):
                self.store.fence(KEY, A)
            return
        numbers = []
        for value in (A, B, C):
            self.store.add(KEY, value, 60)
            numbers += [self._fence(value), self._fence(value)]
            self.store.release(KEY, value)
        assert sorted(set(numbers)) == numbers
        assert numbers[-1] < 2**63

    def test_only_the_holder_gets_a_fencing_token(self) -> None:
        if not self.fences:
            pytest.skip("the store has no fencing tokens")
        assert self.store.fence(KEY, A) is None
        self.store.add(KEY, A, 60)
        assert self.store.fence(KEY, B) is None
        self.store.replace(KEY, A, B, 0.1)
        assert self.store.fence(KEY, A) is None
        self.eventually(lambda: self.store.fence(KEY, B) is None)

    def test_a_fencing_token_loses_no_digit_and_survives_a_clock_that_is_set_back(self) -> None:
        if not self.fences:
            pytest.skip("the store has no fencing tokens")
        self.store.add(KEY, A, 60)
        hour_ahead = self._fence(A) + 3_600_000_000
        for last in (hour_ahead, 2**53 + 1, 2**62 + 1):
            if self._set_last(last):
                assert [self._fence(A), self._fence(A)] == [last + 1, last + 2]

    def test_fencing_tokens_grow_although_the_cache_was_emptied(self) -> None:
        if not self.fences:
            pytest.skip("the store has no fencing tokens")
        self.store.add(KEY, A, 60)
        before = self._fence(A)
        assert abs(before - time.time() * 1_000_000) < 60_000_000
        self.empty()
        self.store.add(KEY, B, 60)
        assert self._fence(B) > before

    # Threads, forks and closing

    def test_stores_of_one_alias_have_the_same_entries(self) -> None:
        one, other = self.open_store(), self.open_store()
        try:
            assert one is not other
            one.add(KEY, A, 60)
            entry = other.read(KEY)
            assert entry is not None
            assert entry.value == A
            one.close()
            assert other.release(KEY, A) is Outcome.OK
        finally:
            one.close()
            other.close()

    def test_threads_read_no_entry_of_each_other(self) -> None:
        def work(number: int, barrier: threading.Barrier) -> None:
            value = _value(f"thread {number}")
            barrier.wait(GIVE_UP)
            for turn in range(ROUNDS):
                key = _key(f"thread {number}, {turn}")
                assert self.store.add(key, value, 60) is None
                assert self.value(key) == value
                assert self.store.renew(key, value, 60) is Outcome.OK
                assert self.store.release(key, value) is Outcome.OK

        _in_threads(work)

    def test_a_child_neither_uses_nor_closes_the_connection_of_its_parent(self) -> None:
        if not hasattr(os, "fork"):
            pytest.skip("this system has no forks")
        entries = {_key(f"entry {number}"): _value(f"{number}") for number in range(10)}
        store = self.store
        for key, value in entries.items():
            assert store.add(key, value, 60) is None

        def read(*arguments: object) -> None:
            for _ in range(ROUNDS):
                for key, value in entries.items():
                    assert get_store(self.alias).read(key) == Entry(value, mock.ANY)

        def read_in_child(number: int, barrier: threading.Barrier) -> None:
            assert get_store(self.alias) is not store
            if self.between_processes:
                barrier.wait(GIVE_UP)
                read()

        _in_processes(read_in_child, meanwhile=read)
        assert self.store is store
        read()

    def test_a_child_that_is_forked_during_a_request_can_use_the_cache(self) -> None:
        """It has no thread that would finish the request, and perhaps a copy of its lock."""
        if not hasattr(os, "fork") or not self.between_processes:
            pytest.skip("this system has no forks, or the store has no use for them")
        opened, stop = threading.Event(), threading.Event()

        def use() -> None:
            try:
                while not stop.is_set():
                    self.store.add(KEY, A, 60)
                    self.store.release(KEY, A)
                    opened.set()
            finally:
                opened.set()
                close_stores()

        def use_in_child(number: int, barrier: threading.Barrier) -> None:
            self.store.limit(10)
            assert self.store.add(_key(f"{number}"), A, 60) is None
            assert self.store.release(_key(f"{number}"), A) is Outcome.OK

        for _ in range(2):
            opened.clear()
            stop.clear()
            with ThreadPoolExecutor(1) as pool:
                user = pool.submit(use)
                # Stop after the forks: a busy writer leaves an SQLite file to nobody for seconds.
                try:
                    opened.wait(GIVE_UP)
                    _in_processes(use_in_child, meanwhile=stop.set)
                finally:
                    stop.set()
            user.result()

    # A cache that forgets

    def test_no_lock_is_taken_at_once_in_a_cache_that_has_forgotten_its_locks(self) -> None:
        store, slots = self.store, Slots((KEY,))
        store.look()
        if not self.forgets:
            assert store.epoch.value is None
            return
        known, store.epoch.changed_at = store.epoch.value, -math.inf
        assert known
        # In tests, which empty their cache often, nothing is held back.
        with override_settings(SINGLETASK_TESTING=False):
            assert store.take(slots, A, 60, heeds_epoch=True) == KEY
            self.empty()
            with pytest.raises(Forgotten) as caught:
                store.take(slots, B, 60, heeds_epoch=True)
            assert 0 < caught.value.args[0] <= 1
            assert store.epoch.value != known
            assert self.value() is None
            # The entry of a queued call need not wait.
            assert store.take(slots, C, 60, heeds_epoch=False) == KEY
            store.release(KEY, C)
            store.epoch.changed_at = -math.inf
            assert store.take(slots, B, 60, heeds_epoch=True) == KEY

    def test_all_that_look_agree_on_the_epoch(self) -> None:
        if not self.forgets:
            pytest.skip("the cache forgets nothing")

        def look(number: int, barrier: threading.Barrier) -> bytes | None:
            barrier.wait(GIVE_UP)
            self.store.look()
            return self.value(EPOCH)

        for epochs in self._race(look):
            assert len({*epochs}) == 1

    # Errors

    def test_a_store_whose_requests_are_short_works_on(self) -> None:
        self.store.add(KEY, A, 60)
        self.store.limit(5)
        assert self.value() == A
        assert self.store.renew(KEY, A, 60) is Outcome.OK
        self.store.limit(2)
        assert self.store.release(KEY, A) is Outcome.OK

    def test_a_cache_that_cannot_be_used_is_neither_held_nor_free(self) -> None:
        broken, store = self.broken(), self.store
        if broken is None:
            pytest.skip("broken() breaks nothing")
        store.add(KEY, A, 60)
        requests: list[Callable[[], object]] = [
            lambda: store.insert(KEY, B, 60),
            lambda: store.add(KEY, B, 60),
            lambda: store.take(Slots((KEY,)), B, 60, heeds_epoch=True),
            lambda: store.read(KEY),
            lambda: store.read_many((KEY, EPOCH)),
            lambda: store.change(KEY, A, B, 60),
            lambda: store.renew(KEY, A, 60),
            lambda: store.release(KEY, A),
            lambda: store.clear(KEY, A, 60),
        ]
        if self.fences:
            requests.append(lambda: store.fence(KEY, A))
        if self.lists:
            requests.append(lambda: list(store.entries()))
        if self.forgets:
            requests.append(store.look)
        with broken:
            for request in requests:
                with pytest.raises(LockUnavailable) as caught:
                    request()
                assert caught.value.__cause__ is not None
        assert store.add(_key("afterwards"), A, 60) is None
