"""Receive lock events and write them, in a thread of each process or at once."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from django.core.signals import request_finished, setting_changed
from django.db import Error, close_old_connections, connections, router, transaction

from django_singletask.conf import conf
from django_singletask.forks import at_fork, close_before_forks, leak, undivided
from django_singletask.history.queries import remedy
from django_singletask.history.writing import is_outage, write
from django_singletask.log import in_words, logger
from django_singletask.models import COUNTED, RETAKEN, TROUBLE, TaskLockEvent
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
    if mode == "off":
        return
    in_thread = False
    if mode != "inline":
        in_thread = has_threads()
    # In the callers' own threads, begin and end could be written in the wrong order, by two threads
    # of one run or after a rollback. Then the row of the begin would stay, so none is written.
    if conf.history_keeps == "trouble" and not in_thread and event.kind not in COUNTED:
        event = dataclasses.replace(event, quiet=True)
    facts = (event.kind, event.outcome)
    if event.quiet and not event.retaken and TROUBLE.keys().isdisjoint(facts):
        return
    try:
        if in_thread:
            writer.add(event)
            if writer.thread is None:
                writer.begin()
        elif conf.testing:
            write_in_test(event)
            writer.succeed()
        else:
            writer.add(event)
            write_here()
    except SoftTimeLimitExceeded:
        raise  # the time limit is meant for the task
    except Exception as error:
        writer.fail(error, is_kept=not conf.testing)


def write_here() -> None:
    """Write the events in this thread, or when the transaction commits that this thread is in.

    In that transaction, the rows would stay locked until its end, and two callers that know nothing
    of each other could wait for each other:

      one:    BEGIN, changes row a ............... changes row b: waits for the other
      other:         BEGIN, changes row b ............... changes row a: waits for the one

    A rollback also drops what is to be done at the commit. Then the events are written with the
    next event, or when the request or the process ends; so they are if there is no autocommit.
    """
    connection = connections[router.db_for_write(TaskLockEvent)]
    # Look at the last hook only, since a project may have many hooks of its own.
    is_hooked = any(write_all in hook for hook in connection.run_on_commit[-1:])
    if not is_hooked:
        connection.on_commit(write_all)  # without a transaction, Django calls write_all() at once


def write_all() -> None:
    """Write events until none is left, or until the database is down."""
    while writer.events:
        if not writer.write_some():
            return


def end_request(**kwargs: Any) -> None:
    """Write what a rollback, or an outage of the database, has left."""
    if not writer.events:
        return
    if conf.history != "inline" and has_threads():
        return  # the thread writes the events
    with suppress(Exception):  # the database may still be down
        write_here()
    close_old_connections()  # Django's own receiver has done so before this one


request_finished.connect(end_request)


def write_in_test(event: LockEvent) -> None:
    """Write an event in the transaction of the test; no event waits for another transaction.

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
            event = dataclasses.replace(event, token="")  # the event gets a row of its own
    write([event])


def flush(timeout: float = 5.0) -> bool:
    until = time.monotonic() + timeout
    while writer.events or writer.batches:
        if time.monotonic() >= until:
            return False
        writer.begin()
        writer.wake()
        time.sleep(0.002)
    return True


def stop() -> None:
    """Write all events and end the thread; the next event starts another."""
    flush(RETRY)
    writer.stopping = True
    until = time.monotonic() + 2 * RETRY
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
    """The finalizer that writes the events at the end of the process."""

    def __init__(self) -> None:
        self.events: deque[LockEvent] = deque()
        self.lost: int = 0  # events that were dropped or cannot be written
        self.batches: int = 0  # batches of events that a thread has taken and is writing
        self.stopping = False
        self.open_connections: list[Any] = []  # the connections of the thread
        self.failing_since: float | None = None
        self.has_warned: bool = False  # whether the log has a warning of this failure

    def add(self, event: LockEvent) -> None:
        self.events.append(event)
        while len(self.events) > BOUND:
            self.events.popleft()
            self.lost += 1
        # A process that multiprocessing starts ends by os._exit(), so that functions of atexit do
        # not run. Finalizers do, but not those of its parent. So each process registers one with
        # its first event: a fork has a writer of its own. Elsewhere atexit runs the finalizer.
        #
        #   parent:  event, registers   forks                                    exits, writes
        #   child:                            forgets    event, registers    writes, os._exit()
        #
        # The finalizer is registered before the thread begins, since a short script ends at once.
        if self.at_exit is None:
            self.at_exit = Finalize(None, flush, [2.0], exitpriority=0)

    def run(self) -> None:
        idle = 0.0
        while idle < IDLE and not self.stopping:
            if len(self.events) < AT_ONCE:
                self.sleep(GATHER)
            if self.events:
                idle = 0.0
            else:
                idle += GATHER
            is_reachable = self.write_some()
            if is_reachable:
                self.open_connections = list(connections.all(initialized_only=True))
                for connection in self.open_connections:
                    close_before_forks(connection)  # only notes that a fork is to close it
            else:
                self.close()
                time.sleep(RETRY)
        self.close()

    def _run_thread(self) -> None:
        super()._run_thread()
        # An event can come after run() has looked for events the last time, and before the thread
        # counts as ended. Then receive() sees a thread and starts none, so the event would wait
        # until another one comes. That is why this looks once more, when the thread has ended.
        if self.events and not self.stopping:
            self.begin()

    def write_some(self) -> bool:
        """Take a batch of events and write them; return False if the database is down.

        Then the events are kept.
        """
        batch: list[LockEvent] = []
        # Counted before events are taken: flush() waits while there are events or batches, so it
        # must always see one of them.
        self.batches += 1
        try:
            with suppress(IndexError):  # there are fewer events
                while len(batch) < AT_ONCE:
                    batch.append(self.events.popleft())
            return self._write_batch(batch)
        finally:
            try:
                # What is not written goes back to the front, in its old order.
                self.events.extendleft(reversed(batch))
            finally:  # also if a signal interrupts that
                self.batches -= 1

    def _write_batch(self, batch: list[LockEvent]) -> bool:
        """Write events, and remove from the batch what is written, or cannot be written."""
        at_once = AT_ONCE
        while batch:
            try:
                write(batch[:at_once])
            except SoftTimeLimitExceeded:
                raise
            except Exception as error:
                if is_outage(error):
                    self.fail(error, is_kept=True)
                    return False
                if at_once > 1:
                    at_once = 1  # write the events one by one, to lose only the one that is wrong
                    continue
                self.fail(error)
            else:
                self.succeed()
            del batch[:at_once]
        return True

    def fail(self, error: Exception, *, is_kept: bool = False) -> None:
        """Note that an event is not recorded, or with ``is_kept`` that it is written later.

        A failure is logged once. If a database is only busy, that is after ``PATIENCE``.
        """
        now = time.monotonic()
        failing_since = self.failing_since  # another thread may set this to None meanwhile
        if failing_since is None:
            failing_since = now
        self.failing_since = failing_since
        warn_at = failing_since
        if is_kept:
            consequence = f"; up to {BOUND} events of each process are kept and written later"
            if trouble(error) in {"race", "busy"}:
                warn_at += PATIENCE
        else:
            consequence = ": an event is not recorded"
            self.lost += 1
        if not self.has_warned and now >= warn_at:
            self.has_warned = True
            logger.warning(
                f"The lock history cannot be written; tasks are not affected{consequence} "
                f"({in_words(error)}).{remedy(error)} To stop recording, set "
                "SINGLETASK_HISTORY = 'off'."
            )

    def succeed(self) -> None:
        """Note that events were written, and log the end of a failure."""
        if self.has_warned or self.lost:
            lost = self.lost
            self.lost = 0  # before the log line: other threads may raise it meanwhile
            logger.warning("The lock history can be written again; events not recorded: %d.", lost)
        self.has_warned = False
        self.failing_since = None

    def close(self) -> None:
        """Close the connections of the thread, also broken ones."""
        for connection in connections.all(initialized_only=True):
            with undivided(connection), suppress(Error):
                connection.close()
        self.open_connections = []


writer: Writer = Writer()


def _replace_writer() -> None:
    """Give a forked child a writer of its own; the parent writes the parent's events."""
    # The connections of the parent must not be deleted in the child: they would send "quit" on
    # sockets that the parent still uses.
    global writer
    leak(writer.open_connections)
    writer = Writer()


at_fork(after_in_child=_replace_writer)
