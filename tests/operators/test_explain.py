from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from django.core.management import CommandError
from django.db import InterfaceError, connection

from tests import inside
from tests.command_line import ended_process, locks, locks_as_json
from tests.command_line import hold as put
from tests.deadline import wait_for
from tests.entries import key_of
from tests.past_rows import before_now, ran, row, skipped

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history", "whole_second"),
]

TASK = "feeds.tasks.import_feed"
NAME, KEY = inside.call_lock(TASK, feed_id=7)
BESIDE = inside.queued_key(KEY, TASK)


def hold(name=NAME, key=KEY, *, ago=134, **facts):
    """Put an entry into the store as a run that began some time ago would have."""
    run = {"task": TASK, "task_id": "3f0c", "token": "9ab2", "timeout": 60}
    run |= {"since": time.time() - ago, **inside.this_process()}
    put(name=name, key=key, **{**run, **facts})


def hold_elsewhere(**facts):
    hold(**{"boot_id": "another", "host": "web-3", "pid": 8121, **facts})


def why(name=NAME):
    """Return what scripts read of it."""
    return SimpleNamespace(**locks_as_json("why", name))


CLOCK = r" \((since )?(\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d\)"
"""The time of what happened, which stands behind its age."""


def explained(name=NAME):
    """Return what is printed, without the times: they are those of this moment."""
    return re.sub(CLOCK, "", locks("why", name)).rstrip("\n")


def facts(name=NAME):
    """Return the lines as they are without a terminal: what follows each label."""
    lines = [line.split(None, 1) for line in explained(name).splitlines()[1:]]
    return dict(reversed(lines))


# Held


def test_slots_are_told_one_by_one_and_their_conflicts_together():
    hold(slots=2, token="one")
    hold(key=f"{KEY}#2", slots=2, token="two", ago=20)
    skipped(20, 10, 4, name=NAME, key=KEY, blocked_by="two")
    skipped(20, 10, 1, name=NAME, key=KEY, blocked_by="one", result="waiting", reason="requeue")
    assert explained().startswith(f"{NAME}: held (2 of 2 slots)\n  slot       held, for 2m ")
    assert facts()["conflicts"].startswith("5 during this hold: 4 skipped, 1 waiting; the last ")
    assert "manage.py locks clear one\n" in explained()
    assert "manage.py locks clear two\n" in explained()


def test_duplicates_of_a_running_call_are_told_as_duplicates():
    row("run", 134, name=NAME, key=KEY, task=TASK, token="one", timeout=60)
    hold(token="one")
    skipped(20, 10, 65, kind="duplicate", name=NAME, key=BESIDE, blocked_by="one")
    assert facts()["conflicts"] == "65 during this hold: 65 duplicates; the last 10s ago"


def test_call_that_was_skipped_is_explained_by_its_id():
    hold(token="t1")
    by = {"blocked_by": "t1", "blocked_by_task_id": "3f0c"}
    skipped(60, 10, 4, name=NAME, key=KEY, task_id="the-call", host="web-1", pid=9, **by)
    text = facts("the-call")["run"]
    assert text.startswith("task the-call on web-1, process 9: conflict 1m ago, skipped, ")
    assert text.endswith(", blocked by 3f0c")


def test_lock_that_a_task_has_the_name_of_is_explained_without_a_history(settings):
    settings.SINGLETASK_HISTORY = "off"
    hold("unique", key_of("unique"))
    assert explained("unique").startswith("unique: held\n")
    assert "free" in facts("unique")


def test_page_of_the_task_is_named(settings):
    settings.SINGLETASK_TASK_URL = "https://flower.example/task/{task_id}"
    hold(task_id="3f/0c")
    assert facts()["page"] == "https://flower.example/task/3f%2F0c"


def test_facts_are_never_wrapped(eighty_columns):
    hold(task_id="9ab2 " * 20)
    lines = explained().splitlines()
    assert (
        f"  stop       celery -A tests.testapp control terminate SIGTERM '{'9ab2 ' * 20}'" in lines
    )


@pytest.mark.parametrize("name", [KEY, NAME, "import_feed(feed_id=7)", "9ab2", "web-3:8121"])
def test_what_the_lists_show_of_a_lock_explains_it(name):
    hold_elsewhere()
    assert why(name).key == KEY
    assert why(name).held[0]["token"] == "9ab2"


def test_process_elsewhere_cannot_be_seen():
    hold_elsewhere()
    assert "process 8121 (another host or container: not known" in facts()["held"]
    assert "stop" in facts()
    assert "kill" not in explained()
    assert why(NAME).held[0]["alive"] is None


def test_start_of_a_process_is_left_out_where_unknown():
    hold(start="")
    assert facts()["held"].endswith("(alive on this host)")


def test_lease_that_was_not_renewed_yet_has_no_time_of_renewal():
    hold(ago=30)
    assert re.fullmatch(r"1m, ends in [23]\ds unless renewed", facts()["lease"])


def test_lease_of_memcached_is_only_its_length(settings, empty_cache):
    settings.SINGLETASK_CACHE = "pymemcache"
    empty_cache("pymemcache")
    hold(alias="pymemcache")
    assert facts(KEY)["lease"] == "1m"


def test_last_completed_run_that_raised_says_so():
    hold()
    ran(60, name=NAME, key=KEY, result="raised")
    assert facts()["completed"].startswith("1m ago with an error, after ")


def test_code_outside_a_task_is_stopped_by_its_process():
    hold(task=None, task_id=None)
    assert "by code outside a task on " in facts()["held"]
    assert facts()["stop"] == f"kill {os.getpid()}  # on {socket.gethostname()}"


def test_lock_that_starves_since_before_its_holder_says_so():
    hold()
    skipped(8000, 60, 40, name=NAME, key=KEY, blocked_by="earlier")
    assert facts()["starving"] == "40 conflicts in 2h 13m; no run completed"


def test_lock_whose_calls_stopped_does_not_starve():
    skipped(8000, 7000, 40, name=NAME, key=KEY)
    assert "starving" not in facts()
    assert why(NAME).starving is None


def test_dead_holder_is_taken_over():
    gone = ended_process()
    hold(**gone)
    gone = f"(dead: process {gone['pid']} is gone; the next call on vm takes the lock over)"
    assert facts()["held"].endswith(gone)
    assert "stop" not in facts()
    assert why(NAME).held[0]["alive"] is False


@pytest.fixture
def child():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_process_that_stands_still_is_called_stopped(child):
    process = {"pid": child.pid, "start": inside.start_of(child.pid)}
    hold(**process)
    child.send_signal(signal.SIGSTOP)
    wait_for(lambda: "(stopped on this host" in facts()["held"], "it is stopped")
    assert facts()["continue"] == f"kill -CONT {child.pid}  # on {socket.gethostname()}"


def test_slow_hold_is_called_slow():
    hold()
    for _ in range(5):
        ran(7800, 0.01, name=NAME, key=KEY, task=TASK)
    assert explained().startswith(f"{NAME}: slow\n")
    assert facts()["usual"] == "0.01s, longest 0.01s"


@pytest.mark.parametrize(
    ("runs", "lasted", "ago", "slow"),
    [(4, 11, 60, 0), (5, 11, 60, 1), (5, 11, 20, 0), (5, 0.01, 9, 0), (5, 0.01, 12, 1)],
)
def test_hold_is_slow_beside_enough_runs_of_less_than_half_its_length(runs, lasted, ago, slow):
    hold(ago=ago)
    for _ in range(runs):
        ran(60, lasted, task=TASK)
    assert (why(NAME).held[0]["state"] == "slow") == bool(slow)


# Free


def test_free_lock_tells_what_was():
    at_end = {"outcome": "expired", "pid": 7, "actor": "web-1:9", "reason": "gone"}
    row("run", 300, name=NAME, key=KEY, task_id="x", host="web-2", **at_end)
    at_end = {"outcome": "cleared", "retaken": 1, "pid": 8, "actor": "ada", "reason": "hung"}
    row("run", 200, name=NAME, key=KEY, task_id="y", host="web-2", **at_end)
    skipped(150, 100, 2, name=NAME, key=KEY, blocked_by="b", blocked_by_task_id="z")
    ran(90, 5, name=NAME, key=KEY, task=TASK, task_id="w", host="web-1", pid=9)
    assert explained().splitlines() == [
        f"{NAME}: not held",
        "  usual      5.00s, longest 5.00s",
        "  conflicts  2 skipped in the last 1d; the last 1m 40s ago, blocked by task z",
        "  completed  1m 30s ago, after 5.00s, by task w on web-1, process 9",
        "  trouble    retaken and cleared 3m 20s ago, task y on web-2, process 8, by ada, hung",
        "  trouble    expired 5m ago, task x on web-2, process 7, noticed by web-1:9, gone",
    ]


def test_free_lock_that_starves_says_so():
    skipped(8000, 60, 40, name=NAME, key=KEY)
    assert facts()["starving"] == "40 conflicts in 2h 13m; no run completed"


def test_free_lock_is_found_by_its_key():
    ran(90, name=NAME, key=KEY, task=TASK)
    assert facts(KEY)["completed"].startswith("1m 30s ago")
    ran(90, name="nightly", key=key_of("nightly"))
    assert facts(key_of("nightly"))["completed"].startswith("1m 30s ago")


def test_rows_of_a_name_that_shows_less_than_the_key_holds_are_kept_apart():
    hold()
    ran(90, name=NAME, key="another key")
    ran(400, name=NAME, key=KEY)
    assert facts(KEY)["completed"].startswith("6m 40s ago")


LONG = "feeds.import_feed('https://…xml')"


def test_several_locks_of_one_name_are_told_one_by_one_and_a_key_means_one_of_them():
    hold(LONG, "singletask:feeds:1", token="1", ago=500)
    hold(LONG, "singletask:feeds:2", token="2")
    ran(90, name=LONG, key="singletask:feeds:2")
    ran(400, name=LONG, key="singletask:feeds:1")
    assert "manage.py locks clear 1\n" in explained(LONG)
    assert "manage.py locks clear 2\n" in explained(LONG)
    known = facts("singletask:feeds:1")
    assert known["free"] == "manage.py locks clear 1"
    assert known["completed"].startswith("6m 40s ago")


def test_name_of_several_free_locks_means_the_one_that_was_seen_last():
    older, newer = f"singletask:{TASK}:1", f"singletask:{TASK}:2"
    ran(400, name=LONG, key=older, task=TASK)
    ran(90, name=LONG, key=newer, task=TASK)
    assert why(LONG).completed["key"] == newer
    assert why(older).completed["key"] == older


def test_lock_and_its_queued_call_are_no_two_locks():
    key = f"singletask:{TASK}:1"
    row("run", 134, name=LONG, key=key, task=TASK, token="9ab2", timeout=60)
    hold(LONG, key)
    hold(LONG, inside.queued_key(key, TASK), token="q", pid=0)
    for text in (LONG, key):
        assert why(text).key == key
        assert len(why(text).held) == 1
        assert why(text).queued[0]["token"] == "q"


def test_task_that_never_ran_is_free():
    name = "tests.testapp.tasks.unique"
    assert explained("unique").startswith(f"{name}: 0 locks held\n")
    assert facts(name)["completed"] == "none is recorded"


def test_lock_without_a_completed_run_tells_that_of_its_task():
    hold()
    ran(2400, name=f"{TASK}(feed_id=8)", task=TASK)
    assert facts()["completed"] == "none of this lock is recorded; the task completed 40m ago"


def test_lock_that_was_taken_again_tells_when():
    again = {"retaken": 1, "retaken_at": before_now(20), "task_id": "y", "host": "web-2", "pid": 8}
    ran(5, name=NAME, key=KEY, **again)
    assert facts()["trouble"] == "retaken 20s ago, task y on web-2, process 8"


def test_lock_that_a_run_kept_can_be_freed_but_not_stopped():
    hold(pid=0, kept=True, timeout=300, left=100)
    assert explained().startswith(f"{NAME}: kept\n")
    assert facts()["held"].startswith("for 1m ")
    assert {"stop", "lease"}.isdisjoint(facts())
    assert facts()["free"] == "manage.py locks clear 9ab2"


def test_retry_that_waits_for_its_own_kept_lock_is_no_other_call():
    hold(pid=0, kept=True, timeout=300, left=100)
    skipped(5, name=NAME, key=KEY, task=TASK, blocked_by="9ab2", reason="retry")
    assert facts()["conflicts"] == "none during this hold"
    assert (why().held[0]["waiting"], why().conflict) == (0, None)
    assert "  waiting: retry  " in locks("history")
    # Negative control.
    skipped(5, name=NAME, key=KEY, task=TASK, blocked_by="9ab2", reason="requeue")
    assert facts()["conflicts"] == "1 during this hold: 1 waiting; the last 5s ago"
    assert why().held[0]["waiting"] == 1


def test_trouble_of_the_past_is_told_while_the_lock_is_held():
    hold(ago=5)
    facts_of = {"name": NAME, "key": KEY, "task": TASK, "task_id": "y", "host": "web-2", "pid": 8}
    row("run", 20, outcome="cleared", actor="ada on web-1", reason="hung", **facts_of)
    assert facts()["trouble"] == (
        "cleared 20s ago, task y on web-2, process 8, by ada on web-1, hung"
    )


def test_expired_hold_says_that_there_is_nothing_to_free():
    row("run", 100, name=NAME, key=KEY, timeout=60, host="web-1", pid=7, task_id="x")
    assert explained().startswith(f"{NAME}: not held\n")
    assert re.fullmatch(
        r"task x on web-1, process 7 took it 1m 4\ds ago; the cache no longer has the lock: "
        r"nothing to free",
        facts()["expired"],
    )


def test_history_that_is_off_is_mentioned(settings):
    settings.SINGLETASK_HISTORY = "off"
    assert explained("nightly") == (
        "nightly: not held\n  history    SINGLETASK_HISTORY = 'off': no history is recorded."
    )


def test_history_off_on_memcached_explains_a_key_and_guesses_nothing(settings, empty_cache):
    settings.SINGLETASK_CACHE = "pymemcache"
    settings.SINGLETASK_HISTORY = "off"
    empty_cache("pymemcache")
    hold(alias="pymemcache")
    assert facts(KEY)["held"].startswith("for 2m 1")
    for text in (NAME, "3f0c1d52-7a41-4c55-9d0b-6f1a2b3c4de1", "feeds*"):
        with pytest.raises(CommandError, match="cannot list"):
            explained(text)
    assert explained("nightly").startswith("nightly: not held")


# Queued


def test_queued_call_is_explained():
    sent = {"task_id": "5d1c", "token": "t", "timeout": 3600, "host": "web-1"}
    hold(key=BESIDE, ago=3, left=3597, pid=0, **sent)
    skipped(1, kind="duplicate", name=NAME, key=BESIDE, blocked_by="t", count=2)
    assert re.fullmatch(
        r"task 5d1c on web-1, sent [34]s ago; stops identical calls for 59m 5\ds at most; "
        r"2 duplicates",
        facts()["queued"],
    )
    assert facts()["forget"] == f"manage.py locks clear --queued {BESIDE}"
    assert facts()["conflicts"] == "2 duplicates in the last 1d; the last 1s ago"


def test_one_duplicate_is_told_in_the_singular():
    skipped(1, kind="duplicate", name=NAME, key=BESIDE, blocked_by="t")
    assert facts()["conflicts"] == "1 duplicate in the last 1d; the last 1s ago"


def test_queued_call_behind_a_held_lock_is_explained_too():
    row("run", 134, name=NAME, key=KEY, task=TASK, token="9ab2", timeout=60)
    hold_elsewhere()
    hold(key=BESIDE, token="q", task_id="5d1c", pid=0)
    assert why("5d1c").held[0]["token"] == "9ab2"
    assert facts()["held"].startswith("for ")
    assert facts()["forget"] == f"manage.py locks clear --queued {BESIDE}"


def test_queued_call_on_memcached_without_history_says_what_is_known(settings, empty_cache):
    settings.SINGLETASK_CACHE = "pymemcache"
    settings.SINGLETASK_HISTORY = "off"
    empty_cache("pymemcache")
    hold(key=BESIDE, alias="pymemcache", ago=20, pid=0)
    assert re.search(r"stops identical calls for (39|40)s at most$", facts(BESIDE)["queued"])


# A task, and a run by its id


def test_task_is_summed_up(empty_cache):
    for feed in range(6):
        name, key = inside.call_lock(TASK, feed_id=feed)
        hold_elsewhere(name=name, key=key, token=str(feed), task_id=f"id{feed}", ago=100 - feed)
    ran(90, 5, name=NAME, task=TASK, task_id="w", host="web-1", pid=9)
    skipped(60, 2, 31, name=NAME, task=TASK, blocked_by_task_id="z")
    skipped(90_000, 90_000, 5, name=NAME, task=TASK)
    lines = []
    for feed in range(5):
        lines += [
            f"  held       {TASK}(feed_id={feed}): held, for 1m {40 - feed}s by task id{feed} on "
            "web-3, process 8121 (another host or container: not known whether it is alive)",
            "  lease      1m, renewed … ago, ends in … unless renewed",
            f"  stop       celery -A tests.testapp control terminate SIGTERM id{feed}",
            f"  free       manage.py locks clear {feed}",
        ]
    # The server's clock goes on, and tells the rest of a lease.
    text = re.sub(r"(renewed|ends in) \d+s", r"\1 …", explained("import_feed"))
    assert text.splitlines() == [
        f"{TASK}: 6 locks held",
        *lines,
        "  held       and 1 more",
        "  usual      5.00s, longest 5.00s",
        "  conflicts  31 skipped in the last 1d; the last 2s ago",
        f"  completed  {NAME}: 1m 30s ago, after 5.00s, by task w on web-1, process 9",
    ]


def test_locks_of_a_task_are_told_worst_first_each_with_its_commands(child):
    hold(f"{TASK}(feed_id=4)", "singletask:4", token="4", ago=1)
    hold(f"{TASK}(feed_id=3)", "singletask:3", token="3", ago=100)
    stopped = {"pid": child.pid, "start": inside.start_of(child.pid)}
    hold(f"{TASK}(feed_id=2)", "singletask:2", token="2", ago=13, **stopped)
    hold(f"{TASK}(feed_id=1)", "singletask:1", **{**ended_process(), "token": "1", "ago": 5})
    for _ in range(5):
        ran(7800, 1, name=NAME, key=KEY, task=TASK)
    child.send_signal(signal.SIGSTOP)
    wait_for(lambda: "(stopped on this host)" in explained(TASK), "it is stopped")
    lines = explained(TASK).splitlines()[1:]
    held = [line for line in lines if line.startswith("  held ")]
    states = [line.partition("): ")[2].partition(",")[0] for line in held]
    assert states == ["dead", "stopped", "slow", "held"]
    labels = [line.split()[0] for line in lines]
    dead = ["held", "lease", "free"]
    stopped = ["held", "lease", "continue", "stop", "stop", "free"]
    running = ["held", "lease", "stop", "stop", "free"]
    assert labels[:19] == [*dead, *stopped, *running, *running]


@pytest.mark.parametrize(("ago", "form"), [(90, "%H:%M:%S"), (100_000, "%Y-%m-%d %H:%M:%S")])
def test_what_happened_has_its_time(ago, form):
    run = ran(ago, 5, name=NAME, key=KEY, task=TASK)
    assert f" ago ({run.ended_at:{form}}), after " in locks("why", NAME)


def test_lock_with_a_name_of_its_own_tells_its_task():
    hold(name="customer:7", key=key_of("customer:7"))
    assert facts("customer:7")["task"] == TASK
    hold()
    assert "task" not in facts()


def test_queued_call_of_a_task_is_told_with_its_name():
    hold()
    name, key = inside.call_lock(TASK, feed_id=8)
    hold(name, inside.queued_key(key, TASK), token="q", task_id="5d1c", pid=0)
    ran(90, name=NAME, key=KEY, task=TASK)
    assert facts(TASK)["queued"].startswith(f"{name}: task 5d1c on ")


def test_end_of_the_names_of_several_tasks_asks_for_one():
    ran(90, name=NAME, task=TASK)
    ran(90, name="shop.import_feed(feed_id=7)", task="shop.import_feed")
    with pytest.raises(CommandError, match=f": {TASK}, shop.import_feed. Name"):
        why("import_feed")


def test_only_held_lock_of_a_task_is_explained_with_its_name():
    hold()
    assert explained(TASK) == explained(NAME)


def test_task_whose_rows_are_many_is_summed_up_for_as_long_as_they_reach(monkeypatch):
    inside.bound(monkeypatch, "rows of a task", 3)
    for ago in (5, 60, 3600):
        skipped(ago, name=NAME, task=TASK)
        skipped(4000, name=NAME, task=TASK)
    assert facts(TASK)["conflicts"].startswith("3 skipped in the last 1h")


@pytest.mark.parametrize("run", ["3f0c", "9ab2"], ids=["task id", "token"])
def test_run_explains_the_lock_that_it_holds(run):
    hold()
    ran(90, name="another", task_id="3f0c")
    assert (why(run).name, why(run).held[0]["token"], why(run).run) == (NAME, "9ab2", None)


def test_run_that_has_ended_is_told_by_the_history():
    ran(90, 5, name=NAME, key=KEY, task=TASK, task_id="w", host="web-1", pid=9)
    assert explained("w").startswith(f"{NAME}: not held\n")
    assert facts("w")["run"] == "task w on web-1, process 9: returned 1m 30s ago"


# Unknown


def test_history_that_is_away_is_mentioned():
    def away(*args):
        raise InterfaceError("connection already closed")

    hold()
    with connection.execute_wrapper(away):
        assert "connection already closed" in why(NAME).no_history


@pytest.mark.parametrize(
    "text", ["import_fed", "import_fed(9)", "feed_id=7", "0b4c5d1e", f"{KEY}0", "None"]
)
def test_text_that_nothing_is_known_by_gets_a_next_step_and_no_guess(text):
    hold_elsewhere(task=None, task_id=None)
    ran(90, name=NAME, key=KEY, task=TASK)
    with pytest.raises(CommandError) as caught:
        why(text)
    assert str(caught.value) == (
        f"No lock or task is known as '{text}'. 'manage.py locks' lists what is held, and "
        "'manage.py locks history' what was."
    )


def test_unknown_call_of_a_known_task_is_sent_to_the_task():
    hold()
    ran(90, name=NAME, key=KEY, task=TASK)
    with pytest.raises(CommandError) as caught:
        why("import_feed(9)")
    assert "'manage.py locks why import_feed' tells what is known of that task." in str(
        caught.value
    )
    assert "feed_id=7" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["import_feed(feed_id=7)", "…feed(feed_id=7)", "*=7)", "web-1", "web-1:9"]
)
def test_free_lock_is_explained_by_what_the_history_shows_of_it(text):
    ran(90, name=NAME, key=KEY, task=TASK, host="web-1", pid=9)
    assert why(text).key == KEY
    ran(80, name="nightly", host="web-1", pid=10)
    if text == "web-1":
        with pytest.raises(CommandError, match="means more than one"):
            why(text)


@pytest.mark.parametrize("text", ["web-3", "import_feed(*"])
def test_text_that_means_several_locks_of_one_task_explains_the_task(text):
    for feed, host in ((1, "web-3"), (2, "web-3"), (3, "web-4")):
        hold_elsewhere(name=f"{TASK}(feed_id={feed})", key=f"singletask:{feed}", host=host)
    assert explained(text).startswith(f"{TASK}: 3 locks held\n")


@pytest.mark.parametrize("text", ["web-3", "web-*", "*i*"])
def test_text_that_means_locks_of_several_tasks_asks_for_one(text):
    hold_elsewhere()
    hold_elsewhere(name="nightly", key=key_of("nightly"), task=None, token="n")
    with pytest.raises(CommandError, match=f"means more than one: {re.escape(NAME)}, nightly"):
        why(text)
    with pytest.raises(CommandError):
        why("…nowhere")


def test_characters_that_control_a_terminal_are_escaped():
    hold(task_id="a\x1b[2Jb", host="c\rd")
    assert "\x1b" not in explained()
    assert "\r" not in explained()
    assert "a\\x1b[2Jb" in explained()


def test_foreign_entry_is_cleared_by_its_key():
    key = key_of("foreign")
    inside.put_entry(key, b"text")
    assert facts(key)["held"].startswith("by code outside a task on an unknown host")
    assert facts(key)["free"] == f"manage.py locks clear {key}"


# As a process


def test_end_of_a_call_that_waited_says_more_than_that_it_waited():
    skipped(60, 10, 5, name=NAME, task=TASK, task_id="5d1c", result="waiting", reason="wait")
    skipped(40, name=NAME, task=TASK, task_id="5d1c", result="failed", reason="wait")
    assert " failed" in facts("5d1c")["run"]


def test_task_without_a_lock_is_sent_to_the_list():
    assert "'manage.py locks'" in facts("tests.testapp.tasks.plain")["task"]
