"""The keys of the entries in a cache."""

from __future__ import annotations

import re

from django_singletask.holder import Holder

PREFIX = "singletask:"
MARKER = ":cleared:"
SLOT = "#"
"""Separates the key of the lock from the number of the slot in the key of a slot."""
MAX_SLOTS = 1000
"""Limited, because a take that finds no free slot reads all slots."""
EPOCH = f"{PREFIX}@epoch"
"""The key of the epoch; see :mod:`django_singletask.stores`."""
FENCE = f"{PREFIX}@fence"
"""The key of the last fencing token of all locks in the cache."""
# memcached takes keys of 250 bytes. The column of DatabaseCache takes 255 characters, and MySQL's
# INSERT IGNORE would cut a longer key.
MAX_KEY = 250
LONGEST_SLOT = f"{PREFIX}{'x' * 100}:{'0' * 32}{SLOT}{MAX_SLOTS}"
LONGEST_KEY = f"{LONGEST_SLOT}{MARKER}{'0' * 32}"
"""The longest key that the package uses, which is the key of a marker."""
MARKER_KEY = re.compile(rf":[0-9a-f]{{32}}({SLOT}\d+)?{MARKER}[^:]*$")
"""The end of a marker's key: that of its lock, which ends in 32 digits, perhaps a slot; a token."""
OTHER_ENTRIES = re.compile(rf"{PREFIX}@(?!queued:)")
"""Of the entries with "@", operators see only those of queued calls."""


def is_key(text: str) -> bool:
    """Return whether a text can be the key of a lock, or of the entry of a queued call."""
    if not text.startswith(PREFIX) or OTHER_ENTRIES.match(text):
        return False
    return MARKER_KEY.search(text) is None


def marker_key(key: str, value: bytes) -> str:
    """Return the key under which ``Store.clear()`` leaves its marker."""
    return f"{key}{MARKER}{Holder.decode(value).token}"
