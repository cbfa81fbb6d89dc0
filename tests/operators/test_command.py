from __future__ import annotations

import datetime
import io
import json
import os
import re
import socket
import time

import pytest
from django.core.management import CommandError, call_command, load_command_class
from django.db import connection

from django_singletask import TaskLock
from django_singletask.models import TaskLockEvent
from tests import inside
from tests.admin_pages import drop_table
from tests.command_line import ended_process, hold, locks, locks_as_json
from tests.entries import key_of
from tests.past_rows import before_now, ran, row, save, skipped
from tests.routers import LOCK_TABLES
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history", "whole_second", "eighty_columns"),
]


def refused(*arguments):
    """Return the error with which the command ends."""
    with pytest.raises(CommandError) as caught:
        locks(*arguments)
    return caught.value


# list


def test_list_is_the_default(take):
    take("nightly", timeout=12_630)  # 3h 30m, also a second later
    assert locks() == locks("list")


def test_unknown_values_are_dashes(settings, take, empty_cache):
    settings.SINGLETASK_CACHE = "pymemcache"
    empty_cache("pymemcache")
    take("nightly")
    assert re.match(r"held +nightly +0s +- +0  ", locks().splitlines()[2])


def test_conflicts_are_a_dash_without_history(settings, take):
    settings.SINGLETASK_HISTORY = "off"
    take("nightly")
    assert re.match(r"held +nightly +0s +(\d\ds|1m) +-  ", locks().splitlines()[2])


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ([], "No lock is held.\n"),
        (["list", "three"], "No matching lock is held.\n"),
        (["list", "other"], "No matching lock is held.\n"),
        (["list", "tests.testapp.*"], "No matching lock is held.\n"),
        (["list", tasks.unique.name], "No matching lock is held.\n"),
        (["--starving"], "No lock starves.\n"),
    ],
)
def test_message_if_nothing_is_held(arguments, output):
    if "list" in arguments:
        ran(60, name="three", task="other")
    assert locks(*arguments) == output


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        (["feeds.tasks.import_feed"], ["customer:7", "feeds.tasks.import_feed(feed_id=7)"]),
        (["import_feed"], ["customer:7", "feeds.tasks.import_feed(feed_id=7)"]),
        (["customer:7"], ["customer:7"]),
        (["feeds.*"], ["customer:7", "feeds.tasks.import_feed(feed_id=7)"]),
        (["import_feed(*"], ["feeds.tasks.import_feed(feed_id=7)"]),
        (["web-4"], ["shops.bill()"]),
        (["web-4:11260"], ["shops.bill()"]),
        (["*:7", "c*r:?"], ["customer:7"]),
        (["*(feed_id=[*"], []),
        (["5d1c"], ["customer:7"]),
        (["b" * 32], ["feeds.tasks.import_feed(feed_id=7)"]),
        (["tasks.import_feed"], ["customer:7", "feeds.tasks.import_feed(feed_id=7)"]),
    ],
)
def test_list_takes_tasks_patterns_task_ids_and_tokens(typed, names):
    task = "feeds.tasks.import_feed"
    ran(60, name=f"{task}(feed_id=1)", task=task)
    ran(60, name="customer:?", task="shops.bill")
    hold(name=f"{task}(feed_id=7)", task=task, task_id="3f0c", token="b" * 32)
    hold(name="customer:7", task=task, task_id="5d1c", token="c" * 32)
    hold(name="shops.bill()", task="shops.bill", token="d" * 32, host="web-4", pid=11260)
    assert sorted(lock["name"] for lock in locks_as_json("list", *typed)["locks"]) == names


@pytest.mark.parametrize("arguments", [["--json"], ["list", "--json"], ["--json", "list"]])
def test_json_if_nothing_is_held(arguments):
    known = json.loads(locks(*arguments))
    assert (known["starving"], known["locks"]) == ([], [])
    assert set(known["states"].values()) == {0}


def test_json_counts_the_states():
    hold(token="1")
    hold(name="gone", **{**ended_process(), "token": "2"})
    states = locks_as_json()["states"]
    assert {state: number for state, number in states.items() if number} == {"held": 1, "dead": 1}


def test_locks_are_counted_above_the_table():
    hold(token="1")
    hold(name="gone", **{**ended_process(), "token": "2"})
    first, head, *lines = locks().splitlines()
    assert first == "2 locks: 1 dead"
    assert head.startswith("STATE ")
    assert [line.split()[:2] for line in lines] == [["dead", "gone"], ["held", "nightly"]]


def test_slow_hold_shows_what_is_usual():
    for _ in range(5):
        ran(60, 5, task="t")
    hold(task="t", since=time.time() - 500)
    assert locks().splitlines()[-1].endswith("  web-3:8121 (usual 5s)")


def test_conflicts_that_wait_are_shown(take):
    lock = take("nightly")
    skipped(5, count=2, reason="requeue", blocked_by=lock.token)
    skipped(5, blocked_by=lock.token)
    assert "  3 (2 waiting)  " in locks()


def test_expired_is_a_word():
    row("run", 7200, name="old", timeout=60, host="web-1", pid=7)
    assert re.search(r"^expired +old +2h +- +0  web-1:7$", locks(), re.M)
    assert locks_as_json()["locks"][0]["state"] == "expired"


def test_json_is_readable_and_steers_no_terminal():
    task_id = "a\x1b\x9bc\u202ed ключ 😀\n"
    ran(60, task_id=task_id)
    output = locks("history", "--json")
    assert '"a\\u001b\\u009bc\\u202ed ключ 😀\\n"' in output
    assert json.loads(output)["rows"][0]["task_id"] == task_id


def test_json_of_a_lock(take):
    lock = take("nightly \u3000 ключ", timeout=30)
    [facts] = locks_as_json()["locks"]
    assert 10 < facts.pop("remaining") <= 30
    assert facts == {
        "name": lock.name,
        "key": lock.key,
        "slots": 1,
        "slots_held": 1,
        "state": "held",
        "queued": False,
        "held_for": 0.0,
        "conflicts": 0,
        "waiting": 0,
        "met": {},
        "token": lock.token,
        "task": None,
        "task_id": None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "alive": True,
        "death": None,
        "since": time.time(),
        "timeout": 30.0,
        "usual": None,
    }


def test_json_of_a_slow_hold_says_what_is_usual():
    for _ in range(5):
        ran(60, 5, task="t")
    hold(task="t", since=time.time() - 500)
    [slow] = locks_as_json()["locks"]
    assert slow["usual"] == {"median": 5.0, "longest": 5.0, "runs": 5}
    assert slow["state"] == "slow"


# clear


KEY = key_of("feeds.sync(7)")


def cleared():
    return list(TaskLockEvent.objects.filter(outcome="cleared"))


@pytest.fixture
def answer(monkeypatch):
    """Let somebody answer the question; return the questions."""
    questions = []

    def answer_with(text):
        def ask(question):
            questions.append(question)
            if isinstance(text, type):
                raise text
            return text() if callable(text) else text

        monkeypatch.setattr("builtins.input", ask)
        return questions

    return answer_with


@pytest.mark.parametrize(
    ("typed", "freed"),
    [
        ([typed], ["feeds.sync(7)"])
        for typed in ("feeds.sync(7)", KEY, "t" * 32, "feeds.*", "feeds.sync", "sync", "5d1c")
    ]
    + [(["--dead"], ["dead"]), (["--all"], ["dead", "feed", "feeds.sync(7)"])],
)
def test_clear_frees_what_is_meant_and_no_other(take, typed, freed):
    take("feed")
    hold(name="dead", **{**ended_process(), "token": "gone"})
    hold(name="feeds.sync(7)", key=KEY, task="feeds.sync", task_id="5d1c", token="t" * 32)
    output = locks("clear", *typed, "--yes")
    assert output.endswith(f"\nFreed {len(freed)} lock{'s' * (len(freed) > 1)}.\n")
    assert sorted(row.name for row in cleared()) == freed
    assert len(inside.held_now()) == 3 - len(freed)


def test_clear_of_a_pattern_that_matches_nothing_is_no_error(take):
    lock = take("nightly")
    assert locks("clear", "feeds.*", "--yes") == "No matching lock is held.\n"
    assert lock.owned()


def test_clear_of_a_name_that_is_not_held_frees_nothing(take):
    lock = take("nightly")
    ran(60, name="feeds.sync(7)")
    error = refused("clear", "feeds.sync(7)", "nightly", "--yes")
    assert (str(error), error.returncode) == ("No matching lock is held: feeds.sync(7).", 1)
    assert lock.owned()


@pytest.mark.parametrize("chosen", [["old"], ["o"], ["--all"]])
def test_clear_of_an_expired_lock_says_that_there_is_nothing_to_free(capsys, chosen):
    open_row = row("run", 7200, name="old", timeout=60, token="o")
    if chosen == ["--all"]:
        text = locks("clear", "--yes", "--all")
    else:
        text = str(refused("clear", "--yes", *chosen))
    assert "is held" in text
    assert text.strip().endswith("An expired lock is not held: there is nothing to free.")
    open_row.refresh_from_db()
    assert open_row.outcome == ""


def test_clear_works_on_memcached(settings, take, empty_cache):
    settings.SINGLETASK_CACHE = "pymemcache"
    empty_cache("pymemcache")
    lock = take("nightly")
    assert "Freed 1 lock." in locks("clear", "--all", "--yes")
    assert not lock.locked()
    assert len(cleared()) == 1


@pytest.mark.parametrize("text", ["", "\udcff"])
@pytest.mark.parametrize("arguments", [["why"], ["list"], ["history"], ["clear", "--yes"]])
def test_text_that_cannot_be_a_name_is_refused(take, arguments, text):
    lock = take("nightly")
    assert "is not a name" in str(refused(*arguments, text))
    assert lock.owned()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--yes"],
            "Say what to clear: a lock, a task, an id, a host or a process, or --",
        ),
        (["nightly", "--json"], "With --json the command cannot ask you: add --yes or --dry-run."),
    ],
)
def test_clear_refuses_options_that_do_not_fit(take, answer, arguments, message):
    lock, questions = take("nightly"), answer("y")
    error = refused("clear", *arguments)
    assert str(error).startswith(message)
    assert error.returncode == 3
    assert lock.owned()
    assert questions == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nightly"], "No matching lock is held: nightly."),
        (["one", "nightly", "was\u202e"], "No matching lock is held: nightly, was\\u202e."),
        (["unique"], "No matching lock is held: unique."),
        (["one", "--dead"], "No matching lock is held by a dead process: one."),
        (["one", "--queued"], "No matching call is queued: one."),
    ],
)
def test_clear_of_a_lock_that_is_not_held_is_an_error(take, arguments, message):
    lock = take("one")
    ran(60)
    ran(60, name="was\u202e", key="singletask:was:0")
    error = refused("clear", *arguments, "--yes")
    assert (str(error), error.returncode) == (message, 1)
    assert lock.owned()
    assert cleared() == []


@pytest.mark.parametrize(
    "name",
    ["onee", "uniqe", "zzz\x1b", "b" * 32, "x" * 256, " ", "two\nlines", "None", "hold('x')"],
)
@pytest.mark.parametrize(
    "action", [["list"], ["list", "--fail-if-held-over", "1h"], ["clear", "--yes"], ["history"]]
)
def test_unknown_name_is_an_error_of_each_action(take, action, name):
    ran(60, task="shops.bill", name="customer:7")
    lock = take("one")
    error = refused(*action, "one", name)
    assert re.match("No lock or task is known as '[^\x00-\x1f]*'.", str(error))
    assert (error.returncode, lock.owned()) == (3, True)


def test_mistyped_action_is_an_error_that_names_the_actions():
    error = refused("hsitory", "--json")
    assert "known as 'hsitory'" in str(error)
    assert re.search(r" The actions are list, why, clear, history, .*prune\.$", str(error))


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--all"], "No lock is held.\n"),
        (["--dead"], "No lock is held by a dead process.\n"),
        (["--queued"], "No call is queued.\n"),
        (["--all", "--json"], '{"version": 3, "locks": []}\n'),
        (["nothing*"], "No matching lock is held.\n"),
    ],
)
def test_clear_without_exact_names_may_find_nothing(arguments, output):
    assert locks("clear", *arguments, "--yes") == output


@pytest.mark.parametrize("text", ["y", "YES", " yes "])
def test_clear_asks_first(take, answer, text):
    lock, questions = take("nightly"), answer(text)
    locks("clear", "nightly")
    assert questions == [
        "Free 1 lock? What runs keeps running, and a second copy can start meanwhile. [y/N] "
    ]
    assert not lock.locked()


@pytest.mark.parametrize("text", ["", "n", "maybe", "yessir", KeyboardInterrupt, EOFError])
def test_anything_but_yes_frees_nothing(take, answer, text):
    lock = take("nightly")
    answer(text)
    message = "Nothing was freed. To skip the question, add --yes."
    assert str(refused("clear", "nightly")) == message
    assert lock.owned()


def test_dry_run_frees_nothing_and_asks_nothing(take, answer):
    lock, questions = take("nightly"), answer("y")
    assert locks("clear", "--all", "--dry-run").endswith("\nWould free 1 lock.\n")
    assert lock.owned()
    assert questions == cleared() == []


@pytest.mark.parametrize("others", [[], ["other"]])
def test_holder_that_changes_while_it_asks_keeps_its_lock(take, answer, others):
    lock, others = take("nightly"), [take(name) for name in others]

    def change():
        lock.release()
        take("nightly")
        return "y"

    answer(change)
    output = io.StringIO()
    with pytest.raises(CommandError) as caught:
        call_command("locks", "clear", "--all", stdout=output, no_color=True)
    assert str(caught.value) == (
        "Not freed: nightly. The holder in the table no longer has the lock. List the locks again."
    )
    assert TaskLock("nightly").locked()
    assert ("Freed 1 lock.\n" in output.getvalue()) == bool(others)
    assert [row.name for row in cleared()] == [other.name for other in others]


def test_clear_leaves_a_row_with_who_did_it(take, monkeypatch):
    monkeypatch.setenv("LOGNAME", "ada")
    lock = take("nightly")
    locks("clear", "nightly", "--yes")
    [row] = cleared()
    assert row.actor == f"ada on {socket.gethostname()} (manage.py locks)"
    assert (row.name, row.token) == ("nightly", lock.token)


def test_reason_of_a_clearing_is_in_the_history(take):
    take("nightly")
    locks("clear", "nightly", "--yes", "--reason", "hangs since the deploy at 02:10, see #1234")
    assert cleared()[0].reason == "hangs since the deploy at 02:10, see #1234"
    assert re.search(r"  \S+: hangs since the deploy.*…$", locks("history"), re.MULTILINE)


def test_clear_works_for_a_user_without_a_name(take, monkeypatch):
    def unknown():
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr("getpass.getuser", unknown)
    take("nightly")
    locks("clear", "nightly", "--yes")
    assert cleared()[0].actor.startswith("unknown user on ")


@pytest.mark.parametrize(("option", "is_freed"), [("--yes", True), ("--dry-run", False)])
def test_json_of_clear_says_what_was_freed(take, option, is_freed):
    lock = take("nightly")
    [facts] = locks_as_json("clear", "nightly", option)["locks"]
    assert (facts["token"], facts["freed"]) == (lock.token, is_freed)
    assert lock.locked() is not is_freed


def test_clear_frees_the_entry_of_a_run_that_hangs():
    """Unique until it has finished, it would stop its duplicates for ever."""
    task = tasks.unique_to_the_end
    lock = task.lock("a")
    for key in (lock.key, inside.queued_key(lock.key, task.name)):
        hold(key=key, name=lock.name, task=task.name, task_id="5d1c")
    assert task.queued("a").id == "5d1c"
    assert "Freed 1 lock." in locks("clear", "--yes", lock.name)
    assert task.queued("a") is None
    assert [row.key for row in cleared()] == [lock.key]


# Queued calls

NAME = "tests.testapp.tasks.unique(key='a')"


@pytest.fixture
def queued(monkeypatch):
    """Queue a call, without sending it."""
    task = tasks.unique

    def send_task(name, args=None, kwargs=None, **options):
        return task.AsyncResult(options["task_id"])

    monkeypatch.setattr(task.app, "send_task", send_task)
    yield lambda *args: task.delay(*args).id
    key = inside.queued_key(task.lock("a").key, task.name)
    if "queued" in locks("list", key):
        locks("clear", "--queued", "--yes", key)


def test_queued_calls_are_listed(queued):
    task_id = queued("a")
    queued("a")
    line = locks().splitlines()[-1]
    assert line.split()[0] == "queued"
    assert task_id[-4:] in line
    [facts] = locks_as_json()["locks"]
    assert (facts["queued"], facts["task_id"], facts["conflicts"]) == (True, task_id, 1)


def test_clear_queued_lets_an_equal_call_be_sent(queued, take):
    take("nightly")
    first = queued("a")
    assert locks("clear", "--queued", "--yes").endswith("Forgot 1 queued call.\n")
    assert queued("a") != first
    assert "nightly" in locks()
    assert len(cleared()) == 1


def test_dry_run_of_clear_queued_forgets_nothing(queued):
    first = queued("a")
    output = locks("clear", "--queued", "--dry-run")
    assert output.endswith("\nWould forget 1 queued call.\n")
    assert queued("a") == first


def test_clear_queued_asks_about_queued_calls(queued, answer):
    queued("a")
    questions = answer("n")
    assert str(refused("clear", "--queued")).startswith("Nothing was freed")
    assert questions[0].startswith("Forget 1 queued call? If the broker still has the message,")


def test_clear_all_leaves_queued_calls(queued, take):
    first = queued("a")
    take("nightly")
    locks("clear", "--all", "--yes")
    assert queued("a") == first


def test_queued_call_on_memcached_is_found_by_its_key(settings, empty_cache, queued):
    settings.SINGLETASK_CACHE = "pymemcache"
    empty_cache("pymemcache")
    first = queued("a")
    error = refused("clear", "--queued", "--yes")
    assert re.search(r"cannot list its entries: name one lock", str(error))
    key = inside.queued_key(tasks.unique.lock("a").key, tasks.unique.name)
    assert "queued" in locks("list", key)
    assert "Forgot 1 queued call" in locks("clear", "--queued", "--yes", key)
    assert queued("a") != first


def test_queued_call_on_memcached_is_found_by_the_name_of_an_earlier_run(
    settings, empty_cache, queued
):
    settings.SINGLETASK_CACHE = "pymemcache"
    empty_cache("pymemcache")
    queued("a")
    ran(60, name=NAME, key=tasks.unique.lock("a").key, task=tasks.unique.name)
    assert "Forgot 1 queued call" in locks("clear", "--queued", "--yes", NAME)


def test_clear_of_a_queued_call_suggests_the_option_queued(queued):
    queued("a")
    error = refused("clear", "--yes", NAME)
    hint = "A call is queued: add --queued to forget it."
    assert str(error) == f"No matching lock is held: {NAME}. {hint}"


# why


def test_why_of_a_pattern_that_fits_nothing_is_an_error(take):
    take("nightly")
    error = refused("why", "nightly(*")
    assert str(error).startswith("No lock or task is known as 'nightly(*'.")
    assert error.returncode == 3


def test_why_of_a_task_as_json():
    ran(90, 5, task="t", name="t(1)")
    ran(91, 5, task="t", name="t(2)")
    facts = locks_as_json("why", "t")
    assert (facts["name"], facts["key"], facts["held"], facts["conflicts"]) == ("t", "", [], {})
    assert facts["completed"]["result"] == "returned"


def test_why_as_json(take):
    lock = take("nightly")
    skipped(60, 5, 2, blocked_by=lock.token)
    ran(90.1234, 5)
    facts = locks_as_json("why", "nightly")
    assert facts["free"] is False
    assert (facts["held"][0]["alive"], facts["held"][0]["token"]) == (True, lock.token)
    assert facts["usual"] == {"median": 5.0, "longest": 5.0, "runs": 1}
    assert facts["completed"]["result"] == "returned"
    assert facts["starving"] is None
    skipped(8000, 60, 40, name="hungry")
    assert locks_as_json("why", "hungry")["starving"]["conflicts"] == 40


def test_why_of_a_free_lock_as_json():
    ran(90, 5)
    facts = locks_as_json("why", "nightly")
    assert (facts["free"], facts["held"], facts["queued"]) == (True, [], [])


def test_a_table_without_rows_is_a_sentence_in_colour_too():
    for arguments in ([], ["--starving"], ["history", "--what", "dead"]):
        output = io.StringIO()
        call_command("locks", *arguments, stdout=output, force_color=True)
        assert re.fullmatch(r"(No lock|The history).*\.\n", output.getvalue())


# history


def test_history_is_a_table_newest_first():
    ran(3600, 134.5, name="feeds.import_feed(7)", host="web-3", pid=8121)
    skipped(60, 5, 31, name="reports.nightly()", host="web-1", pid=40)
    by_command = "root on a-very-long-host-name.example.org (manage.py locks)"
    for actor in ("ada", by_command, "grace"):
        ran(3, outcome="cleared", actor=actor)
    row("run", 2, name="now", host="web-1", pid=40, timeout=60)
    ran(0, name="gone", outcome="dead", result="", host="web-1", pid=40)
    ran(0, name="late", outcome="expired", result="")
    ran(0, name="off", result="postponed")
    lines = [
        re.sub(r"(\d\d-\d\d )?\d\d:\d\d:\d\d", "#", line) for line in locks("history").splitlines()
    ]
    assert lines[0].split() == ["BEGAN", "(UTC)", "ENDED", "LOCK", "WHAT", "HELD", "BY"]
    assert [re.split(r"  +", line.strip()) for line in lines[1:]] == [
        ["#", "#", "off", "postponed", "1.00s", "unknown"],
        ["#", "#", "late", "expired", "≤1.00s", "unknown"],
        ["#", "#", "gone", "dead", "1.00s", "web-1:40"],
        ["#", "running", "now", "held", "-", "web-1:40"],
        ["#", "#", "nightly", "cleared", "1.00s", "grace"],
        ["#", "#", "nightly", "cleared", "1.00s", "root"],
        ["#", "#", "nightly", "cleared", "1.00s", "ada"],
        ["#", "#", "reports.nightly()", "skipped ×31", "-", "web-1:40"],
        ["#", "#", "feeds.import_feed(7)", "returned", "2m 14s", "web-3:8121"],
    ]


@pytest.fixture
def at_noon(monkeypatch):
    """Let it be noon, by the clock of the tests, of the database's rows and of the command."""
    noon = datetime.datetime(2026, 11, 27, 12, tzinfo=datetime.UTC)
    monkeypatch.setattr("time.time", noon.timestamp)
    monkeypatch.setattr("django.utils.timezone.now", lambda: noon)


def test_history_says_when_a_row_began_and_ended_with_the_date_of_another_day(at_noon):
    ran(60, 5)
    ran(86_400, 5)
    skipped(50_000, 5, 31)
    row("run", 120, name="open", timeout=600)
    row("run", 300, name="over", timeout=60)
    lines = locks("history").splitlines()[1:]
    assert [re.split(r"  +", line.strip())[:3] for line in lines] == [
        ["11-26 22:06:40", "11-27 11:59:55", "nightly"],
        ["11:58:55", "11:59:00", "nightly"],
        ["11:58:00", "running", "open"],
        ["11:55:00", "-", "over"],
        ["11-26 11:59:55", "12:00:00", "nightly"],
    ]


def test_history_says_when_a_lock_was_taken_again(at_noon):
    ran(0, 90, retaken=2)
    assert "  returned, retaken  " in locks("history")


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("11:59", "2026-11-27 11:59:00"),
        ("12:00:00", "2026-11-27 12:00:00"),
        ("12:01", "2026-11-26 12:01:00"),
        ("9:30", "2026-11-27 09:30:00"),
    ],
)
def test_time_without_a_date_is_the_last_one(at_noon, text, at):
    began = datetime.datetime.fromisoformat(at).replace(tzinfo=datetime.UTC)
    save(kind="run", name="now", key="k", ref="a", at=began, outcome="lost")
    before = began - datetime.timedelta(seconds=1)
    save(kind="run", name="before", key="k", ref="b", at=before, outcome="lost")
    assert [row["name"] for row in locks_as_json("history", "--since", text)["rows"]] == ["now"]


def test_history_says_what_became_of_a_call_and_why():
    for reason in ("skip", "outage", "superseded", "raise", "wait", "redelivery", "requeue"):
        skipped(1, reason=reason)
    lines = locks("history").splitlines()[1:]
    assert [re.split(r"  +", line.strip())[3] for line in lines] == [
        "waiting: requeue",
        "waiting: redelivery",
        "failed",
        "failed",
        "skipped: superseded",
        "skipped: outage",
        "skipped",
    ]


def test_history_says_which_open_holds_are_over():
    gone = row("run", 3, name="gone", token="t")
    hold(name="gone", key=gone.key, **ended_process())
    row("run", 2, name="over", timeout=1)
    row("run", 1, name="now", timeout=60)
    lines = [re.split(r"  +", line.strip())[2:4] for line in locks("history").splitlines()]
    assert lines[1:] == [["now", "held"], ["over", "expired"], ["gone", "dead"]]


@pytest.mark.parametrize("store", ["redis", "dead_redis"])
def test_history_of_a_state_has_the_rows_that_show_it(settings, request, store):
    """An open row can be each of these: the cache decides. If it is away, all seem held."""
    ran(9, name="gone before", outcome="dead", result="")
    ran(8, name="over before", outcome="expired", result="")
    gone = row("run", 7, name="gone", token="t")
    hold(name="gone", key=gone.key, **ended_process())
    row("run", 6, name="over", timeout=1)
    row("run", 5, name="now", timeout=60)
    if store == "dead_redis":
        settings.SINGLETASK_CACHE = request.getfixturevalue(store)
    shown = {}
    for line in locks("history").splitlines()[1:]:
        _began, _ended, name, state, *_rest = re.split(r"  +", line.strip())
        shown.setdefault(state, []).append(name)
    for state in ("held", "dead", "expired"):
        lines = locks("history", "--what", state).splitlines()[1:]
        assert [re.split(r"  +", line.strip())[2:4] for line in lines] == [
            [name, state] for name in shown[state]
        ]
    assert len(shown["dead"]) == (2 if store == "redis" else 1)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ["5d1c", "two", "two", "one", "lost"]),
        (["one"], ["one"]),
        ([key_of("one")], ["one"]),
        (["--since", "1h"], ["5d1c", "two", "two"]),
        (["--until", "1h"], ["one", "lost"]),
        (["--since", "7250s", "--until", "1h"], ["one"]),
        (["--since", "2026-01-01 14:05", "--what", "lost"], ["lost"]),
        (["--since", "2999-01-01"], []),
        (["--what", "conflict"], ["two"]),
        (["--limit", "2"], ["5d1c", "two"]),
        (["--what", "held"], []),
        # A task id, and a lock that is named so.
        (["3f0c"], ["one"]),
        (["5d1c"], ["5d1c", "two"]),
        (["a"], ["one"]),
        (["tw*"], ["two", "two"]),
        (["*o*"], ["two", "two", "one", "lost"]),
        (["t*o", "a", "--limit", "2"], ["two", "two"]),
        (["--what", "raised"], ["two"]),
        (["--what", "returned"], ["5d1c", "one"]),
        (["*e", "--what", "returned"], ["one"]),
        (["--what", "skipped"], ["two"]),
        (["--what", "retaken"], ["two"]),
        (["--what", "lost"], ["lost"]),
        (["--what", "trouble"], ["two", "lost"]),
        (["c" * 32], ["5d1c"]),
        (["b" * 32], ["lost"]),
        (["web-9"], ["5d1c"]),
        (["web-9:7", "--since", "1h"], ["5d1c"]),
        (["web-*", "--what", "raised"], []),
    ],
)
def test_history_takes_filters(arguments, names):
    ran(7200, name="one", task="a", task_id="3f0c")
    ran(60, name="two", task="b", task_id="5d1c", result="raised", retaken=1)
    skipped(30, name="two", task="b")
    ran(10, name="5d1c", token="c" * 32, host="web-9", pid=7)
    row("run", 7300, outcome="lost", token="b" * 32, name="lost", task="none")
    assert [facts["name"] for facts in locks_as_json("history", *arguments)["rows"]] == names


def test_window_that_ends_before_it_begins_is_an_error():
    ran(3600, 7200)
    for until in ("2h", "2026-01-01"):
        error = refused("history", "--since", "1h", "--until", until)
        assert (str(error), error.returncode) == ("--until must be later than --since.", 3)


def test_history_of_what_was_just_cleared_has_it_although_it_began_long_ago():
    row("run", 9000, outcome="cleared", noticed_at=before_now(2), actor="ada")
    row("run", 9000, name="other", outcome="cleared", noticed_at=before_now(4000))
    [_head, line] = locks("history", "--since", "10m").splitlines()
    assert re.search("  nightly  cleared .* ada$", line)


def test_id_of_a_call_that_is_not_recorded_leads_to_the_log():
    skipped(60, 5, 31, task_id="first")
    error = refused("history", "5d1c3f0c-7a51-4d6a-9f1e-0c2b8e9d4a67")
    assert "The log of the worker has a line for each call" in str(error)
    assert "skipped ×31" in locks("history", "first")


def test_history_says_that_it_searched_the_newest_rows_only(monkeypatch, capsys):
    inside.bound(monkeypatch, "rows of a search", 2)
    ran(60, name="feeds.sync(1)")
    for number in range(3):
        ran(50 - number, name=f"shops.bill({number})")
    assert "shops.bill(2)" in locks("history", "*bill*", "--limit", "2")
    assert "were searched" not in capsys.readouterr().err
    assert locks("history", "*sync*") == "The history has no matching row.\n"
    assert re.match("Only the newest .* rows were searched", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--limit", "2"], "No more than 2 rows: see --limit.\n"),
        (["--limit", "2", "--json"], ""),
        (["--limit", "4"], ""),
    ],
)
def test_history_says_that_it_may_have_more_rows(capsys, arguments, error):
    for _ in range(3):
        ran(60)
    locks("history", *arguments)
    assert capsys.readouterr().err == error


def test_history_is_shown_while_the_cache_is_away(settings, dead_redis):
    settings.SINGLETASK_CACHE = dead_redis
    ran(60, task="feeds.sync", name="feeds.sync()")
    assert "returned" in locks("history", "sync")
    assert refused("history", "nothing").returncode == 3


def test_history_as_json_has_unix_times():
    run = ran(60, 5, host="web-1", pid=7)
    [facts] = locks_as_json("history")["rows"]
    assert (facts["at"], facts["ended_at"]) == (time.time() - 65, time.time() - 60)
    assert (facts["id"], facts["host"], facts["outcome"]) == (run.pk, "web-1", "released")


def test_history_of_a_known_name_may_be_empty():
    ran(7200, name="nightly")
    output = locks("history", "nightly", "--since", "1h")
    assert output == "The history has no matching row.\n"
    assert locks_as_json("history", tasks.unique.name)["rows"] == []


def test_history_that_is_off_still_shows_old_rows(settings, capsys):
    settings.SINGLETASK_HISTORY = "off"
    ran(60)
    for name in ("nightly", key_of("nightly")):
        assert "returned" in locks("history", name)
    assert (
        capsys.readouterr().err
        == 2 * "SINGLETASK_HISTORY = 'off': nothing is recorded, and all rows are old.\n"
    )


# prune


@pytest.fixture
def old():
    for age in (1, 8, 31, 32):
        ran(age * 86_400)
    row("run", 90 * 86_400)


@pytest.mark.parametrize(
    ("arguments", "output", "left"),
    [
        ([], "Deleted 2 rows older than 30d.\n", 3),
        (["--older-than", "7d"], "Deleted 3 rows older than 7d.\n", 2),
        (["--dry-run"], "Would delete 2 rows older than 30d.\n", 5),
    ],
)
def test_prune_deletes_old_rows(old, arguments, output, left):
    assert locks("prune", *arguments) == output
    assert TaskLockEvent.objects.count() == left


@pytest.mark.parametrize("dry_run", [True, False])
def test_prune_as_json(old, dry_run):
    arguments = ["--dry-run"] if dry_run else []
    facts = {"version": 3, "deleted": 2, "older_than": 30 * 86_400, "dry_run": dry_run}
    assert locks_as_json("prune", *arguments) == facts


def test_prune_that_is_interrupted_can_be_run_again(old):
    def interrupt(execute, sql, *args):
        if sql.startswith("DELETE"):
            raise KeyboardInterrupt
        return execute(sql, *args)

    message = r"^Interrupted\. What is done is done: run the command again"
    with connection.execute_wrapper(interrupt), pytest.raises(CommandError, match=message):
        locks("prune")


# Failures


@pytest.mark.parametrize(
    "arguments", [[], ["clear", "--all", "--yes"], ["why", "tests.testapp.tasks.unique"]]
)
def test_memcached_without_history_cannot_be_listed(settings, arguments):
    settings.SINGLETASK_CACHE = "pymemcache"
    settings.SINGLETASK_HISTORY = "off"
    message = str(refused(*arguments))
    assert re.search(r"cannot list its entries: .* SINGLETASK_HISTORY", message)


@pytest.mark.parametrize("arguments", [[], ["clear", "--all", "--yes"], ["probe"]])
def test_store_that_is_down_is_one_message(settings, dead_redis, arguments):
    settings.SINGLETASK_CACHE = dead_redis
    message = str(refused(*arguments))
    assert re.match(r"The cache 'dead' .* cannot be used: ConnectionError: ", message)
    assert "\n" not in message


@pytest.mark.parametrize("action", ["probe", "list"])
@pytest.mark.parametrize("alias", ["default", "sqlite_locks"])
def test_missing_table_of_the_cache_names_the_command_that_creates_it(
    settings, monkeypatch, action, alias
):
    monkeypatch.setitem(LOCK_TABLES, "locks_of_shop", alias)
    backend = "django.core.cache.backends.db.DatabaseCache"
    settings.CACHES = {**settings.CACHES, "new": {"BACKEND": backend, "LOCATION": "locks_of_shop"}}
    settings.SINGLETASK_CACHE = "new"
    message = str(refused(action))
    assert re.match(r"The cache 'new' .* cannot be used: .*locks_of_shop", message)
    command = f"manage.py createcachetable --database {alias}."
    assert message.endswith(f". Create the table of the lock cache: {command}")


@pytest.mark.parametrize("arguments", [[], ["why", "nightly"], ["clear", "--all", "--yes"]])
@pytest.mark.parametrize("eager", [True, False])
def test_command_refuses_a_cache_in_local_memory(settings, arguments, eager):
    settings.SINGLETASK_CACHE = "locmem"
    settings.CELERY_TASK_ALWAYS_EAGER = eager
    message = (
        "SINGLETASK_CACHE = 'locmem' is in local memory: this command cannot see the locks of "
    )
    assert str(refused(*arguments)).startswith(message)


def test_command_refuses_a_cache_that_cannot_hold_locks(settings):
    settings.SINGLETASK_CACHE = "dummy"
    assert "SINGLETASK_CACHE = 'dummy' cannot hold locks" in str(refused())


@pytest.mark.parametrize("arguments", [["history"], ["prune"], ["prune", "--dry-run"]])
def test_missing_history_table_suggests_migrate(arguments):
    drop_table()
    assert re.match(r"The history cannot be read: .*migrate", str(refused(*arguments)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["list", "--fail-if-held-over", "60"],
            "--fail-if-held-over: '60' is not a duration",
        ),
        (["list", "--fail-if-starving", "60"], "--fail-if-starving: '60' is not a duration"),
        (["list", "--fail-if-starving", "0s"], "--fail-if-starving: '0s' is not a duration"),
        (["history", "--since", "x\x1b"], r"--since: 'x\\x1b' is neither a time"),
        (["history", "--limit", "0"], "--limit: '0' is not a positive number"),
        (["history", "--what", "x"], "--what: invalid choice: 'x'"),
        (["prune", "--older-than", "7"], "--older-than: '7' is not a duration"),
        (["clear", "--al", "--yes"], "unrecognized arguments: --al"),
        (["--js"], "unrecognized arguments: --js"),
    ],
)
def test_bad_option_is_named(arguments, message):
    assert message.replace(r"\\", "\\") in str(refused(*arguments)).replace(r"\\", "\\")


# The command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["probe", "nightly"], "'probe' takes no name."),
        (["metrics", "nightly"], "'metrics' takes no name."),
        (["why"], "'why' explains one lock or one task: name one."),
        (["why", "a", "b"], "'why' explains one lock or one task: name one."),
    ],
)
def test_what_does_not_fit_the_action_is_an_error(take, arguments, message):
    lock = take("nightly")
    error = refused(*arguments)
    assert str(error).startswith(message)
    assert error.returncode == 3
    assert lock.owned()


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--dead"], "--dead"),
        (["history", "--dry-run"], "--dry-run"),
        (["clear", "--all", "--older-than=7d"], "--older-than"),
    ],
)
def test_option_of_another_action_is_an_error(take, arguments, option):
    lock = take("nightly")
    assert f"unrecognized arguments: {option}" in str(refused(*arguments))
    assert lock.owned()


def call(*arguments, **options):
    """Return what the command prints if an application calls it with keywords."""
    output = io.StringIO()
    call_command(*arguments, **options, stdout=output, no_color=True)
    return output.getvalue()


@pytest.mark.parametrize(
    ("arguments", "options", "output"),
    [
        (["nightly"], {"fail_if_held_over": 1e9}, "1 lock\n"),
        (["list"], {"starving": True}, "No lock starves.\n"),
        (["why", "nightly"], {"json": True}, '{"version"'),
        (["clear", "nightly"], {"dry_run": True, "reason": "it hangs"}, "Would free 1 lock.\n"),
        (["clear", "nightly"], {"yes": True}, "Freed 1 lock.\n"),
        (["history"], {"limit": 3, "what": "lost"}, "The history has no matching row.\n"),
        (["metrics"], {"json": True}, '{"version"'),
        (["probe"], {"json": True}, '{"version"'),
        (["prune"], {"older_than": 60, "dry_run": True}, "Would delete 0 rows older than 1m.\n"),
    ],
)
def test_application_can_call_each_action_with_keywords(take, arguments, options, output):
    take("nightly")
    assert output in call("locks", *arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [(["nightly"], {"dry_run": True}), (["clear", "--all"], {"older_than": 60, "yes": True})],
)
def test_keyword_for_another_action_is_an_error(take, arguments, options):
    lock = take("nightly")
    with pytest.raises(CommandError, match=f"has no option '{next(iter(options))}'") as caught:
        call("locks", *arguments, **options)
    assert caught.value.returncode == 3
    assert lock.owned()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reason", "clear", "--all", "--yes", "nightly"], "write 'clear' before --reason"),
        (["--reason", "clear", "clear", "nightly", "--yes"], "write 'clear' before --reason"),
        (["--json", "--yes", "clear", "nightly"], "write 'clear' before --yes"),
        (["--reason=clear", "--all", "--yes", "nightly"], "unrecognized arguments: --reason"),
        (["--starving", "clear", "nightly", "--yes"], "unrecognized arguments: --starving"),
    ],
)
def test_action_stands_before_its_options(take, arguments, message):
    lock = take("nightly")
    assert message in str(refused(*arguments))
    assert lock.owned()


def test_command_that_is_used_again_forgets_the_action(take):
    command = load_command_class("django_singletask", "locks")
    lock = take("nightly")
    assert "Would free 1 lock." in call(command, "clear", "nightly", dry_run=True)
    assert call(command, "nightly", starving=True) == "No matching lock starves.\n"
    assert lock.owned()


@pytest.mark.parametrize(
    ("arguments", "own", "other"),
    [
        (["history", "--help"], "--since", "--dead"),
        (["-h", "clear"], "--dead", "--since"),
        (["prune", "--help"], "--older-than", "LOCK"),
        (["why", "--help"], "LOCK", "--dry-run"),
    ],
)
def test_help_of_an_action_names_only_its_options(capsys, arguments, own, other):
    with pytest.raises(SystemExit):
        locks(*arguments)
    text = capsys.readouterr().out
    assert own in text
    assert "--json" in text
    assert other not in text


def test_help_lists_the_actions(capsys):
    with pytest.raises(SystemExit):
        locks("--help")
    text = capsys.readouterr().out
    for action in ("list", "why", "clear", "history", "probe", "prune"):
        assert f"\n{action}:\n" in text
    assert "'locks ACTION --help' names the options of an action." in text


def test_options_stand_between_the_words_and_a_lock_can_have_the_name_of_an_action(take):
    take("probe")
    take("other")
    assert locks("--no-color", "list", "--json", "probe").count('"name"') == 1
    assert "\nheld   other " in locks("other")


def test_clear_refuses_a_text_that_is_a_host_and_a_task():
    """To clear what a host has would be too much for who meant the task."""
    hold(name="reports.worker()", task="reports.worker", host="web-1", token="t1")
    hold(name="nightly", host="worker", token="t2")
    error = refused("clear", "worker", "--yes")
    assert (error.returncode, "the host worker" in str(error)) == (3, True)
    assert cleared() == []
    assert "Would free 1 lock" in locks("clear", "reports.worker", "--dry-run")


def test_history_of_a_lock_has_no_rows_of_others_that_are_called_alike():
    ran(7200, name="nightly")
    ran(60, name="x.nightly")
    assert locks("history", "nightly", "--since", "1h") == "The history has no matching row.\n"


def test_name_that_older_rows_may_have_is_not_unknown(monkeypatch):
    inside.bound(monkeypatch, "rows of a search", 1)
    ran(120, name="nightly", host="web-9")
    ran(60, name="other")
    assert locks("list", "web-9") == "No matching lock is held.\n"


def test_limit_of_an_alarm_changes_no_state():
    hold(name="hungry", token="t1", since=time.time() - 2000)
    skipped(1900, 60, 30, name="hungry", blocked_by="t1")
    error = refused("list", "--fail-if-starving", "10m")
    assert (error.returncode, "hungry (30 conflicts" in str(error)) == (2, True)
    assert "starv" not in locks("list")
