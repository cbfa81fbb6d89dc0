"""Let one of all workers sweep the history and the lock table each minute."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from celery.signals import worker_ready
from django.db import connections

from django_singletask.conf import conf
from django_singletask.history import sweep as history
from django_singletask.log import in_words, logger
from django_singletask.stores import get_store
from django_singletask.stores.base import CannotList
from django_singletask.threads import Background

SWEEP = 60.0
"""Seconds between two sweeps of the history."""


class Sweeper(Background):
    """Sweep each minute, in a thread of its own, since a database may hang."""

    name = "singletask-sweep"

    def run(self) -> None:
        failed = False
        while True:
            time.sleep(SWEEP)
            failed = try_to_sweep(failed)


def try_to_sweep(failed: bool = False) -> bool:
    """Close the history's rows of locks that are no longer held, and clean up the lock table.

    Return whether that failed. The error is logged unless the sweep before ``failed``, too.
    """
    try:
        if history.takes_turn():
            with suppress(CannotList):  # a key function hides which entries are locks
                get_store(conf.cache).purge()
            if conf.history != "off":
                history.sweep()
        return False
    except Exception as error:
        if not failed:
            logger.warning(
                "The history cannot be cleaned up (%s); trying again each minute. Until then the "
                "history may show killed runs as held.",
                in_words(error),
            )
        return True
    finally:
        connections.close_all()


sweeper = Sweeper()
"""That of this process; it begins if it is the main process of a worker."""


@worker_ready.connect
def begin(**kwargs: Any) -> None:
    """Start to sweep; called again after each lost connection to the broker."""
    sweeper.begin()
