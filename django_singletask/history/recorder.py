"""Receive lock events and write them, in a thread of each process or at once."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from django.core.signals import setting_changed
from django.db import Error, connections, transaction

from django_singletask.conf import conf, in_words, logger
from django_singletask.forks import at_fork, close_before_forks, leak, undivided
from django_singletask.history.queries import remedy
from django_singletask.history.writing import is_outage, write
from django_singletask.models import RETAKEN, TROUBLE, TaskLockEvent
from django_singletask.signals import LockEvent, lock_event
from django_singletask.stores.database import trouble
from django_singletask.threads import Background, has_threads

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
IDLE = 5.0
"""Seconds without an event after which the thread ends and its connection is closed."""


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
        writer.events.append(event)
        if len(writer.events) > BOUND:
            writer.events.popleft()
            writer.lost += 1
        # A process that multiprocessing starts ends by os._exit(), without what atexit has. It runs
        # finalizers, but forgets those that were there when it began. So each process registers one
        # with its first event. In other processes, atexit runs it.
        #
        #   parent:  event, registers   forks                                        exits, writes
        #   child:                            forgets    event, registers    writes, os._exit()
        #
        # Registered before the thread begins: a short script ends at once.
        if writer.thread is None:
            writer.at_exit = writer.at_exit or Finalize(None, flush, [2.0], exitpriority=0)
            writer.begin()
        return
    try:
        write_at_once(event)
    except SoftTimeLimitExceeded:
        raise  # it is meant for the task
    except Exception as error:
        writer.fail(error)
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
        if not is_visible:
            if event.kind in ("released", RETAKEN):
                return
            event = dataclasses.replace(event, token="")  # it gets a row of its own
    write([event])


def flush(timeout: float = 5.0) -> bool:
    until = time.monotonic() + timeout
    while writer.events or writer.unwritten:
        if time.monotonic() >= until:
            return False
        writer.begin()
        writer.wake()
        time.sleep(0.002)
    return True


def stop() -> None:
    """Write all events and end the thread; the next event starts another."""
    flush(RETRY)
    writer.stopping, until = True, time.monotonic() + 2 * RETRY
    while writer.thread is not None and time.monotonic() < until:
        writer.wake()
        time.sleep(0.002)
    writer.stopping = False


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
    at_exit: Any = None
    """Writes the events at the end of the process."""

    def __init__(self) -> None:
        self.events: deque[LockEvent] = deque()
        self.lost = 0  # events that were dropped or cannot be written
        self.unwritten = 0  # events that the thread has taken, but not written yet
        self.stopping = False
        self.open_connections: list[Any] = []  # those of the thread
        self.failing_since: float | None = None
        self.has_warned = False  # of this failure

    def run(self) -> None:
        idle = 0.0
        while idle < IDLE and not self.stopping:
            if len(self.events) < AT_ONCE:
                self.sleep(GATHER)
            idle = 0.0 if self.events else idle + GATHER
            self.write_some()
        self.close()

    def _begin(self) -> None:
        super()._begin()
        # Look again when the thread counts as ended. Otherwise an event could wait for the next:
        #
        #   thread: no event                                      ends
        #   receive():         adds an event   a thread? yes
        if self.events and not self.stopping:
            self.begin()

    def write_some(self) -> None:
        # Set this before taking events, so that flush() never sees both empty.
        self.unwritten = at_once = min(len(self.events), AT_ONCE)
        events = [self.events.popleft() for _ in range(at_once)]
        while events and not self.stopping:
            try:
                write(events[:at_once])
            except Exception as error:
                if is_outage(error):
                    self.fail(error, is_kept=True)
                    self.close()
                    time.sleep(RETRY)
                    continue
                if at_once > 1:
                    at_once = 1  # to find the event that cannot be written
                    continue
                self.fail(error)
            else:
                self.succeed()
            finally:
                self.open_connections = list(connections.all(initialized_only=True))
                for connection in self.open_connections:
                    close_before_forks(connection)
            del events[:at_once]
        self.events.extendleft(reversed(events))
        self.unwritten = 0

    def fail(self, error: Exception, *, is_kept: bool = False) -> None:
        """Note that an event is not recorded; or with ``is_kept`` that it is tried again later.

        This is logged once; if a database is only busy, after ``PATIENCE``.
        """
        consequence, now = ": an event is not recorded", time.monotonic()
        if is_kept:
            consequence = f"; up to {BOUND} events of each process are kept and written later"
        self.lost += not is_kept
        self.failing_since = self.failing_since or now
        patience = PATIENCE if is_kept and trouble(error) in {"race", "busy"} else 0
        if not self.has_warned and now - self.failing_since >= patience:
            self.has_warned = True
            logger.warning(
                f"The lock history cannot be written; tasks are not affected{consequence} "
                f"({in_words(error)}).{remedy(error)} To stop recording, set SINGLETASK_HISTORY = "
                "'off'."
            )

    def succeed(self) -> None:
        """Note that events were written, and log the end of a failure."""
        if self.has_warned or self.lost:
            lost, self.lost = self.lost, 0  # other threads may raise it meanwhile
            text = "The lock history can be written again; events not recorded: %d."
            logger.warning(text, lost)
        self.has_warned, self.failing_since = False, None

    def close(self) -> None:
        """Close the connections of the thread, also broken ones."""
        for connection in connections.all(initialized_only=True):
            with undivided(connection), suppress(Error):
                connection.close()
        self.open_connections = []


writer = Writer()


def _after_fork() -> None:
    # The parent writes its own events. Its connections must not be deleted here: they would send
    # "quit" on sockets that the parent still uses.
    global writer
    leak(writer.open_connections)
    writer = Writer()


at_fork(after_in_child=_after_fork)
