"""What every store does to one entry, whichever cache keeps it."""

from __future__ import annotations

import enum
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from django.core.exceptions import ImproperlyConfigured

from django_singletask.holder import Holder
from django_singletask.stores.outage import raise_unavailable

__all__ = [
    "FENCE",
    "LONGEST_KEY",
    "MAX_KEY",
    "MAX_SLOTS",
    "PREFIX",
    "SLOT",
    "TRIES",
    "CannotList",
    "Entry",
    "Outcome",
    "Slots",
    "Store",
    "marker_key",
]

PREFIX = "singletask:"
MARKER = ":cleared:"
SLOT = "#"
"""Stands in the key of a slot between the key of the lock and the number of the slot."""
MAX_SLOTS = 100
"""A take that finds no free slot reads them all."""
# The key of a lock ends in 32 hexadecimal digits and, from the second slot on, its number. So does
# the key of its marker before ":cleared:". Therefore a lock that is named "…:cleared" is not
# mistaken for a marker.
# What the whole cache has once, such as FENCE, is a word after "@". No name of a task has an "@".
NO_LOCK = re.compile(rf":[0-9a-f]{{32}}({SLOT}\d+)?{MARKER}[^:]*$|^{PREFIX}@[^:]*$")
FENCE = f"{PREFIX}@fence"
"""The key of the fencing token that was given last, of all locks in the cache."""
# memcached takes keys of 250 bytes. The column of DatabaseCache takes 255 characters, and MySQL's
# INSERT IGNORE would cut a longer key.
MAX_KEY = 250
LONGEST_KEY = f"{PREFIX}{'x' * 100}:{'0' * 32}{SLOT}{MAX_SLOTS}{MARKER}{'0' * 32}"
"""The longest key that the package asks a store for: that of a marker."""
TRIES = 10
"""Attempts at what other processes spoil, by a release or a takeover between two requests."""


class Entry(NamedTuple):
    """A lock as it stands in the cache: its bytes, and the seconds left (None: unknown)."""

    value: bytes
    remaining: float | None


class Slots(NamedTuple):
    """The slots of one lock: a take looks at all ``keys``, and takes one of the first ``allowed``.

    Most locks have one slot. While one of several entries has the bytes ``mark`` in it, nothing is
    taken: it is the run's own, of an earlier delivery. Only deliveries have a mark.
    """

    keys: tuple[str, ...]
    allowed: int = 1
    mark: bytes = b""

    def is_own(self, entry: Entry) -> bool:
        """Say whether an entry has the mark."""
        return bool(self.mark) and self.mark in entry.value


class Outcome(enum.Enum):
    """What a store found when a caller asked it to change the caller's own entry."""

    OK = "ok"
    RETAKEN = "retaken"  # by renew() alone: the entry was gone, and is the caller's again
    GONE = "gone"
    TAKEN = "taken"  # the entry is somebody else's


class CannotList(Exception):
    """The store cannot say which locks it holds."""


class Store(ABC):
    """Keep locks in one cache. Each kind of cache brings ``add``, ``change`` and ``read``.

    An entry is a key and the bytes of its holder. To change an entry, a caller passes the whole
    bytes that it expects to find there. The bytes hold a random token, so nobody can change what
    somebody else wrote. ``lease`` is in seconds. An outage is reported neither as "held" nor as
    "free": what a subclass defines raises :class:`LockUnavailable` for ``client_errors``.

    One object serves one thread of one process (see :func:`django_singletask.stores.get_store`).
    """

    family: str
    """``"redis"``, ``"memcached"``, ``"database"`` or ``"locmem"``."""

    place = ""
    """Where the entries are, for people, if the settings of the cache do not name a server."""

    cache_alias = ""
    """The alias of the cache; get_store() sets it."""

    client_errors: tuple[type[Exception], ...] = ()
    """What the client raises if the cache cannot be asked, or refuses to answer."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        raise_unavailable(cls)

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        excess = len(cache.make_key(LONGEST_KEY).encode()) - MAX_KEY
        if excess > 0:
            raise ImproperlyConfigured(
                f"KEY_PREFIX of the cache that holds the locks is {excess} bytes too long: with it "
                f"the keys of locks have up to {MAX_KEY + excess} bytes, and {MAX_KEY} are allowed."
            )

    def make_key(self, key: str) -> str:
        """Pass the key of a lock through the cache's own prefix, version and key function."""
        cache_key: str = self.cache.make_key(key)
        return cache_key

    @abstractmethod
    def add(self, key: str, value: bytes, lease: float) -> Entry | None:
        """Add the entry; return None if it was added, else the one that is in the way.

        This is atomic against all other processes. A client that lost the reply may have sent the
        request twice. So if the entry in the way has the caller's own bytes, the first request
        added it.
        """

    # Two deliveries of one message must not take a slot each. Only Redis looks and takes in one
    # step. Elsewhere a run tries its slots in an order that its mark decides, so both deliveries
    # try the same free slot, and the second one finds the entry of the first:
    #
    #   first:   reads: 3 is free      adds 3
    #   second:     reads: 3 is free         adds 3 -> held, reads: its own run has 3
    #
    # If an earlier slot is given back between their looks, they try different ones. So each reads
    # again after its add, and the later one finds the other, or both do and both give way:
    #
    #   first:   reads: 2 is held, 3 is free              adds 3   reads: its own run has 2
    #   second:                         reads: 2 is free     adds 2   reads: its own run has 3

    def take(
        self, slots: Slots, value: bytes, lease: float, *, heeds_epoch: bool
    ) -> str | dict[str, Entry]:
        """Take a free slot and return its key; if none may be taken, return the entries there.

        ``heeds_epoch``: if the cache has just forgotten its locks, raise
        :class:`~django_singletask.stores.epoch.Forgotten`.
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
        """Let the entry be ``new`` for ``lease`` seconds if it is ``old``; None: delete it.

        This is atomic against all other processes. Return OK, GONE or TAKEN. If the entry is
        ``new`` already, an earlier sending of this request did it, and that is OK too.
        """

    @abstractmethod
    def read(self, key: str) -> Entry | None:
        """Return the entry that holds the lock now."""

    def read_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        """Return the entries that are there by their keys, in the order of ``keys``."""
        entries = ((key, self.read(key)) for key in keys)
        return {key: entry for key, entry in entries if entry is not None}

    def release(self, key: str, value: bytes) -> Outcome:
        """Delete the entry if it is ``value``; return OK, GONE or TAKEN."""
        return self.change(key, value, value, None)

    def replace(self, key: str, old: bytes, new: bytes, lease: float) -> bool:
        """Let the entry be ``new`` for ``lease`` seconds if it is ``old``; say whether it is."""
        return self.change(key, old, new, lease) is Outcome.OK

    def renew(self, key: str, value: bytes, lease: float) -> Outcome:
        """Let the entry live for ``lease`` from now if it is ``value``.

        If there is no entry, take the lock again (RETAKEN), unless :meth:`clear` left a marker
        for this value (GONE).
        """
        outcome = self.change(key, value, value, lease)
        return self._take_again(key, value, lease) if outcome is Outcome.GONE else outcome

    def renew_many(self, requests: list[tuple[str, bytes, float]]) -> list[Outcome]:
        """Renew several entries, in as few trips as the store can."""
        return [self.renew(*request) for request in requests]

    # A renewal that finds no entry because of clear() must find the marker of clear(). Therefore
    # clear() writes its marker before it deletes the entry. In the other order:
    #
    #   clear: delete                                        marker
    #   renew:         change -> gone   marker? none   add -> taken again

    def clear(self, key: str, value: bytes, lease: float) -> bool:
        """Delete the entry if it is ``value``, and leave a marker for ``lease`` seconds.

        The holder does not know that its lock was cleared. Without the marker its next renewal
        would find the entry gone, as after an eviction, and would take the lock again. The marker
        stays even if nothing was deleted: another operator, who clears the lock at this moment,
        may rely on it. It says nothing to anybody but the holder of ``value``.
        """
        if Holder.decode(value).token:  # else something else wrote it, and no holder looks
            self.add(marker_key(key, value), b"1", lease)
        return self.release(key, value) is Outcome.OK

    def _take_again(self, key: str, value: bytes, lease: float) -> Outcome:
        if self.read(marker_key(key, value)) is not None:
            return Outcome.GONE
        entry = self.add(key, value, lease)
        # Another thread of the holder may have renewed at the same moment, and taken it again.
        return Outcome.RETAKEN if entry is None or entry.value == value else Outcome.TAKEN

    # Fencing tokens
    #
    # The number must be drawn while the caller has the lock: then every later holder draws a
    # greater one. Look at the owner in the same step as the draw, or after it. In the other order
    # an earlier holder gets the greater number, and its late write passes the guard of the data:
    #
    #   holder A: owner? A        sleeps past its lease                   draws 8 -> writes
    #   holder B:                     takes, draws 7, reads, writes

    @abstractmethod
    def fence(self, key: str, value: bytes) -> int | None:
        """Return a number above all that the cache gave before; None if the entry is not ``value``.

        It is one more than the last number, or the time of the cache's server in microseconds if
        that is greater. So the numbers go on growing after the server has lost the last one, and
        after its clock was set back, but not after both. Raises ``NotImplementedError`` if the
        cache cannot count.
        """

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Yield key and entry of each lock that is held now; raises :class:`CannotList`."""
        raise CannotList

    def purge(self) -> int:
        """Delete entries that ended long ago, if the cache keeps such; return how many."""
        return 0

    def prefix(self) -> str:
        """Return the beginning of all cache keys of locks; raises :class:`CannotList` if none."""
        prefix = self.make_key(PREFIX)
        if self.make_key(f"{PREFIX}x") != f"{prefix}x":
            raise CannotList(f"The KEY_FUNCTION of {type(self.cache).__name__} hides the keys.")
        return prefix

    def lock_key(self, cache_key: str) -> str | None:
        """Undo :meth:`make_key`; return None if the cache key is not that of a lock."""
        prefix = self.make_key(PREFIX)
        key = PREFIX + cache_key.removeprefix(prefix)
        return key if cache_key.startswith(prefix) and not NO_LOCK.search(key) else None

    def close(self) -> None:  # noqa: B027 - LocMemStore has nothing to close
        """Close what the store opened."""


def marker_key(key: str, value: bytes) -> str:
    """Return the key under which :meth:`Store.clear` leaves its marker."""
    return f"{key}{MARKER}{Holder.decode(value).token}"
