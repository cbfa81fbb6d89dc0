"""What is kept, and what is said, with ``SINGLETASK_HISTORY_KEEPS = "trouble"``."""

from __future__ import annotations

import datetime
from functools import partial
from unittest.mock import Mock

import pytest
from django.core.management import CommandError
from django.db import connections, router
from django.db.models.signals import post_delete
from django.utils import timezone

from django_singletask import TaskLock
from django_singletask.conf import conf
from django_singletask.history import recorder, writing
from django_singletask.models import TaskLockEvent
from django_singletask.operators.held import list_held
from django_singletask.operators.per_task import per_task
from django_singletask.operators.windows import Window
from django_singletask.signals import LockEvent
from django_singletask.stores import get_store
from django_singletask.stores.base import CannotList
from tests import inside
from tests.command_line import locks
from tests.past_rows import keep_history_in, ran, row, skipped

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("empty_history"),
]

TROUBLE = ["dead", "expired", "lost", "cleared", "unguarded"]
BEGAN = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
ENDED = BEGAN + datetime.timedelta(minutes=1)


def event(kind, **facts):
    facts = {"token": "t", "since": BEGAN, "at": ENDED, "host": "web-1", "pid": 7, **facts}
    return LockEvent(kind, "nightly", "k", task="nightly", task_id="its id", **facts)


def of_call(kind, **facts):
    facts = {"result": "skipped", "blocked_by": "t", "blocked_by_task_id": "holder", **facts}
    return event(kind, token="", since=None, reason="skip", **facts)


acquired = event("acquired", at=BEGAN)
released = partial(event, "released", outcome="released", result="returned")


@pytest.fixture(params=["default", "mariadb", "sqlite"])
def database(request, settings):
    keep_history_in(settings, request.param)


@pytest.fixture(params=["trouble", "all"])
def keeps(request, settings):
    """Let a test see that the same events leave a row if all is kept."""
    settings.SINGLETASK_HISTORY_KEEPS = request.param
    return request.param


@pytest.fixture
def only_trouble(settings):
    settings.SINGLETASK_HISTORY_KEEPS = "trouble"


def rows():
    return list(TaskLockEvent.objects.order_by("id"))


def outcomes():
    return [(row.outcome, row.retaken) for row in rows()]


# Runs without trouble


@pytest.mark.parametrize(
    "result", ["returned", "raised", "terminated", "retried", "ignored", "postponed"]
)
@pytest.mark.parametrize(
    "batches",
    [
        lambda end: [[acquired, end]],
        lambda end: [[acquired], [end]],
        lambda end: [[acquired], [acquired, end]],  # the reply to the first commit was lost
        lambda end: [[acquired, end], [acquired, end]],
        lambda end: [[acquired], [end, released()]],  # handed over, and then the body has ended
    ],
    ids=["short", "long", "reply lost", "both lost", "two ends"],
)
def test_run_without_trouble_leaves_a_row_only_if_all_are_kept(keeps, result, batches):
    for batch in batches(released(result=result)):
        writing.write(batch)
    assert len(rows()) == (keeps == "all")


@pytest.mark.usefixtures("database")
def test_row_of_a_long_run_is_there_until_it_ends(keeps):
    others = [event("acquired", token=token) for token in ("a", "b")]
    writing.write([acquired, *others])
    assert outcomes() == [("", 0)] * 3
    writing.write([released(token="a"), released()])
    assert [row.outcome for row in rows()].count("") == 1
    assert len(rows()) == {"all": 3, "trouble": 1}[keeps]


@pytest.mark.usefixtures("only_trouble")
@pytest.mark.parametrize("noticed", ["expired", "dead"])
def test_end_of_a_run_that_seemed_to_be_gone_deletes_its_row(noticed):
    writing.write([acquired])
    writing.write([event(noticed)])
    assert outcomes() == [(noticed, 0)]
    writing.write([released()])
    assert rows() == []


# Trouble


@pytest.mark.usefixtures("database")
@pytest.mark.parametrize("first", [[], [acquired]], ids=["alone", "after its begin"])
@pytest.mark.parametrize("kind", TROUBLE)
def test_each_trouble_has_a_row_with_the_begin_of_the_run(keeps, kind, first):
    writing.write(first)
    writing.write([event(kind)])
    [run] = rows()
    assert (run.outcome, run.task_id, run.host, run.pid) == (kind, "its id", "web-1", 7)
    assert run.noticed_at - run.at == ENDED - BEGAN


@pytest.mark.parametrize("batches", [[0, 1, 2], [0, 0, 0], [0, 0, 1], [0, 1, 1]])
@pytest.mark.parametrize(
    ("kind", "facts", "outcome"),
    [("retaken", {"retaken": 1}, "released"), ("lost", {"outcome": "lost"}, "lost")],
)
def test_run_with_trouble_also_has_its_end(keeps, kind, facts, outcome, batches):
    events = [acquired, event(kind), released(**facts)]
    if kind == "retaken":
        events[1] = event(kind, **facts)
    of_batch = {number: [] for number in batches}
    for number, each in zip(batches, events, strict=True):
        of_batch[number].append(each)
    for batch in of_batch.values():
        writing.write(batch)
    [run] = rows()
    assert (run.outcome, run.result, run.retaken) == (outcome, "returned", facts.get("retaken", 0))
    assert run.ended_at - run.at == ENDED - BEGAN


def test_lock_that_was_kept_and_then_cleared_has_a_row(keeps):
    writing.write([acquired, released()])
    writing.write([event("cleared")])
    assert outcomes() == [("cleared", 0)]


@pytest.mark.usefixtures("database")
@pytest.mark.parametrize("kind", ["cleared", "lost", "unguarded", "retaken"])
def test_row_with_trouble_stays_if_an_end_without_trouble_comes_late(settings, kind):
    """As of a body that ends after it has handed its lock over."""
    facts = {}
    for keeps in ("trouble", "all"):
        settings.SINGLETASK_HISTORY_KEEPS = keeps
        writing.write([event(kind, retaken=int(kind == "retaken"))])
        writing.write([released()])
        [run] = rows()
        assert run.troubles == [kind]
        facts[keeps] = {name: getattr(run, name) for name in writing.DEFAULTS}
        run.delete()
    assert facts["trouble"] == facts["all"]
    assert (facts["all"]["result"], facts["all"]["ended_at"] - BEGAN) == ("returned", ENDED - BEGAN)


@pytest.mark.usefixtures("database", "only_trouble")
def test_many_ends_are_written_in_slices(monkeypatch):
    monkeypatch.setattr(writing, "BATCH", 2)
    tokens = ["a", "b", "c", "d", "e"]
    writing.write([event("acquired", token=token) for token in tokens])
    writing.write([event("cleared", token="e")])
    writing.write([released(token=token) for token in tokens])
    assert [(run.token, run.result) for run in rows()] == [("e", "returned")]


@pytest.mark.usefixtures("database", "only_trouble")
@pytest.mark.parametrize("events", [[released()], [acquired, released(token="other")]])
def test_a_transaction_writes_first_and_loads_no_row(events):
    """SQLite refuses to write in a transaction that read first while another process wrote."""
    sent = []

    def note(execute, sql, *args):
        sent.append(sql.split()[0])
        return execute(sql, *args)

    connection = connections[router.db_for_write(TaskLockEvent)]
    with connection.execute_wrapper(note):
        writing.write(events)
    statements = [word for word in sent if word not in ("SAVEPOINT", "RELEASE")]
    assert statements == ["DELETE", "SELECT", "INSERT"][: 1 + len(events)]


@pytest.mark.usefixtures("only_trouble")
def test_a_row_is_deleted_without_signals(request):
    receiver = Mock()
    post_delete.connect(receiver, sender=TaskLockEvent)
    request.addfinalizer(partial(post_delete.disconnect, receiver, sender=TaskLockEvent))
    writing.write([acquired])
    writing.write([released()])
    assert rows() == []
    assert not receiver.called


@pytest.mark.usefixtures("on_redis")
def test_kept_lock_that_is_cleared_says_that_its_body_had_returned(keeps):
    with TaskLock("nightly", timeout=60, at_least=50):
        pass
    TaskLock("nightly").clear(actor="me")
    [run] = rows()
    assert (run.outcome, run.result, run.actor) == ("cleared", "returned", "me")


# Calls


@pytest.mark.usefixtures("database")
@pytest.mark.parametrize("kind", ["conflict", "duplicate"])
def test_call_names_its_holder_which_leaves_no_row(only_trouble, kind):
    writing.write([acquired, of_call(kind)])
    writing.write([of_call(kind), released()])
    [call] = rows()
    assert (call.kind, call.count) == (kind, 2)
    assert (call.blocked_by, call.blocked_by_task_id) == ("t", "holder")


# In the caller's own thread


@pytest.fixture(params=["in a test", "inline", "no threads"])
def no_thread(request, settings, monkeypatch):
    settings.SINGLETASK_HISTORY_KEEPS = "trouble"
    settings.SINGLETASK_TESTING = request.param == "in a test"
    settings.SINGLETASK_HISTORY = "inline"
    if request.param == "no threads":
        settings.SINGLETASK_HISTORY = "background"
        monkeypatch.setattr(recorder, "has_threads", lambda: False)
    monkeypatch.setattr(recorder, "writer", recorder.Writer())
    # Outside of tests, events wait for the end of the caller's transaction.
    monkeypatch.setattr(recorder, "write_here", recorder.write_all)


@pytest.mark.usefixtures("no_thread")
def test_without_a_thread_no_begin_is_written():
    recorder.receive(event=acquired)
    assert rows() == []
    recorder.receive(event=released())
    assert rows() == []
    recorder.receive(event=of_call("conflict"))
    assert [row.kind for row in rows()] == ["conflict"]


@pytest.mark.usefixtures("no_thread")
@pytest.mark.parametrize("kind", TROUBLE)
def test_without_a_thread_trouble_is_written_whole(kind):
    recorder.receive(event=event(kind))
    [run] = rows()
    assert (run.outcome, run.token, run.noticed_at - run.at) == (kind, "t", ENDED - BEGAN)


@pytest.mark.usefixtures("no_thread", "on_redis")
def test_without_a_thread_the_end_of_a_lost_run_is_written():
    with TaskLock("nightly") as lock:
        inside.forget(lock)
    [run] = rows()
    assert (run.outcome, run.result) == ("lost", "returned")
    assert run.ended_at is not None


# What is said


def test_lock_starves_only_behind_a_run_that_still_has_it(keeps, settings):
    """Who has no row has completed."""
    settings.SINGLETASK_TESTING = False  # then a thread writes
    row("run", 7000, name="nightly", token="open", task="t")
    skipped(6900, 60, 30, blocked_by="open")
    skipped(8000, 60, 30, name="busy", blocked_by="gone")
    skipped(8000, 60, 30, name="unknown", blocked_by="")
    starving = {each.name for each in inside.starving(3600)}
    assert starving == {"trouble": {"nightly"}, "all": {"nightly", "busy", "unknown"}}[keeps]
    assert {each.name for each in inside.starving(3600, "busy")} <= starving


def test_no_lock_has_a_usual_length_if_only_trouble_is_kept(keeps):
    for number in range(6):
        ran(100 + number, task="feeds.t", retaken=1)
    usual = TaskLockEvent.objects.usual_hold("nightly", "feeds.t")
    assert (usual is None) == (keeps == "trouble")


def test_figures_of_a_task_leave_out_what_is_not_known(keeps):
    ran(60, 30, task="feeds.t", retaken=1)
    ran(90, 30, task="feeds.t", outcome="lost")
    now = timezone.now()
    window = Window(now - datetime.timedelta(hours=1), now)
    [figures] = per_task(TaskLockEvent.objects.all(), window, now)
    known = [bool(figures.now[column]) for column in ("mean", "longest", "completed")]
    assert known == [keeps == "all"] * 3
    assert (figures.now["run"], figures.now["trouble"]) == (2, 1)


NO_BEGINS = "SINGLETASK_HISTORY_KEEPS = 'trouble' with SINGLETASK_HISTORY = 'inline'"


@pytest.mark.usefixtures("on_redis")
def test_where_no_begin_is_written_it_cannot_be_told_whether_a_lock_starves(keeps, settings):
    settings.SINGLETASK_TESTING = False
    settings.SINGLETASK_HISTORY = "inline"
    row("run", 7000, token="open")
    skipped(7000, 60, 30, blocked_by="open")
    with pytest.raises(CommandError) as error:
        locks("list", "--fail-if-starving", "1h")
    assert error.value.returncode == {"trouble": 3, "all": 2}[keeps]
    assert (NO_BEGINS in str(error.value)) == (keeps == "trouble")


def test_where_no_begin_is_written_locks_that_the_cache_cannot_list_are_unknown(
    keeps, settings, monkeypatch
):
    settings.SINGLETASK_TESTING = False
    settings.SINGLETASK_HISTORY = "inline"
    error = CannotList("The cache cannot list its entries.")
    store = get_store(conf.cache)
    monkeypatch.setattr(store, "entries", Mock(side_effect=error))
    if keeps == "all":
        assert list_held() == []
    else:
        with pytest.raises(CannotList, match=NO_BEGINS):
            list_held()


NOTE = "SINGLETASK_HISTORY_KEEPS = 'trouble': runs without trouble are not kept."


@pytest.mark.usefixtures("on_redis", "only_trouble")
class TestCommand:
    def test_why_says_that_runs_without_trouble_are_not_kept(self):
        ran(90, name="nightly")  # before the setting was changed
        lines = locks("why", "nightly").splitlines()
        assert lines[0] == "nightly: not held"
        assert lines[-1] == f"  completed  not known. {NOTE}"

    def test_a_run_that_is_not_recorded_is_not_unknown(self, settings):
        task_id = "3f0c1d52-7a41-4c55-9d0b-6f1a2b3c4de1"
        assert locks("why", task_id).endswith(f"{NOTE}\n")
        settings.SINGLETASK_HISTORY_KEEPS = "all"
        with pytest.raises(Exception, match="No lock or task is known"):
            locks("why", task_id)

    def test_history_says_so_too(self, capsys):
        skipped(60)
        assert "skipped" in locks("history", "nightly")
        assert capsys.readouterr().err == f"{NOTE}\n"

    def test_history_that_is_off_is_said_alone(self, settings, capsys):
        settings.SINGLETASK_HISTORY = "off"
        assert NOTE not in locks("why", "nightly")
        locks("history")
        assert NOTE not in capsys.readouterr().err
