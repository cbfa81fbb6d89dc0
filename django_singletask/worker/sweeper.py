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
        has_failed = False
        while True:
            time.sleep(SWEEP)
            has_failed = try_to_sweep(failed_before=has_failed)


def try_to_sweep(*, failed_before: bool = False) -> bool:
    """Close the history's rows of locks that are no longer held, and clean up the lock table.

    Return whether this sweep failed. Its error is logged, unless the sweep before failed as well.
    """
    try:
        if history.take_turn():
            with suppress(CannotList):  # a key function hides which entries are locks
                get_store(conf.cache).purge()
            if conf.history != "off":
                history.sweep()
        return False
    except Exception as error:
        if not failed_before:
            logger.warning(
                "The history cannot be cleaned up (%s); trying again each minute. Until then the "
                "history may show killed runs as held.",
                in_words(error),
            )
        return True
    finally:
        connections.close_all()


sweeper: Sweeper = Sweeper()
"""The sweeper of this process; its thread begins only in the main process of a worker."""


@worker_ready.connect
def begin(**kwargs: Any) -> None:
    """Start to sweep."""
    sweeper.begin()
