"""Lay out what the command prints, so that it fits the terminal and cannot steer it."""

from __future__ import annotations

import shutil
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from django_singletask.holder import clean

WIDTH = 80
SHOWN = 5
"""Locks that a sentence names."""

LEFT, RIGHT, NAME = "left", "right", "name"


def width() -> int:
    """Return the columns of the terminal; 80 if it has fewer, or where there is none."""
    return max(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def table(
    heads: Sequence[str],
    kinds: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Iterable[str] = (),
) -> Iterator[str]:
    """Lay out rows below their heads, and yield the lines.

    A column is ``"left"`` or ``"right"`` and as wide as its texts, but one has the ``"name"``. The
    last column has up to a third of the room that is left, and the names the rest.
    A row's note stands behind its last cell, or below where it does not fit.
    """
    first, last, room = kinds.index(NAME), len(kinds) - 1, width()
    # A text that many rows have is measured once.
    texts = ({head, *(row[n] for row in rows)} for n, head in enumerate(heads))
    widths = [max(columns(printable(text)) for text in column) for column in texts]
    left = room - sum(widths[n] for n in range(last) if n != first) - 2 * last
    # The last may have the room that the first does not need.
    widths[last] = min(widths[last], max(left // 3, left - widths[first]))
    widths[first] = min(widths[first], left - widths[last])
    yield "  ".join(map(_fit, heads, widths, kinds)).rstrip()
    for row, note in zip_longest(rows, notes, fillvalue=""):
        line = "  ".join(map(_fit, row, widths, kinds)).rstrip()
        if note and columns(f"{line} {note}") > room:
            yield line
            yield f"    {note}"
        else:
            yield f"{line} {note}" if note else line


def _fit(text: str, width: int, kind: str) -> str:
    """Cut or pad a cell, so that it has a width."""
    if not (text.isascii() and text.isprintable() and len(text) <= width):
        # The names of two pods differ at their ends, as those of two locks do: cut the middle.
        text = printable(text)
        text = _name(text, width) if kind == NAME else printable(text, width)
        width -= columns(text) - len(text)
    return text.rjust(width) if kind == RIGHT else text.ljust(width)


def _name(text: str, width: int) -> str:
    """Cut the name of a call so that the function and the last arguments stay: they tell it apart.

    First the modules go, from the left, then the middle of the arguments.
    """
    task, parenthesis, arguments = text.partition("(")
    modules = len(task.rpartition(".")[0])
    if not (parenthesis and modules) or columns(text) <= width:
        return printable(text, width)
    task = f"…{task[min(modules, columns(text) - width) + 1 :]}("
    return printable(f"{task}{arguments}", width, columns(task))


def printable(text: str, width: int | None = None, beginning: int = 255) -> str:
    """Escape what could steer a terminal, and cut the middle out of what is wider than ``width``.

    Format characters are escaped too: they can turn the direction of what follows. What stays of
    the beginning is half of ``width``, but not more than ``beginning``.
    """
    text = clean(text)
    if width is None or columns(text) <= width:
        return text
    head = tail = text
    while columns(head) > min((width - 1) // 2, beginning):
        head = head[:-1]
    while tail and columns(head) + 1 + columns(tail) > width:
        tail = tail[1:]
    return f"{head}…{tail}"


def columns(text: str) -> int:
    """Count the columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def few(names: Sequence[str]) -> str:
    """Write the first few names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(printable, names[:SHOWN])) + more
