"""The record of a lock's holder, which is stored as the lock's value in the cache."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from functools import lru_cache
from itertools import product
from operator import itemgetter
from typing import Any, Final, get_args, get_type_hints
from unicodedata import category

from django_singletask.arguments import MAX_LEASE
from django_singletask.process import Process

# A token is part of the key of a marker, and memcached must accept that key.
IS_TOKEN = re.compile("[!-9;-~]{0,32}")
LONGEST = 255
"""The maximum number of characters in a text, as in a database column."""
LARGEST = 2**14
"""The maximum number of bytes in a record."""
COLUMN = 2**31 - 1
"""The largest number that a database column holds."""
VERSION = 1
"""Grows if a field gets another meaning; the holder of a newer record is unknown."""
LIMITS = {
    "pid": COLUMN,
    "retries": COLUMN,
    "slots": COLUMN,
    "since": 2**32,
    "timeout": MAX_LEASE,
    "version": VERSION,
}
"""The largest numbers; those of ``since`` and ``timeout`` are the year 2106, and a month."""
_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().decode


@dataclasses.dataclass
class Holder(Process):
    """The record stored as the value of a lock: who holds it, since when, for how long.

    ``since`` is a Unix time by the clock of the holder's host: people read it, but no lease is
    computed from it. ``timeout`` is the length of the lease in seconds. ``kept`` is true for an
    entry that belongs to no process any more and is kept for ``timeout`` seconds. ``returned`` is
    then true if the body has returned. Do not change a record: other code may have the same object.
    """

    token: str
    name: str
    task: str | None
    task_id: str | None
    retries: int
    since: float | int
    timeout: float | int
    kept: bool = False
    returned: bool = False
    slots: int = 1
    """How many runs may hold the lock at once, according to this holder."""
    version: int = VERSION

    def encode(self) -> bytes:
        return _encode(vars(self)).encode("ascii")

    @classmethod
    @lru_cache(maxsize=64)
    def decode(cls, value: bytes) -> Holder:
        """Read a record. Bytes of another origin become :data:`UNKNOWN`."""
        if len(value) > LARGEST:
            return UNKNOWN
        try:
            data = _decode(value.decode())
        except (ValueError, RecursionError):
            return UNKNOWN
        if not isinstance(data, dict):
            return UNKNOWN
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Holder:
        """Read the fields that this version has; missing fields are as in :data:`UNKNOWN`.

        If one value does not fit, nothing of the record is trusted: the holder is unknown. Texts
        become safe to show, and short enough for a column.
        """
        fields = data
        if not fields.keys() >= HINTS.keys():
            fields = {**vars(UNKNOWN), **data}
        values = in_order(fields)
        if tuple(map(type, values)) not in TYPES:
            return UNKNOWN
        for number, limit in zip(numbers_of(fields), LIMITS.values(), strict=True):
            if not 0 <= number <= limit:
                return UNKNOWN
        if not IS_TOKEN.fullmatch(fields["token"]):
            return UNKNOWN
        # Nearly all texts are clean, and one look at all of them together shows that.
        texts = "".join(filter(None, texts_of(fields)))
        if len(texts) > LONGEST or not texts.isprintable():
            values = tuple(map(_clean_value, values))
        return cls(*values)

    @property
    def result(self) -> str:
        """How the body of a kept entry ended, as in the history; empty if that is not known."""
        if self.returned:
            return "returned"
        return ""

    def is_run_of(self, task_id: str | None) -> bool:
        """Return whether the task with this id is the holder, also if the record cleaned the id."""
        if task_id is None:
            return False
        return self.task_id == clean(task_id, LONGEST)

    def __str__(self) -> str:
        """Return the run and its process as text: ``task 3f0c on web-3, process 8121``."""
        text = "code outside a task"
        if self.task_id:
            text = f"task {self.task_id}"
        if self.host:
            text += f" on {self.host}"
        else:
            text += " on an unknown host"
        if self.pid:
            text += f", process {self.pid}"
        return text


UNKNOWN = Holder("", "", "", "", 0, "", "", "", None, None, 0, 0.0, 0.0)
"""The holder of an entry that this package did not write."""
HINTS = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(Holder).items()}
TYPES = {*product(*HINTS.values())}
"""The types that the fields can have together, in their order; True is no number here."""
TEXTS = [name for name, types in HINTS.items() if str in types]
in_order: Final = itemgetter(*HINTS)
texts_of: Final = itemgetter(*TEXTS)
numbers_of: Final = itemgetter(*LIMITS)


def without_process(holder: Holder, timeout: float, **changes: Any) -> Holder:
    """Return the record of an entry without a process, which ends after ``timeout``."""
    return dataclasses.replace(holder, pid=0, start="", timeout=timeout, **changes)


def mark_of(task_id: str | None) -> bytes:
    """Return the bytes that identify this task id in a record; empty without a task id.

    Quotes in other fields are escaped, so no other field can contain these bytes.
    """
    if task_id is None:
        return b""
    return f'"task_id":{_encode(task_id)}'.encode("ascii")


def clean(text: str, length: int | None = None) -> str:
    """Shorten an untrusted text, and escape the characters that are not printable.

    Control characters steer a terminal, format characters change the direction of the text after
    them, and some databases refuse NUL and surrogates.
    """
    text = text[:length]
    if text.isprintable():
        return text
    return "".join(map(_printable, text))[:length]


def _clean_value(value: Any) -> Any:
    if type(value) is str:
        return clean(value, LONGEST)
    return value


def _printable(character: str) -> str:
    # Python does not count the spaces of Japanese and French as printable.
    if character.isprintable() or category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()


def _clean_line(record: logging.LogRecord) -> bool:
    """Let a line into the log; :func:`clean` its names, ids and texts of errors first."""
    line = record.getMessage()
    cleaned = clean(line)
    if cleaned != line:
        record.msg = cleaned
        record.args = ()
    return True


# On the logger, not on a handler: the handlers are the project's.
logging.getLogger("django_singletask").addFilter(_clean_line)
