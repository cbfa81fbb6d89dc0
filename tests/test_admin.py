from __future__ import annotations

import datetime
import re
from contextlib import contextmanager

import pytest
from django.contrib.admin.sites import AdminSite
from django.contrib.auth.models import Permission, User
from django.contrib.staticfiles import finders
from django.db import InterfaceError, connection, connections
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_singletask import SingletonTask
from django_singletask.admin import filters
from django_singletask.admin.filters import UncountedPaginator
from django_singletask.admin.history import TaskLockEventAdmin
from django_singletask.history import queries
from django_singletask.models import TaskLockEvent
from tests.testapp.celery import app

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("empty_history"),
]

BASE = "/admin/django_singletask/tasklockevent/"
LIST = f"{BASE}history/"
TABLE = TaskLockEvent._meta.db_table
TASK = "feeds.tasks.import_feed"


@pytest.fixture(autouse=True)
def another_minute():
    filters.recorded_tasks.cache_clear()


@pytest.fixture
def log_in(client):
    def as_user_with(*codenames):
        user = User.objects.create_user("ada", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
        client.force_login(user)
        return client

    return as_user_with


@pytest.fixture
def admin(client):
    client.force_login(User.objects.create_superuser("root"))
    return client


def make(**facts):
    now = timezone.now()
    return TaskLockEvent.objects.create(
        **{"kind": "acquired", "name": f"{TASK}(feed_id=7)", "key": "k", "at": now, **facts}
    )


def shown(client, **query):
    """Return the rows that the list shows, as their texts."""
    response = client.get(LIST, query)
    assert response.status_code == 200
    return [text_of(row) for row in rows_of(response)]


def rows_of(response):
    body = re.search(r"<tbody>.*</tbody>", response.content.decode(), re.DOTALL)
    return re.findall(r"<tr>.*?</tr>", body[0], re.DOTALL) if body else []


def text_of(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html).replace("&#x27;", "'")).strip()


# Permissions


@pytest.mark.parametrize("codename", ["view_tasklockevent", "delete_tasklockevent", "clear_lock"])
def test_only_viewers_see_the_list(log_in, codename):
    status = log_in(codename).get(LIST).status_code
    assert status == (200 if codename == "view_tasklockevent" else 403)


def test_viewer_sees_one_event_and_can_change_nothing(log_in):
    event = make()
    response = log_in("view_tasklockevent").get(f"{BASE}{event.pk}/change/")
    assert response.status_code == 200
    assert b'name="_save"' not in response.content
    assert b"/delete/" not in response.content


def test_nobody_adds(admin):
    assert admin.get(f"{BASE}add/").status_code == 403


def test_nobody_changes(admin):
    event = make()
    assert admin.post(f"{BASE}{event.pk}/change/", {"name": "other"}).status_code == 403
    event.refresh_from_db()
    assert event.name == f"{TASK}(feed_id=7)"


def test_viewer_cannot_delete(log_in):
    event = make()
    client = log_in("view_tasklockevent")
    assert client.post(f"{BASE}{event.pk}/delete/", {"post": "yes"}).status_code == 403
    assert TaskLockEvent.objects.exists()


def test_deleter_deletes(log_in):
    event = make()
    client = log_in("view_tasklockevent", "delete_tasklockevent")
    assert client.post(f"{BASE}{event.pk}/delete/", {"post": "yes"}).status_code == 302
    assert not TaskLockEvent.objects.exists()


def test_deleter_deletes_those_that_are_selected(log_in):
    first, _second = make(), make()
    data = {"action": "delete_selected", "_selected_action": [first.pk], "post": "yes"}
    log_in("view_tasklockevent", "delete_tasklockevent").post(LIST, data)
    assert TaskLockEvent.objects.count() == 1


# What the list says


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, "held"),
        ({"outcome": "released", "result": "returned"}, "returned after 1m 05s"),
        ({"outcome": "released", "result": "raised"}, "raised after 1m 05s"),
        ({"outcome": "released"}, "released after 1m 05s"),
        ({"outcome": "dead"}, "dead after 1m 05s"),
        ({"outcome": "lost", "result": "returned"}, "lost after 1m 05s"),
        ({"kind": "skipped", "reason": "skip", "blocked_by_task_id": "x"}, "skipped blocked by x"),
        ({"kind": "skipped", "reason": "wait", "count": 31}, "skipped × 31 wait"),
        ({"kind": "lost", "reason": "gone", "blocked_by": "tok"}, "lost gone blocked by tok"),
        ({"kind": "cleared", "actor": "ada"}, "cleared by ada"),
    ],
)
def test_list_says_what_happened(admin, facts, expected):
    now = timezone.now()
    if facts.get("outcome"):
        facts = {**facts, "ended_at": now + datetime.timedelta(seconds=65)}
    make(at=now, **facts)
    [row] = shown(admin)
    assert f") {expected} -" in row


def test_list_names_task_process_and_second(admin, settings):
    settings.TIME_ZONE = "UTC"
    at = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)
    make(at=at, task_id="the-id", host="web-3", pid=8121)
    [row] = shown(admin)
    assert row == f"2026-01-02 03:04:05 {TASK}(feed_id=7) held the-id web-3:8121"


def test_queued_call_that_was_forgotten_has_no_process(admin):
    make(kind="cleared", task_id="the-id", host="vm")
    [row] = shown(admin)
    assert row.endswith(" cleared the-id")


def test_list_shows_the_latest_first(admin):
    for name in ("first", "second", "third"):
        make(name=name)
    assert [row.split()[2] for row in shown(admin)] == ["third", "second", "first"]


def test_short_runs_show_parts_of_a_second(admin):
    now = timezone.now()
    ended = now + datetime.timedelta(milliseconds=40)
    make(at=now, outcome="released", result="returned", ended_at=ended)
    assert "returned after 0.04s" in shown(admin)[0]


def test_end_before_the_start_by_another_clock_is_no_negative_duration(admin):
    now = timezone.now()
    make(at=now, outcome="dead", ended_at=now - datetime.timedelta(seconds=5))
    assert "after 0.00s" in shown(admin)[0]


@pytest.mark.parametrize(
    "field", ["name", "task", "task_id", "host", "reason", "actor", "blocked_by_task_id", "key"]
)
@pytest.mark.parametrize("page", ["history/", "timeline/", "{}/change/", "{}/delete/"])
def test_what_others_wrote_is_escaped(admin, field, page):
    script = "<script>alert(1)</script>"
    event = make(**{"host": "h", field: script})
    response = admin.get(BASE + page.format(event.pk))
    assert response.status_code == 200
    assert script not in response.content.decode()


def test_page_of_an_event_shows_all_of_it(admin):
    event = make(kind="skipped")
    content = admin.get(f"{BASE}{event.pk}/change/").content.decode()
    labels = {field.verbose_name.capitalize() for field in TaskLockEvent._meta.fields}
    found = {text_of(label).rstrip(":") for label in re.findall(r"<label>.*?</label>", content)}
    assert found == labels - {"Id"} | {"Held for"}


def test_times_of_a_project_without_time_zones_are_shown(admin, settings):
    event = make(ended_at=timezone.now(), outcome="released")
    settings.USE_TZ = False
    assert len(shown(admin)) == 1
    assert admin.get(f"{BASE}{event.pk}/change/").status_code == 200


def test_style_sheet_is_there(admin):
    assert "django_singletask/admin.css" in admin.get(LIST).content.decode()
    assert finders.find("django_singletask/admin.css")


def test_a_site_of_ones_own_takes_it():
    site = AdminSite(name="own")
    site.register(TaskLockEvent, TaskLockEventAdmin)
    assert site.is_registered(TaskLockEvent)
    assert reverse("admin:django_singletask_tasklockevent_changelist") == BASE


# Filters and search


@pytest.mark.parametrize(
    ("since", "found"), [("15m", 1), ("1h", 2), ("24h", 3), ("7d", 4), ("", 5), ("odd", 5)]
)
def test_time_filter(admin, since, found):
    for hours in (0.1, 0.5, 5, 50, 500):
        make(at=timezone.now() - datetime.timedelta(hours=hours))
    assert len(shown(admin, since=since)) == found


def test_task_filter_offers_the_registered_tasks(admin):
    content = admin.get(LIST).content.decode()
    assert "tests.testapp.tasks.hold" in content
    assert "celery.backend_cleanup" not in content


def test_task_filter_offers_what_the_history_knows(admin):
    for task in ("an.only_one", "removed.task", "", "removed.task"):
        make(task=task)
    choices = admin.get(LIST).content.decode().partition('id="changelist-filter"')[2]
    for task in ("an.only_one", "removed.task", "tests.testapp.tasks.hold"):
        assert choices.count(f">{task}</a>") == 1
    assert 'href="?task="' not in choices


@pytest.mark.parametrize("alias", ["default", "mariadb", "sqlite"])
def test_tasks_of_the_history_are_bounded_and_in_order(alias, settings, monkeypatch):
    monkeypatch.setattr(filters, "TASKS", 3)
    settings.DATABASE_ROUTERS = []
    rows = TaskLockEvent.objects.using(alias)
    monkeypatch.setattr(TaskLockEvent, "objects", rows)
    for task in ("d", "b", "", "c", "a", "a"):
        rows.create(name="n", key="k", at=timezone.now(), task=task)
    with CaptureQueriesContext(connections[alias]) as captured:
        assert filters.recorded_tasks(1) == ["a", "b", "c"]
        assert filters.recorded_tasks(1) == ["a", "b", "c"]
    assert len(captured) == 3


def test_task_filter(admin):
    make(task="tests.testapp.tasks.hold", name="one")
    make(task=TASK, name="two")
    [row] = shown(admin, task="tests.testapp.tasks.hold")
    assert " one " in row


@pytest.mark.parametrize(
    ("query", "found"),
    [({"kind__exact": "skipped"}, "skip"), ({"outcome__exact": "dead"}, "dead")],
)
def test_kind_and_outcome_filters(admin, query, found):
    make(name="skip", kind="skipped")
    make(name="dead", outcome="dead")
    [row] = shown(admin, **query)
    assert row.split()[2] == found


@pytest.mark.parametrize(
    ("term", "found"),
    [
        (f"{TASK}(", 1),
        (f"{TASK}(feed_url='https://x', page=2)", 1),
        (f"  {TASK}(feed_url='https://x', p ", 1),
        ("import_feed", 0),
        ("5d1c-1", 1),
        ("5d1c", 0),
        ("%", 0),
        ("", 2),
    ],
)
def test_search_finds_beginnings_of_names_and_whole_task_ids(admin, term, found):
    make(name=f"{TASK}(feed_url='https://x', page=2)", task_id="5d1c-1")
    make(name="nightly", task_id="5d1c-2")
    assert len(shown(admin, q=term)) == found


@pytest.fixture
def import_feed():
    @app.task(name=TASK, base=SingletonTask, shared=False)
    def import_feed(feed_url, secs=0, full=False): ...

    yield import_feed
    app.tasks.unregister(TASK)


@pytest.mark.parametrize("frequent", [5000, 1])
@pytest.mark.parametrize(
    "arguments", ["secs=2, feed_url='https://a/1', full=False", "'https://a/1', 2"]
)
def test_search_finds_a_call_however_its_arguments_are_written(
    admin, import_feed, monkeypatch, frequent, arguments
):
    monkeypatch.setattr(queries, "FREQUENT", frequent)
    name = import_feed.lock("https://a/1", 2).name
    assert name == f"{TASK}(feed_url='https://a/1', secs=2)"
    for recorded in (name, name, f"{name} and more", "nightly"):
        make(name=recorded)
    assert len(shown(admin, q=f"{TASK}({arguments})")) == 2


@pytest.mark.parametrize("kind", ["", "acquired"])
def test_time_filter_finds_what_was_written_late_and_early(admin, kind):
    now = timezone.now()
    for minutes in (5, 70, 10, 20, 2, 40):
        make(at=now - datetime.timedelta(minutes=minutes))
    assert len(shown(admin, since="15m", **({"kind__exact": kind} if kind else {}))) == 3


def test_search_for_what_many_names_begin_with(admin, monkeypatch):
    monkeypatch.setattr(queries, "FREQUENT", 2)
    for name in ("feeds(1)", "feeds(2)", "feeds(3)", "nightly"):
        make(name=name)
    assert len(shown(admin, q="feeds(")) == 3
    assert len(shown(admin, q="night")) == 1


def test_deleting_leads_back_to_the_history(log_in):
    event = make()
    client = log_in("view_tasklockevent", "delete_tasklockevent")
    assert client.post(f"{BASE}{event.pk}/delete/", {"post": "yes"}).url == LIST


def test_deleting_in_a_popup_is_answered_as_ever(log_in):
    event = make()
    client = log_in("view_tasklockevent", "delete_tasklockevent")
    response = client.post(f"{BASE}{event.pk}/delete/", {"post": "yes", "_popup": "1"})
    assert response.status_code == 200


@pytest.mark.parametrize("alias", ["mariadb", "sqlite"])
def test_search_works_on_other_databases(alias, rf):
    TaskLockEvent.objects.using(alias).create(name="nightly 1", key="k", at=timezone.now())
    rows = TaskLockEvent.objects.using(alias).all()
    model_admin = TaskLockEventAdmin(TaskLockEvent, AdminSite())
    found, duplicates = model_admin.get_search_results(rf.get("/"), rows, "nightly ")
    assert (found.count(), duplicates) == (1, False)


# Large tables


def test_number_of_queries_does_not_grow_with_the_rows(admin):
    def count():
        filters.recorded_tasks.cache_clear()
        with CaptureQueriesContext(connection) as captured:
            admin.get(LIST)
        return len(captured)

    make()
    count()
    few = count()
    for _ in range(20):
        make()
    assert count() == few
    assert few < 12


@pytest.fixture
def large():
    """Fill the table as a year of a busy site does, in small."""
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {TABLE} (kind, outcome, result, name, key, cache, task, task_id, token, "
            "host, pid, at, timeout, count, blocked_by, blocked_by_task_id, actor, reason) "
            "SELECT (CASE WHEN n % 500 = 0 THEN 'cleared' ELSE 'acquired' END), "
            "(CASE WHEN n % 700 = 0 THEN 'dead' ELSE 'released' END), 'returned', "
            "'feeds.tasks.import_feed(feed_id=' || n % 1000 || ')', 'k', 'c', "
            "'tests.testapp.tasks.' || (CASE WHEN n % 900 = 0 THEN 'hold' ELSE 'meet' END), "
            "md5(n::text), md5(n::text), 'h', 1, now() - n * interval '10 minutes', 60, 1, "
            "'', '', '', '' FROM generate_series(30000, 1, -1) n"
        )
        cursor.execute(f"ANALYZE {TABLE}")


@contextmanager
def plans():
    """Collect the plan of each query to the table."""
    found = []
    with CaptureQueriesContext(connection) as captured:
        yield found
    for query in captured.captured_queries:
        if TABLE in query["sql"]:
            with connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN {query['sql']}")
                plan = "\n".join(line for (line,) in cursor.fetchall())
            found.append((query["sql"], plan))


def test_every_query_uses_an_index(large, admin):
    with plans() as found:
        for query in (
            {},
            {"p": "3"},
            {"since": "15m"},
            {"since": "7d"},
            {"kind__exact": "cleared"},
            {"kind__exact": "cleared", "since": "24h"},
            {"outcome__exact": "dead"},
            {"task": "tests.testapp.tasks.hold"},
            {"q": "feeds.tasks.import_feed(feed_id=7)"},
            {"q": "feeds.tasks.import_feed(feed_id=77"},
            {"q": "tests.testapp.tasks.hold('x')"},
            {"q": "c4ca4238a0b923820dcc509a6f75849b"},
        ):
            assert admin.get(LIST, query).status_code == 200
    assert len(found) >= 22
    for sql, plan in found:
        assert "Seq Scan" not in plan, sql
        assert "DISTINCT" not in sql
        assert "COUNT(" not in sql or f"LIMIT {UncountedPaginator.limit + 1}" in sql


def test_list_knows_no_facets_that_would_count_the_table(admin):
    make()
    with CaptureQueriesContext(connection) as captured:
        admin.get(LIST, {"_facets": "True"})
    assert not any("FILTER (WHERE" in query["sql"] for query in captured)


@pytest.mark.parametrize(
    ("query", "offered"),
    [({}, 0), ({"q": " "}, 0), ({"q": TASK}, 1), ({"since": "1h"}, 1), ({"task_id": ""}, 1)],
)
def test_all_are_offered_only_where_not_all_are_shown(admin, query, offered):
    make()
    assert admin.get(LIST, query).content.decode().count("Show all") == offered


@pytest.mark.parametrize(
    ("query", "offered"), [({}, 0), ({"q": TASK}, 1), ({"kind__exact": "acquired"}, 1)]
)
def test_rows_are_counted_up_to_a_limit_and_that_is_said(admin, monkeypatch, query, offered):
    monkeypatch.setattr(UncountedPaginator, "limit", 3)
    monkeypatch.setattr(TaskLockEventAdmin, "list_per_page", 2)

    def content():
        return text_of(admin.get(LIST, {**query, "p": 2}).content.decode())

    for _ in range(3):
        make()
    assert "More than 3 results" not in content()
    assert "There are more than 3" not in content()
    make()
    assert len(shown(admin, **query, p=2)) == 1
    assert content().count("More than 3 results ( Show all )") == offered
    assert "There are more than 3: these are the newest. Older ones are found by" in content()
    assert " 3 results" not in content().replace("More than 3 results", "")


def test_history_that_is_off_is_told_above_its_old_rows(admin, settings):
    settings.SINGLETASK_HISTORY = "off"
    make()
    said = "nothing is being recorded, and what is told of the past is old."
    for page in ("", "history/", "timeline/"):
        assert admin.get(BASE + page).content.decode().count(said) == 1
    settings.SINGLETASK_HISTORY = "inline"
    assert said not in admin.get(LIST).content.decode()


@pytest.mark.parametrize("name", ["q", "task", "kind__exact", "outcome__exact", "task_id", "since"])
def test_nul_in_the_address_leads_to_the_whole_list(admin, name):
    make()
    response = admin.get(LIST, {name: "a\0"})
    assert (response.status_code, response.url) == (302, LIST)


def drop_table():
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {TABLE} RENAME TO {TABLE}_gone")


def away(execute, sql, params, many, context):
    """Answer for a database whose connection is gone."""
    if TABLE in sql:
        raise InterfaceError("connection already closed")
    return execute(sql, params, many, context)


@pytest.mark.parametrize("query", [{}, {"q": "night"}, {"since": "1h"}, {"task": TASK}])
def test_list_without_its_table_says_so(admin, query):
    drop_table()
    response = admin.get(LIST, query)
    content = response.content.decode()
    assert response.status_code == 200
    assert "The history cannot be read: relation" in content
    assert "migrate&#x27; run?" in content
    assert 'aria-current="page">History' in content


@pytest.mark.parametrize("page", ["change", "delete", "history"])
def test_event_without_its_table_says_so(admin, page):
    drop_table()
    response = admin.get(f"{BASE}1/{page}/")
    assert response.status_code == 200
    assert "The history cannot be read: relation" in response.content.decode()


def test_list_whose_database_is_away_says_so(admin):
    with connection.execute_wrapper(away):
        content = admin.get(LIST).content.decode()
    assert "The history cannot be read: connection already closed" in content


def test_events_of_a_task_are_read_in_the_order_of_their_index(admin):
    for name in ("first", "second", "third"):
        make(name=name, task=TASK)
    make(name="other", task="another")
    with CaptureQueriesContext(connection) as captured:
        rows = shown(admin, task=TASK)
    assert [row.split()[2] for row in rows] == ["third", "second", "first"]
    [page] = [query["sql"] for query in captured if f'{TABLE}"."at",' in query["sql"]]
    assert f"\"task\" >= '{TASK}'" in page
    assert f'ORDER BY "{TABLE}"."task" ASC, "{TABLE}"."id" DESC' in page
