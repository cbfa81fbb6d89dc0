"""The table at the end."""

from __future__ import annotations

from collections import Counter

from example_project.demo.calls import Calls
from example_project.demo.measure import Overlap, Run
from example_project.demo.screen import fit
from example_project.demo.site import PublishedFeed

COLUMNS = "{:<10} {:<9} {:>6} {:>6} {:>8} {:>7} {:>9} {:>8}"


def final_table(
    feeds: list[PublishedFeed],
    calls: Calls,
    runs: list[Run],
    overlaps: list[Overlap],
    stored: dict[str, int],
) -> list[str]:
    run_of = Counter(run.feed for run in runs)
    overlap_of = Counter(overlap.second.feed for overlap in overlaps)
    titles = ("FEED", "FORMAT", "CALLS", "RUNS", "SKIPPED", "FAILED", "OVERLAPS", "ENTRIES")
    lines = [COLUMNS.format(*titles)]
    totals = [0] * 6
    for feed in feeds:
        numbers = [
            calls.sent[feed.url],
            run_of[feed.url],
            calls.skipped[feed.url],
            calls.failed[feed.url].total(),
            overlap_of[feed.url],
            stored.get(feed.url, 0),
        ]
        totals = [total + number for total, number in zip(totals, numbers, strict=True)]
        lines.append(COLUMNS.format(feed.name, feed.format, *numbers))
    rule = "-" * len(lines[0])
    lines += [rule, COLUMNS.format("all", "", *totals)]
    failures = [
        fit(f"  {feed.name} ({count} times): {reason}", 80)
        for feed in feeds
        for reason, count in calls.failed[feed.url].items()
    ]
    if failures:
        lines += ["", "These three feeds should fail:", *failures]
    return lines


def problems(
    feeds: list[PublishedFeed],
    calls: Calls,
    runs: list[Run],
    overlaps: list[Overlap],
    stored: dict[str, int],
    skipped_in_history: int,
) -> list[str]:
    """Return a sentence for each result that is not as it must be."""
    sentences = []
    if overlaps:
        worst = max(overlaps, key=lambda overlap: overlap.seconds)
        sentences.append(
            f"{len(overlaps)} runs began while another of the same feed was running, for up to "
            f"{worst.seconds:.2f} s (processes {worst.first.pid} and {worst.second.pid})."
        )
    if calls.pending:
        sentences.append(f"{len(calls.pending)} calls did not complete.")
    skipped = calls.skipped.total()
    if not calls.pending and calls.sent.total() != len(runs) + skipped:
        sentences.append(
            f"{calls.sent.total()} calls were sent, but {len(runs)} ran and {skipped} were skipped."
        )
    if skipped_in_history != skipped:
        sentences.append(
            f"The history has {skipped_in_history} skipped calls, but the results have {skipped}."
        )
    for feed in feeds:
        if stored.get(feed.url, 0) != feed.stored:
            sentences.append(
                f"{feed.name} has {feed.stored} entries, but {stored.get(feed.url, 0)} are stored."
            )
        if not feed.importable and calls.imported[feed.url]:
            sentences.append(f"{feed.name} cannot be imported, but an import of it succeeded.")
        if feed.importable and calls.failed[feed.url]:
            reason = next(iter(calls.failed[feed.url]))
            sentences.append(f"{feed.name} failed: {reason}")
    return sentences
