"""Tables of what was measured, of the targets, and of which targets are reached."""

from __future__ import annotations

import os
import platform
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import Series

PACKAGES = ["Django", "celery", "redis", "hiredis", "django-redis", "pymemcache", "pylibmc"]
PACKAGES += ["psycopg", "celery-singleton", "celery-once", "python-redis-lock", "django-pglock"]


def installed(name: str) -> str:
    """Return the version of a package; the model of a fleet needs only a few of them."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


VERSIONS = {name: installed(name) for name in PACKAGES}
"""They are read before something is measured: without hiredis, redis-py is another client."""


class Check(NamedTuple):
    """A target, and what was measured."""

    target: str
    measured: str
    reached: bool


@dataclass
class Table:
    """A heading, a text, cells and targets. ``series`` has the figures from which the cells are."""

    title: str
    text: str
    head: Sequence[str]
    cells: Sequence[Sequence[str]]
    checks: Sequence[Check] = ()
    series: Series = field(default_factory=Series)

    def rst(self) -> str:
        parts = [
            self.title,
            "-" * len(self.title),
            "",
            *wrapped(self.text),
            "",
            *grid(self.head, self.cells),
        ]
        if self.checks:
            rows = [(c.target, c.measured, "yes" if c.reached else "**no**") for c in self.checks]
            parts += ["", *grid(("Target", "measured", "reached"), rows)]
        return "\n".join([*parts, ""])


def compared(
    title: str, text: str, series: Series, checks: Sequence[Check], unit: str = "µs"
) -> Table:
    """Return the table of a series, with ratios to the first candidate."""
    head = ["Candidate", "median", "ratio"]
    cells = [[name, *median_and_ratio(series, name, unit)] for name in series]
    if series.processor is not None:
        head += ["processor", "ratio"]
        for row in cells:
            row.extend(median_and_ratio(series.processor, row[0], unit))
    return Table(title, text, head, cells, checks, series)


def median_and_ratio(series: Series, name: str, unit: str) -> tuple[str, str]:
    first = next(iter(series))
    return f"{figure(series.median(name))} {unit}", f"{series.ratio(name, first):.2f}"


def titled(title: str, busy: bool) -> str:
    return f"{title}, one core busy" if busy else title


def at_most(series: Series, name: str, bound: float, other: str) -> Check:
    ratio = series.ratio(name, other)
    return Check(f"{name}: ≤ {bound:.2f} × {other}", f"{ratio:.2f}", ratio <= bound)


def processor_at_most(series: Series, name: str, bound: float, other: str) -> Check:
    """Bound the processor time, which other programs on the machine change less."""
    assert series.processor is not None
    target, measured, reached = at_most(series.processor, name, bound, other)
    return Check(f"processor time, {target}", measured, reached)


def faster(series: Series, name: str, other: str) -> Check:
    ratio = series.ratio(name, other)
    return Check(f"{name}: faster than {other}", f"{ratio:.2f}", ratio < 1)


def at_least(series: Series, name: str, bound: float, other: str) -> Check:
    ratio = series.ratio(name, other)
    return Check(f"{name}: ≥ {bound:.2f} × {other}", f"{ratio:.2f}", ratio >= bound)


def figure(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def grid(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    rule = "  ".join("=" * width for width in widths)
    rows = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return [rule, rows[0], rule, *rows[1:], rule]


def results(tables: Sequence[Table], servers: str, loads: Sequence[float], minutes: float) -> str:
    """Return RESULTS.rst."""
    packages = ", ".join(f"{name} {number}" for name, number in VERSIONS.items())
    checks = [(table.title, check) for table in tables for check in table.checks]
    missed = [f"* {title}: {check.target}" for title, check in checks if not check.reached]
    reached = f"{len(checks) - len(missed)} of {len(checks)} targets are reached"
    lines = [
        "==========",
        "Benchmarks",
        "==========",
        "",
        *wrapped(
            "``python benchmarks/run.py`` wrote this page. The candidates of a table took turns, "
            "in a different order in each round. The times are medians over the rounds. A ratio is "
            "the median of the ratios within a round, to the first row unless another row is "
            "named. Times depend on the machine; ratios depend on it much less. *processor* is the "
            "processor time of the thread that makes the calls: it does not wait for a server, and "
            "what else runs on the machine changes it least. redis-py reads with hiredis. *One "
            "core busy* in a heading means that another process used one core all the time, as on "
            "a busy server."
        ),
        "",
        *wrapped(
            f"* {processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}; "
            f"servers on the same machine. Load average {loads[0]:.1f} at the start and "
            f"{loads[1]:.1f} at the end; {minutes:.0f} minutes."
        ),
        *wrapped(f"* Python {platform.python_version()}, {packages}."),
        f"* {servers}.",
        "",
        f"{reached}. Not reached:" if missed else f"{reached}.",
        "",
        *missed,
        *([""] if missed else []),
    ]
    return "\n".join([*lines, "\n".join(table.rst() for table in tables)])


def wrapped(text: str) -> list[str]:
    indent = "  " if text.startswith("* ") else ""
    return textwrap.wrap(text, 100, subsequent_indent=indent, break_on_hyphens=False)


def processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
