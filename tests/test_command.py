from __future__ import annotations

import io
import json
import os
import pty
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from celery import Celery
from django.core.management import CommandError, call_command

from django_singletask import SingletonTask, TaskLock, registry
from django_singletask.keys import name_key
from django_singletask.liveness import Holder
from django_singletask.management.commands import locks as command
from django_singletask.management.commands.locks import columns, printable
from django_singletask.models import TaskLockEvent
from django_singletask.stores import get_store
from tests.testapp import tasks

pytestmark = pytest.mark.django_db(databases="__all__")

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def on_redis(settings, empty_cache, db, monkeypatch):
    settings.SINGLETASK_CACHE = "redis"
    empty_cache("redis")
    # Threads of other tests write outside of the transactions of those.
    TaskLockEvent.objects.all().delete()
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def take():
    """Take locks that are given back after the test."""
    taken = []

    def take_one(name, **options):
        lock = TaskLock(name, **options)
        assert lock.acquire()
        taken.append(lock)
        return lock

    yield take_one
    for lock in taken:
        if lock.token is not None:
            lock.release()


def hold(**facts):
    """Put an entry into the store as another process would."""
    facts = {"token": "t", "name": "nightly", "host": "web-3", "pid": 8121, **facts}
    key = name_key("held").key + facts["token"]
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
    monkeypatch.setattr("django_singletask.registry.time.time", lambda: 1_000_134.0)
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


def test_beginning_and_end_of_a_long_name_are_shown():
    hold(name=f"feeds.tasks.import_feed(feed_url='https://example.org/{'x' * 90}/7.xml')")
    assert re.search(r"^feeds\.tasks\.import\S*…\S*/7\.xml'\)  ", locks(), re.MULTILINE)


def test_wide_terminal_shows_more(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    hold(name="x" * 120)
    assert "x" * 120 in locks()


@pytest.mark.parametrize("place", ["name", "host"])
@pytest.mark.parametrize(
    "evil", ["\x1b[2J", "\r", "\n", "\x9b31m", "\u202e", "\x00", "\ud800"], ids=ascii
)
def test_what_steers_a_terminal_is_escaped(place, evil):
    hold(**{place: f"a{evil}b"})
    escaped = evil.encode("unicode_escape").decode()
    assert f"a{escaped}b" in locks().splitlines()[1]


def test_json_is_valid_and_alone(take):
    lock = take("nightly \u202e ключ", timeout=30)
    [found] = json.loads(locks("--json"))
    assert found.pop("held_for") < 20
    assert 10 < found.pop("remaining") <= 30
    assert found.pop("since") > 1_700_000_000
    assert found == {
        "name": lock.name,
        "key": lock.key,
        "queued": False,
        "skipped": 0,
        "token": lock.token,
        "task": None,
        "task_id": None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "timeout": 30.0,
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
    with pytest.raises(CommandError, match="Say what to clear"):
        locks("clear", "--yes")
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


def test_clear_all_of_nothing_is_an_error():
    with pytest.raises(CommandError, match=r"^No lock is held\.$"):
        locks("clear", "--all", "--yes")


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
    with pytest.raises(CommandError, match=r"^Not freed: nightly\. Meanwhile given back, or taken"):
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
    with pytest.raises(CommandError, match="cannot list its entries, and with SINGLETASK_HISTORY"):
        locks(*arguments)


@pytest.mark.parametrize("arguments", [[], ["clear", "--all", "--yes"]])
def test_store_that_is_down_is_one_message(settings, dead_redis, arguments):
    settings.SINGLETASK_CACHE = dead_redis
    with pytest.raises(CommandError) as caught:
        locks(*arguments)
    assert re.match(r"The cache 'dead' .* cannot be asked: ConnectionError: ", str(caught.value))
    assert "\n" not in str(caught.value)


def test_cache_that_cannot_hold_locks_says_so(settings):
    settings.SINGLETASK_CACHE = "dummy"
    with pytest.raises(CommandError, match="SINGLETASK_CACHE = 'dummy' cannot hold locks"):
        locks()


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


def test_process_that_frees_nothing_exits_with_one():
    done = run("clear", "nightly", "--yes")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "CommandError: Not held: nightly.\n"


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
    assert "queued " in line
    assert len(line) <= 80
    (shown,) = json.loads(locks("--json"))
    assert (shown["queued"], shown["task_id"], shown["skipped"]) == (True, task_id, 1)


def test_clear_queued_lets_an_equal_call_be_sent(queued, take):
    take("nightly")
    first = queued("a")
    assert locks("clear", "--queued", "--yes").endswith("Freed 1 queued call.\n")
    assert queued("a") != first
    assert "nightly" in locks()
    assert TaskLockEvent.objects.filter(kind="cleared").count() == 1


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
    with pytest.raises(CommandError, match=r"^No call is queued\.$"):
        locks("clear", "--queued", "--yes")
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
    assert "Freed 1 queued call" in locks("clear", "--queued", "--yes", name)
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
    assert len(registry.keys_of(name)) == count


def test_a_call_is_found_by_its_arguments():
    key = tasks.unique.lock("a").key
    for name in (NAME, "tests.testapp.tasks.unique('a', 5)"):
        assert key in registry.keys_of(name)
