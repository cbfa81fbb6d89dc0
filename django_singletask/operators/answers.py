"""Ask the store and the history for a page, which shows what can be had while one is down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache

from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections, router, transaction
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_singletask.conf import conf
from django_singletask.models import TaskLockEvent
from django_singletask.operators import held as registry
from django_singletask.operators.errors import without_secrets
from django_singletask.operators.held import CannotList, HeldLock, NoHistory
from django_singletask.operators.starving import HOUR
from django_singletask.operators.words import duration

__all__ = [
    "apart",
    "ask_the_store",
    "ask_who_starves",
    "holder_row",
    "recorded",
    "recorded_tasks",
    "why",
]

TASKS = 100
"""Tasks of the history that a page offers, each found by a query of its own."""


@contextmanager
def apart() -> Iterator[None]:
    """Keep a statement to the history that fails from spoiling the transaction of the request."""
    alias, done = router.db_for_read(TaskLockEvent), False
    in_transaction = connections[alias].in_atomic_block
    try:
        with transaction.atomic(using=alias) if in_transaction else nullcontext():
            yield
            done = True
    except Error:
        # The savepoint is gone back to. Who swallowed the error of a statement has told it.
        if not done:
            raise


def holder_row(token: str) -> TaskLockEvent | None:
    """Return the row of the run that has, or had, this token."""
    # The kind is looked at here: SQLite would rather read all that were acquired.
    rows = TaskLockEvent.objects.filter(token=token).order_by() if token else []
    return next((row for row in rows if row.kind == "acquired"), None)


def recorded(locks: list[HeldLock]) -> set[str]:
    """Return the tokens of those that the history knows: a search for their task finds them."""
    tokens = [lock.holder.token for lock in locks if lock.holder.token]
    rows = TaskLockEvent.objects.filter(token__in=tokens).order_by()
    try:
        with apart():
            return set(rows.values_list("token", flat=True))
    except Error:
        return set()


@lru_cache(maxsize=1)
def recorded_tasks(minute: int) -> list[str]:
    """Return the first tasks that the history knows; asked once a minute, which is a number.

    Each is looked up by the one before it: DISTINCT would read the whole table, or its index.
    """
    rows, found = TaskLockEvent.objects.order_by("task").values_list("task", flat=True), [""]
    while len(found) <= TASKS and (after := rows.filter(task__gt=found[-1]).first()):
        found.append(after)
    return found[1:]


def ask_the_store() -> tuple[list[HeldLock], str]:
    """Return what is held now, or why that cannot be asked."""
    try:
        with apart():
            return registry.held(), ""
    except Exception as error:  # each client has errors of its own
        return [], why(error)


def ask_who_starves() -> tuple[list[tuple[str, str]], str]:
    """Return the names of locks that starve, each with a sentence, or why nobody knows."""
    try:
        with apart():
            states = registry.starving(HOUR)
        return [(state.name, _describe(state)) for state in states], ""
    except NoHistory as error:
        return [], without_secrets(str(error))


def _describe(state: registry.Starving) -> str:
    calls = ngettext(
        "{} call came to nothing in {}, the last {} ago.",
        "{} calls came to nothing in {}, the last {} ago.",
        state.skipped,
    )
    text = calls.format(state.skipped, duration(state.unmet), duration(state.last_skip))
    if state.since_completed is None:
        return f"{text} " + _("No completed run is known.")
    return f"{text} " + _("Last completed {} ago.").format(duration(state.since_completed))


def why(error: Exception) -> str:
    """Say why the cache cannot be asked."""
    if isinstance(error, (CannotList, ImproperlyConfigured)):
        return without_secrets(str(error))
    first = without_secrets(str(error).partition("\n")[0]).rstrip(".")
    return _("The cache {} (SINGLETASK_CACHE) cannot be asked: {}.").format(
        repr(conf.cache), f"{type(error).__name__}: {first}"
    )
