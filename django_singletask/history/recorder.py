"""Receive lock events and write them: in a thread of each process, or where they happen."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import time
from collections import deque
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from django.core.signals import setting_changed
from django.db import (
    Error,
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
    connections,
)

from django_singletask.conf import conf
from django_singletask.history.writing import TROUBLE, write
from django_singletask.locks.renewal import has_threads
from django_singletask.signals import LockEvent, lock_event
from django_singletask.stores.database import asks_again

__all__ = ["connect", "flush", "stop"]

logger = logging.getLogger("django_singletask")

BOUND = 50_000
"""Events that are kept while the database is away; then the oldest go."""

AT_ONCE = 1000
"""Events in one transaction at most."""

RETRY = 1.0
PAUSE = 0.005
"""Seconds for which few events gather: many small writes take the processor from the tasks."""

SHARE = 10
"""A pause is so many times as long as the last write took, so that much gathers under load."""

LONGEST = 0.05
"""Seconds of the longest pause."""

IDLE = 5.0
"""Seconds without an event after which the connection is closed."""


LISTENER = "django_singletask.history"


def connect(**kwargs: Any) -> None:
    """Listen, unless there is no history: then a lock need not tell anybody."""
    if conf.history == "off":
        lock_event.disconnect(sender=LockEvent, dispatch_uid=LISTENER)
    else:
        lock_event.connect(receive, sender=LockEvent, dispatch_uid=LISTENER)


setting_changed.connect(connect)


def receive(*, event: LockEvent, **kwargs: Any) -> None:
    """Record an event; what fails here costs the row and one log line, never the task."""
    mode = conf.history
    if mode == "off" or (event.quiet and event.kind not in TROUBLE):
        return
    if mode == "background" and has_threads():
        _writer.put(event)
        return
    try:
        write([event])
    except SoftTimeLimitExceeded:
        raise  # it is meant for the task
    except Exception as error:
        _losses.add(1, error)
    else:
        _losses.end()


def flush(timeout: float = 5.0) -> bool:
    """Wait until what has happened is written; say whether it was, within ``timeout`` seconds."""
    return _writer.flush(timeout)


def stop() -> None:
    """Write what has happened and end the thread; the next event starts another."""
    _writer.stop()


class Losses:
    """Count what is not recorded, and log a row of losses at its begin and its end."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, count: int, error: object) -> None:
        if not self.count:
            logger.warning(
                "The history of the locks cannot be written, which does no harm to the tasks: "
                "events are not recorded (%s: %s). Has 'manage.py migrate' run? "
                "SINGLETASK_HISTORY = 'off' stops recording.",
                type(error).__name__,
                str(error).partition("\n")[0],
            )
        self.count += count

    def end(self) -> None:
        if self.count:
            logger.warning(
                "The history of the locks is written again; %d events were not recorded.",
                self.count,
            )
        self.count = 0


_losses = Losses()

# Group commit
#
# The thread writes in one transaction what has gathered since its last write, and unless that is
# much already, for some milliseconds more, in which a short run ends: one row is then inserted, and
# none changed. No task waits.
#
#   tasks:    a        b c d                e
#   thread:    .. write a   .. write b c d    .. write e
#
# SIGKILL loses what has gathered since. An outage loses nothing up to BOUND.


class Writer:
    """The events of this process that are not written yet, and the thread that writes them."""

    def __init__(self) -> None:
        self.events: deque[LockEvent] = deque()
        self.dropped = 0
        self.there = threading.Event()
        self.in_a_hurry = threading.Event()
        self.written = threading.Condition()
        self.unwritten = 0  # taken from the events by the thread
        self.starting = threading.Lock()
        self.thread: threading.Thread | None = None
        self.open: list[Any] = []  # the connections of the thread
        self.away = False
        self.ended = threading.Event()

    def put(self, event: LockEvent) -> None:
        self.events.append(event)
        if len(self.events) > BOUND:
            self.events.popleft()
            self.dropped += 1
        if not self.there.is_set():
            self.there.set()
        if self.thread is None or not self.thread.is_alive():
            self.start()

    def start(self) -> None:
        with self.starting:
            if self.thread is None or not self.thread.is_alive():
                self.ended = threading.Event()
                # Known before it starts, or a signal between the two would leave a stranger.
                self.thread = threading.Thread(
                    target=self.run, args=(self.ended,), name="singletask-history", daemon=True
                )
                self.thread.start()

    def stop(self) -> None:
        if self.thread is None:
            return
        self.flush(RETRY)
        self.ended.set()
        self.there.set()
        self.thread.join(RETRY)
        self.thread = None

    def run(self, ended: threading.Event) -> None:
        while not ended.is_set():
            if not self.there.wait(IDLE if self.open else None):
                self.close()
                continue
            self.there.clear()
            pause = PAUSE
            while self.events and not ended.is_set():
                if len(self.events) < AT_ONCE:
                    self.in_a_hurry.wait(pause)
                began = time.monotonic()
                self.write_some(ended)
                took = time.monotonic() - began
                pause = min(max(PAUSE, SHARE * took), LONGEST)
        self.close()

    def write_some(self, ended: threading.Event) -> None:
        # Looked at before they are taken away, so that flush() never finds nothing in between.
        self.unwritten = count = min(len(self.events), AT_ONCE)
        events = [self.events.popleft() for _ in range(count)]
        again = False
        while not self.try_to_write(events, again):
            again = True
            if ended.wait(RETRY):
                self.events.extendleft(reversed(events))
                break
        with self.written:
            self.unwritten = 0
            self.written.notify_all()

    def try_to_write(self, events: list[LockEvent], again: bool) -> bool:
        """Write events; say whether they are done with."""
        try:
            write(events, again=again)
        except (OperationalError, InterfaceError, InternalError, ProgrammingError) as error:
            if not is_about_values(error):
                # Away, read-only, without the table yet: it may come.
                self.tell_once(error)
                self.close()
                return False
            return self.write_singly(events, error)
        except Exception as error:
            return self.write_singly(events, error)
        finally:
            self.open = list(connections.all(initialized_only=True))
        if self.away:
            self.away = False
            logger.warning("The history of the locks is written again.")
        if self.dropped:
            dropped, self.dropped = self.dropped, 0
            logger.warning("%d events were dropped: more than %d had gathered.", dropped, BOUND)
        _losses.end()
        return True

    def write_singly(self, events: list[LockEvent], error: Exception) -> bool:
        """Leave out the one that cannot be written; what is written is taken off the list."""
        if len(events) == 1:
            _losses.add(1, error)
            return True
        while events:
            if not self.try_to_write(events[:1], True):
                return False
            del events[0]
        return True

    def tell_once(self, error: Exception) -> None:
        if self.away or asks_again(error):
            return
        self.away = True
        logger.warning(
            "The history of the locks cannot be written, which does no harm to the tasks; the last "
            "%d events of each process are kept and written when it can be (%s: %s). Has "
            "'manage.py migrate' run? SINGLETASK_HISTORY = 'off' stops recording.",
            BOUND,
            type(error).__name__,
            str(error).partition("\n")[0],
        )

    def close(self) -> None:
        """Close the connections of the thread; a broken one may fail at that, too."""
        for connection in connections.all(initialized_only=True):
            try:
                connection.close()
            except Error:
                connection.connection = None
        self.open = []

    def flush(self, timeout: float) -> bool:
        until = time.monotonic() + timeout
        try:
            self.in_a_hurry.set()
            with self.written:
                while self.events or self.unwritten:
                    left = until - time.monotonic()
                    if left <= 0:
                        return False
                    self.written.wait(min(left, 0.05))
        finally:
            self.in_a_hurry.clear()
        return True


INCORRECT_STRING = 1366


def is_about_values(error: Exception) -> bool:
    """Say whether MySQL refuses a text, which it calls an operational error."""
    return bool(error.args) and error.args[0] == INCORRECT_STRING


_writer = Writer()


@atexit.register
def _at_exit() -> None:
    if _writer.thread is not None:
        flush(2.0)


def _after_fork() -> None:
    # What has gathered is the parent's to write. Its connection is, too: it must not be closed
    # here, where that would say "quit" on the shared socket.
    global _writer
    for connection in _writer.open:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
    _writer = Writer()
    _losses.count = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
