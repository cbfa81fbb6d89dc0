"""The history in the admin: who may do what, what the list says, filters, search, large tables."""

from __future__ import annotations

import datetime
import re

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_singletask.admin import TaskLockEventAdmin
from django_singletask.models import TaskLockEvent
from tests import inside
from tests.admin_pages import BASE, LIST, TABLE, TASK, event, fill_table, log_in, rows_of, text_of
from tests.plans import plans

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("empty_history"),
]

VIEW, DELETE, CLEAR = "view_tasklockevent", "delete_tasklockevent", "clear_lock"
NAME = f"{TASK}(feed_id=7)"
SKIPPED = {"kind": "conflict", "reason": "skip", "result": "skipped"}


@pytest.fixture
def admin():
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    return client


def shown(client, **query):
    """Return the texts of the rows that the list shows."""
    return rows_of(client.get(LIST, query), '<table id="result_list"')


# Permissions


def test_nobody_adds_an_event(admin):
    assert admin.get(f"{BASE}add/").status_code == 403


def test_nobody_changes_an_event(admin):
    row = event()
    admin.post(f"{BASE}{row.pk}/change/", {"name": "other"})
    row.refresh_from_db()
    assert row.name == f"{TASK}(feed_id=7)"


def test_viewer_cannot_delete():
    address = f"{BASE}{event().pk}/delete/"
    assert log_in(VIEW).post(address, {"post": "yes"}).status_code == 403
    assert TaskLockEvent.objects.exists()


def test_deleter_deletes_the_selected_events():
    first, second = event(), event()
    data = {"action": "delete_selected", "_selected_action": [first.pk]}
    client = log_in(VIEW, DELETE)
    asked = client.post(LIST, data).content.decode()
    assert "delete the selected lock events?" in asked
    assert "Lock events: 1" in asked
    done = client.post(LIST, {**data, "post": "yes"}, follow=True).content.decode()
    assert "Successfully deleted 1 lock event." in done
    assert "Delete selected lock events" in done
    assert TaskLockEvent.objects.get() == second


# What the list says


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, "held"),
        ({"outcome": "released", "result": "returned"}, "returned after 1m 05s"),
        ({"outcome": "released", "result": "raised"}, "raised after 1m 05s"),
        ({"outcome": "released"}, "released after 1m 05s"),
        ({"outcome": "dead", "actor": "web-3:8"}, "dead after 1m 05s noticed by web-3:8"),
        ({"outcome": "lost", "result": "returned", "reason": "gone"}, "lost after 1m 05s gone"),
        ({"outcome": "cleared", "actor": "ada"}, "cleared after 1m 05s by ada"),
        ({"outcome": "unguarded", "reason": "no cache"}, "unguarded no cache"),
        ({**SKIPPED, "blocked_by_task_id": "x"}, "conflict skipped blocked by x"),
        ({**SKIPPED, "blocked_by": "tok"}, "conflict skipped blocked by tok"),
        (
            {"kind": "conflict", "result": "failed", "reason": "wait", "count": 31},
            "conflict × 31 failed",
        ),
        ({"kind": "duplicate", "reason": "kept"}, "duplicate kept"),
    ],
)
def test_list_says_what_happened(admin, facts, text):
    now = timezone.now()
    end = now + datetime.timedelta(seconds=65) if facts.get("outcome") else None
    event(at=now, ended_at=end, noticed_at=end, **facts)
    [row] = shown(admin)
    assert f") {text} -" in row


@pytest.mark.parametrize(("seconds", "text"), [(0.04, "after 0.04s"), (-5, "after 0.00s")])
def test_short_and_negative_holds_are_told_in_parts_of_a_second(admin, seconds, text):
    """A hold is negative if the clock of another host wrote its end."""
    now = timezone.now()
    event(at=now, outcome="released", ended_at=now + datetime.timedelta(seconds=seconds))
    assert text in shown(admin)[0]


def test_list_shows_time_task_id_and_process(admin, settings):
    settings.TIME_ZONE = "UTC"
    at = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    event(at=at, task_id="the-id", host="web-3", pid=8121, timeout=1e9)
    [row] = shown(admin)
    assert row == f"2026-01-02 03:04:05 running {TASK}(feed_id=7) held the-id web-3:8121"


def test_list_says_when_a_lock_was_taken_again(admin, settings):
    settings.TIME_ZONE = "UTC"
    at = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    event(at=at, retaken=2, retaken_at=at, timeout=1e9)
    [row] = shown(admin)
    assert " held retaken × 2, last at 2026-01-02 03:04:05 -" in row


def test_queued_call_that_was_forgotten_has_no_process(admin):
    event(outcome="cleared", noticed_at=timezone.now(), task_id="the-id", host="vm")
    [row] = shown(admin)
    assert re.search(r" cleared after 0\.\d\ds the-id$", row)


def test_list_shows_first_what_happened_last(admin):
    for name in ("first", "second", "third"):
        event(name=name)
    began = timezone.now() - datetime.timedelta(hours=1)
    event(name="late", at=began, outcome="cleared", noticed_at=timezone.now())
    names = [re.search(r"(first|second|third|late) ", row)[1] for row in shown(admin)]
    assert names == ["late", "third", "second", "first"]


# Filters and search


@pytest.mark.parametrize(
    ("since", "count"), [("15m", 1), ("1h", 2), ("24h", 3), ("7d", 4), ("", 5), ("odd", 5)]
)
def test_time_filter(admin, since, count):
    for hours in (0.1, 0.5, 5, 50, 500):
        ended = timezone.now() - datetime.timedelta(hours=hours)
        event(at=ended - datetime.timedelta(hours=9), outcome="released", ended_at=ended)
    assert len(shown(admin, range=since)) == count


def test_what_happened_in_a_window_is_listed_before_what_only_went_on(admin, monkeypatch):
    inside.bound(monkeypatch, "rows of a list", 2)
    now = timezone.now()
    hour = datetime.timedelta(hours=1)
    for number in range(4):
        event(name=f"through-{number}", at=now - 5 * hour, ended_at=now, outcome="released")
    event(name="began", at=now - 2.5 * hour, ended_at=now, outcome="released")
    event(name="victim", at=now - 4 * hour, noticed_at=now - 2.5 * hour, outcome="dead")
    window = {"from": (now - 3 * hour).isoformat(), "to": (now - 2 * hour).isoformat()}
    first, second, *_others = shown(admin, **window)
    assert "victim" in first
    assert "began" in second


def test_task_filter_offers_registered_and_recorded_tasks(admin):
    for task in ("an.only_one", "removed.task", "", "removed.task"):
        event(task=task)
    offered = choices(admin, "task")
    for task in ("an.only_one", "removed.task", "tests.testapp.tasks.hold"):
        assert offered.count(task) == 1
    assert "celery.backend_cleanup" not in offered  # it takes no lock
    assert offered.count("") == 1  # for all tasks


def test_recorded_tasks_that_the_filter_offers_are_bounded(admin, monkeypatch):
    inside.bound(monkeypatch, "recorded tasks", 3)
    for task in ("d.task", "b.task", "", "c.task", "a.task", "a.task"):
        event(task=task)
    assert [task for task in choices(admin, "task") if task.endswith(".task")] == [
        "a.task",
        "b.task",
        "c.task",
    ]


def choices(admin, name):
    """Return what one of the filters above the list offers, in its order."""
    select = admin.get(LIST).content.decode().partition(f'<select name="{name}"')[2]
    return re.findall(r'<option value="(.*?)"', select.partition("</select>")[0])


def test_words_of_the_filter_are_grouped_and_all_are_there(admin):
    content = admin.get(LIST).content.decode()
    assert re.findall(r'<optgroup label="(\w+)"', content) == ["Trouble", "Runs", "Calls"]
    offered = choices(admin, "what")
    assert offered[:3] == ["", "trouble", "dead"]
    assert sorted(offered) == sorted(["", *inside.words_of_the_history()])


def test_filters_stand_above_the_list_and_keep_the_window_and_the_search(admin):
    event()
    content = admin.get(LIST, {"range": "1h", "q": TASK, "what": "held"}).content.decode()
    assert 'id="changelist-filter"' not in content
    assert '<option value="held" selected>' in content
    form = content.partition('<select name="what"')[0].rpartition("<form")[2]
    hidden = re.findall(r'type="hidden" name="(\w+)"', form)
    assert sorted(hidden) == ["q", "range"]


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ({"what": "conflict"}, "skip"),
        ({"what": "skipped"}, "skip"),
        ({"what": "dead"}, "dead"),
        ({"what": "held"}, "hold"),
        ({"what": "expired"}, "over"),
        ({"what": "trouble", "range": "15m"}, "dead"),
        ({"task": "tests.testapp.tasks.hold"}, "hold"),
    ],
)
def test_filters_for_what_happened_and_for_the_task(admin, query, name):
    event(name="skip", **SKIPPED)
    event(name="dead", outcome="dead")
    event(name="hold", task="tests.testapp.tasks.hold")
    event(name="over", at=timezone.now() - datetime.timedelta(hours=1))
    assert [row for row in shown(admin, **query) if f" {name} " in row]
    assert len(shown(admin, **query)) <= 2


@pytest.mark.parametrize(
    "text",
    [
        *[f"{TASK}(page=2)", "import_feed(page=2)", TASK, "import_feed", "  import_feed "],
        *["5d1c-1", "c0ffee", "singletask:feeds:1", "web-3", "web-3:8121", "*feed(p*", "…page=2)"],
    ],
)
def test_events_are_searched_by_what_the_command_selects_them_by(admin, text):
    facts = {"task_id": "5d1c-1", "ref": "c0ffee", "host": "web-3", "pid": 8121}
    event(name=f"{TASK}(page=2)", task=TASK, key="singletask:feeds:1", **facts)
    event(name="nightly", task_id="5d1c-2", host="web-31")
    [row] = shown(admin, q=text)
    assert f" {TASK}(page=2) " in row


@pytest.mark.parametrize("text", [f"{TASK}(", "5d1c", "%", "IMPORT_FEED", "web-3:812"])
def test_search_finds_no_part_of_a_text_without_a_pattern(admin, text):
    event(name=f"{TASK}(page=2)", task=TASK, task_id="5d1c-1", host="web-3", pid=8121)
    assert shown(admin, q=text) == []
    assert len(shown(admin, q=f"*{text}*")) == (text in f"{TASK}(page=2) 5d1c-1 web-3:8121")


def test_search_that_finds_nothing_offers_a_pattern_and_is_escaped(admin):
    event()
    text = "<script>alert(1)</script>"
    content = admin.get(LIST, {"q": text, "what": "held", "p": "1"}).content.decode()
    assert "Search for *&lt;script&gt;" in content
    assert text not in content
    [link] = re.findall(r'href="(.*?)">Search for', content)
    assert link.startswith(f"{LIST}?")
    assert "what=held" in link
    assert "p=" not in link
    for other in ({"q": "*zz*"}, {"q": NAME}, {"q": " ", "what": "dead"}):
        assert "Search for" not in text_of(admin.get(LIST, other).content.decode())


@pytest.mark.parametrize("text", ["import_feed", "web-3", "*feed*"])
def test_search_goes_together_with_the_filters_the_window_and_the_pages(admin, monkeypatch, text):
    monkeypatch.setattr(TaskLockEventAdmin, "list_per_page", 2)
    began = timezone.now() - datetime.timedelta(hours=5)
    for number in range(3):
        facts = {"task": TASK, "host": "web-3", "outcome": "dead"}
        event(name=f"feed {number}", noticed_at=timezone.now(), **facts)
        event(name=f"old feed {number}", at=began, noticed_at=began, **facts)
        event(name=f"held feed {number}", task=TASK, host="web-3")
        event(name=f"other {number}", outcome="dead", noticed_at=timezone.now())
    query = {"q": text, "what": "dead", "range": "1h"}
    first, second = shown(admin, **query), shown(admin, **query, p=2)
    assert [re.search(r" feed \d ", row)[0] for row in (*first, *second)] == [
        " feed 2 ",
        " feed 1 ",
        " feed 0 ",
    ]
    assert len(shown(admin, q=text, task=TASK, p=5)) == 1
    assert shown(admin, **query, task="tests.testapp.tasks.hold") == []


def test_search_by_a_pattern_says_that_it_searched_the_newest_rows_only(admin, monkeypatch):
    inside.bound(monkeypatch, "rows of a search", 2)
    for name in ("sync", "bill", "bill", "bill"):
        event(name=name)
    for text, said in (("*sync*", True), ("sync", False), ("zz", True), ("", False)):
        content = admin.get(LIST, {"q": text}).content.decode()
        assert ("Only the newest 20,000 rows were searched" in content) == said


def test_search_for_an_id_that_is_not_recorded_says_where_to_look(admin):
    event()
    assert (
        "The log of the worker has a line for each call"
        in admin.get(LIST, {"q": "3f0c1d52"}).content.decode()
    )
    assert "The log of the worker" not in admin.get(LIST, {"q": NAME}).content.decode()


@pytest.mark.parametrize("name", ["q", "task", "what", "task_id", "range"])
def test_nul_in_the_address_leads_to_the_whole_list(admin, name):
    event()
    response = admin.get(LIST, {name: "a\0"})
    assert (response.status_code, response.url) == (302, LIST)


# Large tables


@pytest.mark.only_all("it writes 30,000 rows")
def test_every_statement_of_the_list_uses_an_index(admin, monkeypatch):
    inside.bound(monkeypatch, "rows of a search", 1000)  # of 30,000 rows
    fill_table()
    addresses = [
        {},
        {"p": "3"},
        {"range": "15m"},
        {"range": "7d"},
        {"what": "conflict"},
        {"what": "conflict", "range": "24h"},
        {"what": "held"},
        {"what": "dead"},
        {"what": "retaken"},
        {"what": "raised"},
        {"what": "skipped", "range": "24h"},
        {"task": "tests.testapp.tasks.hold"},
        {"q": "feeds.tasks.import_feed(feed_id=7)"},
        {"q": "feeds.tasks.import_feed(feed_id=77*"},
        {"q": "*feed_id=77*", "task": "feeds.tasks.import_feed"},
        {"q": "tests.testapp.tasks.hold"},
        {"q": "tests.testapp.tasks.hold('x')"},
        {"q": "tests.testapp.tasks.hold('x')", "what": "conflict", "range": "24h"},
        {"q": "c4ca4238a0b923820dcc509a6f75849b"},
    ]
    sent = plans("default", lambda: [shown(admin, **query) for query in addresses])
    sent = [plan for plan in sent if TABLE in plan.sql]
    assert len(sent) >= 22
    limit = TaskLockEventAdmin.paginator.limit
    for plan in sent:
        assert not plan.reads_the_table(), plan.sql
        assert "DISTINCT" not in plan.sql
        assert "COUNT(" not in plan.sql or f"LIMIT {limit + 1}" in plan.sql


def test_events_of_a_task_are_read_in_the_order_of_their_index(admin):
    for name in ("first", "second", "third"):
        event(name=name, task=TASK)
    event(name="other", task="another")
    with CaptureQueriesContext(connection) as captured:
        rows = shown(admin, task=TASK)
    assert [row.split()[3] for row in rows] == ["third", "second", "first"]
    [page] = [query["sql"] for query in captured if '"task" ASC, ' in query["sql"]]
    assert f"\"task\" >= '{TASK}'" in page
    assert f'ORDER BY "{TABLE}"."task" ASC, 3 DESC LIMIT' in page  # the third column


def test_facets_which_would_count_the_table_cannot_be_asked_for(admin):
    event()
    with CaptureQueriesContext(connection) as captured:
        admin.get(LIST, {"_facets": "True"})
    assert not any("FILTER (WHERE" in query["sql"] for query in captured)


@pytest.mark.parametrize(
    ("query", "count"),
    [({}, 0), ({"q": " "}, 0), ({"q": TASK}, 1), ({"range": "1h"}, 1), ({"task_id": ""}, 1)],
)
def test_list_offers_to_show_all_only_if_something_narrows_it(admin, query, count):
    event()
    assert admin.get(LIST, query).content.decode().count("Show all") == count


@pytest.mark.parametrize(("query", "count"), [({}, 0), ({"q": NAME}, 1), ({"what": "held"}, 1)])
def test_rows_are_counted_up_to_a_limit_and_the_list_says_so(admin, monkeypatch, query, count):
    monkeypatch.setattr(TaskLockEventAdmin.paginator, "limit", 3)
    monkeypatch.setattr(TaskLockEventAdmin, "list_per_page", 2)

    def content():
        return text_of(admin.get(LIST, {**query, "p": 2}).content.decode())

    for _ in range(3):
        event()
    assert "There are more than 3" not in content()
    event()
    assert len(shown(admin, **query, p=2)) == 1
    assert content().count("3 results ( Show all )") == count
    assert "3 lock events" in content()
    assert "There are more than 3 events: these are the newest." in content()
