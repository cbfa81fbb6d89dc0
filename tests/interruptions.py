"""Raise an error once, at a chosen place of the code that is tested, as a signal does.

Python calls a signal's handler when a Python function begins, when a C function has returned, and
while a C function waits. A test that raises at one such place after the other meets all of them,
and each of them every time. At each line it would raise too often: a signal cannot strike between
the body of ``with lock:`` and the release of a C lock, but an error at that line does.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import django.core.cache
import django.db.backends

import django_singletask

LIBRARIES = {"redis", "valkey", "django_redis", "django_valkey", "pymemcache", "pylibmc"}
FOLDERS = [
    *(str(Path(module.__file__).parent) for module in (django_singletask, django.core.cache)),
    *django.db.backends.__path__,
]
WAITS = {"connect", "poll", "recv", "recv_into", "select", "send", "sendall", "sleep"}
"""C functions that a signal interrupts before they have done their work."""


def in_locks(file: str) -> bool:
    """Return whether a file belongs to the package, or to the client of a cache."""
    if any(file.startswith(f"{folder}/") for folder in FOLDERS):
        return True
    return "site-packages" in file and bool(LIBRARIES.intersection(Path(file).parts))


class Interruption:
    """Raise ``error`` in this thread, at the place with this number in the ``watched`` files.

    Only functions that are called after :meth:`begin` count. Python ignores an error in
    ``__del__`` and in the callback of a weak reference, and logging ignores one while it writes.
    So nothing is raised there.
    """

    def __init__(
        self, number: int, error: type[BaseException], watched: Callable[[str], bool] = in_locks
    ) -> None:
        self.number = number
        self.error = error
        self.watched = watched
        self.seen = 0
        self.place = ""
        """Where the error was raised; empty until then."""
        self._base: FrameType | None = None

    def begin(self) -> None:
        here = inspect.currentframe()
        self._base = here and here.f_back
        sys.setprofile(self._profile)

    def end(self) -> None:
        sys.setprofile(None)
        self._base = None

    def __enter__(self) -> Interruption:
        self.begin()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("return", "c_exception"):
            return
        if event == "c_call" and getattr(argument, "__name__", "") not in WAITS:
            return
        file = frame.f_code.co_filename
        if frame is self._base or not self._is_watched(file) or not self._is_heard(frame):
            return
        self.seen += 1
        if self.seen == self.number:
            self.end()
            what = getattr(argument, "__name__", "")
            self.place = f"{Path(file).name}:{frame.f_lineno} {frame.f_code.co_qualname} {what}"
            self.strike()

    def strike(self) -> None:
        raise self.error

    def _is_watched(self, file: str) -> bool:
        known: dict[str, bool] = WATCHED.setdefault(self.watched, {})
        if file not in known:
            known[file] = self.watched(file)
        return known[file]

    def _is_heard(self, frame: FrameType | None) -> bool:
        """Return whether an error that is raised here reaches the code that is tested."""
        while frame is not None and frame is not self._base:
            code = frame.f_code
            if code.co_name == "__del__" or "/logging/" in code.co_filename:
                return False
            if code.co_name in {"remove", "_remove"} and "weak" in code.co_filename:
                return False
            frame = frame.f_back
        return True


WATCHED: dict[Callable[[str], bool], dict[str, bool]] = {}
"""What the functions said of the files; asked once, since there are many calls."""


def interruptions(error: type[BaseException], **options: Any) -> Iterator[Interruption]:
    """Yield an interruption for each place in turn, until there is none left to raise at."""
    number = 0
    while True:
        number += 1
        interruption = Interruption(number, error, **options)
        yield interruption
        interruption.end()
        if not interruption.place:
            return
