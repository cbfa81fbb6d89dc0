"""What the documentation shows of the command is what the command prints."""

from __future__ import annotations

import io
import os
import re
import shlex
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from django.core.management import BaseCommand, CommandError, call_command, load_command_class

from tests import inside
from tests.command_line import hold as put
from tests.past_rows import ran, skipped

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history", "whole_second"),
]

ROOT = Path(__file__).parents[2]
SAMPLE = re.compile(r"^    \$ manage\.py locks(.*)\n((?:    (?!\$).*\n|\n(?=    (?!\$)))*)", re.M)
"""A command in a block of a page, and what the page shows of its output."""
SAMPLES = [
    (page.stem, arguments.strip(), output)
    for folder in ("operating", "reference", "explanation")
    for page in sorted((ROOT / "docs" / folder).glob("*.rst"))
    for arguments, output in SAMPLE.findall(page.read_text())
    if output.strip()
]
FEED, NIGHTLY, BILL = "feeds.tasks.import_feed", "reports.tasks.nightly", "shop.tasks.bill"
FEED_ID = "3f0c1d52-7a41-4c55-9d0b-6f1a2b3c4de1"
TOKEN = "9ab2" + 28 * "0"


def hold(task: str, arguments: dict[str, Any], task_id: str, ago: float, **facts: Any) -> None:
    """Put the entry of a run into the store, as one of ``ago`` seconds before now left it."""
    name, key = inside.call_lock(task, **arguments)
    if facts.pop("queued", False):
        key = inside.queued_key(key, task)
    run = {"token": os.urandom(16).hex(), "timeout": 60, "since": time.time() - ago, "left": 48.9}
    run |= {"name": name, "key": key, "task": task, "task_id": task_id, **inside.this_process()}
    put(**{**run, **facts})


def about(task: str, **arguments: Any) -> dict[str, str]:
    """Return what all rows of a call's lock have."""
    name, key = inside.call_lock(task, **arguments)
    return {"name": name, "key": key, "task": task}


@pytest.fixture
def site() -> None:
    """Be the site that the samples show."""
    elsewhere = {"boot_id": "another", "host": "web-1", "pid": 40, "start": "1"}
    gone = {"host": "web-3", "pid": 8122, "start": "0"}
    hold(NIGHTLY, {}, "77aa", 3725, token="1" * 32, left=59.9, **elsewhere)
    hold(FEED, {"feed_id": 7}, FEED_ID, 134, token=TOKEN, host="web-3")
    hold(BILL, {"customer_id": 7}, "c4d9", 12, **gone)
    hold(FEED, {"feed_id": 9}, "5d1c77e0", 3, queued=True, pid=0, start="")
    for number in range(5):
        ran(86_400 * (5 - number), 640 + 10 * number, **about(NIGHTLY))
    of_eleven = {**about(FEED, feed_id=11), "blocked_by": "2" * 32}
    skipped(28_740, 60, 27, task_id="b7e2", host="web-2", pid=77, **of_eleven)
    for ago, lasted in ((16_000, 80), (12_000, 50), (11_000, 49), (9000, 45), (7800, 51)):
        facts = {"task_id": "88b0f3a9", "host": "web-3", "pid": 8120}
        ran(ago, lasted, **about(FEED, feed_id=7), **facts)
    of_feed = {**about(FEED, feed_id=7), "blocked_by": TOKEN}
    facts = {"task_id": "5e20", "host": "web-1", "pid": 41, "blocked_by_task_id": FEED_ID}
    skipped(130, 2, 28, **of_feed, **facts)
    skipped(90, 30, 3, reason="requeue", **of_feed, **facts)
    of_nightly = {**about(NIGHTLY), "blocked_by": "1" * 32}
    skipped(3720, 60, 4, task_id="a01c", host="web-1", pid=41, **of_nightly)


def printed(arguments: str) -> str:
    """Return what the command prints: on stdout, and after that its error, as on stderr."""
    arguments, redirect, _file = arguments.partition(" > ")
    output = io.StringIO()
    try:
        call_command("locks", *shlex.split(arguments), stdout=output, no_color=True)
    except CommandError as error:
        output = io.StringIO() if redirect else output
        output.write(f"{type(error).__name__}: {error}\n")
    return re.sub(rf"\b{os.getpid()}\b", "8121", output.getvalue())


CHANGING = (
    (r"(\d\d-\d\d )?\d\d:\d\d:\d\d", "at"),
    (r"^ +(?=BEGAN|at)", ""),
    (r"[\d.]+ ms", "ms"),
    (r"Cache '\w+'", "cache"),
    (r"127\.0\.0\.1:\d+ database \d", "address"),
    (r"redis [\d.]+", "version"),
    (r"celery -A [\w.<>]+", "celery"),
    # What is left of a lease goes on while the clock of the test stands still.
    (r"\b4\ds\b", "48s"),
    (r"\b5[2-9]s\b", "59s"),
    (r"renewed \d+s ago", "renewed"),
    (r" +$", ""),
)
"""What differs from one run to the next, and what replaces it on both sides."""


def settled(text: str) -> str:
    for pattern, word in CHANGING:
        text = re.sub(pattern, word, text, flags=re.MULTILINE)
    return text


def fits(sample: str, output: str) -> bool:
    """Say whether a sample shows the output; … stands for the rest of an id, ``[…]`` for lines."""
    pattern = re.escape(settled(textwrap.dedent(sample)).strip())
    pattern = pattern.replace(re.escape("…"), r"[\w-]+")
    pattern = re.sub(r"(?<=\S)(\\ )+", r" +", pattern)  # a shortened id makes a column narrower
    return re.fullmatch(pattern, settled(output).strip()) is not None


@pytest.mark.parametrize(("page", "arguments", "sample"), SAMPLES)
def test_sample_is_what_the_command_prints(site: None, page: str, arguments: str, sample: str):
    output = printed(arguments)
    assert fits(sample, output), f"{sample}\n\nThe command prints:\n\n{output}"


def test_each_action_that_prints_a_table_or_facts_has_a_sample():
    shown = {(arguments.split() or ["list"])[0] for _page, arguments, _sample in SAMPLES}
    assert {"list", "why", "history", "metrics", "probe", "clear", "prune"} <= {*shown, "list"}


def test_control_another_word_or_number_does_not_fit(site: None):
    output = printed("list --starving")
    assert fits(textwrap.indent(output, "    "), output)
    assert not fits(output.replace("27", "28"), output)
    assert not fits(output.replace("STARVING", "WAITING"), output)
    assert not fits(output.partition("\n")[0], output)


def options_of(text: str) -> set[str]:
    return {*re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.M)}


def test_the_page_has_each_option_of_the_command_and_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    help_of_all = (
        load_command_class("django_singletask", "locks").create_parser("", "").format_help()
    )
    actions = re.findall(r"^(\w+):$", help_of_all, re.M)
    assert len(actions) > 5
    options = set[str]()
    for action in actions:
        if action == "options":
            continue
        with pytest.raises(SystemExit):
            call_command("locks", action, "--help")
        options |= options_of(capsys.readouterr().out)
    of_django = options_of(BaseCommand().create_parser("", "").format_help())
    page = (ROOT / "docs/reference/command.rst").read_text()
    lines = re.findall(r"^``--.*``$", page, re.MULTILINE)
    listed = {*re.findall(r"``(--[\w-]+)", "\n".join(lines))}
    assert listed | {"--json"} == options - of_django
    assert "``--json``" in page
