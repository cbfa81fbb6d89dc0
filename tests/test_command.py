from __future__ import annotations

import io
import json
import os
import pty
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from celery import Celery
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_singletask import SingletonTask, TaskLock
from django_singletask.history.writing import prune
from django_singletask.holder import Holder, this_process
from django_singletask.locks.keys import name_key
from django_singletask.management.commands import locks as command
from django_singletask.management.tables import columns, printable
from django_singletask.models import TaskLockEvent
from django_singletask.operators import held as registry
from django_singletask.operators import names as calls
from django_singletask.operators.starving import starving
from django_singletask.stores import get_store
from django_singletask.task.delivery import HEADER
from tests.past_rows import before_now, ran, row, skipped
from tests.test_conflicts import receive
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history", "whole_second", "eighty_columns"),
]

ROOT = Path(__file__).parent.parent


def hold(**facts):
    """Put an entry into the store as another process would."""
    facts = {"token": "t", "name": "nightly", "host": "web-3", "pid": 8121, **facts}
    key = name_key(f"held {facts['token']}").key
    get_store("redis").add(key, Holder.from_dict(facts).encode(), 30)


def locks(*arguments, **options):
    output = io.StringIO()
    call_command("locks", *arguments, stdout=output, no_color=True, **options)
    return output.getvalue()


def answer(monkeypatch, text):
    """Let somebody answer the question; return the questions."""
    questions = []

    def ask(question):
        questions.append(question)
        if isinstance(text, type):
            raise text
        return text

    monkeypatch.setattr("builtins.input", ask)
    return questions


def cleared():
    return list(TaskLockEvent.objects.filter(kind="cleared"))


# list


def test_list_is_the_default(take):
    take("nightly")
    assert locks() == locks("list")


def test_nothing_held_is_said():
    assert locks() == "No lock is held.\n"


def test_list_has_the_columns_of_the_design(monkeypatch):
    monkeypatch.setattr("django_singletask.operators.held.time.time", lambda: 1_000_134.0)
    hold(name="feeds.tasks.import_feed(feed_id=7)", since=1_000_000, token="a")
    TaskLockEvent.objects.create(
        kind="skipped", name="x", key="x", blocked_by="a", count=31, at="2026-01-01T00:00Z"
    )
    lease = r"(29|30)s"
    assert re.fullmatch(
        "LOCK                                HELD FOR  LEASE  SKIPPED  HOLDER\n"
        rf"feeds\.tasks\.import_feed\(feed_id=7\)    2m 14s    {lease}       31  web-3:8121" + "\n",
        locks(),
    )


def test_unknown_values_are_dashes(settings, take, empty_cache):
    settings.SINGLETASK_CACHE = "pymemcache"
    empty_cache("pymemcache")
    take("nightly")
    assert re.match(r"nightly +0s +- +0  ", locks().splitlines()[1])


def test_missing_history_is_a_dash(settings, take):
    settings.SINGLETASK_HISTORY = "off"
    take("nightly")
    assert re.match(r"nightly +0s +(59s|1m 00s) +-  ", locks().splitlines()[1])


def test_list_takes_names_and_tasks(take):
    take("one")
    take("two")
    assert "two" not in locks("list", "one")
    assert locks("list", "three") == "None of these is held.\n"
    assert locks("list", "--task", "other") == "None of these is held.\n"


@pytest.mark.parametrize("char", ["x", "ж", "字", "e\u0301", "\x1b", "\u202e"])
def test_list_fits_eighty_columns(char):
    hold(name=char * 255, host=char * 255, token="1")
    hold(name="nightly", token="2", since=1)
    lines = locks().splitlines()
    assert len(lines) == 3
    assert 79 <= max(map(columns, lines)) <= 80


def test_columns_stand_below_each_other_whatever_the_script():
    hold(name="字字", token="1")
    hold(name="e\u0301", token="2")
    hold(name="long enough", token="3")
    ends = {columns(line[: line.index("web-3")]) for line in locks().splitlines()[1:]}
    assert len(ends) == 1


def test_function_and_end_of_a_long_name_are_shown():
    hold(name=f"feeds.tasks.import_feed(feed_url='https://example.org/{'x' * 90}/7.xml')")
    assert re.search(r"^…import_feed\(…x+/7\.xml'\)  ", locks(), re.MULTILINE)


def test_wide_terminal_shows_more(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    hold(name="x" * 120)
    assert "x" * 120 in locks()


@pytest.mark.parametrize("place", ["name", "host"])
@pytest.mark.parametrize("evil", ["\x1b[2J", "\r", "\n", "\x9b31m", "\u202e"], ids=ascii)
def test_what_steers_a_terminal_is_escaped(place, evil):
    hold(**{place: f"a{evil}b"})
    escaped = evil.encode("unicode_escape").decode()
    assert f"a{escaped}b" in locks().splitlines()[1]


@pytest.mark.parametrize("evil", ["\x00", "\ud800"], ids=ascii)
def test_what_no_database_takes_is_replaced(evil):
    hold(name=f"a{evil}b")
    assert locks().splitlines()[1].startswith("a\N{REPLACEMENT CHARACTER}b ")


def test_json_is_valid_and_alone(take):
    lock = take("nightly \u202e ключ", timeout=30)
    [found] = json.loads(locks("--json"))
    assert found.pop("held_for") < 20
    assert 10 < found.pop("remaining") <= 30
    assert found.pop("since") > 1_700_000_000
    assert found == {
        "name": lock.name,
        "key": lock.key,
        "state": "held",
        "queued": False,
        "skipped": 0,
        "token": lock.token,
        "task": None,
        "task_id": None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "timeout": 30.0,
        "usual": None,
        "slow": False,
    }


def test_json_of_nothing_is_an_empty_list():
    assert json.loads(locks("--json")) == []


@pytest.mark.parametrize("arguments", [["--json", "list"], ["list", "--json"]])
def test_json_stands_before_or_after_the_action(arguments):
    assert json.loads(locks(*arguments)) == []


def test_json_names_task_and_id():
    with Celery("commanded", set_as_current=False, broker="memory://") as app:

        @app.task(base=SingletonTask, name="commanded", shared=False)
        def commanded():
            return locks("--json", "list", "--task", "commanded")

        [found] = json.loads(commanded.apply(task_id="the-id").get())
    assert (found["task"], found["task_id"]) == ("commanded", "the-id")


# clear


def test_clear_frees_what_it_shows(take):
    lock = take("nightly")
    output = locks("clear", "nightly", "--yes")
    assert re.search(r"^nightly  .*\nFreed 1 lock\.\n$", output, re.MULTILINE)
    assert not lock.locked()


def test_clear_takes_keys(take):
    lock = take("nightly")
    locks("clear", lock.key, "--yes")
    assert not lock.locked()


def test_clear_leaves_the_others(take):
    take("one")
    other = take("two")
    locks("clear", "one", "--yes")
    assert other.owned()


def test_clear_of_a_task_leaves_the_others(take):
    other = take("by hand")
    with Celery("cleared", set_as_current=False, broker="memory://") as app:

        @app.task(base=SingletonTask, name="cleared", shared=False)
        def task():
            return locks("clear", "--task", "cleared", "--yes")

        assert "Freed 1 lock." in task.apply().get()
    assert other.owned()


def test_clear_all(take):
    held = [take("one"), take("two")]
    assert "Freed 2 locks.\n" in locks("clear", "--all", "--yes")
    assert not any(lock.locked() for lock in held)


def test_clear_by_token_frees_that_holder(take):
    lock = take("nightly")
    locks("clear", "--token", lock.token, "--yes")
    assert not lock.locked()


@pytest.mark.parametrize("name", [[], ["nightly"]])
def test_clear_by_another_token_frees_nothing(take, name):
    lock = take("nightly")
    with pytest.raises(CommandError, match=r"^Not held( by that token: nightly|: --token other)"):
        locks("clear", *name, "--token", "other", "--yes")
    assert lock.owned()


def test_clear_of_nothing_says_what_to_say(take):
    lock = take("nightly")
    with pytest.raises(CommandError, match="Say what to clear") as caught:
        locks("clear", "--yes")
    assert caught.value.returncode == 2
    assert lock.owned()


@pytest.mark.parametrize("narrowed", [["nightly"], ["--dead"], ["--task", "x"], ["--token", "x"]])
def test_clear_of_all_and_of_some_is_an_error(take, narrowed):
    lock = take("nightly")
    with pytest.raises(CommandError, match=r"^--all does not go together with a name") as caught:
        locks("clear", "--all", *narrowed, "--yes")
    assert caught.value.returncode == 2
    assert lock.owned()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nightly"], "Not held: nightly."),
        (["one", "nightly", "x\x1b"], "Not held: nightly, x\\x1b."),
        (["--task", "x"], "Not held: --task x."),
        (["--token", "x"], "Not held: --token x."),
    ],
)
def test_clear_of_what_is_not_there_frees_nothing(take, arguments, message):
    lock = take("one")
    with pytest.raises(CommandError, match=f"^{re.escape(message)}$"):
        locks("clear", *arguments, "--yes")
    assert lock.owned()
    assert cleared() == []


def test_clear_all_of_nothing_is_done():
    assert locks("clear", "--all", "--yes") == "No lock is held.\n"
    assert json.loads(locks("clear", "--all", "--yes", "--json")) == []


@pytest.mark.parametrize("text", ["y", "YES", " yes "])
def test_clear_asks_first(take, monkeypatch, text):
    lock = take("nightly")
    [question] = [answer(monkeypatch, text)]
    locks("clear", "nightly")
    assert question == [
        "Free 1 lock? The runs above go on, and others can start beside them. [y/N] "
    ]
    assert not lock.locked()


@pytest.mark.parametrize("text", ["", "n", "maybe", "yessir", KeyboardInterrupt])
def test_anything_but_yes_frees_nothing(take, monkeypatch, text):
    lock = take("nightly")
    answer(monkeypatch, text)
    with pytest.raises(CommandError, match=r"^Nothing was freed\.$"):
        locks("clear", "nightly")
    assert lock.owned()


def test_nobody_to_ask_frees_nothing(take, monkeypatch):
    lock = take("nightly")
    answer(monkeypatch, EOFError)
    with pytest.raises(CommandError, match="--yes frees without asking"):
        locks("clear", "nightly")
    assert lock.owned()


def test_dry_run_frees_nothing_and_asks_nothing(take, monkeypatch):
    lock = take("nightly")
    questions = answer(monkeypatch, "y")
    assert locks("clear", "--all", "--dry-run").endswith("\nWould free 1 lock.\n")
    assert lock.owned()
    assert questions == cleared() == []


def test_holder_that_changes_while_it_asks_keeps_its_lock(take, monkeypatch):
    lock = take("nightly")

    def change(question):
        lock.release()
        take("nightly")
        return "y"

    monkeypatch.setattr("builtins.input", change)
    with pytest.raises(
        CommandError, match=r"^Not freed: nightly\. The holder that was shown no longer has it"
    ):
        locks("clear", "nightly")
    assert TaskLock("nightly").locked()
    assert cleared() == []


def test_those_that_stay_are_free_while_it_asks_frees_the_rest(take, monkeypatch):
    one, two = take("one"), take("two")

    def change(question):
        one.release()
        return "y"

    monkeypatch.setattr("builtins.input", change)
    output = io.StringIO()
    with pytest.raises(CommandError, match=r"^Not freed: one\."):
        call_command("locks", "clear", "--all", stdout=output, no_color=True)
    assert "Freed 1 lock.\n" in output.getvalue()
    assert not two.locked()


def test_clear_leaves_a_row_with_who_did_it(take, monkeypatch):
    monkeypatch.setenv("LOGNAME", "ada")
    lock = take("nightly")
    locks("clear", "nightly", "--yes")
    [row] = cleared()
    assert row.actor == f"ada on {socket.gethostname()} (manage.py locks)"
    assert (row.name, row.token) == ("nightly", lock.token)
    assert TaskLockEvent.objects.get(kind="acquired").outcome == "cleared"


def test_user_without_a_name_is_no_obstacle(take, monkeypatch):
    def unknown():
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr(command.getpass, "getuser", unknown)
    take("nightly")
    locks("clear", "nightly", "--yes")
    assert cleared()[0].actor.startswith("unknown user on ")


def test_json_of_clear_is_alone_and_says_what_was_freed(take):
    lock = take("nightly")
    [found] = json.loads(locks("clear", "nightly", "--yes", "--json"))
    assert (found["token"], found["freed"]) == (lock.token, True)


def test_json_of_a_dry_run_frees_nothing(take):
    lock = take("nightly")
    [found] = json.loads(locks("clear", "nightly", "--dry-run", "--json"))
    assert found["freed"] is False
    assert lock.owned()


def test_json_cannot_ask(take, monkeypatch):
    lock = take("nightly")
    questions = answer(monkeypatch, "y")
    with pytest.raises(CommandError, match="add --yes or --dry-run"):
        locks("clear", "nightly", "--json")
    assert lock.owned()
    assert questions == []


def test_clear_works_on_memcached(settings, take, empty_cache):
    settings.SINGLETASK_CACHE = "pymemcache"
    empty_cache("pymemcache")
    lock = take("nightly")
    assert "Freed 1 lock." in locks("clear", "--all", "--yes")
    assert not lock.locked()
    assert len(cleared()) == 1


# Failures


@pytest.mark.parametrize("arguments", [[], ["clear", "--all", "--yes"]])
def test_memcached_without_history_says_plainly_that_it_cannot(settings, take, arguments):
    settings.SINGLETASK_CACHE = "pymemcache"
    settings.SINGLETASK_HISTORY = "off"
    with pytest.raises(CommandError, match=r"cannot list its entries, .* SINGLETASK_HISTORY"):
        locks(*arguments)


def test_other_errors_are_not_told_as_those_of_the_cache(take, monkeypatch):
    def broken(locks):
        raise LookupError("of a table")

    take("nightly")
    monkeypatch.setattr(command.listings, "held", broken)
    with pytest.raises(LookupError, match="of a table"):
        locks()


@pytest.mark.parametrize("arguments", [[], ["clear", "--all", "--yes"]])
def test_store_that_is_down_is_one_message(settings, dead_redis, arguments):
    settings.SINGLETASK_CACHE = dead_redis
    with pytest.raises(CommandError) as caught:
        locks(*arguments)
    assert re.match(r"The cache 'dead' .* cannot be asked: ConnectionError: ", str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments", [[], ["why", "nightly"], ["clear", "--all", "--yes"]])
@pytest.mark.parametrize("eager", [True, False])
def test_locks_of_other_processes_cannot_be_seen_in_local_memory(settings, arguments, eager):
    settings.SINGLETASK_CACHE = "locmem"
    settings.CELERY_TASK_ALWAYS_EAGER = eager
    message = "SINGLETASK_CACHE = 'locmem' uses django.core.cache.backends.locmem.LocMemCache: each"
    with pytest.raises(CommandError, match=rf"^{re.escape(message)}.* cannot be seen\. "):
        locks(*arguments)


def test_cache_that_cannot_hold_locks_says_so(settings):
    settings.SINGLETASK_CACHE = "dummy"
    with pytest.raises(CommandError, match="SINGLETASK_CACHE = 'dummy' cannot hold locks"):
        locks()


# States


@pytest.fixture
def ended_process():
    """Describe a process of this host that has ended."""
    child = subprocess.Popen(["true"])
    child.wait()
    return {**vars(this_process()), "pid": child.pid, "start": "1"}


def test_slow_hold_says_what_is_usual():
    for _ in range(5):
        ran(60, 660, task="reports.tasks.nightly")
    hold(task="reports.tasks.nightly", name="reports.tasks.nightly()", since=time.time() - 3720)
    hold(task="reports.tasks.nightly", name="young", since=time.time() - 600, token="2")
    output = locks()
    assert re.search(r"nightly\(\) +1h 02m +.*  web-3:8121 \(slow: usual 11m\)$", output, re.M)
    assert output.count("slow") == 1


def test_slow_hold_on_a_long_host_fits_eighty_columns():
    for _ in range(5):
        ran(60, 5, task="t")
    hold(task="t", name="x" * 200, host="h" * 200, since=time.time() - 500)
    [_head, line, note] = locks().splitlines()
    assert re.search(r"^x+…x+ .*  hhh.*…h+:8121$", line)
    assert len(line) <= 80
    assert note == "    (slow: usual 5s)"


def test_slow_hold_takes_no_room_from_names():
    """Two names that differ in the middle would look alike."""
    hold(task="t", name=f"imports.feed('{'x' * 20}', 1)", host="web-3", since=time.time() - 500)
    before = locks().splitlines()[1]
    for _ in range(5):
        ran(60, 5, task="t")
    line, *note = locks().splitlines()[1:]
    assert line.split()[:2] == before.split()[:2]
    assert note == ["    (slow: usual 5s)"]


def test_dead_and_expired_are_marked_by_a_word(ended_process):
    hold(**{**ended_process, "host": "web-3"})
    row("acquired", 7200, name="old", timeout=60, host="web-1", pid=7)
    assert re.search(rf"  dead web-3:{ended_process['pid']}$", locks(), re.M)
    assert re.search(r"^old +2h 00m +- +0  expired web-1:7$", locks(), re.M)
    assert {lock["state"] for lock in json.loads(locks("--json"))} == {"dead", "expired"}


def test_json_of_a_slow_hold_says_what_is_usual():
    for _ in range(5):
        ran(60, 5, task="t")
    hold(task="t", since=time.time() - 500)
    row("acquired", 7200, name="old", timeout=60)
    old, slow = json.loads(locks("--json"))
    assert slow["usual"] == {"median": 5.0, "longest": 5.0, "runs": 5}
    assert (slow["slow"], old["slow"], old["usual"]) == (True, False, None)


def test_clear_dead_leaves_the_living(take, ended_process):
    lock = take("nightly")
    hold(**ended_process)
    assert "Freed 1 lock." in locks("clear", "--dead", "--yes")
    assert [found["name"] for found in json.loads(locks("--json"))] == [lock.name]
    assert locks("clear", "--dead", "--yes") == "No lock is held by a dead process.\n"
    with pytest.raises(CommandError, match=r"^Not held by a dead process: nightly\.$"):
        locks("clear", "--dead", "--yes", "nightly")
    assert lock.owned()


def test_clear_of_an_expired_lock_says_that_there_is_nothing_to_free():
    open_row = row("acquired", 7200, name="old", timeout=60)
    with pytest.raises(
        CommandError, match=r"^Not held: old\. Expired is not held: there is nothing"
    ):
        locks("clear", "--yes", "old")
    assert locks("clear", "--yes", "--all").startswith("No lock is held. Expired is not held")
    open_row.refresh_from_db()
    assert open_row.outcome == ""


# For monitoring


def alarm(*arguments):
    output = io.StringIO()
    with pytest.raises(CommandError) as caught:
        call_command("locks", "list", *arguments, stdout=output, no_color=True)
    return output.getvalue(), str(caught.value)


def test_lock_that_is_held_over_a_time_is_an_alarm():
    hold(name="old\x1b", since=time.time() - 3700)
    hold(name="young", since=time.time() - 3500, token="2")
    output, message = alarm("--fail-if-held-over", "1h")
    assert message == "Held for over 1h: old\\x1b (1h 01m)."
    assert "young" in output
    assert "young" in locks("list", "--fail-if-held-over", "2h")


def test_queued_and_expired_are_not_held(queued):
    queued("a")
    row("acquired", 7200, name="old", timeout=60)
    assert "old" in locks("list", "--fail-if-held-over", "1s")


def test_alarms_name_a_few_of_many():
    for number in range(7):
        hold(name=f"lock {number}", since=time.time() - 3700, token=str(number))
    assert alarm("--fail-if-held-over", "1h")[1].endswith(" (1h 01m) and 2 more.")


@pytest.mark.parametrize(
    ("limit", "how"),
    [("1h", "for 1h"), ("40x", "40 times in a row"), ("1x", "1 time in a row")],
)
def test_lock_that_starves_is_an_alarm(limit, how):
    skipped(8000, 60, 40, task="t")
    output, message = alarm("--fail-if-starving", limit)
    assert output == "No lock is held.\n"
    assert message == f"Starving {how} or more: nightly (40 calls in 2h 13m)."
    assert alarm("--fail-if-starving", limit, "nightly")
    assert alarm("--fail-if-starving", limit, "--task", "t")
    ran(60, name="other", task="of the past")
    locks("list", "--fail-if-starving", limit, "other")
    locks("list", "--fail-if-starving", limit, "--task", "of the past")
    locks("list", "--fail-if-starving", limit, "--task", tasks.unique.name)


@pytest.mark.parametrize("option", ["--fail-if-held-over", "--fail-if-starving"])
@pytest.mark.parametrize(
    ("watched", "message"),
    [
        (["nightly", "nigthly"], "No lock is known as 'nigthly'. Did you mean \"nightly\"?"),
        (["x\x1b"], "No lock is known as 'x\\x1b'. 'manage.py locks' lists what is held."),
        (
            ["--task", "unique"],
            "No task is known as 'unique'. Did you mean \"tests.testapp.tasks.unique\", or ",
        ),
        (["--task", "zzz"], "No task is known as 'zzz'. 'manage.py locks' lists what is held."),
    ],
)
def test_what_is_watched_must_be_known(take, option, watched, message):
    take("nightly")
    with pytest.raises(CommandError, match=f"^{re.escape(message)}") as caught:
        locks("list", option, "1h", *watched)
    assert caught.value.returncode == 2


def test_task_is_known_without_history_too(settings):
    settings.SINGLETASK_HISTORY = "off"
    locks("list", "--fail-if-held-over", "1h", "--task", tasks.unique.name)
    assert "known as 'zzz'" in alarm("--fail-if-held-over", "1h", "--task", "zzz")[1]


def test_both_alarms_are_told_at_once():
    skipped(8000, 60, 40)
    hold(since=time.time() - 8000)
    message = alarm("--fail-if-starving", "1h", "--fail-if-held-over", "1h")[1]
    assert re.match(r"Held for over 1h: .*\. Starving for 1h or more: ", message)


def test_alarm_comes_after_the_json():
    hold(since=time.time() - 8000)
    assert json.loads(alarm("--fail-if-held-over", "1h", "--json")[0])


def test_lock_that_starves_is_watched_by_its_key():
    skipped(8000, 60, 40)
    assert "nightly" in alarm("--fail-if-starving", "1h", name_key("nightly").key)[1]


def test_starving_without_history_is_an_error(settings):
    settings.SINGLETASK_HISTORY = "off"
    message = alarm("--fail-if-starving", "1h")[1]
    assert message.startswith("--fail-if-starving needs the history. SINGLETASK_HISTORY = 'off'")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "--fail-if-held-over", "60"], "--fail-if-held-over: '60' is no duration: write"),
        (["list", "--fail-if-starving", "60"], "--fail-if-starving: '60' is no duration"),
        (["list", "--fail-if-starving", "x"], "'x' is no duration: write it as 90s, 15m, 2h or 7d"),
        (["list", "--fail-if-starving", "x"], "7d. Or a number of calls: 50x."),
        (["list", "--fail-if-starving", "0s"], "--fail-if-starving: '0s': a duration must be pos"),
        (["list", "--fail-if-starving", "0x"], "--fail-if-starving: '0' is no positive number"),
        (["history", "--since", "x\x1b"], r"--since: 'x\\x1b' is no duration"),
        (["history", "--limit", "0"], "--limit: '0' is no positive number"),
        (["history", "--kind", "x"], "--kind: invalid choice: 'x'"),
        (["prune", "--older-than", "7"], "--older-than: '7' is no duration"),
    ],
)
def test_bad_option_is_named(arguments, message):
    with pytest.raises(CommandError, match=re.escape(message).replace(r"\\\\", r"\\")):
        locks(*arguments)


# why


def test_why_is_told(take):
    take("nightly")
    assert locks("why", "nightly").startswith("Held for 0 s by a lock in code on ")


def test_why_of_an_unknown_name_says_what_is_like_it():
    ran(60, name="nightly")
    with pytest.raises(
        CommandError, match=r"^No lock is known as 'nigthly'\. Did you mean \"nightly\""
    ):
        locks("why", "nigthly")
    with pytest.raises(CommandError, match=r"'manage\.py locks' lists what is held\.$"):
        locks("why", "something else")


def test_why_as_json(take):
    lock = take("nightly")
    skipped(60, 5, 2, blocked_by=lock.token)
    ran(90, 5)
    found = json.loads(locks("why", "nightly", "--json"))
    assert (found["free"], found["alive"], found["lock"]["token"]) == (False, True, lock.token)
    assert found["usual"]["runs"] == 1
    assert found["completed"]["what"] == "returned"
    assert found["starving"]["skipped"] == 2
    assert found["completed"]["ago"] == round(found["completed"]["ago"], 3)


def test_why_of_a_free_lock_as_json():
    ran(90, 5)
    found = json.loads(locks("why", "nightly", "--json"))
    assert (found["free"], found["lock"], found["queued"]) == (True, None, None)


# history


def test_history_is_a_table_newest_first():
    ran(3600, 134.5, name="feeds.import_feed(feed_id=7)", host="web-3", pid=8121)
    skipped(60, 5, 31, name="reports.tasks.nightly()", host="web-1", pid=40)
    row("cleared", 1, name="nightly", actor="ada")
    row("acquired", 1, name="held", host="web-1", pid=40)
    row("acquired", 1, name="off", outcome="released", result="postponed", ended_at=before_now(0))
    lines = [
        re.sub(r"\d\d-\d\d \d\d:\d\d:\d\d", "##-## ##:##:##", line)
        for line in (locks("history").splitlines())
    ]
    assert lines[0].split() == ["AT", "LOCK", "WHAT", "HELD", "BY"]
    assert [re.split(r"  +", line)[1:] for line in lines[1:]] == [
        ["off", "postponed", "1.00s", "unknown"],
        ["held", "held", "-", "web-1:40"],
        ["nightly", "cleared", "-", "ada"],
        ["reports.tasks.nightly()", "skipped ×31", "-", "web-1:40"],
        ["feeds.import_feed(feed_id=7)", "returned", "2m 14s", "web-3:8121"],
    ]


@pytest.mark.parametrize("char", ["x", "字", "\x1b"])
def test_history_fits_eighty_columns(char):
    row("cleared", 1, key="singletask:x", name=char * 200, actor=char * 200)
    ran(60, name="nightly")
    lines = locks("history").splitlines()
    assert 78 <= max(map(columns, lines)) <= 80


def test_history_takes_filters():
    ran(7200, name="one", task="a")
    ran(60, name="two", task="b")
    skipped(30, name="two", task="b")

    def names(*arguments):
        return [found["name"] for found in json.loads(locks("history", "--json", *arguments))]

    assert names() == ["two", "two", "one"]
    assert names("one") == names("--task", "a") == ["one"]
    assert names("--since", "1h") == ["two", "two"]
    assert names("--kind", "skipped") == names("--limit", "1") == ["two"]
    assert names("--outcome", "released") == ["two", "one"]
    assert names(name_key("one").key) == ["one"]


def test_history_of_a_call_is_found_by_its_arguments():
    name = tasks.unique.lock("a").name
    ran(60, name=name)
    assert "returned" in locks("history", "tests.testapp.tasks.unique('a')")


def test_history_of_a_task_id_is_found_if_no_lock_is_named_so():
    ran(60, name="one", task_id="3f0c")
    ran(60, name="two", task_id="5d1c")
    ran(60, name="5d1c")
    assert [found["name"] for found in json.loads(locks("history", "3f0c", "--json"))] == ["one"]
    assert [found["name"] for found in json.loads(locks("history", "5d1c", "--json"))] == ["5d1c"]


def test_history_names_who_used_the_command_without_host():
    row("cleared", 1, actor="root on a-very-long-host-name.example.org (manage.py locks)")
    row("cleared", 1, actor="ada on call")
    assert [line.split("  ")[-1] for line in locks("history").splitlines()[1:]] == [
        "ada on call",
        "root",
    ]


def test_history_as_json_has_unix_times():
    made = ran(60, 5, host="web-1", pid=7)
    [found] = json.loads(locks("history", "--json"))
    assert found["ended_at"] - found["at"] == pytest.approx(5, abs=0.01)
    assert found["at"] == pytest.approx(time.time() - 65, abs=20)
    assert (found["id"], found["host"], found["outcome"]) == (made.pk, "web-1", "released")


def test_empty_history_is_said():
    assert locks("history") == "Nothing of this is in the history.\n"
    assert json.loads(locks("history", "--json")) == []


@pytest.mark.parametrize("name", ["", "x" * 256, "a\0b", "two\nlines"])
def test_history_of_what_can_be_no_name_is_empty(name):
    ran(60, name="nightly")
    assert locks("history", name) == "Nothing of this is in the history.\n"
    assert "nightly" in locks("history", name, "nightly")


def test_history_that_is_off_still_shows_old_rows(settings, capsys):
    settings.SINGLETASK_HISTORY = "off"
    ran(60)
    for name in ("nightly", name_key("nightly").key):
        assert "returned" in locks("history", name)
    assert capsys.readouterr().err == 2 * "SINGLETASK_HISTORY = 'off': only old rows are there.\n"


# prune


@pytest.fixture
def old():
    for age in (1, 8, 31, 32):
        ran(age * 86_400)
    row("acquired", 90 * 86_400)


def left():
    return TaskLockEvent.objects.count()


def test_what_went_on_until_later_is_no_older():
    ran(600, 7000)
    skipped(7000, 700, 5)
    row("cleared", 7200)
    assert locks("prune", "--older-than", "1h") == "Deleted 1 row older than 1h.\n"
    assert left() == 2


@pytest.mark.parametrize("limit", range(1, 8))
def test_prune_that_stops_halfway_lets_nothing_starve(limit):
    """Calls that met a completed run would, without it, have come to nothing."""
    ran(90_000, 1000, name="other")
    ran(700, 20_000, token="a")
    skipped(20_600, 720, 9, blocked_by="a", reason="skip")
    skipped(20_000, 800, 9, blocked_by="a", reason="rerun")
    assert starving(3600) == []
    told = locks("prune", "--older-than", "10m", "--limit", str(limit))
    assert told.startswith(f"Deleted {min(limit, 4)} row")
    assert starving(3600) == []


def test_prune_deletes_what_is_older_than_the_setting(old):
    assert locks("prune") == "Deleted 2 rows older than 30d.\n"
    assert left() == 3


def test_prune_deletes_what_is_older_than_asked_for(old):
    assert locks("prune", "--older-than", "7d") == "Deleted 3 rows older than 7d.\n"
    assert left() == 2


def test_prune_stops_at_its_limit(old):
    assert locks("prune", "--limit", "1") == "Deleted 1 row older than 30d.\n"
    assert left() == 4


def test_dry_run_of_prune_deletes_nothing(old):
    assert locks("prune", "--dry-run") == "Would delete 2 rows older than 30d.\n"
    assert locks("prune", "--dry-run", "--limit", "1") == "Would delete 1 row older than 30d.\n"
    assert left() == 5


def test_statements_of_prune_do_not_grow():
    for _ in range(20):
        ran(31 * 86_400)
    with CaptureQueriesContext(connection) as queries:
        assert prune(batch=2) == 20
    lengths = [len(query["sql"]) for query in queries if query["sql"].startswith("SELECT")]
    assert max(lengths[1:]) - min(lengths[1:]) < 10


def test_prune_as_json(old):
    told = json.loads(locks("prune", "--json"))
    assert told == {"deleted": 2, "older_than": 30 * 86_400, "dry_run": False}


def test_prune_that_is_interrupted_says_how_far_it_is(old, monkeypatch):
    def interrupted(*, progress, **options):
        progress(1000)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "prune", interrupted)
    with pytest.raises(
        CommandError, match=r"^Interrupted: 1000 rows .* gone\. Run it again to go on"
    ):
        locks("prune")


def test_prune_of_a_table_that_is_not_there_says_so():
    table = TaskLockEvent._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO {table}_gone")
    with pytest.raises(CommandError, match=r"^The history cannot be read: .*migrate"):
        locks("prune")


# As a process


def run(*arguments, cache="redis", **options):
    return subprocess.run(
        [sys.executable, "-m", "django", "locks", *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "SINGLETASK_TEST_CACHE": cache,
            "TERM": "xterm-256color",
        },
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def test_process_lists_without_colour_into_a_pipe(take):
    take("nightly")
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("LOCK ")
    assert "\x1b" not in done.stdout


def test_process_lists_in_colour_on_a_terminal(take):
    take("nightly")
    parent, child = pty.openpty()
    try:
        assert run(stdout=child).returncode == 0
        assert b"\x1b[36;1mLOCK " in os.read(parent, 4096)
    finally:
        os.close(parent)
        os.close(child)


def test_process_exits_with_one_on_an_alarm(take):
    hold(since=time.time() - 3700)
    done = run("list", "--fail-if-held-over", "1h")
    assert done.returncode == 1
    assert done.stdout.startswith("LOCK ")
    assert done.stderr == "CommandError: Held for over 1h: nightly (1h 01m).\n"
    assert run("list", "--fail-if-held-over", "2h").returncode == 0


def test_process_whose_reader_is_gone_says_nothing(take):
    take("nightly")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        done = run(stdout=closed)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is of Linux")
def test_process_on_a_full_disk_says_so(take):
    take("nightly")
    with open("/dev/full", "w") as full:
        done = run(stdout=full)
    assert done.returncode == 1
    assert re.match(r"CommandError: The output cannot be written: .*No space left", done.stderr)
    assert done.stderr.count("\n") == 1


def test_process_on_a_terminal_of_few_characters_replaces_the_others(take, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    take("x" * 200)
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert "xx?xx" in done.stdout


def test_process_that_prunes_tells_how_far_it_is_on_a_terminal():
    parent, child = pty.openpty()
    try:
        assert run("prune", stdout=child).returncode == 0
        assert os.read(parent, 4096) == b"Deleted 0 rows older than 30d.\r\n"
    finally:
        os.close(parent)
        os.close(child)


def test_process_takes_options_of_django_before_the_action(take):
    take("nightly")
    done = run("--settings", "tests.settings", "list", "nightly")
    assert (done.returncode, done.stderr) == (0, "")
    assert "nightly" in done.stdout


def test_process_that_is_told_too_little_exits_with_two():
    done = run("clear", "--yes")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("CommandError: Say what to clear")


def test_process_that_frees_nothing_exits_with_one():
    done = run("clear", "nightly", "--yes")
    assert (done.returncode, done.stdout) == (1, "")
    # The history of other tests' runs may add a word.
    assert done.stderr.startswith("CommandError: Not held: nightly.")


def test_process_of_an_unusable_cache_exits_with_one():
    done = run(cache="dummy")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("CommandError: SINGLETASK_CACHE = 'dummy'")
    assert done.stderr.count("\n") == 1


def test_process_that_nobody_answers_exits_with_one(take):
    lock = take("nightly")
    done = run("clear", "nightly", stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert "Nobody answered" in done.stderr
    assert lock.owned()


# Texts


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("abc", None, "abc"),
        ("abc", 3, "abc"),
        ("abcdefgh", 5, "ab…gh"),
        ("abcdefgh", 6, "ab…fgh"),
        ("字字字字", 5, "字…字"),
        ("a\x1bb", None, "a\\x1bb"),
        ("", 5, ""),
        ("abc", 1, "…"),
    ],
)
def test_long_text_loses_its_middle(text, width, expected):
    assert printable(text, width) == expected


# Queued calls


@pytest.fixture
def queued(monkeypatch, settings):
    """Queue a call, without sending it."""
    task = tasks.unique

    def send_task(name, args=None, kwargs=None, **options):
        return task.AsyncResult(options["task_id"])

    monkeypatch.setattr(task.app, "send_task", send_task)
    yield lambda *args: task.delay(*args).id
    for entry in registry.held():
        registry.clear(entry, actor="the test")


NAME = "tests.testapp.tasks.unique(key='a')"


def test_queued_calls_are_listed(queued):
    task_id = queued("a")
    queued("a")
    _head, line = locks().splitlines()
    assert line.split()[1:4] == ["0s", "-", "1"]
    assert line.startswith(NAME[:8])
    assert line.endswith(f"  queued {task_id[:4]}…")
    assert len(line) <= 80
    (shown,) = json.loads(locks("--json"))
    assert (shown["queued"], shown["task_id"], shown["skipped"]) == (True, task_id, 1)


def test_clear_queued_lets_an_equal_call_be_sent(queued, take):
    take("nightly")
    first = queued("a")
    assert locks("clear", "--queued", "--yes").endswith("Forgot 1 queued call.\n")
    assert queued("a") != first
    assert "nightly" in locks()
    assert TaskLockEvent.objects.filter(kind="cleared").count() == 1


def test_dry_run_of_clear_queued_forgets_nothing(queued):
    first = queued("a")
    told = locks("clear", "--queued", "--dry-run")
    assert told.endswith("\nWould forget 1 queued call.\n")
    assert queued("a") == first


def test_clear_queued_asks_what_it_is_about(queued, monkeypatch):
    queued("a")
    questions = answer(monkeypatch, "n")
    with pytest.raises(CommandError, match=r"Nothing was freed\."):
        locks("clear", "--queued")
    assert questions[0].startswith("Forget 1 queued call? Those that the broker has still run")


def test_clear_all_leaves_queued_calls(queued, take):
    first = queued("a")
    take("nightly")
    locks("clear", "--all", "--yes")
    assert queued("a") == first


def test_clear_queued_of_nothing(take):
    take("nightly")
    assert locks("clear", "--queued", "--yes") == "No call is queued.\n"
    with pytest.raises(CommandError, match=r"^Not queued: nightly\.$"):
        locks("clear", "--queued", "--yes", "nightly")


@pytest.mark.parametrize("name", [NAME, "tests.testapp.tasks.unique('a')"])
def test_on_memcached_a_queued_call_is_named(settings, empty_cache, queued, name):
    settings.SINGLETASK_CACHE = "pymemcache"
    empty_cache("pymemcache")
    first = queued("a")
    with pytest.raises(CommandError, match=r"cannot list its entries.*Name them"):
        locks("clear", "--queued", "--yes")
    assert "queued" in locks("list", name)
    assert "Forgot 1 queued call" in locks("clear", "--queued", "--yes", name)
    assert queued("a") != first


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("nightly", 1),
        ("singletask:x:0", 1),
        (NAME, 5),
        ("tests.testapp.tasks.unique('a')", 3),
        ("unknown.task(a=1)", 3),
        ("unknown.task(1)", 1),
        ("tests.testapp.tasks.unique(", 1),
        ("tests.testapp.tasks.unique(open('/etc/passwd'))", 1),
        ("(" * 250, 1),
        ("\x00", 0),
    ],
)
def test_what_a_name_can_stand_for(name, count):
    assert len(calls.keys_of(name)) == count


def test_a_call_is_found_by_its_arguments():
    key = tasks.unique.lock("a").key
    for name in (NAME, "tests.testapp.tasks.unique('a', 5)"):
        assert key in calls.keys_of(name)


def test_clear_of_a_queued_call_says_how(queued):
    queued("a")
    with pytest.raises(CommandError, match=r"Not held: .*A call is queued: --queued"):
        locks("clear", "--yes", NAME)


def test_clear_by_a_token_says_nothing_of_others(queued):
    queued("a")
    row("acquired", 7200, name="old", timeout=60, token="o")
    with pytest.raises(CommandError, match=r"^Not held: --token zzz\.$"):
        locks("clear", "--yes", "--token", "zzz")
    with pytest.raises(CommandError, match=r"^Not held: --token o\. Expired is not held: "):
        locks("clear", "--yes", "--token", "o")


def test_clear_of_an_unknown_name_says_what_is_like_it(take):
    take("nightly")
    with pytest.raises(CommandError, match=r"^Not held: nigthly\. .*Did you mean \"nightly\"\?$"):
        locks("clear", "--yes", "nigthly")


def test_clear_frees_the_entry_of_a_run_that_hangs(monkeypatch):
    """Unique until it has finished, it would stop its duplicates for ever."""
    task, seen = tasks.unique_to_the_end, []
    sent = []

    def send_task(name, args=None, kwargs=None, **options):
        sent.append(options)
        return task.AsyncResult(options["task_id"])

    def hang(*args):
        assert task.queued("a")
        locks("clear", "--yes", task.lock("a").name)
        seen.append(task.queued("a"))

    monkeypatch.setattr(task.app, "send_task", send_task)
    monkeypatch.setattr("tests.testapp.tasks.body", hang)
    task.delay("a")
    header = sent[0]["headers"][HEADER]
    receive(task, "a", task_id=sent[0]["task_id"], header=header)
    assert seen == [None]


def test_a_lock_name_that_raises_is_no_call(monkeypatch):
    def name(key):
        raise KeyError(key)

    monkeypatch.setattr(type(tasks.unique._get_current_object()), "lock_on", None)
    monkeypatch.setattr(
        type(tasks.unique._get_current_object()), "lock_name", staticmethod(name), raising=False
    )
    assert len(calls.keys_of(NAME)) == 3
