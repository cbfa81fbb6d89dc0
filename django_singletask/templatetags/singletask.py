"""Show ids, times and processes on a page."""

from __future__ import annotations

import re
from functools import partial

from django import template
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from django_singletask.operators.words import clock_time, duration, hold_time, place, task_page

BREAK = re.compile(r"(?<=[(,=/_])|(?<=\.)(?![0-9])")
"""Where a name can go on in the next line: not at the point of a number."""
register: template.Library = template.Library()
register.filter(duration)
register.filter(hold_time)
register.filter(place)
moment: partial[str] = partial(clock_time, dated=True)
register.filter("moment", moment)


@register.filter
def breakable(name: str) -> SafeString:
    """Let a long name break into lines after its punctuation, not inside a number or a word."""
    parts = BREAK.split(name)
    return format_html_join(SafeString("<wbr>"), "{}", [(part,) for part in parts])


@register.filter
def long_id(text: str | None) -> SafeString:
    """Show the beginning of an id; the page has all of it, to search for and to copy."""
    if not text:
        return SafeString("-")
    return format_html('<code class="singletask-id" title="{0}">{0}</code>', text)


@register.filter
def task_id(text: str | None) -> SafeString:
    """Show the beginning of a task's id, with a link to its page (``SINGLETASK_TASK_URL``)."""
    shown = long_id(text)
    page = task_page(text)
    if not page:
        return shown
    return format_html('<a href="{}" rel="noopener">{}</a>', page, shown)
