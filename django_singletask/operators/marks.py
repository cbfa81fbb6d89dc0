"""What the timeline draws: marks of events and of sums of events, each in the lane of a lock."""

from __future__ import annotations

import dataclasses
import math
from datetime import datetime
from functools import cached_property
from typing import NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_singletask.models import TaskLockEvent
from django_singletask.operators import words

SIGNS = {
    "expired": "M0-6 6 5H-6Z",
    "lost": "M0-7 6 0 0 7-6 0Z",
    "retaken": "M-5-5H5V5H-5Z",
    "cleared": "M-5-5 5 5M5-5-5 5",
    "unguarded": "M-5 0A5 5 0 1 0 5 0 5 5 0 1 0-5 0Z",
}
"""Paths around (0, 0): triangle, diamond, square, cross and circle differ not only in colour."""
NEAR = 0.3
"""Percent of the width: marks of one kind that are nearer to each other become one mark."""


class Lane(NamedTuple):
    """What a line of the drawing is about; ``field`` is ``"name"``, of a lock, or ``"task"``."""

    label: str
    field: str

    @classmethod
    def of(cls, event: TaskLockEvent, by_task: bool) -> Lane:
        return cls(event.task, "task") if by_task and event.task else cls(event.name, "name")


@dataclasses.dataclass
class Mark:
    """One event in a lane, several of one shape and state at nearly the same place, or a sum.

    ``shape`` is ``"bar"`` for a hold, ``"tick"`` for skips and duplicates, ``"sign"`` for trouble.
    ``state`` and ``word`` are those of :func:`status`. ``x`` and ``width`` are percent of the width
    of the lane; ``width`` is never too small to be seen. A bar that sums up ``runs`` is as high as
    the ``share`` of the time for which they had the lock, on top of the share ``below``.
    """

    shape: str
    state: str
    word: str
    at: datetime
    until: datetime
    x: float
    width: float
    events: list[TaskLockEvent]
    number: int = 0
    when: str = ""
    runs: int = 0
    seconds: float = 0.0
    share: float = 1.0
    below: float = 0.0
    query: str = ""

    @property
    def is_open(self) -> bool:
        return self.shape == "bar" and not self.events[0].outcome

    @property
    def count(self) -> int:
        return sum(event.count for event in self.events)

    @property
    def path(self) -> str:
        return SIGNS[self.state]

    @property
    def height(self) -> int:
        """Return the height in pixels: of a tick 4 for one skip, 12 from about 30 skips on."""
        if self.shape == "tick":
            return min(12, 4 + round(math.log2(self.count) * 1.6))
        return max(2, round(16 * self.share))

    @property
    def y(self) -> int:
        return 24 if self.shape == "tick" else 21 - round(16 * self.below) - self.height

    @cached_property
    def text(self) -> str:
        event = self.events[0]
        if self.shape == "tick":
            reasons = {event.reason for event in self.events} - {"skip"}
            blockers = {event.blocked_by_task_id or event.blocked_by for event in self.events}
            several = len(blockers - {""}) > 1
            blocked = _("blocked by {} …") if several else _("blocked by {}")
            blocker = min(filter(None, blockers), default="")
            word = self.word if self.count == 1 else f"{self.word} × {self.count}"
            parts = [word, *sorted(reasons), blocker and blocked.format(blocker)]
        elif self.runs or len(self.events) > 1:
            if self.runs:
                lengths = _("held for {} in all").format(words.hold_time(round(self.seconds, 1)))
            else:
                holds = sorted(words.hold_seconds(event) for event in self.events)
                lengths = f"{words.hold_time(holds[0])} – {words.hold_time(holds[-1])}"
            count = self.runs or len(self.events)
            runs = ngettext("{} run: {}", "{} runs: {}", count).format(count, self.word)
            parts = [runs, lengths]
        else:
            word = self.word
            if self.shape == "bar":
                text = _("{} after {}") if event.ended_at else _("{} for {}")
                word = text.format(word, words.hold_time(words.hold_seconds(event, self.until)))
            actor = event.actor and _("by {}").format(event.actor)
            task = event.task_id and _("task {}").format(event.task_id)
            parts = [word, event.reason, actor, task, words.process(event.host, event.pid)]
        return ", ".join(filter(None, parts))
