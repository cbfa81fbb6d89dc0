"""The operations of a store, which are the same for each kind of cache."""

from __future__ import annotations

import enum
import math
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from django_singletask.conf import conf
from django_singletask.exceptions import LockUnavailable
from django_singletask.holder import Holder
from django_singletask.stores.places import place_of

PREFIX = "singletask:"
MARKER = ":cleared:"
SLOT = "#"
"""Separates the key of the lock from the number of the slot in the key of a slot."""
MAX_SLOTS = 100
"""Limited, because a take that finds no free slot reads all slots."""
# The key of a marker is that of its lock, which ends in 32 hexadecimal digits and perhaps a slot's
# number, and then ":cleared:…". Of the entries with "@", operators see only those of queued calls.
NO_LOCK = re.compile(rf":[0-9a-f]{{32}}({SLOT}\d+)?{MARKER}[^:]*$|^{PREFIX}@(?!queued:)")
FENCE = f"{PREFIX}@fence"
"""The key of the last fencing token of all locks in the cache."""
# memcached takes keys of 250 bytes. The column of DatabaseCache takes 255 characters, and MySQL's
# INSERT IGNORE would cut a longer key.
MAX_KEY = 250
LONGEST_KEY = f"{PREFIX}{'x' * 100}:{'0' * 32}{SLOT}{MAX_SLOTS}{MARKER}{'0' * 32}"
"""The longest key that the package uses, which is the key of a marker."""
TRIES = 10
"""How often a change is tried that other processes can disturb between two requests."""


def is_key(text: str) -> bool:
    """Return whether a text can be the key of a lock, or of the entry of a queued call."""
    return text.startswith(PREFIX) and not NO_LOCK.search(text)


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

    def is_own(self, entry: Entry) -> bool:
        return bool(self.mark) and self.mark in entry.value


class Outcome(enum.Enum):
    """What a store found when it was to change the caller's entry."""

    OK = "ok"
    SENT_TWICE = "sent twice"  # only from release(): see Store.sent_twice()
    RETAKEN = "retaken"  # only from renew(): the entry was gone, and the caller has it again
    GONE = "gone"
    TAKEN = "taken"  # another holder has the entry


class CannotList(Exception):
    """The store cannot list its locks."""


class Store(ABC):
    """Keep locks in one cache. Each kind of cache defines ``add``, ``change`` and ``read``.

    An entry is a key and the bytes of its holder. To change an entry, a caller passes the bytes
    that it expects there. The bytes contain a random token, so no caller can change the entry of
    another. ``lease`` is in seconds. An outage is neither "held" nor "free": the methods raise
    :class:`LockUnavailable` for ``client_errors``.

    One object serves one thread of one process (see :func:`django_singletask.stores.get_store`).
    """

    family: str
    """``"redis"``, ``"memcached"``, ``"database"`` or ``"locmem"``."""

    place = ""
    """Where the entries are, for people, if the settings of the cache name no server."""

    cache_alias = ""
    """The alias of the cache; get_store() sets it."""

    batch = 1
    """How many leases are renewed in one request."""

    limited = math.inf
    """The longest time of a request in seconds; without end: as the cache's options say."""

    client_errors: tuple[type[Exception], ...] = ()
    """What the client raises if the cache does not answer, or refuses to."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        excess = len(cache.make_key(LONGEST_KEY).encode()) - MAX_KEY
        if excess > 0:
            raise ImproperlyConfigured(
                f"KEY_PREFIX of the cache that holds the locks is {excess} bytes too long: lock "
                f"keys would have up to {MAX_KEY + excess} bytes, and {MAX_KEY} are allowed."
            )

    def make_key(self, key: str) -> str:
        """Return the key with the cache's prefix and version, as its key function makes it."""
        return str(self.cache.make_key(key))

    def unavailable(self, error: Exception) -> LockUnavailable:
        """Return what to raise for an error of the client: an outage is never "held" or "free"."""
        reason = f"{type(error).__name__}: " + str(error).partition("\n")[0].rstrip(".")
        text = f"The cache {self.cache_alias!r} cannot be used: {reason}."
        if self.cache_alias in settings.CACHES:
            text += f" It is {place_of(self.cache_alias)}."
        if self.cache_alias == conf.cache:
            text += " 'manage.py locks probe' tests it."
        return LockUnavailable(text)

    def limit(self, seconds: float) -> None:
        """Limit the time of each request, for a background thread; it is never raised again."""
        if seconds < self.limited:
            self.limited = seconds
            self.set_timeouts(seconds)

    def set_timeouts(self, seconds: float) -> None:  # noqa: B027 - LocMemStore sends no requests
        """Set the timeouts of the client, where they are not shorter."""

    @abstractmethod
    def add(self, key: str, value: bytes, lease: float) -> Entry | None:
        """Add the entry; return None if it was added, otherwise the existing entry.

        This is atomic between processes. A client may send a request again after a lost reply, so
        an existing entry with the caller's bytes means that the first request added it.
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

        ``heeds_epoch``: raise :class:`~django_singletask.stores.epoch.Forgotten` if the cache has
        just forgotten its locks.
        """
        if len(slots.keys) == 1:
            (key,) = slots.keys
            entry = self.add(key, value, lease)
            return key if entry is None or entry.value == value else {key: entry}
        start = zlib.crc32(slots.mark or os.urandom(4)) % slots.allowed
        order = [*slots.keys[start : slots.allowed], *slots.keys[:start]]
        entries: dict[str, Entry] = {}
        for _ in range(TRIES + slots.allowed):
            entries = self.read_many(slots.keys)
            free = next((key for key in order if key not in entries), None)
            if free is None or any(map(slots.is_own, entries.values())):
                break
            entry = self.add(free, value, lease)
            if entry is None or entry.value == value:
                entries = self.read_many(slots.keys) if slots.mark else {}
                entries.pop(free, None)
                if not any(map(slots.is_own, entries.values())):
                    return free
                self.release(free, value)
                break
            entries[free] = entry  # another run was faster
        return entries

    @abstractmethod
    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        """Replace the entry ``old`` by ``new`` for ``lease`` seconds (None: delete it).

        This is atomic between processes. Return OK, GONE or TAKEN. If the entry is already
        ``new``, an earlier sending of this request did it; that is OK, too.
        """

    @abstractmethod
    def read(self, key: str) -> Entry | None:
        """Return the entry that is there now, or None."""

    def read_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        """Return the existing entries by key, in the order of ``keys``."""
        entries = ((key, self.read(key)) for key in keys)
        return {key: entry for key, entry in entries if entry is not None}

    def release(self, key: str, value: bytes) -> Outcome:
        """Delete the entry if it is ``value``; return OK, SENT_TWICE, GONE or TAKEN."""
        return self.change(key, value, value, None)

    def sent_twice(self, key: str, value: bytes, sent: float) -> Outcome:
        """Return the outcome of a deletion that was sent again, and found no entry.

        The first one, at the time ``sent``, has deleted it, and its reply was lost; unless the
        entry was cleared. The caller knows whether the lease had ended before.

          here:   DELETE ->                 (no reply)   DELETE ->
          store:            deleted                                nothing to delete
        """
        cleared = self.read(marker_key(key, value)) is not None
        return Outcome.GONE if cleared else Outcome.SENT_TWICE

    def replace(self, key: str, old: bytes, new: bytes, lease: float) -> bool:
        """Replace the entry ``old`` by ``new`` for ``lease`` seconds; return whether it did."""
        return self.change(key, old, new, lease) is Outcome.OK

    def renew(self, key: str, value: bytes, lease: float) -> Outcome:
        """Renew one entry; see :meth:`renew_many`."""
        return self.renew_many([(key, value, lease)])[0]

    def renew_many(self, requests: Sequence[tuple[str, bytes, float]]) -> list[Outcome]:
        """Let each entry (key, value, lease) end ``lease`` seconds from now.

        If there is no entry, take the lock again (RETAKEN), unless :meth:`clear` left a marker
        for this value (GONE).
        """
        return [
            self._take_again(*request) if outcome is Outcome.GONE else outcome
            for request, outcome in zip(requests, self._extend(requests), strict=True)
        ]

    def _extend(self, requests: Sequence[tuple[str, bytes, float]]) -> list[Outcome]:
        return [self.change(key, value, value, lease) for key, value, lease in requests]

    # clear() writes its marker before it deletes the entry. In the other order a renewal could find
    # neither:
    #
    #   clear: delete                                        marker
    #   renew:         change -> gone   marker? none   add -> taken again

    def clear(self, key: str, value: bytes, lease: float) -> bool:
        """Delete the entry ``value``, and leave a marker for ``lease`` seconds.

        Without the marker, the holder's next renewal would find no entry, as after an eviction, and
        would take the lock again. The marker is for the holder of ``value`` only. It stays even if
        nothing was deleted, because another operator may be clearing the lock at the same moment.
        """
        if Holder.decode(value).token:  # otherwise no holder looks for a marker
            self.add(marker_key(key, value), b"1", lease)
        return self.release(key, value) is Outcome.OK

    def _take_again(self, key: str, value: bytes, lease: float) -> Outcome:
        if self.read(marker_key(key, value)) is not None:
            return Outcome.GONE
        entry = self.add(key, value, lease)
        # Another thread of the holder may have taken it again at the same moment.
        return Outcome.RETAKEN if entry is None or entry.value == value else Outcome.TAKEN

    # Fencing tokens
    #
    # The number must be drawn while the caller has the lock, so that every later holder draws a
    # greater one. Check the owner in the same step as the draw, or after it. In the other order an
    # earlier holder could get the greater number, and its late write would be accepted:
    #
    #   holder A: owner? A        sleeps past its lease                   draws 8 -> writes
    #   holder B:                     takes, draws 7, reads, writes

    @abstractmethod
    def fence(self, key: str, value: bytes) -> int | None:
        """Return a number above all earlier ones of this cache; None if the entry is not ``value``.

        It is one more than the last number, or the server's time in microseconds if that is
        greater. So the numbers keep growing if the server loses the last one, or if its clock is
        set back, but not after both. Raises ``NotImplementedError`` if the cache cannot count.
        """

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Yield the key and entry of each lock that is held now; can raise :class:`CannotList`."""
        raise CannotList(
            f"The cache {self.cache_alias!r} cannot list its entries: name one lock, or one call "
            "with its arguments."
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

    def lock_key(self, cache_key: str) -> str | None:
        """Undo :meth:`make_key`; return None if the cache key does not belong to a lock."""
        prefix = self.make_key(PREFIX)
        key = PREFIX + cache_key.removeprefix(prefix)
        return key if cache_key.startswith(prefix) and is_key(key) else None

    def close(self) -> None:  # noqa: B027 - LocMemStore has nothing to close
        """Close what the store opened."""


def marker_key(key: str, value: bytes) -> str:
    """Return the key under which :meth:`Store.clear` leaves its marker."""
    return f"{key}{MARKER}{Holder.decode(value).token}"
