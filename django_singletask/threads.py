"""Background threads that a signal cannot break, also under gevent and eventlet."""

from __future__ import annotations

import _thread
import logging
import os
import queue
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any

logger = logging.getLogger("django_singletask")

# Why only these primitives
#
# A signal handler runs between two lines of Python. threading.Event, Condition and Semaphore are
# written in Python, and Thread.start() waits for an Event. If a soft time limit strikes inside
# them, their inner lock stays locked for ever:
#
#   task:     Event.set(): locks its Condition   SIGUSR1: SoftTimeLimitExceeded   (never unlocked)
#   thread:                                                   Event.wait(): waits for ever
#
# So a task's thread wakes another one by queue.SimpleQueue, which is written in C. It guards data
# by "with" on a plain lock, or by an atomic method of a dict. It starts a thread by
# _thread.start_new_thread.
#
# gevent and eventlet replace these names, perhaps after this package was imported. So nothing of
# them is made or imported by name before its first use.

_made: dict[str, Any] = {}
variables: Any = None
"""The variables of this thread or greenlet; :func:`own` makes each at its first use."""


def own(name: str, make: Callable[[], Any]) -> Any:
    global variables
    variables = _made.setdefault("variables", threading.local())  # the first thread decides
    if not hasattr(variables, name):
        setattr(variables, name, make())
    return getattr(variables, name)


def _after_fork() -> None:
    global variables
    variables = None
    _made.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def are_greenlets() -> bool:
    """Return whether gevent or eventlet has replaced threads by greenlets."""
    return not threading.local.__module__.startswith("_thread")


def new_queue() -> Any:
    return queue.SimpleQueue()


def start(function: Callable[[], None]) -> None:
    _thread.start_new_thread(function, ())


class Background(ABC):
    """An object with one thread, which :meth:`begin` starts and :meth:`wake` wakes.

    If two threads call :meth:`begin` at once, two threads start, and the second ends at once. A
    thread that has ended is started again by the next :meth:`begin`.
    """

    name: str
    thread: int | None = None
    """The number of the thread that runs."""

    def begin(self) -> None:
        if self.thread is None:
            has_threads()
            start(self._begin)

    def _begin(self) -> None:
        number = threading.get_ident()
        if vars(self).setdefault("thread", number) == number:  # atomic
            threading.current_thread().name = self.name
            try:
                self.run()
            finally:
                del self.thread

    @abstractmethod
    def run(self) -> None:
        """Do the work of the thread."""

    def wake(self, reason: object = None) -> None:
        self._wakes().put(reason)

    def sleep(self, seconds: float | None) -> list[object]:
        """Sleep until a :meth:`wake`, at most ``seconds``; return the reasons that were given."""
        wakes, reasons = self._wakes(), []
        try:
            reasons.append(wakes.get(timeout=seconds))
            while True:
                reasons.append(wakes.get_nowait())
        except queue.Empty:
            return reasons

    def _wakes(self) -> Any:
        wakes = vars(self).get("wakes")
        return vars(self).setdefault("wakes", new_queue()) if wakes is None else wakes


@cache
def has_threads() -> bool:
    """Return whether threads run here; if not, log that leases are not renewed."""
    uwsgi = sys.modules.get("uwsgi")
    if uwsgi is None or {"enable-threads", "threads"} & set(uwsgi.opt):
        return True
    logger.warning(
        "uWSGI runs without threads, so held locks are not renewed: they expire after their "
        "lease. Start uWSGI with --enable-threads."
    )
    return False
