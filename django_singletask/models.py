"""The history: one row for each run that had a lock, and for the calls that one holder blocked."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from django_singletask.conf import conf
from django_singletask.history.queries import TaskLockEventQuerySet, ago, timestamp
from django_singletask.holder import Holder
from django_singletask.locks.keys import QUEUED

__all__ = ["TaskLockEvent"]

if TYPE_CHECKING:
    # What a field holds. Only mypy's plugin for Django finds that out by itself.
    Text = models.CharField[str, str]
    Number = models.PositiveIntegerField[int, int]
    Seconds = models.FloatField[float, float]
    MaybeSeconds = models.FloatField[float | None, float | None]
    Moment = models.DateTimeField[datetime, datetime]
    MaybeMoment = models.DateTimeField[datetime | None, datetime | None]

COUNTED = {"conflict": _("conflict"), "duplicate": _("duplicate")}
"""Kinds of calls that found a holder or an equal call: those against one holder are one row."""
KINDS = {"run": pgettext_lazy("lock", "run"), **COUNTED}
"""What a row is about: a run that had the lock, or calls that one holder blocked."""

TROUBLE = {
    "dead": _("dead"),
    "expired": _("expired"),
    "lost": _("lost"),
    "cleared": _("cleared"),
    "unguarded": _("unguarded"),
}
"""Outcomes of a run that can let two runs work at the same time; unguarded: it had no lock."""
OUTCOMES = {"released": _("released"), **TROUBLE}
"""How a hold ended; empty while it lasts."""
RETAKEN = "retaken"
"""An event that is no outcome, since the run goes on: a row counts how often it happened."""

COMPLETED = {"returned": _("returned"), "raised": _("raised")}
"""Results of a body that came to its end."""
OF_CALLS = {"skipped": _("skipped"), "waiting": _("waiting"), "failed": _("failed")}
"""Results of calls that found the lock held."""
RESULTS = {
    **COMPLETED,
    "terminated": _("terminated"),
    "retried": _("retried"),
    "ignored": _("ignored"),
    "postponed": _("postponed"),
    **OF_CALLS,
}
"""How the body of a run ended, or what became of a call that found the lock held."""
WAS_WAITING = ":was_waiting"
"""The end of ``ref`` for calls that gave up, and that their holder has counted as waiting."""


def is_over(row: TaskLockEvent) -> bool:
    """Return whether the first lease of a hold has ended, which its process should have renewed.

    False of a hold in another cache than that of this process, which does not ask that cache; and
    of a lock that was left to a receiver.
    """
    if row.cache not in ("", conf.cache) or row.was_left:
        return False
    return ago(row.at) > row.timeout


class TaskLockEvent(models.Model):
    """A run that had a lock, or all the calls with one end that one holder blocked.

    ``ref`` finds the row: the token of a run; token, reason and result of blocked calls.
    ``ended_at`` and ``result`` are what the run itself reported. If its hold ended otherwise,
    ``outcome`` says how, ``noticed_at`` when, ``actor`` who noticed it or cleared the lock, and
    ``reason`` how that is known. ``happened_at`` is when the last thing happened that the row
    tells; the rows are in its order. ``waited`` is how long a run waited for its lock; of counted
    calls, how long those that failed had waited in vain, all together. Durations are in seconds.
    """

    id: models.BigAutoField[int, int] = models.BigAutoField(primary_key=True, verbose_name=_("ID"))
    ref: Text = models.CharField(max_length=64)
    kind: Text = models.CharField(_("kind"), max_length=10, choices=KINDS)
    outcome: Text = models.CharField(_("outcome"), max_length=10, choices=OUTCOMES, blank=True)
    result: Text = models.CharField(_("result"), max_length=10, choices=RESULTS, blank=True)
    name: Text = models.CharField(_("lock"), max_length=255)
    key: Text = models.CharField(_("cache key"), max_length=255)
    cache: Text = models.CharField(_("cache"), max_length=255, blank=True)
    task: Text = models.CharField(_("task"), max_length=255, blank=True)
    task_id: Text = models.CharField(_("task id"), max_length=255, blank=True)
    host: Text = models.CharField(_("host"), max_length=255, blank=True)
    pid: Number = models.PositiveIntegerField(_("process"), default=0)
    at: Moment = models.DateTimeField(_("at"))
    happened_at: Moment = models.DateTimeField(_("last happened at"))
    ended_at: MaybeMoment = models.DateTimeField(_("ended at"), null=True, blank=True)
    noticed_at: MaybeMoment = models.DateTimeField(_("noticed at"), null=True, blank=True)
    retaken: Number = models.PositiveIntegerField(_("retaken"), default=0)
    retaken_at: MaybeMoment = models.DateTimeField(_("retaken at"), null=True, blank=True)
    timeout: Seconds = models.FloatField(_("lease"), default=0, help_text=_("Seconds."))
    fixed: models.BooleanField[bool, bool] = models.BooleanField(_("fixed lease"), default=False)
    count: Number = models.PositiveIntegerField(_("count"), default=1)
    last_at: MaybeMoment = models.DateTimeField(_("last at"), null=True, blank=True)
    blocked_by: Text = models.CharField(
        _("blocked by"), max_length=32, blank=True, help_text=_("Token of the holder.")
    )
    blocked_by_task_id: Text = models.CharField(_("blocked by task id"), max_length=255, blank=True)
    actor: Text = models.CharField(_("actor"), max_length=255, blank=True)
    reason: Text = models.CharField(_("reason"), max_length=255, blank=True)
    longest_renewal_gap: MaybeSeconds = models.FloatField(
        _("longest renewal gap"), null=True, blank=True, help_text=_("Seconds.")
    )
    waited: Seconds = models.FloatField(_("waited"), default=0, help_text=_("Seconds."))

    state = "held"
    """The state of a hold that has not ended, as far as the cache was asked."""

    # A manager, which has the methods of the QuerySet.
    objects: TaskLockEventQuerySet = TaskLockEventQuerySet.as_manager()  # type: ignore[assignment]

    class Meta:
        verbose_name: ClassVar = _("lock event")
        # The menu of the admin shows it: the page of what is held is the first one there.
        verbose_name_plural: ClassVar = _("locks")
        ordering: ClassVar = ("-happened_at",)
        default_permissions: ClassVar = ("view", "delete")
        permissions: ClassVar = (("clear_lock", _("Can clear a lock")),)
        constraints: ClassVar = (models.UniqueConstraint(fields=("ref",), name="singletask_ref"),)
        indexes: ClassVar = (
            models.Index(fields=("task", "-happened_at"), name="singletask_task"),
            models.Index(fields=("name", "-happened_at"), name="singletask_name"),
            models.Index(fields=("happened_at",), name="singletask_happened"),
            # The second column shows without the row what went on after a window in the past.
            models.Index(fields=("at", "happened_at"), name="singletask_at"),
            models.Index(fields=("task_id",), name="singletask_task_id"),
            # Most rows are runs that released their lock. The conditions keep them out of the next
            # indexes; MySQL and MariaDB ignore conditions.
            models.Index(
                fields=("kind", "outcome", "-happened_at"),
                name="singletask_state",
                condition=~models.Q(outcome="released"),
            ),
            models.Index(
                fields=("blocked_by",),
                name="singletask_blocked_by",
                condition=~models.Q(kind="run"),
            ),
            models.Index(
                fields=("-retaken_at",),
                name="singletask_retaken",
                condition=models.Q(retaken_at__isnull=False),
            ),
        )

    def __str__(self) -> str:
        what = self.get_kind_display()  # pyright: ignore[reportAttributeAccessIssue]
        if self.outcome:
            what = self.get_outcome_display()  # pyright: ignore[reportAttributeAccessIssue]
        return f"{self.name}: {what}"

    @property
    def token(self) -> str:
        """The token of the run; empty if the row counts calls."""
        if self.is_counted:
            return ""
        return self.ref

    def holder(self) -> Holder:
        """Return the holder of the lock, as far as the row describes it."""
        # A holder has None or another value of its own where a column is empty.
        facts = {name: value for name, value in vars(self).items() if value}
        facts["token"] = self.token
        facts["since"] = timestamp(self.at)
        return Holder.from_dict(facts)

    @property
    def is_hold(self) -> bool:
        """Whether the row is about a run that had a lock; not about a queued call, for example."""
        if self.is_counted or self.outcome == "unguarded":
            return False
        return not self.key.startswith(QUEUED)

    @property
    def was_left(self) -> bool:
        """Whether the lock was handed over: it has no process, and ends as its holder wanted."""
        if self.pid:
            return False
        return self.fixed

    @property
    def hold_ended_at(self) -> datetime | None:
        """When the hold of this row ended; None without a hold, or if its end is not known."""
        if not self.is_hold:
            return None
        if self.outlived_fixed_lease:
            lease_end = self.at + timedelta(seconds=self.timeout)
            if self.noticed_at and self.noticed_at < lease_end:
                return self.noticed_at  # the cache forgot the lock
            return lease_end
        if not self.outcome:
            return None
        if self.outcome == "cleared" and self.ended_at and self.noticed_at:
            # The run went on without its lock, or what was cleared is the lock that it had kept.
            return min(self.ended_at, self.noticed_at)
        if self.ended_at is None:
            return self.noticed_at
        return self.ended_at

    @property
    def outlived_fixed_lease(self) -> bool:
        """Whether this run had a lease that was not renewed, and that ended before the run."""
        if not self.fixed:
            return False
        if self.outcome:
            return self.outcome in ("expired", "lost")
        return self.state == "expired"

    @property
    def end(self) -> datetime:
        """When the hold ended, or else when the last thing happened, as far as is known."""
        ended_at = self.hold_ended_at
        if ended_at is not None:
            return ended_at
        return self.happened_at

    @property
    def is_counted(self) -> bool:
        return self.kind in COUNTED

    @property
    def is_completed(self) -> bool:
        """Whether this run had the lock and its body returned or raised."""
        if self.kind != "run" or self.result not in COMPLETED:
            return False
        if self.outcome == "cleared" and self.ended_at and self.noticed_at:
            return self.ended_at <= self.noticed_at  # then the lock was cleared that the run kept
        return self.outcome == "released"

    @property
    def troubles(self) -> list[str]:
        """What could let another run work at the same time."""
        troubles = []
        if self.retaken:
            troubles.append(RETAKEN)
        if self.outcome in TROUBLE:
            troubles.append(self.outcome)
        return troubles
