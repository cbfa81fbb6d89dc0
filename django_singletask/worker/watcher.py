"""Free the lock of a run whose pool process is dead."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from celery.signals import worker_ready
from django.db import connections

from django_singletask import clock
from django_singletask.conf import conf
from django_singletask.exceptions import LockError
from django_singletask.locks.keys import NO_LOCK, QUEUED
from django_singletask.locks.liveness import proof_that_gone
from django_singletask.locks.ref import LockRef
from django_singletask.log import logger
from django_singletask.process import start_time
from django_singletask.stores import look_at_epoch
from django_singletask.stores.epoch import epoch_of
from django_singletask.task.ended import DIED, note
from django_singletask.task.header import Header
from django_singletask.task.options import LockOptions
from django_singletask.task.unique import owe
from django_singletask.threads import Background

CHECK = 0.2
"""Seconds between two checks of the processes of the pool."""
LEARN_EVERY = 1.0
"""Seconds between two looks at the epoch of the cache."""


class Accepted:
    """The last delivery that a pool process has accepted; its lock is freed if the process dies."""

    start = ""
    """When the process started; a later process with the same pid has another start."""
    ended = False
    """Whether the delivery has ended."""

    def __init__(self, request: Any, header: Header) -> None:
        self.request = request
        self.header = header

    def find_lock(self) -> tuple[LockRef, LockOptions] | None:
        """Return the lock of the delivery, not acquired, and its options; None without a lock."""
        task = self.request.task
        header = self.header
        try:
            key = header.lock_key
            if header.options:
                LockOptions.check_call(task, header.options)
            options = LockOptions.of(task, header.options)
            if key is None:
                args, kwargs, _embed = self.request._payload  # noqa: SLF001, Celery has no other way
                key = options.key(task, args, kwargs)
        except (TypeError, ValueError, LockError):
            return None  # the run itself has failed with this error
        if key == NO_LOCK:
            return None
        quiet = not options.lock_history
        return LockRef(conf.cache, *key, task=task.name, quiet=quiet), options

    def free(self, ref: LockRef, slots: int, proof: str) -> None:
        """Free the lock of a process that is dead, as the ``proof`` says, and its queued call."""
        header = self.header
        token = header.token
        assert token is not None  # hand_out_token() chose it
        note(ref.lock_key, header.id, DIED)
        ref.of_token(token, slots).free_killed(token, proof)
        if header.queued:
            beside = ref.beside(QUEUED)
            if not self.ended:
                # A delivery that has ended may have queued its call again with that entry.
                owe(beside, header.queued.encode(errors="replace"))
            beside.free_killed(token, proof)


# Which process frees the lock of a killed process
#
# The main process chooses the token, so it can release the lock of that run only, once its process
# is gone. It must not do that before: the signals of a failure (task_failure, task_revoked,
# on_timeout) come while the process still runs its "finally", up to seconds before the body ends:
#
#   main:   time limit -> on_timeout ............ pid gone -> release(token)
#   child:  body ....................... SIGKILL
#
# A process runs one task at a time, so only the last accepted delivery matters. If the child has
# already released the lock, the main process finds another token, or no entry.
#
# The start time of the process is read at the first check, because reading it at each delivery
# would cost more than everything else here. If the process was killed before that check, and a new
# process already has its pid, nothing proves the death. Then the lock expires with its lease, and
# no living run is harmed.
#
#   main:         accepted by pid 7                               checks: start of the new pid 7
#   process 7:                      runs   killed   new process 7


class Watcher(Background):
    """Watch the pool's processes in a thread, since a store that is down must not stop the hub."""

    name = "singletask-watcher"
    someone_died: bool = False
    free_failed: bool = False

    def __init__(self) -> None:
        self.deliveries: dict[int, Accepted] = {}
        self.to_free: list[tuple[float, Callable[[], None]]] = []
        """When to give up, a lease after the death of a run, and what frees the run's lock."""

    def run(self) -> None:
        while True:
            time.sleep(CHECK)
            try:
                self.check_processes()
                self.free()
                self.learn_epoch()
            except Exception:
                logger.exception("The check of the pool's processes failed; trying again.")

    def learn_epoch(self) -> None:
        """Read the epoch of the cache, so that a process that is forked later inherits it.

        With an old epoch the process would wait for a second before its first lock.
        """
        next_look_at = epoch_of(conf.cache).seen_at + LEARN_EVERY
        if clock.now() < next_look_at:
            return
        with suppress(Exception):  # if the cache is down, the next lock reports the outage
            look_at_epoch()

    def check_processes(self) -> None:
        """Find the processes that are dead, and note which locks are to be freed for them."""
        for pid, delivery in list(self.deliveries.items()):
            proof = proof_that_gone(pid, delivery.start)
            if proof is None:
                if not delivery.start:
                    delivery.start = start_time(pid)
                continue
            if self.deliveries.get(pid) is delivery:
                del self.deliveries[pid]
            self.someone_died = True
            found = delivery.find_lock()
            if found is not None:
                ref, options = found
                length = options.lock_timeout
                if length is None:
                    length = conf.lock_timeout
                give_up_at = time.monotonic() + length
                free_lock = partial(delivery.free, ref, options.lock_slots, proof)
                self.to_free.append((give_up_at, free_lock))

    def free(self) -> None:
        """Free the locks of killed runs; if the store is down, the next check tries again."""
        if not self.to_free:
            return
        left = []
        failure = None
        for give_up_at, free_lock in self.to_free:
            try:
                free_lock()
            except Exception as error:  # the next lock may be on a node of a cluster that answers
                failure = error
                if time.monotonic() < give_up_at:
                    left.append((give_up_at, free_lock))
        if failure is not None and not self.free_failed:  # logged once per outage
            logger.warning("The locks of killed runs are not freed yet; trying again: %s", failure)
        self.free_failed = failure is not None
        self.to_free = left
        connections.close_all()


watcher: Watcher = Watcher()
"""The watcher of this process; its thread begins only in the main process of a worker."""


def has_processes(consumer: Any) -> bool:
    """Return whether the pool of a worker consists of processes."""
    return type(consumer.pool).__module__ == "celery.concurrency.prefork"


@worker_ready.connect
def watch_pool(sender: Any, **kwargs: Any) -> None:
    """Start to watch the processes."""
    watcher.begin()
    if has_processes(sender) and sender.hub:
        # The pool itself replaces a dead process only within 5 seconds. Without a hub (filesystem
        # broker), it has a thread for that.
        def replace() -> None:
            if watcher.someone_died:
                watcher.someone_died = False
                sender.pool.maintain_pool()

        sender.hub.call_repeatedly(CHECK, replace)
