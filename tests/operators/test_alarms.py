from __future__ import annotations

import json
import re
import time

import pytest

from tests import inside
from tests.admin_pages import drop_table
from tests.command_line import alarm, hold, locks
from tests.entries import key_of
from tests.past_rows import ran, row, skipped
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history", "whole_second"),
]


def test_lock_that_is_held_over_a_time_is_an_alarm():
    hold(name="old\x1b", since=time.time() - 3700)
    hold(name="young", since=time.time() - 3500, token="2")
    output, message = alarm("--fail-if-held-over", "1h")
    assert message == "Held for more than 1h: old\\x1b (1h 01m)."
    assert "young" in output


def test_lock_that_is_held_for_less_is_no_alarm():
    hold(since=time.time() - 3700)
    assert "nightly" in locks("list", "--fail-if-held-over", "2h")


def test_queued_and_expired_are_not_held():
    hold(since=time.time() - 3700, key=inside.queued_key(key_of("nightly"), "t"), pid=0)
    row("run", 7200, name="old", timeout=60)
    output = locks("list", "--fail-if-held-over", "1s")
    assert "\nqueued " in output
    assert "\nexpired " in output


def test_alarm_names_a_few_of_many():
    for number in range(7):
        hold(name=f"lock {number}", since=time.time() - 3700, token=str(number))
    assert alarm("--fail-if-held-over", "1h")[1].endswith(" (1h 01m) and 2 more.")


@pytest.mark.parametrize(
    "watched", [[], ["nightly"], ["a.t"], ["t"], ["night*"], [key_of("nightly")]]
)
def test_lock_that_starves_is_an_alarm(watched):
    skipped(8000, 60, 40, task="a.t")
    if watched:
        skipped(8000, 60, 40, task="b.u", name="other")
    output, message = alarm("--fail-if-starving", "1h", *watched)
    none, line = output.splitlines()
    assert none == ("No matching lock is held." if watched else "No lock is held.")
    assert line.startswith("1 lock starves: ")
    assert message == "Starving for 1h or more: nightly (40 conflicts in 2h 13m)."


@pytest.mark.parametrize("watched", [["other"], ["of the past"], [tasks.unique.name]])
def test_lock_that_is_not_watched_is_no_alarm(watched):
    skipped(8000, 60, 40, task="t")
    ran(60, name="other", task="of the past")
    assert locks("list", "--fail-if-starving", "1h", *watched)


def test_task_is_known_without_history_too(settings):
    settings.SINGLETASK_HISTORY = "off"
    locks("list", "--fail-if-held-over", "1h", tasks.unique.name)


def test_both_alarms_are_one_message():
    skipped(8000, 60, 40)
    hold(since=time.time() - 8000)
    message = alarm("--fail-if-starving", "1h", "--fail-if-held-over", "1h")[1]
    assert re.match(r"Held for more than 1h: .*\. Starving for 1h or more: ", message)


def test_alarm_comes_after_the_json():
    hold(since=time.time() - 8000)
    assert json.loads(alarm("--fail-if-held-over", "1h", "--json")[0])["locks"]


def test_starving_without_history_is_an_error(settings):
    drop_table()
    message = alarm("--fail-if-starving", "1h")[1]
    assert re.match(r"The history cannot be read: .*Run 'manage\.py migrate'\.", message)
    settings.SINGLETASK_HISTORY = "off"
    message = alarm("--fail-if-starving", "1h")[1]
    assert message.startswith("SINGLETASK_HISTORY = 'off'")
