"""Negative controls of the contract: each of these stores is broken, and fails its test."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core.cache import caches

from django_singletask import LockUnavailable
from django_singletask.holder import Holder
from django_singletask.stores import locmem, redis
from django_singletask.stores.base import Entry, Outcome, Store
from django_singletask.testing.stores import StoreContract
from tests.file_locks import FileStore
from tests.stores import test_file_locks

BROKEN: list[tuple[type[Store], str]] = []
"""Stores, each with the test that must fail; the name of the class says what is wrong."""


def fails(*tests: str) -> Any:
    def note(store: type[Store]) -> type[Store]:
        BROKEN.extend((store, test) for test in tests)
        return store

    return note


class Files(FileStore):
    def put(self, key: str, value: bytes, lease: float) -> None:
        with self.all() as entries:
            entries[self.make_key(key)] = value.decode(), time.time() + lease

    def delete(self, key: str) -> None:
        with self.all() as entries:
            entries.pop(self.make_key(key), None)


@fails(
    "test_of_several_that_take_a_free_lock_one_gets_it",
    "test_of_several_that_take_an_expired_lock_one_gets_it",
    "test_several_take_turns",
)
class AddsByGetAndSet(Files):
    def insert(self, key: str, value: bytes, lease: float) -> bool:
        is_free = self.read(key) is None
        if is_free:
            self.put(key, value, lease)
        return is_free


@fails("test_add_leaves_a_held_lock_and_returns_its_entry")
class AddsAlways(Files):
    def insert(self, key: str, value: bytes, lease: float) -> bool:
        self.put(key, value, lease)
        return True


@fails(
    "test_the_owner_is_checked_by_all_bytes",
    "test_a_lock_is_free_when_its_lease_has_ended",
    "test_clear_frees_the_lock_of_this_value_only",
)
class ReleasesByKey(Files):
    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        if lease is not None or self.read(key) is None:
            return super().change(key, old, new, lease)
        self.delete(key)
        return Outcome.OK


@fails("test_the_owner_is_checked_by_all_bytes", "test_replace_changes_no_other_entry")
class ReplacesByKey(Files):
    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        entry = self.read(key)
        return super().change(key, old if entry is None else entry.value, new, lease)


@fails("test_the_owner_is_checked_by_all_bytes", "test_values_are_kept_byte_by_byte")
class ComparesTheBeginning(Files):
    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        entry = self.read(key)
        is_own = entry is not None and entry.value[:190] == old[:190]
        return super().change(key, entry.value if entry and is_own else old, new, lease)


@fails("test_of_several_that_replace_an_entry_one_does")
class ReplacesInTwoSteps(Files):
    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        entry = self.read(key)
        if lease is None or entry is None or entry.value not in (old, new):
            return super().change(key, old, new, lease)
        self.put(key, new, lease)
        return Outcome.OK


@fails("test_replace_sent_twice_is_one_change")
class RefusesASecondSending(Files):
    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        entry = self.read(key)
        if old != new and entry is not None and entry.value == new:
            return Outcome.TAKEN
        return super().change(key, old, new, lease)


@fails("test_a_change_takes_no_missing_lock", "test_replace_changes_no_other_entry")
class ChangesWhatIsMissing(Files):
    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        outcome = super().change(key, old, new, lease)
        if outcome is Outcome.GONE and lease is not None:
            self.put(key, new, lease)
            return Outcome.OK
        return outcome


@fails("test_release_of_a_missing_entry_says_that_it_is_gone")
class SaysNothingOfWhatIsGone(Files):
    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        outcome = super().change(key, old, new, lease)
        return Outcome.OK if outcome is Outcome.GONE else outcome


@fails("test_a_renewed_lock_outlives_its_first_lease", "test_a_changed_entry_has_the_new_lease")
class RenewsNoLease(Files):
    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        entry = self.read(key)
        left = entry.remaining if entry else None
        return super().change(key, old, new, lease if lease is None else left or lease)


@fails("test_a_lease_does_not_depend_on_the_clock_of_a_host")
class HasTheClockOfEachHost(Files):
    pass


@fails("test_no_lease_ends_while_its_holder_trusts_it")
class EndsLeasesEarly(Files):
    def insert(self, key: str, value: bytes, lease: float) -> bool:
        return super().insert(key, value, lease * 0.9)


@fails("test_no_lease_ends_while_its_holder_trusts_it")
class RoundsLeasesDown(Files):
    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        return super().change(key, old, new, lease and lease - lease % 1)


@fails("test_a_lock_is_free_when_its_lease_has_ended", "test_the_marker_ends_with_its_lease")
class NeverEndsALease(Files):
    def insert(self, key: str, value: bytes, lease: float) -> bool:
        return super().insert(key, value, lease + 3600)


@fails("test_an_entry_says_what_is_left_of_its_lease")
class DoesNotSayWhatIsLeft(Files):
    def live(self, entries: dict[str, Any], name: str) -> Entry | None:
        entry = super().live(entries, name)
        return entry and entry._replace(remaining=None)


@fails("test_values_are_kept_byte_by_byte")
class StripsValues(Files):
    def insert(self, key: str, value: bytes, lease: float) -> bool:
        return super().insert(key, value.strip(b"x") or b"x", lease)


@fails("test_the_longest_key_is_an_entry_of_its_own")
class CutsKeys(Files):
    def __init__(self, cache: Any, alias: str) -> None:
        super().__init__(cache, alias)
        self.make_key = lambda key: cache.make_key(key)[:200]


@fails("test_keys_that_differ_in_one_character_are_two_locks")
class ReadsPatterns(Files):
    def live(self, entries: dict[str, Any], name: str) -> Entry | None:
        name = next((each for each in entries if each.startswith(name)), name)
        return super().live(entries, name)


@fails("test_the_entries_of_several_keys_are_read_in_their_order")
class ReadsInAnotherOrder(Files):
    def read_many(self, keys: Any) -> dict[str, Entry]:
        return dict(reversed(super().read_many(keys).items()))


@fails("test_entries_lists_the_locks_that_are_held")
class ListsWhatHasEnded(Files):
    def scan(self, prefix: str) -> list[tuple[str, Entry]]:
        with self.all() as entries:
            return [(name, Entry(value.encode(), 59)) for name, (value, _) in entries.items()]


@fails("test_entries_lists_the_locks_that_are_held")
class ListsMarkers(Files):
    def entries(self) -> Iterator[tuple[str, Entry]]:
        prefix = self.make_key("")
        for name, entry in self.scan(prefix):
            yield name.removeprefix(prefix), entry


@fails("test_purge_deletes_no_live_entry")
class PurgesAll(Files):
    def purge(self) -> int:
        self.cache.clear()
        return 1


@fails("test_renewal_after_clear_does_not_take_the_lock_again", "test_renewal_says_what_it_found")
class LeavesNoMarker(Files):
    def clear(self, key: str, value: bytes, lease: float) -> bool:
        return self.release(key, value) is Outcome.OK


@fails("test_the_marker_of_clear_is_there_before_the_entry_is_gone")
class MarksTooLate(Files):
    def clear(self, key: str, value: bytes, lease: float) -> bool:
        done = self.release(key, value) is Outcome.OK
        self.add(f"{key}:cleared:{Holder.decode(value).token}", b"1", lease)
        return done


@fails("test_no_slot_is_taken_beside_an_entry_with_the_mark")
class HeedsNoMark(Files):
    def take(self, slots: Any, *args: Any, **kwargs: Any) -> Any:
        return super().take(slots._replace(mark=b""), *args, **kwargs)


@fails("test_take_that_finds_its_own_bytes_has_taken", "test_add_sent_twice_is_one_acquisition")
class DoesNotKnowItsOwnBytes(Files):
    def add(self, key: str, value: bytes, lease: float) -> Entry | None:
        return None if self.insert(key, value, lease) else self.read(key)


@fails("test_several_share_two_slots")
class TakesSlotsInTwoSteps(Files):
    def take(self, slots: Any, value: bytes, lease: float, *, heeds_epoch: bool) -> Any:
        entries = self.read_many(slots.keys)
        for key in slots.keys[: slots.allowed]:
            if key not in entries:
                self.put(key, value, lease)
                return key
        return entries


@fails("test_of_several_that_take_a_free_lock_one_gets_it", "test_it_says_what_it_can_do")
class IsInEachProcess(locmem.LocMemStore):
    """Where others must see it, too."""

    places = None  # type: ignore[assignment]

    def __init__(self, cache: Any, alias: str) -> None:
        super().__init__(caches.create_connection("locmem"), alias)


@fails("test_each_fencing_token_is_greater_than_all_before", "test_several_take_turns")
class CountsInEachProcess(Files):
    numbers = itertools.count(1)

    def fence(self, key: str, value: bytes) -> int | None:
        return -next(self.numbers)


@fails("test_fencing_tokens_grow_although_the_cache_was_emptied")
class ForgetsItsCounter(Files):
    def microseconds(self) -> int:
        return 1


@fails("test_only_the_holder_gets_a_fencing_token", "test_the_owner_is_checked_by_all_bytes")
class FencesAnybody(Files):
    def fence(self, key: str, value: bytes) -> int | None:
        return time.time_ns() // 1000


@fails("test_a_cache_that_cannot_be_used_is_neither_held_nor_free")
class RaisesWhatTheClientRaises(Files):
    @contextmanager
    def all(self) -> Iterator[dict[str, Any]]:
        with self.locked():
            pass
        with super().all() as entries:
            yield entries


@fails("test_a_cache_that_cannot_be_used_is_neither_held_nor_free")
class CallsAnOutageHeld(Files):
    def insert(self, key: str, value: bytes, lease: float) -> bool:
        try:
            return super().insert(key, value, lease)
        except Exception:
            return False


@fails("test_no_lock_is_taken_at_once_in_a_cache_that_has_forgotten_its_locks")
class HeedsNoEpoch(Files):
    forgets = True


@fails("test_a_child_neither_uses_nor_closes_the_connection_of_its_parent")
class SharesItsConnection(redis.RedisStore):
    shared: list[Any] = []

    def __init__(self, cache: Any, alias: str) -> None:
        super().__init__(caches.create_connection("redis"), alias)
        self.shared[:] = self.shared or self.connections
        self.connections = self.shared

    def _open(self, connection: Any) -> None:
        super()._open(connection)
        # Otherwise the first reply to another process that it finds ends the sharing.
        connection.waiting = connection.has_more = lambda seconds: False


@fails("test_a_child_that_is_forked_during_a_request_can_use_the_cache")
class KeepsTheLocksOfItsParent(Files):
    timeout = 0.5

    def set_timeouts(self, seconds: float) -> None:
        pass

    @contextmanager
    def locked(self) -> Iterator[None]:
        file = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR)
        try:
            self.wait_for(file)
            yield
        finally:
            os.close(file)


class Contract(StoreContract):
    alias = "files"
    ends_within = 2

    def __init__(self, broken: type[Store]) -> None:
        self.class_ = broken
        self.forgets = broken.forgets
        self.broken = test_file_locks.TestFileStore().broken

    def open_store(self) -> Store:
        return self.class_(caches.create_connection("files"), "files")

    def empty(self) -> None:
        for alias in ("files", "locmem"):
            caches[alias].clear()

    def often(self, test: str) -> None:
        for _ in range(20):  # some go wrong by chance
            with self.prepared():
                getattr(self, test)()


ERRORS = (AssertionError, OSError, LockUnavailable, pytest.fail.Exception)


@pytest.mark.only_all(
    "another case shows it",
    "test_of_several_that_take_a_free_lock_one_gets_it",
    "KeepsTheLocksOfItsParent",
    "AddsByGetAndSet-test_several_take_turns",
)
@pytest.mark.parametrize(("broken", "test"), BROKEN)
def test_control_a_broken_store_fails(broken: type[Store], test: str) -> None:
    with pytest.raises(ERRORS):
        Contract(broken).often(test)
