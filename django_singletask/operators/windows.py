"""Time windows of the history, as a page's address names them: the last hour, or from … to …."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django.utils.formats import date_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_singletask.operators import words

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
SPANS = {
    "15m": gettext_lazy("15 minutes"),
    "1h": gettext_lazy("1 hour"),
    "24h": gettext_lazy("24 hours"),
    "7d": gettext_lazy("7 days"),
}
"""The time spans up to now that the pages offer."""
TODAY = ["15m", "1h"]
"""The spans whose times are clear without a date."""
LABELS = 7
SECONDS = [1, 10, 30, 60, 180, 600, 1800, 3600, 14_400]
"""Lengths of steps between two labels; the longer ones are days."""
STEPS = [timedelta(seconds=length) for length in SECONDS]
STEPS += [timedelta(days=days) for days in (1, 7, 30, 365, 10_000)]


@dataclasses.dataclass(frozen=True)
class Window:
    """The time from ``start`` to ``end``; ``span`` is its name if the pages offer it."""

    start: datetime
    end: datetime
    span: str = ""

    @classmethod
    def past(cls, span: str, now: datetime) -> Window:
        return cls(now - timedelta(seconds=words.parse_duration(span)), now, span)

    def query(self, **others: Any) -> str:
        """Return an address's parameters: ``others``, and those that name this window."""
        if self.span:
            return urlencode({**others, "range": self.span})
        return urlencode({**others, "from": self.start.isoformat(), "to": self.end.isoformat()})

    @property
    def until(self) -> datetime | None:
        """The end for a query; None if it is now: the clock of another host may be ahead."""
        if self.span:
            return None
        return self.end

    @property
    def length(self) -> timedelta:
        return self.end - self.start

    def before(self) -> Window:
        """Return the window of the same length that ends where this one starts."""
        return Window(self.start - self.length, self.start)

    def clock_time(self, at: datetime) -> str:
        """Write a time within it, with the date where that is needed."""
        return words.clock_time(at, dated=self.span not in TODAY)

    def percent(self, at: datetime) -> float:
        return min(100.0, max(0.0, 100 * ((at - self.start) / self.length)))

    def labels(self) -> Iterator[tuple[str, str]]:
        """Yield the place and the text of each time that is round in the user's time zone."""
        # the shortest step that needs few enough labels
        step = next(step for step in STEPS if self.length / step <= LABELS)
        form = "H:i"
        if step >= DAY:
            form = "D j"
        elif step < MINUTE:
            form = "H:i:s"
        start = words.to_local(self.start)
        midnight = start.replace(hour=0, minute=0, second=0, microsecond=0)
        at = midnight + step * ((start - midnight) // step + 1)
        while at <= self.end:
            # Converted, since the clock change may leave the hour out.
            text = date_format(words.to_local(words.to_utc(at)), form)
            yield f"{self.percent(at):.2f}%", text
            at += step


def window_of(query: Mapping[str, str], now: datetime) -> tuple[Window | None, str]:
    """Return the window that an address names, if any, and what is wrong with it, if anything.

    Without ``to`` the window ends now. Without ``from`` it begins an hour before its end.
    """
    first = query.get("from", "").strip()
    last = query.get("to", "").strip()
    if not first and not last:
        span = query.get("range", "")
        if span in SPANS:
            return Window.past(span, now), ""
        return None, ""
    try:
        end = now
        if last:
            end = min(words.to_moment(last), now)
        start = end - HOUR
        if first:
            start = words.to_moment(first)
        # No window is longer than the longest step, so that each one has labels.
        start = max(start, now - STEPS[-1])
    except (ValueError, OverflowError):
        typed = f"{first} {last}".strip()
        example = f"{words.to_local(now):%Y-%m-%dT%H:%M}"
        return None, _("{} is not a time: write it as {}.").format(repr(typed), example)
    if start < end:
        return Window(start, end), ""
    text = _("The window must end after it begins: write a time after {} into the second field.")
    return None, text.format(words.clock_time(start, dated=True))
