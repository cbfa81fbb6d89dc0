"""Lay out what the command prints, so that it fits the terminal and cannot steer it."""

from __future__ import annotations

import shutil
import unicodedata
from collections.abc import Sequence

from django_singletask.holder import clean

__all__ = ["LEFT", "LONG", "RIGHT", "columns", "few", "printable", "table", "width"]

WIDTH = 80
SHOWN = 5
"""Locks that a sentence names."""

LEFT, RIGHT, LONG = "left", "right", "long"


def width() -> int:
    """Return the columns of the terminal; 80 if it has fewer, or where there is none."""
    return max(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def table(
    heads: Sequence[str],
    kinds: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
) -> list[str]:
    """Lay out rows below their heads.

    A column is ``"left"`` or ``"right"`` and as wide as its texts, or ``"long"``. Of the two long
    ones the last has up to a third of the room that is left, and the first, of names, the rest. A
    row's note stands behind its last cell, or below where it does not fit.
    """
    first, last = kinds.index(LONG), len(kinds) - 1
    cells = [[printable(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(columns(row[n]) for row in cells) for n in range(len(heads))]
    left = width() - sum(widths[n] for n in range(last) if n != first) - 2 * last
    # The last may have the room that the first does not need.
    widths[last] = min(widths[last], max(left // 3, left - widths[first]))
    widths[first] = min(widths[first], left - widths[last])
    lines = []
    for row, note in zip(cells, ["", *(notes or [""] * len(rows))], strict=True):
        # The names of two pods differ at their ends, as those of two locks do: cut the middle.
        fitted = [printable(cell, widths[n]) for n, cell in enumerate(row)]
        fitted[first] = _name(row[first], widths[first])
        gaps = [" " * (widths[n] - columns(cell)) for n, cell in enumerate(fitted)]
        padded = [
            gap + cell if kind == RIGHT else cell + gap
            for cell, gap, kind in zip(fitted, gaps, kinds, strict=True)
        ]
        line = "  ".join(padded).rstrip()
        if note and columns(f"{line} {note}") <= width():
            line, note = f"{line} {note}", ""
        lines += [line, f"    {note}"] if note else [line]
    return lines


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
