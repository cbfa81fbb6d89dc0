"""Time windows of the history, as a page's address names them: the last hour, or from … to …."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from datetime import timezone as offset
from typing import NamedTuple
from urllib.parse import urlencode

from django.conf import settings
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.formats import date_format
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_singletask.operators.words import clock_time

UTC = offset.utc
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


class Span(NamedTuple):
    label: str | Promise
    length: timedelta


SPANS = {
    "15m": Span(gettext_lazy("15 minutes"), timedelta(minutes=15)),
    "1h": Span(gettext_lazy("1 hour"), HOUR),
    "24h": Span(gettext_lazy("24 hours"), DAY),
    "7d": Span(gettext_lazy("7 days"), 7 * DAY),
}
"""The time spans up to now that the pages offer."""
LABELS, BUCKETS = 7, 60
STEPS = [timedelta(seconds=seconds) for seconds in (1, 10, 30, 60, 180, 600, 1800)]
STEPS += [HOUR, 4 * HOUR, DAY, 7 * DAY, 30 * DAY, 365 * DAY, 10_000 * DAY]


@dataclasses.dataclass(frozen=True)
class Window:
    """The time from ``start`` to ``end``; ``span`` is its name if the pages offer it."""

    start: datetime
    end: datetime
    span: str = ""

    @classmethod
    def past(cls, span: str, now: datetime) -> Window:
        return cls(now - SPANS[span].length, now, span)

    @property
    def query(self) -> str:
        """The parameters of an address that name this window."""
        if self.span:
            return urlencode({"range": self.span})
        return urlencode({"from": self.start.isoformat(), "to": self.end.isoformat()})

    @property
    def until(self) -> datetime | None:
        """The end for a query; None if it is now: the clock of another host may be ahead."""
        return None if self.span else self.end

    @property
    def is_dated(self) -> bool:
        """Whether the times within it need their date."""
        return self.end - self.start >= DAY or not self.span

    @property
    def fields(self) -> tuple[str, str]:
        """Its start and its end, as two fields of a form for local times have them."""
        start, end = map(_local, (self.start, self.end))
        return f"{start:%Y-%m-%dT%H:%M:%S}", f"{end:%Y-%m-%dT%H:%M:%S}"

    def percent(self, at: datetime) -> float:
        return min(100.0, max(0.0, 100 * ((at - self.start) / (self.end - self.start))))

    def rounded(self, parts: int) -> tuple[datetime, timedelta]:
        """Divide it into so many parts at most, between times that are round in its time zone.

        Return the last such time that is not after the start, and the length of a part.
        """
        step = next(step for step in STEPS if (self.end - self.start) / step <= parts)
        local = _local(self.start)
        midnight = local.replace(hour=0, minute=0, second=0, microsecond=0)
        return midnight + step * ((local - midnight) // step), step

    def labels(self) -> Iterator[tuple[str, str]]:
        """Return the places and the texts of the round times."""
        at, step = self.rounded(LABELS)
        text = "D j" if step >= DAY else "H:i:s" if step < STEPS[3] else "H:i"
        while (at := at + step) <= self.end:
            # Converted, since the clock change may leave the hour out.
            yield f"{self.percent(at):.2f}%", date_format(_local(to_utc(at)), text)


def window_of(query: Mapping[str, str], now: datetime) -> tuple[Window | None, str]:
    """Return the window that an address names, if any, and what is wrong with it, if anything.

    Only ``from`` is up to now, only ``to`` is the hour before.
    """
    texts = {name: query.get(name, "").strip() for name in ("from", "to")}
    if not any(texts.values()):
        span = query.get("range", "")
        if not span or span in SPANS:
            return Window.past(span, now) if span else None, ""
        text = _("There is no range {}: choose {}, or a time from … to …")
        return None, text.format(repr(span), ", ".join(SPANS))
    try:
        end = min(_moment(texts["to"]), now) if texts["to"] else now
        start = _moment(texts["from"]) if texts["from"] else end - HOUR
        start = max(start, now - STEPS[-1])
    except (ValueError, OverflowError) as error:
        text = _("{} is not a time: write it as {}.")
        return None, text.format(repr(str(error)), f"{_local(now):%Y-%m-%dT%H:%M}")
    if start < end:
        return Window(start, end), ""
    text = _("The window must end after it begins: write a time after {} into the second field.")
    return None, text.format(clock_time(start, dated=True))


def _moment(text: str) -> datetime:
    """Read a time; without an offset it is in the time zone of the page."""
    try:
        at = parse_datetime(text)
    except ValueError:
        at = None
    if at is None:
        raise ValueError(text)
    if not settings.USE_TZ:
        return at if timezone.is_naive(at) else timezone.make_naive(at)
    return to_utc(timezone.make_aware(at) if timezone.is_naive(at) else at)


def _local(at: datetime) -> datetime:
    return timezone.localtime(at) if timezone.is_aware(at) else at


def to_utc(at: datetime) -> datetime:
    return at.astimezone(UTC) if timezone.is_aware(at) else at
