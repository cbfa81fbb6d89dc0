"""Background threads that a signal cannot break, also under gevent and eventlet."""

from __future__ import annotations

import _thread
import queue
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from django_singletask.forks import at_fork
from django_singletask.log import logger

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
# _thread.start_new_thread. (In Python 3.14.0 to 3.14.8, a signal can also strike between the lock
# and the block of a "with": python/cpython#148874. No cure is known here: the docs say so.)
#
# gevent and eventlet replace these names, perhaps after this package was imported. So no such thing
# is made or imported by name before its first use.

T = TypeVar("T")

made: dict[str, Any] = {}
"""The ``"variables"`` of each thread or greenlet, once :func:`put` has set one."""

at_fork(after_in_child=made.clear)


def put(name: str, value: T) -> T:
    """Set a variable of this thread or greenlet, and return its value."""
    variables = made.setdefault("variables", threading.local())  # the first thread decides
    setattr(variables, name, value)
    return value


def are_greenlets() -> bool:
    """Return whether gevent or eventlet has replaced threads by greenlets."""
    return not threading.local.__module__.startswith("_thread")


class Background:
    """An object with one thread, which :meth:`begin` starts and :meth:`wake` wakes.

    If two threads call :meth:`begin` at once, two threads start, and the second ends at once. A
    thread that has ended is started again by the next :meth:`begin`.
    """

    name: str
    run: Callable[[], None]
    """Do the work of the thread."""
    thread: int | None = None
    """The number of the thread that runs; None if none does."""
    wakes: Any = None
    """The queue by which others wake the thread."""

    def begin(self) -> None:
        if self.thread is None:
            has_threads()  # logs if there are none
            _thread.start_new_thread(self._run_thread, ())

    def _run_thread(self) -> None:
        """Be the thread of this object for as long as :meth:`run` works, unless it has one."""
        number = threading.get_ident()
        winner = vars(self).setdefault("thread", number)  # atomic
        if winner == number:
            threading.current_thread().name = self.name
            self.wakes = queue.SimpleQueue()
            try:
                self.run()
            finally:
                del self.thread

    # A thread that has no queue yet sees everything that was noted before wake():
    #
    #   task:     notes its wish              wake(): no queue
    #   thread:                    begins                        queue, reads all wishes, sleeps

    def wake(self) -> None:
        if self.wakes is not None:
            self.wakes.put(None)

    def sleep(self, seconds: float | None) -> bool:
        """Sleep until a :meth:`wake`, at most ``seconds``; return whether there was one."""
        woken = False
        try:
            while True:
                self.wakes.get(timeout=seconds)
                woken = True
                seconds = 0  # others may have woken the thread as well
        except queue.Empty:
            return woken


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
