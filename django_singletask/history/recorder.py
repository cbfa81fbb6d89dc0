"""Receive lock events and write them, in a thread of each process or at once."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import logging
import os
import threading
import time
from collections import deque
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from django.core.signals import setting_changed
from django.db import Error, connections, transaction

from django_singletask.conf import conf
from django_singletask.forks import close_before_forks, undivided
from django_singletask.history.queries import remedy
from django_singletask.history.writing import is_outage, write
from django_singletask.models import RETAKEN, TROUBLE, TaskLockEvent
from django_singletask.signals import LockEvent, lock_event
from django_singletask.stores.database import asks_again
from django_singletask.threads import Background, has_threads

__all__ = ["flush"]

logger = logging.getLogger("django_singletask")

LISTENER = "django_singletask.history"
BOUND = 50_000
"""How many events are kept while the database is down; then the oldest are dropped."""
AT_ONCE = 1000
"""The maximum number of events in one transaction."""
RETRY = 1.0
"""Seconds between two attempts to write while the database is down."""
PATIENCE = 10.0
"""Seconds without a log line while a database is busy, or asks to try again."""
GATHER = 1.0
"""Seconds for which events are collected, unless there are enough or flush() waits."""
FLUSH = "flush() waits"
"""A reason to write all events now."""
IDLE = 5.0
"""Seconds without an event after which the connection is closed."""


def connect(**kwargs: Any) -> None:
    """Receive lock events, unless the history is off; without receivers no event is created."""
    if conf.history == "off":
        lock_event.disconnect(sender=LockEvent, dispatch_uid=LISTENER)
    else:
        lock_event.connect(receive, sender=LockEvent, dispatch_uid=LISTENER)


setting_changed.connect(connect)


def receive(*, event: LockEvent, **kwargs: Any) -> None:
    """Record an event; a failure is logged and does not affect the task."""
    mode = conf.history
    if mode == "off" or (event.quiet and event.kind not in TROUBLE and not event.retaken):
        return
    if mode == "background" and has_threads():
        writer.put(event)
        return
    try:
        write_at_once(event)
    except SoftTimeLimitExceeded:
        raise  # it is meant for the task
    except Exception as error:
        writer.lose(error)
    else:
        writer.succeed()


def write_at_once(event: LockEvent) -> None:
    """Write an event in the caller's own transaction; one about a run waits for no other one.

    Another thread may have the row of this run in a transaction that has not ended:

      thread:  BEGIN, takes the lock ................ waits for the other thread
      other:                          releases it: waits for the row, without end
    """
    rows = TaskLockEvent.objects.primary().filter(ref=event.token)
    if event.token and event.kind not in ("acquired", "unguarded") and not event.quiet:
        with transaction.atomic(using=rows.db):
            is_visible = rows.exists()
        if not is_visible and event.kind in ("released", RETAKEN):
            return
        if not is_visible:
            event = dataclasses.replace(event, token="")  # it gets a row of its own
    write([event])


def flush(timeout: float = 5.0) -> bool:
    """Wait up to ``timeout`` seconds until all events are written; return whether they are."""
    return writer.flush(timeout)


def stop() -> None:
    """Write all events and end the thread; the next event starts another."""
    writer.stop()


def warn(error: Exception, consequence: str) -> None:
    logger.warning(
        "The lock history cannot be written; tasks are not affected%s (%s: %s).%s To stop "
        "recording, set SINGLETASK_HISTORY = 'off'.",
        consequence,
        type(error).__name__,
        str(error).partition("\n")[0],
        remedy(error),
    )


# Group commit
#
# The thread collects events for a second and writes them together. So most short runs are one
# inserted row, without a change. No task waits.
#
# SIGKILL loses unwritten events: those of the last second. The process that frees the lock of a
# killed run writes its row in any case. An outage of the database loses no event up to BOUND.


class Writer(Background):
    """The events of this process that are not written yet, and the thread that writes them."""

    name = "singletask-history"

    def __init__(self) -> None:
        self.events: deque[LockEvent] = deque()
        self.dropped = self.lost = 0
        self.unwritten = 0  # events that the thread has taken, but not written yet
        self.sleeps = True  # and must be woken for an event
        self.stopping = False
        self.open_connections: list[Any] = []  # those of the thread
        self.away = False
        self.failing_since: float | None = None

    def put(self, event: LockEvent) -> None:
        self.events.append(event)
        if len(self.events) > BOUND:
            self.events.popleft()
            self.dropped += 1
        if self.sleeps:  # the thread clears it: a signal could come between that and the wake-up
            self.wake()
        self.begin()

    def stop(self) -> None:
        self.flush(RETRY)
        if self.thread is not None:
            self.stopping = True
            self.wake()
            until = time.monotonic() + RETRY
            while self.thread is not None and time.monotonic() < until:
                time.sleep(0.002)
            self.stopping = False

    def flush(self, timeout: float) -> bool:
        until = time.monotonic() + timeout
        if self.events:
            self.begin()
            self.wake(FLUSH)
        while self.events or self.unwritten:
            if time.monotonic() >= until:
                return False
            time.sleep(0.002)
        return True

    def run(self) -> None:
        while not self.stopping:
            # Set sleeps before the test. In the other order an event could wait for the next one:
            #
            #   thread: no event                                      sleeps = True
            #   put():             adds an event   sleeps? no: no wake
            self.sleeps = True
            reasons = self.sleep(0 if self.events else IDLE if self.open_connections else None)
            if not (reasons or self.events):
                self.close()
                continue
            self.sleeps = False
            while self.events and not self.stopping:
                if len(self.events) < AT_ONCE and FLUSH not in reasons:
                    reasons = self.sleep(GATHER)
                self.write_some()
        self.close()

    def write_some(self) -> None:
        # Set this before taking events, so that flush() never sees both empty.
        self.unwritten = at_once = min(len(self.events), AT_ONCE)
        events = [self.events.popleft() for _ in range(at_once)]
        again = False
        while events and not self.stopping:
            try:
                write(events[:at_once], again=again)
            except Exception as error:
                again = True
                if is_outage(error):
                    self.keep(error)
                    self.sleep(RETRY)
                    continue
                if at_once > 1:
                    at_once = 1  # to find the event that cannot be written
                    continue
                self.lose(error)
            else:
                self.succeed()
            finally:
                self.open_connections = list(connections.all(initialized_only=True))
                for connection in self.open_connections:
                    # Another thread uses its connections for more than these writes.
                    if self.thread == threading.get_ident():
                        close_before_forks(connection)
            del events[:at_once]
        self.events.extendleft(reversed(events))
        self.unwritten = 0

    def lose(self, error: Exception) -> None:
        """Note that an event is not recorded; only the first one is logged."""
        if not self.lost:
            warn(error, ": an event is not recorded")
        self.lost += 1

    def keep(self, error: Exception) -> None:
        """Note that the database is down; logged once, and after 10 seconds if it is only busy."""
        now = time.monotonic()
        self.failing_since = self.failing_since or now
        patience = PATIENCE if asks_again(error) else 0
        if not self.away and now - self.failing_since >= patience:
            self.away = True
            warn(error, f"; up to {BOUND} events of each process are kept and written later")
        self.close()

    def succeed(self) -> None:
        """Note that events were written, and log the end of an outage."""
        if self.away:
            logger.warning("The lock history can be written again.")
        if self.lost > 1:  # the loss of a single event is already logged
            text = "The lock history can be written again; %d events were not recorded."
            logger.warning(text, self.lost)
        self.away, self.failing_since, self.lost = False, None, 0
        if self.dropped:
            dropped, self.dropped = self.dropped, 0  # other threads may raise it meanwhile
            logger.warning("%d events were dropped: more than %d were waiting.", dropped, BOUND)

    def close(self) -> None:
        """Close the connections of the thread, also broken ones."""
        for connection in connections.all(initialized_only=True):
            try:
                with undivided(connection):
                    connection.close()
            except Error:
                connection.connection = None
        self.open_connections = []


writer = Writer()


@atexit.register
def _at_exit() -> None:
    if writer.thread is not None:
        flush(2.0)


def _after_fork() -> None:
    # The parent writes its own events. Its connections must not be deleted here: they would send
    # "quit" on sockets that the parent still uses.
    global writer
    for connection in writer.open_connections:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
    writer = Writer()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
