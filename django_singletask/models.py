"""The history: one row for each run that had a lock, each skip, duplicate and trouble."""

from __future__ import annotations

from datetime import datetime

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_singletask.history.queries import TaskLockEventQuerySet, timestamp
from django_singletask.holder import Holder

__all__ = ["TaskLockEvent"]


class Kind(models.TextChoices):
    ACQUIRED = "acquired", _("acquired")
    SKIPPED = "skipped", _("skipped")
    DUPLICATE = "duplicate", _("duplicate")
    EXPIRED = "expired", _("expired")
    LOST = "lost", _("lost")
    RETAKEN = "retaken", _("taken again")
    CLEARED = "cleared", _("cleared")
    UNGUARDED = "unguarded", _("ran without a lock")


COUNTED = frozenset({"skipped", "duplicate"})
"""Calls that did not run: repeats against one holder are counted in one row."""

TROUBLE = frozenset({"expired", "lost", "retaken", "cleared", "unguarded"})
"""What can let two runs work at the same time; also recorded with ``lock_history=False``."""


class HoldOutcome(models.TextChoices):
    """How a hold ended; empty while it lasts.

    What ends it otherwise than its run has a row as well, and that one has the shorter word.
    """

    RELEASED = "released", _("released")
    DEAD = "dead", _("process dead")
    EXPIRED = "expired", _("hold expired")
    LOST = "lost", _("hold lost")
    CLEARED = "cleared", _("hold cleared")


class Result(models.TextChoices):
    """How the body of a run ended."""

    RETURNED = "returned", _("returned")
    RAISED = "raised", _("raised")
    TERMINATED = "terminated", _("terminated")
    RETRIED = "retried", _("retried")
    IGNORED = "ignored", _("ignored")
    POSTPONED = "postponed", _("postponed")


class TaskLockEvent(models.Model):
    """One thing that happened to a lock.

    An ``acquired`` row is open (``outcome`` is empty) while the run has the lock, and is closed
    when the run ends. Repeated skips against one holder increase ``count`` and ``last_at`` of one
    row. Durations are in seconds.
    """

    id = models.BigAutoField(primary_key=True, verbose_name=_("ID"))
    kind = models.CharField(_("kind"), max_length=10, choices=Kind)
    outcome = models.CharField(_("outcome"), max_length=10, choices=HoldOutcome, blank=True)
    result = models.CharField(_("result"), max_length=10, choices=Result, blank=True)
    name = models.CharField(_("lock"), max_length=255)
    key = models.CharField(_("cache key"), max_length=255)
    cache = models.CharField(_("cache"), max_length=255, blank=True)
    task = models.CharField(_("task"), max_length=255, blank=True)
    task_id = models.CharField(_("task id"), max_length=255, blank=True)
    token = models.CharField(_("token"), max_length=32, blank=True)
    host = models.CharField(_("host"), max_length=255, blank=True)
    pid = models.PositiveIntegerField(_("process"), default=0)
    at = models.DateTimeField(_("at"))
    ended_at = models.DateTimeField(_("ended at"), null=True, blank=True)
    timeout = models.FloatField(_("lease"), default=0, help_text=_("Seconds."))
    count = models.PositiveIntegerField(_("count"), default=1)
    last_at = models.DateTimeField(_("last at"), null=True, blank=True)
    blocked_by = models.CharField(
        _("blocked by"), max_length=32, blank=True, help_text=_("Token of the holder.")
    )
    blocked_by_task_id = models.CharField(_("blocked by task id"), max_length=255, blank=True)
    actor = models.CharField(_("actor"), max_length=255, blank=True)
    reason = models.CharField(_("reason"), max_length=255, blank=True)
    longest_renewal_gap = models.FloatField(
        _("longest renewal gap"), null=True, blank=True, help_text=_("Seconds.")
    )

    state = "held"
    """Of a hold that has not ended, as far as the cache was asked."""

    objects = TaskLockEventQuerySet.as_manager()

    class Meta:
        verbose_name = _("lock event")
        verbose_name_plural = _("lock events")
        ordering = ("-id",)
        default_permissions = ("view", "delete")
        permissions = (("clear_lock", _("Can clear a lock")),)
        constraints = (
            # Repeats are counted in one row, even if many processes meet the holder at once.
            models.UniqueConstraint(
                fields=("blocked_by", "kind", "key", "reason"),
                name="singletask_counted",
                condition=models.Q(kind__in=("skipped", "duplicate")) & ~models.Q(blocked_by=""),
            ),
        )
        indexes = (
            models.Index(fields=("task", "-id"), name="singletask_task"),
            # With these classes PostgreSQL also finds the beginning of a name, under any
            # collation; the other databases ignore them.
            models.Index(
                fields=("name", "-id"),
                name="singletask_name",
                opclasses=("varchar_pattern_ops", "int8_ops"),
            ),
            models.Index(fields=("at",), name="singletask_at"),
            models.Index(fields=("task_id",), name="singletask_task_id"),
            # Most rows are runs of tasks that released their lock. The conditions keep them out of
            # the next indexes; MySQL and MariaDB ignore conditions.
            models.Index(
                fields=("token",),
                name="singletask_token",
                condition=models.Q(task_id="") | ~models.Q(outcome="released"),
            ),
            models.Index(
                fields=("kind", "-id"),
                name="singletask_kind",
                condition=~models.Q(kind="acquired"),
            ),
            models.Index(
                fields=("outcome", "-id"),
                name="singletask_outcome",
                condition=~models.Q(outcome__in=("", "released")),
            ),
            models.Index(
                fields=("kind", "outcome", "key"),
                name="singletask_open",
                condition=models.Q(kind="acquired", outcome=""),
            ),
            # For MySQL and MariaDB, which do not support a constraint with a condition. Elsewhere
            # this index is empty, because the column is never NULL.
            models.Index(
                fields=("blocked_by",),
                name="singletask_blocked_by",
                condition=models.Q(blocked_by__isnull=True),
            ),
        )

    def __str__(self) -> str:
        return f"{self.name}: {self.get_outcome_display() or self.get_kind_display()}"

    def holder(self) -> Holder:
        """Return the holder of the lock, as far as the row describes it."""
        facts = {"task": self.task or None, "task_id": self.task_id or None}
        return Holder.from_dict({**vars(self), **facts, "since": timestamp(self.at)})

    @property
    def end(self) -> datetime:
        """When it ended, or happened last, as far as is known."""
        return self.ended_at or self.last_at or self.at

    @property
    def is_counted(self) -> bool:
        return self.kind in COUNTED

    @property
    def is_completed(self) -> bool:
        """Whether this run had the lock and its body returned or raised."""
        ended = (self.kind, self.outcome) == ("acquired", "released")
        return ended and self.result in ("returned", "raised")
