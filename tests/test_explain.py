from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from django.db import InterfaceError, connection

from django_singletask import TaskLock
from django_singletask.holder import Holder, start_time
from django_singletask.locks.keys import QUEUED, LockKey, call_key, name_key
from django_singletask.locks.parameters import AS_SHOWN
from django_singletask.management.output import columns, explain
from django_singletask.operators.explain import why
from django_singletask.operators.names import UnknownName
from django_singletask.stores import get_store
from tests.command_line import locks
from tests.deadline import wait_for
from tests.past_rows import ran, row, skipped

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history", "whole_second", "eighty_columns"),
]

TASK = "feeds.tasks.import_feed"
NAME = f"{TASK}(feed_id=7)"
KEY = call_key(TASK, AS_SHOWN, (), {"feed_id": 7}).key
BESIDE = LockKey(NAME, KEY).beside(QUEUED, TASK).key


def hold(name=NAME, key=KEY, *, left=30, ago=134, alias="redis", **facts):
    """Put an entry into the store as a run that began some time ago would have."""
    holder = Holder.new(name, 60, task=TASK, task_id="3f0c", retries=0, token="9ab2")
    holder = dataclasses.replace(holder, since=time.time() - ago, **facts)
    get_store(alias).add(key, holder.encode(), left)
    return holder


def hold_elsewhere(**facts):
    return hold(boot_id="another", host="web-3", pid=8121, **facts)


def explained(name=NAME):
    return "\n".join(explain(why(name)))


def flat(name=NAME):
    """Return the sentences in one line, wherever they are wrapped."""
    return explained(name).replace("\n", " ")


# Held


def test_held_lock_is_explained_in_full(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    holder = hold()
    for lasted in (3, 4, 31):
        ran(7800, lasted, name=NAME, key=KEY, task=TASK)
    skipped(60, 2, 31, name=NAME, key=KEY, blocked_by="9ab2")
    assert re.fullmatch(
        rf"Held for 2m 1\ds by task 3f0c on {re.escape(holder.host)}, process {os.getpid()} "
        rf"\(alive, on this host, started [^)]+ ago\)\.\n"
        r"Lease: 60 s, renewed 3\d s ago, ends in 2\d s unless renewed\. "
        r"Usual hold of its task: 4 s, longest 31 s\.\n"
        r"31 conflicts during this hold, the last [23] s ago\. Last completed: 2h 10m ago\.\n"
        r"The lock is released when the task ends or its process dies\. To stop the task:\n"
        r"    celery -A tests\.testapp control terminate SIGTERM 3f0c\n"
        r"To free only the lock \(the task keeps running, and a second copy can start at the same "
        r"time\):\n"
        r"    manage\.py locks clear 9ab2",
        explained(),
    )


def test_page_of_the_task_is_named(settings):
    settings.SINGLETASK_TASK_URL = "https://flower.example/task/{task_id}"
    hold(task_id="3f/0c")
    assert "The page of the task:\n    https://flower.example/task/3f%2F0c\n" in explained()


def test_sentences_fit_the_terminal_and_commands_are_never_wrapped():
    hold(task_id="9ab2 " * 20)
    lines = explained().splitlines()
    assert f"    celery -A tests.testapp control terminate SIGTERM '{'9ab2 ' * 20}'" in lines
    assert all(columns(line) <= 80 for line in lines if not line.startswith("    "))


def test_name_key_and_call_explain_the_same():
    hold_elsewhere()
    for name in (KEY, NAME, f"{TASK}( feed_id = 7 )"):
        assert why(name).name == NAME
        assert why(name).lock.token == "9ab2"


def test_process_elsewhere_cannot_be_seen():
    hold_elsewhere()
    assert "process 8121 (on another host or in another" in flat()
    assert why(NAME).alive is None


def test_start_of_a_process_is_left_out_where_unknown():
    hold(start="")
    assert "(alive, on this host)" in flat()


def test_lease_that_was_not_renewed_yet_has_no_time_of_renewal():
    hold(ago=30)
    assert re.search(
        r"^Lease: 60 s, ends in (29|30) s unless renewed\.$", explained(), re.MULTILINE
    )


def test_lease_of_memcached_is_only_its_length(settings, empty_cache):
    settings.SINGLETASK_CACHE = "pymemcache"
    empty_cache("pymemcache")
    hold(alias="pymemcache")
    assert "Lease: 60 s.\n" in explained()


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (1, "1 conflict during this hold, 5 s ago."),
        (2, "2 conflicts during this hold, the last"),
    ],
)
def test_one_conflict_is_written_in_the_singular(count, words):
    hold()
    skipped(9, 5, count, name=NAME, key=KEY, blocked_by="9ab2")
    assert words in explained()


def test_no_conflict_and_no_completed_run_are_said():
    hold()
    assert "No conflict during this hold. No completed run is in the history." in flat()


def test_last_completed_run_that_raised_says_so():
    hold()
    ran(60, name=NAME, key=KEY, result="raised")
    assert "Last completed: 60 s ago (it raised an error)." in flat()


def test_lock_in_code_has_no_task_to_stop():
    hold(task=None, task_id=None)
    text = explained()
    assert "by code outside a task on " in text
    assert "The lock is released when the code ends or its process dies.\n" in text
    assert "celery -A" not in text


def test_lock_that_starves_since_before_its_holder_says_so():
    hold()
    skipped(8000, 60, 40, name=NAME, key=KEY, blocked_by="earlier")
    assert explained().startswith("Starving: 40 conflicts in 2h 13m; no run completed.\n")


def test_lock_whose_calls_stopped_does_not_starve():
    skipped(8000, 7000, 40, name=NAME, key=KEY)
    assert "Starving" not in explained()
    assert why(NAME).starving is None


def test_dead_holder_is_taken_over():
    child = subprocess.Popen(["true"])
    child.wait()
    hold(pid=child.pid)
    text = explained()
    assert f"(dead: process {child.pid} is gone)" in flat()
    assert "The next call on this host takes the lock over. To free the lock now:" in text
    assert why(NAME).alive is False


@pytest.fixture
def child():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_process_that_stands_still_is_called_stopped(child):
    process = {"pid": child.pid, "start": start_time(child.pid)}
    hold(**process)
    child.send_signal(signal.SIGSTOP)
    wait_for(lambda: "(stopped, on this host" in flat(), "it is stopped")
    assert "and cannot renew the lease: another run can start when the lease ends. To " in flat()
    assert f"\n    kill -CONT {child.pid}\n" in explained()
    assert locks().rstrip().endswith(" (stopped)")


def test_slow_hold_is_called_slow():
    hold()
    for _ in range(5):
        ran(7800, 0.01, name=NAME, key=KEY, task=TASK)
    assert "Slower than usual. Usual hold of its task: 0.01 s, longest 0.01 s." in flat()
    assert "(slow: usual <1s)" in locks()


@pytest.mark.parametrize(
    ("runs", "lasted", "ago", "slow"),
    [(4, 11, 60, 0), (5, 11, 60, 1), (5, 11, 20, 0), (5, 0.01, 9, 0), (5, 0.01, 12, 1)],
)
def test_hold_is_slow_beside_enough_runs_of_less_than_half_its_length(runs, lasted, ago, slow):
    hold(ago=ago)
    for _ in range(runs):
        ran(60, lasted, task=TASK)
    assert why(NAME).lock.slow == bool(slow)


# Free


def test_free_lock_tells_what_was(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    facts = {"outcome": "expired", "pid": 7, "actor": "web-1:9", "reason": "gone"}
    row("run", 300, name=NAME, key=KEY, task_id="x", host="web-2", **facts)
    facts = {"outcome": "cleared", "retaken": 1, "pid": 8, "actor": "ada", "reason": "hung"}
    row("run", 200, name=NAME, key=KEY, task_id="y", host="web-2", **facts)
    skipped(150, 100, 2, name=NAME, key=KEY, blocked_by="b", blocked_by_task_id="z")
    ran(90, 5, name=NAME, key=KEY, task=TASK, task_id="w", host="web-1", pid=9)
    assert explained().splitlines() == [
        f"Free: {NAME}.",
        "Last completed: 1m 30s ago, by task w on web-1, process 9 (held for 5 s).",
        "Usual hold of its task: 5 s, longest 5 s.",
        "Last conflict: 1m 40s ago, because task z had the lock.",
        "Last trouble: retaken and cleared 3m 20s ago, task y on web-2, process 8 (by ada, hung).",
        "Last trouble: expired 5m 00s ago, task x on web-2, process 7 (noticed by web-1:9, gone).",
    ]


def test_free_lock_that_starves_says_so():
    skipped(8000, 60, 40, name=NAME, key=KEY)
    assert "Starving: 40 conflicts in 2h 13m; no run completed." in explained()


def test_free_lock_is_found_by_its_key():
    ran(90, name=NAME, key=KEY, task=TASK)
    assert "Last completed" in explained(KEY)
    ran(90, name="nightly", key=name_key("nightly").key)
    assert "Last completed" in explained(name_key("nightly").key)


def test_rows_of_a_name_that_shows_less_than_the_key_holds_are_kept_apart():
    hold()
    ran(90, name=NAME, key="another key")
    ran(400, name=NAME, key=KEY)
    assert "Last completed: 6m 40s ago." in explained()


LONG = "feeds.import_feed('https://…xml')"


def test_held_locks_of_one_name_are_told_apart():
    hold(LONG, "singletask:feeds:1", token="1", ago=500)
    hold(LONG, "singletask:feeds:2", token="2")
    ran(90, name=LONG, key="singletask:feeds:2")
    ran(400, name=LONG, key="singletask:feeds:1")
    text = flat(LONG)
    assert text.startswith(
        "2 locks have this name. This is the lock with the key singletask:feeds:1; the other "
        "keys: singletask:feeds:2. Held for 8m "
    )
    assert "clear 1" in text
    assert "Last completed: 6m 40s ago." in text
    assert "have this name" not in explained("singletask:feeds:2")
    assert why(LONG).same_name == ["singletask:feeds:2"]


def test_free_locks_of_one_name_are_told_apart():
    ran(400, name=LONG, key="singletask:feeds:1")
    ran(90, name=LONG, key="singletask:feeds:2")
    ran(60, name=LONG, key="singletask:feeds:1")
    skipped(50, name=LONG, key="singletask:feeds:2")
    assert (why(LONG).key, why(LONG).same_name) == ("singletask:feeds:2", ["singletask:feeds:1"])
    assert why(LONG).completed.key == "singletask:feeds:2"


def test_lock_and_its_queued_call_are_no_two_locks():
    hold(LONG, "singletask:feeds:1")
    key = LockKey(LONG, "singletask:feeds:1").beside(QUEUED, TASK).key
    queued = Holder.from_dict({"name": LONG, "task": TASK, "token": "q", "timeout": 60})
    get_store("redis").add(key, queued.encode(), 30)
    assert why(LONG).same_name == []
    assert why(LONG).queued.token == "q"


def test_task_that_never_ran_is_free():
    name = "tests.testapp.tasks.unique('a')"
    assert explained(name).startswith(f"Free: {name}.\nNo completed run")


def test_expired_hold_says_that_there_is_nothing_to_free():
    row("run", 100, name=NAME, key=KEY, timeout=60, host="web-1", pid=7, task_id="x")
    text = flat()
    assert text.startswith(
        f"Free: {NAME}. Stale history entry: task x on web-1, process 7 acquired this lock "
    )
    assert "ago with a 60 s lease; the cache no longer has it. Nothing to free. A worker" in text


def test_history_that_is_off_is_mentioned(settings):
    settings.SINGLETASK_HISTORY = "off"
    assert explained("nightly") == (
        "Free: nightly.\nSINGLETASK_HISTORY = 'off': no history is recorded."
    )


def test_history_off_on_memcached_still_explains_what_is_held(settings, empty_cache):
    settings.SINGLETASK_CACHE = "pymemcache"
    settings.SINGLETASK_HISTORY = "off"
    empty_cache("pymemcache")
    hold(alias="pymemcache")
    assert explained().startswith("Held for 2m 1")


# Queued


def test_queued_call_is_explained():
    key = BESIDE
    holder = Holder.new(NAME, 3600, task=TASK, task_id="5d1c", retries=0, token="t")
    holder = dataclasses.replace(holder, pid=0, start="", since=time.time() - 3, host="web-1")
    get_store("redis").add(key, holder.encode(), 3597)
    skipped(1, kind="duplicate", name=NAME, key=key, blocked_by="t", count=2)
    text = explained()
    assert re.match(
        r"Queued: task 5d1c, sent [34] s ago from web-1\. It stops identical calls until it has "
        r"run, but at most for 59m 5\ds more\. 2 duplicates\.",
        flat(),
    )
    assert f"\n    manage.py locks clear --queued {key}\n" in text
    assert "Last duplicate: 1 s ago." in text


def test_queued_call_behind_a_held_lock_is_explained_too():
    hold_elsewhere()
    queued = Holder.from_dict({"name": NAME, "token": "q", "task_id": "5d1c", "timeout": 60})
    get_store("redis").add(BESIDE, queued.encode(), 30)
    text = explained()
    assert text.startswith("Held for")
    assert f"clear --queued {BESIDE}" in text


def test_queued_call_on_memcached_without_history_says_what_is_known(settings, empty_cache):
    settings.SINGLETASK_CACHE = "pymemcache"
    settings.SINGLETASK_HISTORY = "off"
    empty_cache("pymemcache")
    hold(NAME, LockKey(NAME, KEY).beside(QUEUED, TASK).key, alias="pymemcache", ago=20, pid=0)
    assert re.search(r"until it has run, but at most for (39|40) s more\. To forget", flat())


# A task, and a run by its id


def test_task_is_summed_up(empty_cache):
    for feed in range(6):
        key = call_key(TASK, AS_SHOWN, (), {"feed_id": feed}).key
        name = f"{TASK}(feed_id={feed})"
        hold_elsewhere(name=name, key=key, token=str(feed), ago=100 - feed)
    ran(90, 5, name=NAME, task=TASK, task_id="w", host="web-1", pid=9)
    skipped(60, 2, 31, name=NAME, task=TASK, blocked_by_task_id="z")
    skipped(90_000, 90_000, 5, name=NAME, task=TASK)
    text = flat("import_feed")
    assert text.startswith(
        f"{TASK}: 6 locks held, 0 calls queued. Held: (feed_id=0), (feed_id=1), (feed_id=2), "
        "(feed_id=3), (feed_id=4) and 1 more. The first has been held for 1m 40s, by task 3f0c on "
        "web-3, process 8121. Last completed: 1m 30s ago. Usual hold: 5 s, longest 5 s. Last "
        "conflict: 2 s ago, because task z had the lock. 31 conflicts in the last 1d. "
        "To explain one lock:"
    )
    assert f"\n    manage.py locks why '{TASK}(feed_id=0)'" in explained("import_feed")


def test_sum_of_a_task_says_which_locks_are_held_by_no_running_process(child):
    gone = subprocess.Popen(["true"])
    gone.wait()
    hold(f"{TASK}(feed_id=1)", "singletask:1", token="1", pid=gone.pid)
    stopped = {"pid": child.pid, "start": start_time(child.pid)}
    hold(f"{TASK}(feed_id=2)", "singletask:2", token="2", ago=133, **stopped)
    hold(f"{TASK}(feed_id=3)", "singletask:3", token="3", ago=100)
    hold(f"{TASK}(feed_id=4)", "singletask:4", token="4", ago=1)
    for _ in range(5):
        ran(7800, 1, name=NAME, key=KEY, task=TASK)
    child.send_signal(signal.SIGSTOP)
    names = "(feed_id=1) (dead), (feed_id=2) (stopped), (feed_id=3) (slow), (feed_id=4). "
    wait_for(lambda: names in flat(TASK), "it is stopped")


def test_only_held_lock_of_a_task_is_explained_with_its_name():
    hold()
    assert locks("why", TASK).startswith(f"{NAME}:\nHeld for 2m 1")
    assert locks("why", NAME).startswith("Held for 2m 1")


def test_sum_of_a_task_names_a_lock_that_is_known():
    name = "tests.testapp.tasks.unique"
    assert f"To explain one lock, name the call with its arguments: {name}(…)." in flat(name)
    ran(90, name=f"{name}(key='a')", task=name)
    assert explained(name).endswith(f"""why '{name}(key='"'"'a'"'"')'""")


def test_usual_hold_of_a_lock_without_a_task_is_its_own():
    ran(90, 5, name="nightly", key=name_key("nightly").key)
    assert "Usual hold: 5 s, longest 5 s." in flat("nightly")
    hold("nightly", name_key("nightly").key, task=None, task_id=None)
    assert "Usual hold: 5 s, longest 5 s." in flat("nightly")


def test_task_whose_rows_are_many_is_summed_up_for_as_long_as_they_reach(monkeypatch):
    monkeypatch.setattr("django_singletask.operators.explain.NEWEST", 3)
    for ago in (5, 60, 3600):
        skipped(ago, name=NAME, task=TASK)
        skipped(4000, name=NAME, task=TASK)
    assert "3 conflicts in the last 1h" in flat(TASK)


def test_only_lock_of_a_task_is_explained_by_the_name_of_the_task():
    name = "reports.tasks.nightly()"
    hold(
        name, call_key("reports.tasks.nightly", AS_SHOWN, (), {}).key, task="reports.tasks.nightly"
    )
    ran(90, name=name, task="reports.tasks.nightly")
    assert why("reports.tasks.nightly").lock.name == name


@pytest.mark.parametrize("run", ["3f0c", "9ab2"], ids=["task id", "token"])
def test_run_explains_the_lock_that_it_holds(run):
    hold()
    ran(90, name="another", task_id="3f0c")
    assert (why(run).name, why(run).lock.token, why(run).run) == (NAME, "9ab2", None)


def test_run_that_has_ended_is_told_by_the_history():
    ran(90, 5, name=NAME, key=KEY, task=TASK, task_id="w", host="web-1", pid=9)
    assert flat("w").startswith(
        f"Task w on web-1, process 9: returned 1m 30s ago. Free: {NAME}. Last completed: "
    )


# Unknown


def test_history_that_is_away_is_mentioned():
    def away(*args):
        raise InterfaceError("connection already closed")

    hold()
    with connection.execute_wrapper(away):
        assert "connection already closed" in why(NAME).no_history


def test_unknown_name_has_close_matches():
    ran(90, name="reports.nightly()")
    ran(90, name="feeds.import_feed(feed_id=7)")
    hold("customer:12", name_key("customer:12").key)

    def like(name):
        with pytest.raises(UnknownName) as caught:
            why(name)
        return caught.value.matches

    for name in ("feed.import_feed(feed_id=7)", "import_fed", "IMPORT_FEED", "feed_id=7"):
        assert like(name) == ["feeds.import_feed(feed_id=7)"]
    assert like("nightly") == ["reports.nightly()"]
    assert like("costumer:12") == ["customer:12"]
    assert like("something else") == like("") == []
    assert like("tests.testapp.tasks.uniqe(7)")[0] == "tests.testapp.tasks.unique"


def test_unknown_key_is_unknown():
    ran(90, name=NAME, key=KEY, task=TASK)
    with pytest.raises(UnknownName):
        why(f"{KEY}0")


def test_characters_that_control_a_terminal_are_escaped():
    hold(task_id="a\x1b[2Jb", host="c\rd")
    assert "\x1b" not in explained()
    assert "\r" not in explained()
    assert "a\\x1b[2Jb" in explained()


def test_foreign_entry_is_cleared_by_its_key():
    key = name_key("foreign").key
    get_store("redis").add(key, b"text", 30)
    assert "Held by code outside a task on an unknown host" in explained(key)
    assert f"manage.py locks clear {key}" in explained(key)


# As a process


def test_command_explains_a_lock_of_another_process():
    lock = TaskLock("nightly")
    lock.acquire()
    try:
        command = [sys.executable, "-m", "django", "locks", "why", "nightly"]
        done = subprocess.run(command, capture_output=True, text=True)
    finally:
        lock.release()
    assert (done.returncode, done.stderr) == (0, "")
    assert f"process {os.getpid()}" in done.stdout.replace("\n", " ")
    assert "(alive, on this host, started" in done.stdout.replace("\n", " ")


def test_command_exits_with_3_for_an_unknown_name():
    command = [sys.executable, "-m", "django", "locks", "why", "nothing\x1b"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("CommandError: No lock or task is known as 'nothing\\x1b'.")
