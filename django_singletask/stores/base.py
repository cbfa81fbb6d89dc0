"""What is the same for each kind of cache: the operations of a store.

A project can add a store. The page "Add a store" of the documentation is its contract, and
:mod:`django_singletask.testing.stores` tests it.
"""

from __future__ import annotations

import enum
import math
import os
import select
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from django.core.exceptions import ImproperlyConfigured

from django_singletask import clock
from django_singletask.conf import conf
from django_singletask.exceptions import LockUnavailable
from django_singletask.log import in_words
from django_singletask.stores.epoch import LOOK_AGAIN, Epoch, epoch_of
from django_singletask.stores.epoch import Forgotten as Forgotten  # for other stores
from django_singletask.stores.keys import (
    EPOCH,
    FENCE,
    LONGEST_KEY,
    MAX_KEY,
    PREFIX,
    is_key,
    marker_key,
)

FOREVER = 100 * 365 * 24 * 60 * 60
"""The lease of the last fencing token in seconds, where an entry needs one."""
TRIES = 10
"""How often a change is tried that other processes can disturb between two requests."""
TIMEOUT = 5.0
"""Seconds to connect, and for a reply, where the options of the cache set no limit."""
PATIENCE = 10.0
"""Seconds for a request that an idle connection does not answer, and for its second try."""

Errors = tuple[type[Exception], ...]
"""The classes of errors that an ``except`` names."""


def address(host: str | None, port: object) -> str:
    """Return the address of a server in a uniform spelling."""
    if not host or host.lower() in {"localhost", "::1"}:
        host = "127.0.0.1"
    return f"{host.lower()}:{port}"


def watch(sock: Any) -> Callable[[int], Any]:
    """Return a function that tells whether a socket has something to read.

    The argument of the function is the time that it waits, here always 0.
    """
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return poll.poll
    return lambda seconds: select.select([sock], [], [], seconds)[0]  # Windows, eventlet


class Entry(NamedTuple):
    """A lock as it stands in the cache: its bytes, and the seconds left (None: unknown)."""

    value: bytes
    remaining: float | None


class Slots(NamedTuple):
    """The slots of one lock: a take reads all ``keys``, and takes one of the first ``allowed``.

    If an entry contains the bytes ``mark``, nothing is taken, because an earlier delivery of the
    same message has that slot. Only deliveries have a mark.
    """

    keys: tuple[str, ...]
    allowed: int = 1
    mark: bytes = b""

    def has_own(self, entries: Iterable[Entry]) -> bool:
        """Return whether an earlier delivery of the same message has one of these entries."""
        if not self.mark:
            return False
        return any(self.mark in entry.value for entry in entries)


class Outcome(enum.Enum):
    """What a store found when it was to change the caller's entry."""

    OK = "ok"
    SENT_TWICE = "sent twice"  # a deletion was sent again, and found no entry: see release()
    RETAKEN = "retaken"  # only from renew(): the entry was gone, and the caller has it again
    GONE = "gone"
    TAKEN = "taken"  # another holder has the entry, or others changed it at each attempt
    UNSURE = "unsure"  # only from renew_many(): TAKEN, but perhaps by a taker that gives it back


RENEWED = {Outcome.OK, Outcome.RETAKEN}


class CannotList(Exception):
    """The store cannot list its locks."""


class NotMarked(LockUnavailable):
    """A lock was not cleared, because the cache did not take the marker for its holder."""


class Store(ABC):
    """Keep locks in one cache. Each kind of cache has its own requests for that.

    An entry is a key and the bytes of its holder. To change an entry, a caller passes the bytes
    that it expects there. The bytes contain a random token, so no caller can change the entry of
    another that it does not know. An outage is neither "held" nor "free": where a store sends a
    request, it raises :meth:`unavailable` for ``client_errors``.

    ``lease`` is in seconds. One clock ends all leases, that of the server; an entry that has ended
    is gone. No lease ends early: a holder trusts its lease from before it sent the request.

    A subclass writes :meth:`insert`, :meth:`change` and :meth:`read_many`, and where the cache can,
    :meth:`scan`. A request may be sent again after a lost reply, and must then say what the first
    one did.

    One object serves one thread of one process (see :func:`django_singletask.stores.get_store`).
    After a fork, the child neither uses nor closes that object. So the object has a connection of
    its own, which is closed after any exception that may leave a reply unread.
    """

    family = ""
    """A word for the kind of cache; ``locks probe`` asks the servers of the built-in kinds."""

    places: frozenset[str] = frozenset()
    """The servers or the table of the entries, for people, in a uniform spelling.

    A check warns if two caches have a place in common. Without places, messages name the alias.
    """

    forgets = False
    """Whether the server can restart empty while locks are held, so that there is an epoch.

    Then :meth:`take` compares the epoch.
    """

    batch = 1
    """How many leases :meth:`_extend` renews in one request."""

    limited: float = math.inf
    """The longest time of a request in seconds; without end: as the cache's options say."""

    is_asking = False
    """Whether a request runs that no other one of this thread may interrupt."""

    was_sent_twice = False
    """Whether the last request was sent again, so that its deletion may find nothing."""

    client_errors: Errors = ()
    """What the client raises if the cache does not answer, or refuses to."""

    refusals: Any = ()
    """The ``client_errors`` after which the server has done nothing, and can be asked at once."""

    def __init__(self, cache: Any, alias: str) -> None:
        self.cache = cache
        self.cache_alias = alias
        self.epoch: Epoch = epoch_of(alias)
        self.make_key: Callable[[str], str] = cache.make_key
        excess = len(self.make_key(LONGEST_KEY).encode()) - MAX_KEY
        if excess > 0:
            raise ImproperlyConfigured(
                f"KEY_PREFIX of the cache that holds the locks is {excess} bytes too long: the key "
                f"of a lock can have at most {MAX_KEY} bytes."
            )

    @property
    def place(self) -> str:
        if not self.places:
            return f"CACHES[{self.cache_alias!r}]"
        return ", ".join(sorted(self.places))

    def unavailable(self, error: Exception, next_step: str = "") -> LockUnavailable:
        """Return what to raise for an error of the client: an outage is never "held" or "free"."""
        text = f"The cache {self.cache_alias!r} cannot be used: {in_words(error)}{next_step}."
        text += f" It is {type(self.cache).__name__} on {self.place}."
        if self.cache_alias == conf.cache:
            text += " 'manage.py locks probe' tests it."
        outage = LockUnavailable(text)
        outage.__cause__ = error
        return outage

    def limit(self, seconds: float) -> None:
        """Limit the time of each request, for a background thread.

        Each change connects again, so a limit that is a little too short stays.
        """
        if seconds < self.limited or self.limited < seconds / 2:
            self.limited = seconds
            self.set_timeouts(seconds)

    def set_timeouts(self, seconds: float) -> None:  # noqa: B027 - LocMemStore sends no requests
        """Let each request fail after so many seconds; :meth:`limit` calls this."""

    def add(self, key: str, value: bytes, lease: float) -> Entry | None:
        """Add the entry; return None if it was added, otherwise the existing entry.

        A client may send a request again after a lost reply, so an existing entry with the caller's
        bytes means that the first request added it.
        """
        for _ in range(TRIES):
            if self.insert(key, value, lease):
                return None
            entry = self.read(key)
            if entry is not None:
                if entry.value == value:
                    return None
                return entry
            # The lock was released, or it expired, between the two requests: try again.
        # Other processes change the entry all the time, so the lock is held by an unknown holder.
        return Entry(b"", None)

    @abstractmethod
    def insert(self, key: str, value: bytes, lease: float) -> Any:
        """Add the entry if there is none that lasts, and return whether it was added.

        This is atomic between processes. For the epoch, the lease is infinite. If the request is
        sent twice, this may return False for the caller's own entry: :meth:`add` compares it.
        """

    # Two deliveries of one message must not take two slots. Only Redis reads and takes in one step.
    # In other caches the mark decides the order of the slots. So both deliveries try the same free
    # slot, and the second one finds the entry of the first:
    #
    #   first:   reads: 3 is free      adds 3
    #   second:     reads: 3 is free         adds 3 -> held, reads: its own run has 3
    #
    # If an earlier slot is released between their reads, they try different slots. So each reads
    # again after its add. The later one finds the other, or both do and both release:
    #
    #   first:   reads: 2 is held, 3 is free              adds 3   reads: its own run has 2
    #   second:                         reads: 2 is free     adds 2   reads: its own run has 3

    def take(
        self, slots: Slots, value: bytes, lease: float, *, heeds_epoch: bool
    ) -> str | dict[str, Entry]:
        """Take a free slot and return its key, or return the entries of the slots.

        ``heeds_epoch``: raise :class:`Forgotten` if the cache has just forgotten its locks. A store
        that ``forgets`` does this in a method of its own, which compares the epoch in the same step
        or after the entry was added.
        """
        if len(slots.keys) == 1:
            (key,) = slots.keys
            entry = self.add(key, value, lease)
            if entry is None:
                return key
            return {key: entry}
        seed = slots.mark
        if not seed:
            seed = os.urandom(4)
        start = zlib.crc32(seed) % slots.allowed
        order = [*slots.keys[start : slots.allowed], *slots.keys[:start]]
        for _ in range(TRIES + slots.allowed):
            entries = self.read_many(slots.keys)
            if slots.has_own(entries.values()):
                return entries
            free = [key for key in order if key not in entries]
            if not free:
                return entries
            key = free[0]
            entry = self.add(key, value, lease)
            if entry is None:
                return self._check_slot(slots, key, value)
            entries[key] = entry  # another run was faster
        return entries

    def _check_slot(self, slots: Slots, key: str, value: bytes) -> str | dict[str, Entry]:
        """Return the key of a slot that was added, unless the message has another slot.

        If it has, this releases the slot that was added, and returns the entries of the others.
        """
        if not slots.mark:
            return key
        others = self.read_many(slots.keys)
        others.pop(key, None)
        if not slots.has_own(others.values()):
            return key
        self.release(key, value)
        return others

    @abstractmethod
    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        """Replace the entry ``old`` by ``new`` for ``lease`` seconds (None: delete it).

        This is atomic between processes, and compares all bytes. Return OK, GONE, TAKEN or
        SENT_TWICE. If the entry is already ``new``, an earlier sending of this request did it; that
        is OK, too. SENT_TWICE: a deletion found no entry, but was sent twice by this call.
        """

    def read(self, key: str) -> Entry | None:
        """Return the entry that is there now, or None."""
        return self.read_many((key,)).get(key)

    @abstractmethod
    def read_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        """Return the entries that last by key, in the order of ``keys``; there may be no key."""

    # A client sends a request again if the server has closed the connection. If the first deletion
    # was made, and its reply was lost, the second one finds no entry:
    #
    #   here:   DELETE ->                 (no reply)   DELETE ->
    #   store:            deleted                                nothing to delete

    def release(self, key: str, value: bytes, new: bytes = b"", until: float = 0.0) -> Outcome:
        """Delete the entry ``value``, or replace it by ``new`` ``until`` a time of :mod:`clock`.

        Return OK, SENT_TWICE, GONE or TAKEN. SENT_TWICE: this request has deleted it, unless the
        lease had ended before, which the caller knows.
        """
        if new:
            left = until - clock.now()
            if left > 0:
                return self.change(key, value, new, left)
        changed_at = self.epoch.changed_at
        outcome = self.change(key, value, value, None)
        if outcome is Outcome.SENT_TWICE:
            self.look((key,))
            if self.epoch.changed_at != changed_at:
                return Outcome.GONE
            if self.read(marker_key(key, value)) is not None:
                return Outcome.GONE
        return outcome

    def replace(self, key: str, old: bytes, new: bytes, lease: float) -> bool:
        """Replace the entry ``old`` by ``new`` for ``lease`` seconds; return whether it did."""
        return self.change(key, old, new, lease) is Outcome.OK

    def renew(self, key: str, value: bytes, lease: float) -> Outcome:
        """Renew one entry; see :meth:`renew_many`. This waits until the outcome is sure."""
        while True:
            (outcome,) = self.renew_many([(key, value, lease)])
            if isinstance(outcome, LockUnavailable):
                raise outcome
            if outcome is not Outcome.UNSURE:
                return outcome
            time.sleep(LOOK_AGAIN)

    def renew_many(
        self, requests: Sequence[tuple[str, bytes, float]]
    ) -> list[Outcome | LockUnavailable]:
        """Let each entry (key, value, lease) end ``lease`` seconds from now.

        If there is no entry, take the lock again (RETAKEN), unless :meth:`clear` left a marker
        for this value (GONE). After UNSURE the caller asks again; :mod:`django_singletask.stores`
        says why. The outcome is the error for an entry alone that the server refuses to renew or
        to take again.
        """
        outcomes = self._extend(requests)
        try:
            for i, request in enumerate(requests):
                if outcomes[i] is Outcome.GONE:
                    outcomes[i] = self._take_again(*request)
            if Outcome.TAKEN in outcomes:
                # Perhaps nobody here has seen the change yet.
                self.look([key for key, _, _ in requests])
        except LockUnavailable as error:
            for i, outcome in enumerate(outcomes):
                if outcome not in RENEWED:
                    outcomes[i] = error
            return outcomes
        for i, outcome in enumerate(outcomes):
            if outcome is Outcome.TAKEN and self.epoch.pause() > 0:
                outcomes[i] = Outcome.UNSURE
        return outcomes

    def _take_again(self, key: str, value: bytes, lease: float) -> Outcome | LockUnavailable:
        """Add an entry that is gone, unless it was cleared; return what became of it."""
        try:
            if self.read(marker_key(key, value)) is not None:
                return Outcome.GONE
            if self.add(key, value, lease) is not None:
                return Outcome.TAKEN
            return Outcome.RETAKEN
        except LockUnavailable as error:
            if isinstance(error.__cause__, self.refusals):  # a full server refuses new entries
                return error
            raise

    def _extend(
        self, requests: Sequence[tuple[str, bytes, float]]
    ) -> list[Outcome | LockUnavailable]:
        return [self.change(key, value, value, lease) for key, value, lease in requests]

    # clear() writes its marker before it deletes the entry. In the other order a renewal could find
    # neither:
    #
    #   clear: delete                                        marker
    #   renew:         change -> gone   marker? none   add -> taken again

    def clear(self, key: str, value: bytes, lease: float) -> bool:
        """Delete the entry ``value``, and leave a marker for ``lease`` seconds.

        Return whether this call deleted the entry.

        Without the marker, the holder's next renewal would find no entry, as after an eviction, and
        would take the lock again. The marker is for the holder of ``value`` only. It stays even if
        nothing was deleted, because another operator may be clearing the lock at the same moment.
        """
        try:
            self.add(marker_key(key, value), b"1", lease)
        except LockUnavailable as error:
            text = "The lock was not freed, because the cache refused what tells its holder of it"
            raise NotMarked(f"{text}: {error}") from error.__cause__
        return self.release(key, value) is Outcome.OK

    # Fencing tokens
    #
    # The number must be drawn while the caller has the lock, so that every later holder draws a
    # greater one. Check the owner in the same step as the draw, or after it. In the other order an
    # earlier holder could get the greater number, and its late write would be accepted:
    #
    #   holder A: owner? A        sleeps past its lease                   draws 8 -> writes
    #   holder B:                     takes, draws 7, reads, writes

    def fence(self, key: str, value: bytes) -> int | None:
        """Return a number above all earlier ones of this cache; None if the entry is not ``value``.

        It is one more than the last number, or the server's time in microseconds if that is
        greater. So the numbers keep growing if the server loses the last one, or if its clock is
        set back, but not after both. Two numbers that are drawn at the same moment for different
        locks may be equal. Raises ``NotImplementedError`` where the cache can lose the number and
        does not tell its time in microseconds, such as memcached.
        """
        # Not in a transaction: a stopped process with an open transaction would block all others.
        drawn = False
        while not drawn:
            number = self.microseconds()
            last = self.read(FENCE)
            if last is None:
                drawn = self.insert(FENCE, b"%d" % number, FOREVER)
            else:
                number = max(int(last.value) + 1, number)
                drawn = self.replace(FENCE, last.value, b"%d" % number, FOREVER)
        entry = self.read(key)
        if entry is None or entry.value != value:
            return None
        return number

    def microseconds(self) -> int:
        """Return the time of the server; a store in this process has the time of this host."""
        return time.time_ns() // 1000

    def look(self, keys: Iterable[str] = ()) -> None:
        """Read the epoch of a cache that can forget its locks, and add one if there is none.

        In a cluster this reads the epochs of these locks, or of all locks.
        """
        if not self.forgets:
            return
        for _ in range(TRIES):
            entry = self.read(EPOCH)
            if entry is not None:
                return self.epoch.see(entry.value)
            # If several processes find none, one adds its epoch, and all read that.
            self.insert(EPOCH, os.urandom(16).hex().encode(), math.inf)
        raise LockUnavailable(
            f"The cache {self.cache_alias!r} does not keep new entries: it lost "
            f"{self.make_key(EPOCH)} {TRIES} times."
        )

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Yield the key and entry of each lock that is held now; can raise :class:`CannotList`."""
        prefix = self.prefix()
        for cache_key, entry in self.scan(prefix):
            key = PREFIX + cache_key.removeprefix(prefix)
            if cache_key.startswith(prefix) and is_key(key):
                yield key, entry

    def scan(self, prefix: str) -> Iterable[tuple[str, Entry]]:
        """Return the cache key and entry of each entry that lasts, if its key has this prefix.

        More entries do no harm.
        """
        raise CannotList(
            f"The cache {self.cache_alias!r} cannot list its entries: name one lock, by its name "
            "or its key."
        )

    def purge(self) -> int:
        """Delete entries that expired long ago, if the cache keeps them; return how many."""
        return 0

    def prefix(self) -> str:
        """Return the common prefix of all cache keys of locks, or raise :class:`CannotList`."""
        prefix = self.make_key(PREFIX)
        if self.make_key(f"{PREFIX}x") != f"{prefix}x":
            raise CannotList(
                f"The KEY_FUNCTION of {type(self.cache).__name__} changes the beginning of "
                "keys, so locks cannot be listed."
            )
        return prefix

    def close(self) -> None:  # noqa: B027 - LocMemStore has nothing to close
        """Close what the store opened, at the end of its thread; nobody uses the store again."""
