"""What every store does to one entry, and which store serves which cache."""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

from django.core.exceptions import ImproperlyConfigured

from django_singletask.holder import Holder

__all__ = ["CannotList", "Entry", "Outcome", "Store"]


PREFIX = "singletask:"
MARKER = ":cleared:"
# Both a lock's key and its marker end in 32 hexadecimal digits, so a lock that is itself named
# "…:cleared" is not taken for a marker.
IS_MARKER = re.compile(rf":[0-9a-f]{{32}}{MARKER}[^:]*$")
# What django_singletask.keys makes at most, with its marker. memcached takes 250 bytes, the column
# of DatabaseCache 255 characters, beyond which MySQL's INSERT IGNORE would cut the key.
MAX_KEY = 250
LONGEST = f"{PREFIX}{'x' * 100}:{'0' * 32}{MARKER}{'0' * 32}"


class Entry(NamedTuple):
    """A lock as it stands in the cache: its bytes and the seconds left (None: unknown)."""

    value: bytes
    remaining: float | None


class Outcome(enum.Enum):
    """What a store found when it was asked to change an entry that should be the caller's."""

    OK = "ok"
    RETAKEN = "retaken"  # renew only: it was gone, and is the caller's again
    GONE = "gone"
    TAKEN = "taken"  # somebody else's


class CannotList(Exception):
    """The store cannot say which locks it holds."""


class Store(ABC):
    """Keep locks in one cache; every method is atomic against all other processes.

    An entry is a key and the holder's bytes. Whoever changes an entry shows the whole bytes that
    it believes to be there, so nobody can change what somebody else wrote: the bytes hold a
    random token. ``lease`` is in seconds. Errors of the cache's client pass through: an outage is
    never "held" and never "free".

    One object serves one thread of one process (see :func:`django_singletask.stores.get_store`).
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        excess = len(cache.make_key(LONGEST).encode()) - MAX_KEY
        if excess > 0:
            raise ImproperlyConfigured(
                f"KEY_PREFIX of the cache that holds the locks is {excess} bytes too long: with it "
                f"the keys of locks have up to {MAX_KEY + excess} bytes, and {MAX_KEY} are allowed."
            )

    def make_key(self, key: str) -> str:
        """Pass a lock's key through the cache's own prefix, version and key function."""
        made: str = self.cache.make_key(key)
        return made

    @abstractmethod
    def add(self, key: str, value: bytes, lease: float) -> Entry | None:
        """Take the lock; return None when taken, else the entry that is in the way.

        A client that lost the reply may have sent the request twice: the caller's own bytes in
        the way mean that the first request took the lock.
        """

    @abstractmethod
    def release(self, key: str, value: bytes) -> Outcome:
        """Delete the entry if it is ``value``: OK, GONE or TAKEN."""

    @abstractmethod
    def renew(self, key: str, value: bytes, lease: float) -> Outcome:
        """Let the entry live for ``lease`` from now if it is ``value``.

        If there is none it is taken again (RETAKEN), unless :meth:`clear` left its marker (GONE).
        """

    def renew_many(self, requests: list[tuple[str, bytes, float]]) -> list[Outcome]:
        """Renew several entries, in as few trips as the store can."""
        return [self.renew(*request) for request in requests]

    @abstractmethod
    def replace(self, key: str, old: bytes, new: bytes, lease: float) -> bool:
        """Let the entry be ``new`` for ``lease`` seconds if it is ``old``; say whether it is.

        An entry that is ``new`` already was made so by the same request, whose reply was lost.
        """

    @abstractmethod
    def read(self, key: str) -> Entry | None:
        """Return the entry that holds the lock now."""

    @abstractmethod
    def clear(self, key: str, value: bytes, lease: float) -> bool:
        """Delete the entry if it is ``value`` and leave a marker for ``lease`` seconds.

        The holder does not know that its lock was cleared. Without the marker its next renewal
        would find the entry gone, as after an eviction, and take it again.
        """

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Yield key and entry of each lock that is held now; raises :class:`CannotList`."""
        raise CannotList

    def purge(self) -> int:
        """Delete what ended long ago, where the cache itself keeps it; return how many entries."""
        return 0

    def prefix(self) -> str:
        """Return how all keys of locks begin; raises :class:`CannotList` if they do not."""
        prefix = self.make_key(PREFIX)
        if self.make_key(f"{PREFIX}x") != f"{prefix}x":
            raise CannotList(f"The KEY_FUNCTION of {type(self.cache).__name__} hides the keys.")
        return prefix

    def lock_key(self, made: str) -> str | None:
        """Return the lock's key that :meth:`make_key` made this of; None if it is no lock's."""
        prefix = self.make_key(PREFIX)
        if not made.startswith(prefix) or IS_MARKER.search(made):
            return None
        return PREFIX + made.removeprefix(prefix)

    def close(self) -> None:  # noqa: B027 - most stores have nothing to close
        """Give back what the store opened."""


def marker_key(key: str, value: bytes) -> str:
    """Return the key under which :meth:`Store.clear` leaves its marker."""
    return f"{key}{MARKER}{Holder.decode(value).token}"
