"""The picture of the README: two bar charts as SVG, readable on a light and on a dark page."""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from benchmarks.measure import Series

WIDTH, EDGE = 810, 24
LABELS, FIGURES = 240, 150
"""Width of the names to the left of the bars, and of the figures to the right of the bars."""

BARS = WIDTH - 2 * EDGE - LABELS - FIGURES
ROW, BAR, HEAD, NOTE = 26, 16, 58, 40

# Draw a background: a page can be dark in a browser that is set to light.
STYLE = """
svg { color-scheme: light dark; font: 13px system-ui, -apple-system, "Segoe UI", sans-serif }
.page { fill: #fcfcfb } text { fill: #2b2a27 } .title { font-weight: 600; font-size: 15px }
.quiet { fill: #62605a } .ours { font-weight: 600 } .figure { font-variant-numeric: tabular-nums }
.bar { fill: #b4b2aa } .bar.ours { fill: #2a6fc9 } .line { stroke: #62605a; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  .page { fill: #1b1b1a } text { fill: #eceae4 } .quiet { fill: #a9a79f }
  .bar { fill: #6b6963 } .bar.ours { fill: #5a9cf0 } .line { stroke: #a9a79f }
}
"""


TABLE_ONLY = ("history off", "bare connection")


class Chart(NamedTuple):
    """Bars of the ratios to the first candidate, which is drawn as a line at 1."""

    title: str
    subtitle: str
    line: str
    series: Series
    unit: str


def draw(locks: Series, throughput: Series) -> str:
    """Return the SVG."""
    charts = [
        Chart(
            "Take and release a lock on Redis",
            "times the floor, which is two trips on a bare client; shorter is better",
            "floor",
            # Only the table has the rows without the history and the floor on a bare connection.
            Series({name: locks[name] for name in locks if not name.endswith(TABLE_ONLY)}),
            "µs",
        ),
        Chart(
            "Throughput of a real worker, no-op tasks",
            "share of what a plain Task reaches; longer is better",
            "plain Task",
            throughput,
            "tasks/s",
        ),
    ]
    parts: list[str] = []
    top = 0
    for chart in charts:
        drawn, height = bars(chart, top)
        parts += drawn
        top += height
    notes = [
        "* releases a lock without a check of its owner.",
        "Medians of one run with all candidates in turns: benchmarks/RESULTS.rst names machine and "
        "versions.",
    ]
    parts += [text(EDGE, top + 4 + 18 * i, note, "quiet") for i, note in enumerate(notes)]
    height = top + NOTE
    title = "Benchmarks of django-singletask and its alternatives"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" aria-label="{title}">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def bars(chart: Chart, top: int) -> tuple[list[str], int]:
    """Return the SVG elements of a chart, and the height of the chart."""
    first, *names = chart.series
    ratios = {name: chart.series.ratio(name, first) for name in names}
    scale = BARS / max(1.0, *ratios.values())
    left, one = EDGE + LABELS, EDGE + LABELS + scale
    bottom = top + HEAD + ROW * len(names)
    parts = [
        text(EDGE, top + 32, chart.title, "title"),
        text(EDGE, top + 50, chart.subtitle, "quiet"),
    ]
    for number, (name, ratio) in enumerate(ratios.items()):
        y = top + HEAD + ROW * number + 8
        kind = "ours" if name.startswith("django-singletask") else ""
        figure = f"{ratio:.2f}  ({chart.series.median(name):,.0f} {chart.unit})"
        parts += [
            text(left - 8, y + 13, name.replace(" (no owner check)", "*"), kind, "end"),
            f'<rect class="bar {kind}" x="{left}" y="{y}" width="{ratio * scale:.1f}" '
            f'height="{BAR}" rx="2"/>',
            # To the right of the bar, and of the line if the bar ends before the line.
            text(max(left + ratio * scale, one) + 8, y + 13, figure, f"figure {kind}"),
        ]
    parts += [
        f'<line class="line" x1="{one:.1f}" x2="{one:.1f}" y1="{top + HEAD}" y2="{bottom + 4}"/>',
        text(one, bottom + 18, f"{chart.line} = 1", "quiet", "middle"),
    ]
    return parts, HEAD + ROW * len(names) + 30


def text(x: float, y: float, content: str, kind: str, anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(content)}</text>"
    )
