"""The pages beside the history: what is held now, the clearing of a lock, the timeline."""

from __future__ import annotations

import os
import re
import time
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.admin.sites import AdminSite
from django.contrib.staticfiles import finders
from django.core.cache import caches
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import path, reverse
from django.utils import timezone, translation

from django_singletask import TaskLock
from django_singletask.admin import TaskLockEventAdmin
from django_singletask.models import TaskLockEvent
from tests import inside
from tests.admin_pages import (
    BASE,
    CLEAR,
    LIST,
    TABLE,
    TIMELINE,
    drop_table,
    event,
    fill_table,
    gone,
    log_in,
    rows_of,
    text_of,
)
from tests.command_line import ended_process, hold
from tests.entries import key_of
from tests.past_rows import ran, skipped
from tests.plans import plans
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]

KEY = key_of("nightly")
QUEUED_KEY = inside.queued_key(KEY, "nightly")
SCRIPT = "<script>alert(1)</script>"


@pytest.fixture
def operator():
    return log_in("view_tasklockevent", "clear_lock")


def put(name="nightly", key=None, **facts):
    """Write an entry as a run of this process would have done; return its holder."""
    run = {"token": os.urandom(16).hex(), "timeout": 60, "since": time.time()}
    facts = {**inside.this_process(), **run, **facts}
    return hold(name=name, key=key or key_of(name), left=60, **facts)


def rows(client, query=None):
    """Return the texts of the rows of what is held."""
    return rows_of(client.get(BASE, query), 'class="singletask-table')


def content_of(client, address=BASE, query=None):
    return client.get(address, query).content.decode()


def clear_page(client, holder, key=KEY):
    """Return the text of the page that asks whether to clear a lock."""
    return text_of(content_of(client, CLEAR, {"lock": f"{key} {holder.token}"}))


def clear(client, holder, key=KEY):
    """Clear a lock; return the page that follows."""
    query = {"lock": f"{key} {holder.token}", "reason": ""}
    return client.post(CLEAR, query, follow=True).content.decode()


def query_of(*locks):
    return {"lock": [f"{lock.key} {lock.token}" for lock in locks]}


def form_of(*locks):
    """Return what the form of the page sends that asks whether to clear these locks."""
    return {**query_of(*locks), "reason": ""}


# Every page

OF_THE_HISTORY = ["history/", "timeline/", "per-task/", "{event}/change/", "{event}/delete/"]
PAGES = ["", "clear/?lock={lock}", *OF_THE_HISTORY]
LISTS = ["", "history/", "timeline/", "per-task/"]


def address_of(page, event=None, holder=None, base=BASE):
    """Return the address of a page, perhaps of an event, or of a lock and its holder."""
    lock = f"{key_of(holder.name)}+{holder.token}" if holder else ""
    return base + page.format(event=event.pk if event else 1, lock=lock)


@pytest.mark.parametrize("page", [*LISTS, "{event}/change/"])
def test_pages_are_for_viewers(page):
    address = address_of(page, event())
    assert log_in("clear_lock", "delete_tasklockevent").get(address).status_code == 403
    assert log_in("view_tasklockevent", name="eve").get(address, follow=True).status_code == 200
    assert Client().get(address).status_code == 302


@pytest.mark.parametrize("page", PAGES)
def test_texts_are_escaped_and_pages_have_no_inline_script_or_style(page):
    texts = dict.fromkeys(["name", "task", "task_id", "host"], SCRIPT)
    holder = put(**texts)
    texts |= dict.fromkeys(["key", "reason", "actor", "blocked_by_task_id"], SCRIPT)
    for facts in ({"kind": "conflict"}, {"outcome": "cleared"}, {"outcome": "lost"}, {}):
        row = event(**texts, **facts)
    client = log_in("view_tasklockevent", "clear_lock", "delete_tasklockevent")
    response = client.get(address_of(page, row, holder), follow=True)
    assert response.status_code == 200
    content = response.content.decode()
    assert "alert(1)" in content
    for text in (SCRIPT, " style=", "<style", "<script>", " onclick="):
        assert text not in content


@pytest.mark.parametrize("page", [*LISTS, "{event}/change/"])
def test_project_without_time_zones_has_the_pages(operator, settings, page):
    settings.USE_TZ = False
    row = ran(60, name="feeds.fetch(7)", task="feeds.fetch")
    response = operator.get(address_of(page, row), follow=True)
    assert response.status_code == 200
    assert page == "" or "feeds.fetch" in response.content.decode()


@pytest.mark.parametrize(
    "page",
    [
        *("", *OF_THE_HISTORY, "{event}/history/"),
        *("history/?q=a", "history/?range=1h", "history/?task=a"),
    ],
)
@pytest.mark.parametrize("outage", ["no table", "no connection"])
def test_pages_say_that_the_history_cannot_be_read(page, outage):
    client = log_in("view_tasklockevent", "clear_lock", "delete_tasklockevent")
    address = address_of(page, event(), put())
    if outage == "no table":
        drop_table()
        response = client.get(address)
        error = "ProgrammingError: relation"
        assert "Run &#x27;manage.py migrate&#x27;." in response.content.decode()
    else:
        with connection.execute_wrapper(gone):
            response = client.get(address)
        error = "InterfaceError: connection already closed"
    content = response.content.decode()
    assert response.status_code == 200
    assert f"The history cannot be read: {error}" in content
    assert 'aria-current="page"' in content


@pytest.mark.parametrize("page", LISTS)
def test_pages_say_that_the_history_is_off_above_old_rows_and_what_is_held(
    operator, settings, page
):
    note = "nothing is being recorded, and what these pages say of the past is old."
    event(name="nightly", task="nightly")
    put()
    assert note not in content_of(operator, BASE + page)
    settings.SINGLETASK_HISTORY = "off"
    content = content_of(operator, BASE + page)
    assert content.count(note) == 1
    assert "nightly" in content


@pytest.mark.parametrize("page", LISTS)
def test_pages_say_that_runs_without_trouble_are_not_kept(operator, settings, page):
    note = "runs without trouble are not kept.<"
    assert note not in content_of(operator, BASE + page)
    settings.SINGLETASK_HISTORY_KEEPS = "trouble"
    assert content_of(operator, BASE + page).count(note) == 1
    settings.SINGLETASK_HISTORY = "off"
    assert note not in content_of(operator, BASE + page)


@pytest.mark.parametrize("page", LISTS)
def test_number_of_statements_does_not_grow_with_locks_and_rows(operator, page):
    def statements():
        inside.forget_tasks_of_the_history()  # else the minute decides whether they are asked for
        with CaptureQueriesContext(connection) as captured:
            operator.get(BASE + page)
        return len(captured)

    def more(numbers):
        for number in numbers:
            put(f"nightly-{number}", task="feeds.tasks.import_feed")
            event(blocked_by=f"b{number}", task="feeds.tasks.import_feed")
            ran(60, task="feeds.tasks.import_feed")

    more([0])
    statements()
    few = statements()
    more(range(1, 9))
    assert statements() == few
    assert page != "history/" or few < 14


other_site = AdminSite(name="operations")
other_site.register(TaskLockEvent, TaskLockEventAdmin)
urlpatterns = [path("admin/", admin.site.urls), path("here/it/is/", other_site.urls)]
PREFIX = "/here/it/is/django_singletask/tasklockevent/"


@pytest.mark.urls("tests.operators.test_pages")
@pytest.mark.parametrize("page", PAGES[:-1])
def test_pages_work_on_another_admin_site(operator, page):
    assert reverse("operations:django_singletask_tasklockevent_changelist") == PREFIX
    holder = put()
    row = event(kind="conflict", blocked_by=holder.token)
    response = operator.get(address_of(page, row, holder, PREFIX), follow=True)
    assert response.status_code == 200
    assert "/admin/django" not in response.content.decode()
    assert PREFIX in response.content.decode()


def test_index_of_the_admin_leads_to_what_is_held(operator):
    assert f'href="{BASE}"' in content_of(operator, "/admin/")
    content = content_of(operator)
    assert content.count("<h1") == 1
    assert '<h1 class="singletask-title"><bdi>Held now</bdi></h1>' in content
    assert "django_singletask/admin.css" in content
    assert finders.find("django_singletask/admin.css")


def test_every_page_says_where_it_is(operator):
    pages = {"": "Held now", "history/": "History", "timeline/?name=nightly": "Lock"}
    for page, crumb in pages.items():
        content = content_of(operator, BASE + page).partition('class="breadcrumbs">')[2]
        assert text_of(content.partition("</div>")[0]) == f"Home › Task locks › Locks › {crumb}"


# Held now


def test_held_lock_is_shown(operator, take):
    lock = take("nightly", timeout=30)
    [row] = rows(operator)
    assert row.startswith("nightly held ")
    host = lock.holder().host
    of_host, of_process = re.findall(f'href="{BASE}[?]q=([^"]*)"', content_of(operator))
    assert (of_host, of_process) == (host, f"{host}%3A{os.getpid()}")
    assert len(rows(operator, {"q": f"{host}:{os.getpid()}"})) == 1


def test_conflicts_are_counted_and_those_that_wait(operator, take):
    start = timezone.now() - timedelta(hours=1)
    for seconds in (4, 8, 90):
        ended_at = start + timedelta(seconds=seconds)
        event(name="nightly", at=start, outcome="released", result="returned", ended_at=ended_at)
    lock = take()
    for _ in range(3):
        TaskLock("nightly").acquire()
    event(kind="conflict", result="waiting", count=2, blocked_by=lock.token)
    [row] = rows(operator)
    assert " 5 2 waiting " in row
    assert "usual" not in row  # only a hold that is slow is compared with it
    assert lock.owned()


def hold_often():
    now = timezone.now()
    facts = {"outcome": "released", "result": "returned", "ended_at": now + timedelta(seconds=4)}
    for _ in range(5):
        event(name="nightly", at=now, **facts)


def test_hold_longer_than_the_longest_is_slow(operator):
    hold_often()
    put(since=time.time() - 3600)
    [row] = rows(operator)
    assert row.startswith("nightly slow 1h usual 4.00s ")


def test_dead_holder_is_called_dead_and_not_slow(operator):
    hold_often()
    put(**ended_process(), since=time.time() - 3600)
    [row] = rows(operator)
    assert row.startswith("nightly dead ")
    assert "slow" not in row


def test_expired_hold_is_shown_without_a_button(operator):
    at = timezone.now() - timedelta(hours=1)
    event(name="old", key="singletask:old:0", ref="t", cache="redis", timeout=60, at=at)
    [row] = rows(operator)
    assert row.startswith("old expired ")
    assert "Clear" not in row


def test_lock_that_is_handed_over_waits_for_its_receiver(operator):
    holder = put(pid=0, start="")
    [row] = rows(operator)
    assert row.startswith("nightly handed over ")
    text = clear_page(operator, holder)
    assert "it was handed over, and waits for its receiver. If you clear the lock" in text
    assert "The run that holds it" not in text


def test_queued_call_is_shown_without_a_process(operator):
    holder = put(key=QUEUED_KEY, pid=0, task_id="5d1cb1f6-9f3c")
    [row] = rows(operator)
    assert row.startswith("nightly queued ")
    assert " 5d1cb1f6-9f3c " in row
    assert holder.host not in row
    assert row.endswith("Forget…")


@pytest.mark.parametrize("page", [BASE, CLEAR])
def test_task_id_is_a_link_to_its_page(operator, settings, page):
    settings.SINGLETASK_TASK_URL = "https://flower.example/task/{task_id}"
    holder = put(task_id='a/b?"<i>')
    link = (
        '<a href="https://flower.example/task/a%2Fb%3F%22%3Ci%3E" rel="noopener">'
        '<code class="singletask-id" title="a/b?&quot;&lt;i&gt;">a/b?&quot;&lt;i&gt;</code></a>'
    )
    query = {"lock": f"{KEY} {holder.token}"} if page == CLEAR else {}
    assert link in content_of(operator, page, query)


def test_task_id_is_no_link_without_an_address(operator, settings):
    put(task_id="3f0c")
    for address in (None, "", "javascript:alert('{task_id}')"):
        settings.SINGLETASK_TASK_URL = address
        content = content_of(operator)
        assert 'title="3f0c">3f0c</code></div>' in content
        assert "alert(" not in content


def test_entry_that_something_else_wrote_is_shown(operator):
    put("odd", since=1e300, pid=10**6, host="")
    inside.put_entry(key_of("foreign"), b"no record")
    assert len(rows(operator)) == 2


@pytest.mark.parametrize("bad", ["\ud800", "\0"])
@pytest.mark.parametrize("field", ["name", "task", "task_id", "host", "start"])
def test_entry_with_text_that_no_database_takes_is_shown_and_cleared(operator, field, bad):
    holder = put(**{"name": "odd", "key": KEY, field: f"a{bad}b"})
    [row] = rows(operator)
    if field not in ("start", "task"):
        assert f"a{bad.encode('unicode_escape').decode()}b" in row
    assert "Clear these locks?" in clear_page(operator, holder)
    assert "Cleared: " in clear(operator, holder)
    assert not inside.has_entry(KEY)
    assert LogEntry.objects.exists()


@pytest.mark.parametrize("bad", ["\ud800", "\0"])
def test_entry_whose_token_no_page_can_show_is_listed(operator, bad):
    put(token=f"a{bad}b")
    assert len(rows(operator)) == 1


def test_page_says_that_nothing_is_held(operator):
    assert "No lock is held." in content_of(operator)


def test_long_lists_have_pages(operator, monkeypatch):
    inside.bound(monkeypatch, "locks on a page", 2)
    for name in "abc":
        put(name)
    assert len(rows(operator)) == 2
    content = content_of(operator, query={"o": "name"})
    assert "1 to 2 of 3" in content
    assert f'<a rel="next" href="{BASE}?o=name&amp;p=2">' in content
    assert [row[0] for row in rows(operator, {"o": "name", "p": 2})] == ["c"]
    for odd in ("9", "-1", "x"):
        assert len(rows(operator, {"p": odd})) in (1, 2)


@pytest.mark.parametrize(
    "text",
    ["import_feed(7)", "feeds.import_feed", "3f0c-1", "c0ffee", "web-3", "web-3:8121", "*d(7*"],
)
def test_locks_are_searched_by_what_the_command_selects_them_by(operator, text):
    facts = {"task_id": "3f0c-1", "token": "c0ffee", "host": "web-3", "pid": 8121}
    put("feeds.import_feed(7)", task="feeds.import_feed", **facts)
    put("web-1-only", token="c0ffe", host="web-1")
    [row] = rows(operator, {"q": f" {text} "})
    assert row.startswith("feeds.import_feed(7) ")
    assert "1 lock: 1 dead " in text_of(content_of(operator, query={"q": text}))


def test_search_that_finds_nothing_says_so_and_is_escaped(operator):
    put()
    content = content_of(operator, query={"q": SCRIPT})
    assert "No matching lock is held: &lt;script&gt;" in content
    assert "Search for *&lt;script&gt;" in content
    assert SCRIPT not in content
    assert f'<a href="{BASE}?">Show all' in content or f'<a href="{BASE}">Show all' in content


@pytest.mark.parametrize(
    ("order", "names"),
    [
        *[("name", "abc"), ("-name", "cba"), ("held", "bca"), ("-conflicts", "cab")],
        *[("odd", "acb"), ("state", "bca")],
    ],
)
def test_locks_are_sorted_by_a_column(operator, order, names):
    for name, minutes, conflicts in (("a", 3, 2), ("b", 1, 0), ("c", 2, 7)):
        holder = put(name, since=time.time() - 60 * minutes)
        if conflicts:
            event(name=name, kind="conflict", count=conflicts, blocked_by=holder.token)
    assert "".join(row[0] for row in rows(operator, {"o": order})) == names


def test_worst_locks_come_first_and_are_counted(operator):
    hold_often()
    put("long", since=time.time() - 900)
    put(since=time.time() - 600)
    put("gone", **ended_process())
    assert [row.split()[1] for row in rows(operator)] == ["dead", "slow", "held"]
    text = text_of(content_of(operator))
    assert "3 locks: 1 dead, 1 slow " in text
    assert "If the cache loses its data now: 2 held: taken again" in text


def test_column_that_sorts_says_so_and_turns(operator):
    put()
    content = content_of(operator, query={"o": "-held", "q": "nightly", "p": "1"})
    link = f'href="{BASE}?o=held&amp;q=nightly">Held for'
    assert f'<th scope="col" aria-sort="descending"><a {link}' in content
    assert f'<th scope="col"><a href="{BASE}?o=-conflicts&amp;q=nightly">Conflicts' in content


def test_page_asks_again_by_itself_without_a_script(operator):
    response = operator.get(BASE, {"refresh": "10", "q": "a"})
    assert response["Refresh"] == "10"
    content = response.content.decode()
    assert "This page asks again every 10 s." in content
    assert f'<a href="{BASE}?q=a">Stop refreshing' in content
    for odd in ("", "1", "-5", "0x10", "١٠", "9" * 5000):
        assert not operator.get(BASE, {"refresh": odd}).has_header("Refresh")
    assert f'<a href="{BASE}?refresh=10">Refresh every 10 s' in content_of(operator)


@pytest.mark.usefixtures("whole_second")
def test_starving_locks_say_when_they_were_last_completed_and_are_cut(operator):
    for number in range(30):
        ran(7200, name=f"lock {number}")
        skipped(3700, 2, 9, name=f"lock {number}")
    text = "9 conflicts in 1h 01m, the last 2s ago; no run completed. Last completed 2h ago."
    content = content_of(operator)
    assert content.count(text) == 20
    assert "And 10 more" in content


def test_hidden_arguments_are_on_no_page(operator, settings):
    settings.SINGLETASK_RECORD_ARGUMENTS = False
    lock = tasks.hold.lock("my secret")
    assert lock.acquire()
    try:
        for address, query in ((BASE, {}), (LIST, {}), (TIMELINE, {}), (CLEAR, query_of(lock))):
            content = content_of(operator, address, query)
            assert "tests.testapp.tasks.hold" in content
            assert "secret" not in content
    finally:
        lock.release()


# While the cache or the history is away


def test_page_says_that_the_cache_is_down_while_the_history_is_shown(
    operator, settings, dead_redis
):
    settings.SINGLETASK_CACHE = dead_redis
    event(name="nightly")
    assert (
        "The cache &#x27;dead&#x27; (SINGLETASK_CACHE) cannot be used: ConnectionError"
        in content_of(operator)
    )
    assert "nightly" in content_of(operator, LIST)
    assert "nightly" in content_of(operator, TIMELINE)
    for ask in (operator.get, operator.post):
        response = ask(CLEAR, {"lock": "singletask:a:0 t", "reason": ""}, follow=True)
        assert "cannot be used" in response.content.decode()


def test_sentence_with_links_is_translated_as_one(operator, settings, dead_redis, monkeypatch):
    settings.SINGLETASK_CACHE = dead_redis
    texts = []
    monkeypatch.setattr(translation, "gettext", lambda text: texts.append(text) or text)
    sentence = (
        'What is held now cannot be shown. <a href="%(events_url)s">The history</a> and '
        '<a href="%(timeline_url)s">the timeline</a> show what happened before.'
    )
    assert sentence % {"events_url": LIST, "timeline_url": TIMELINE} in content_of(operator)
    assert sentence in texts


def test_memcached_without_history_cannot_be_listed(operator, settings, empty_cache):
    empty_cache("pymemcache")
    settings.SINGLETASK_CACHE, settings.SINGLETASK_HISTORY = "pymemcache", "off"
    content = content_of(operator)
    assert "cannot list its entries" in content
    assert "No lock is held" not in content


def test_locks_are_shown_and_cleared_while_the_history_has_no_table(operator):
    """The test is one transaction, as a request is with ATOMIC_REQUESTS."""
    holder = put(task="t")
    drop_table()
    assert rows(operator)[0].startswith("nightly held ")
    assert "Clear these locks?" in clear_page(operator, holder)
    content = clear(operator, holder)
    assert "Cleared: nightly." in content
    assert "The history cannot be read: ProgrammingError: rel" in content
    assert LogEntry.objects.get().object_repr == "nightly: cleared"
    assert not TaskLock("nightly").locked()


def test_clear_is_logged_while_the_database_of_the_history_is_away(operator, take):
    lock = take()
    with connection.execute_wrapper(gone):
        response = operator.post(CLEAR, form_of(lock))
    assert response.url == BASE
    assert LogEntry.objects.get().object_id is None
    assert not lock.locked()


def test_clear_does_not_mention_a_history_that_is_off(operator, settings):
    settings.SINGLETASK_HISTORY = "off"
    holder = put()
    drop_table()
    content = clear(operator, holder)
    assert "Cleared: nightly." in content
    assert "cannot be read" not in content


def test_lock_that_memcached_without_history_no_longer_has(operator, settings, empty_cache):
    empty_cache("pymemcache")
    settings.SINGLETASK_CACHE, settings.SINGLETASK_HISTORY = "pymemcache", "off"
    response = operator.post(CLEAR, {"lock": "singletask:x:0 t", "reason": ""})
    assert response.url == BASE


# The page that asks


def test_page_names_the_holder_and_how_to_stop_the_task(operator):
    holder = put(task="t", task_id="3f0c")
    text = clear_page(operator, holder)
    assert f"{holder.host}:{os.getpid()} Alive , on this host. 3f0c" in text
    assert "a second copy can start at the same time" in text
    assert " control terminate SIGTERM 3f0c" in text


def test_page_says_that_the_holder_is_dead_and_how_that_is_known(operator):
    gone = ended_process()
    text = clear_page(operator, put(**gone))
    assert f"Dead : process {gone['pid']} is gone." in text
    assert "beside" not in text


def test_page_says_that_it_cannot_see_the_process(operator):
    text = clear_page(operator, put(boot_id="another"))
    assert "Not known whether it is alive: it is on another host" in text
    assert "Alive" not in text


@pytest.mark.parametrize("codename", ["view_tasklockevent", "clear_lock", "delete_tasklockevent"])
def test_clearing_needs_its_own_permission_and_that_to_view(take, codename):
    lock, client = take(), log_in(codename)
    assert client.get(CLEAR, query_of(lock)).status_code == 403
    assert client.post(CLEAR, form_of(lock)).status_code == 403
    assert lock.owned()


def test_viewer_is_offered_no_clear(take):
    take()
    viewer = log_in("view_tasklockevent")
    assert "Clear" not in rows(viewer)[0]
    assert f'href="{CLEAR}' not in content_of(viewer, TIMELINE, {"name": "nightly"})


@pytest.mark.parametrize("method", ["get", "post"])
def test_nothing_is_freed_before_the_user_has_confirmed(operator, take, method):
    lock = take()
    asked = getattr(operator, method)(CLEAR, query_of(lock))
    assert "Clear these locks?" in asked.content.decode()
    assert operator.get(CLEAR, form_of(lock)).status_code == 200
    assert lock.owned()


def test_clearing_needs_the_csrf_token_of_the_form(take):
    lock = take()
    client = log_in("view_tasklockevent", "clear_lock", enforce_csrf_checks=True)
    assert client.post(CLEAR, form_of(lock)).status_code == 403
    assert lock.owned()


# Clear


def test_clear_frees_the_lock_and_is_recorded(operator, take):
    lock = take()
    response = operator.post(CLEAR, form_of(lock), follow=True)
    assert response.redirect_chain == [(BASE, 302)]
    assert "Cleared: nightly." in response.content.decode()
    assert not lock.locked()
    row = TaskLockEvent.objects.get(outcome="cleared")
    assert (row.actor, row.token, row.name) == ("ada", lock.token, "nightly")


def test_clear_is_in_the_admins_own_log(operator, take):
    lock = take()
    operator.post(CLEAR, form_of(lock))
    entry = LogEntry.objects.get()
    assert (entry.user.username, entry.object_repr) == ("ada", "nightly: cleared")
    assert lock.token in entry.get_change_message()
    assert TaskLockEvent.objects.get(pk=entry.object_id).token == lock.token
    assert operator.get("/admin/").status_code == 200  # it lists recent actions


def test_reason_of_a_clearing_is_kept_and_escaped(operator, take):
    reason = f"hangs since the deploy\n{SCRIPT}"
    operator.post(CLEAR, {**form_of(take()), "reason": f" {reason} "})
    kept = TaskLockEvent.objects.get(outcome="cleared").reason
    assert kept == reason.replace("\n", "\\n")
    assert LogEntry.objects.get().get_change_message().endswith(f" Reason: {kept}")
    for page in (LIST, TIMELINE, "/admin/"):
        content = content_of(operator, page)
        assert SCRIPT not in content
        assert page == "/admin/" or "hangs since the deploy" in content


def test_the_page_that_asks_counts_the_slots_that_are_held(operator, take):
    first, second = take(slots=3), take(slots=3)
    assert "2 of 3 slots, of which this frees one" in clear_page(operator, second, second.key)
    assert "Cleared: nightly" in clear(operator, second, second.key)
    assert first.owned()


def test_clear_of_a_holder_without_a_row_is_logged_without_an_event(operator):
    clear(operator, put())
    assert LogEntry.objects.get().object_id is None
    assert not TaskLock("nightly").locked()


@pytest.mark.parametrize("method", ["get", "post"])
def test_lock_that_another_run_has_by_now_stays(operator, take, method):
    query = form_of(take())
    assert TaskLock("nightly").clear()
    other = take()
    response = getattr(operator, method)(CLEAR, {**query, "reason": ""}, follow=True)
    assert "Not freed: " in response.content.decode()
    assert other.owned()
    assert not LogEntry.objects.exists()


def test_of_two_who_clear_at_once_the_second_is_told(operator, take, monkeypatch):
    lock = take()
    grace = log_in("view_tasklockevent", "clear_lock", name="grace")
    responses = []

    def clear_after_grace(*, actor, **by):
        # Ada's request has looked, and has not freed yet: now the one of Grace frees.
        if actor == "ada":
            responses.append(grace.post(CLEAR, form_of(lock), follow=True))

    inside.before_each_clear(monkeypatch, clear_after_grace)
    responses.append(operator.post(CLEAR, form_of(lock), follow=True))
    first, second = (response.content.decode() for response in responses)
    assert "Cleared: nightly" in first
    assert "Not freed: singletask:nightly:" in second
    assert TaskLockEvent.objects.get(outcome="cleared").actor == "grace"
    assert LogEntry.objects.get().user.username == "grace"


@pytest.mark.parametrize("method", ["get", "post"])
@pytest.mark.parametrize(
    "query",
    [{"lock": "x"}, {"lock": "singletask:x:0 \0"}, {"lock": "a( "}, {"lock": ["", " "]}],
)
def test_odd_addresses_free_nothing(operator, take, query, method):
    lock = take()
    response = getattr(operator, method)(CLEAR, query, follow=True)
    assert "Not freed: " in response.content.decode()
    assert lock.owned()


@pytest.mark.parametrize("method", ["get", "post"])
def test_clear_without_a_lock_says_what_to_do(operator, method):
    response = getattr(operator, method)(CLEAR, follow=True)
    assert response.redirect_chain == [(BASE, 302)]
    assert "choose here which one to clear" in response.content.decode()


@pytest.mark.usefixtures("whole_second")
def test_page_of_a_queued_call_says_what_it_stops(operator):
    sent = time.time() - 95
    holder = put(key=QUEUED_KEY, pid=0, task="t", task_id="5d1c", since=sent)
    text = clear_page(operator, holder, QUEUED_KEY)
    assert "Forget these calls?" in text
    assert "nightly queued 1m 35s at most " in text
    assert "If the broker still has the message, the call runs" in text
    assert " control revoke 5d1c" in text
    assert holder.host not in text


def test_queued_call_is_forgotten_once(operator):
    holder = put(key=QUEUED_KEY, pid=0, task="t", task_id="5d1c")
    assert "Cleared: nightly." in clear(operator, holder, QUEUED_KEY)
    assert not inside.has_entry(QUEUED_KEY)
    assert f"Not freed: {QUEUED_KEY}. " in clear(operator, holder, QUEUED_KEY)


# Several at once


def test_selected_locks_are_cleared_after_one_question(operator, take):
    first, second, third = take("first"), take("second"), take("third")
    page = operator.get(BASE).content.decode()
    for lock in (first, second, third):
        assert f'name="lock" value="{lock.key} {lock.token}"' in page
    asked = operator.post(CLEAR, query_of(first, second)).content.decode()
    for lock in (first, second):
        assert f'<input type="hidden" name="lock" value="{lock.key} {lock.token}">' in asked
    assert "third" not in asked
    answer = operator.post(CLEAR, {**query_of(first, second), "reason": "deploy"}, follow=True)
    assert "Cleared: " in answer.content.decode()
    assert [lock.locked() for lock in (first, second, third)] == [False, False, True]
    assert LogEntry.objects.count() == TaskLockEvent.objects.filter(reason="deploy").count() == 2


def keys_read(request):
    """Return how many keys the server looks up for a request: for the value, and for its rest."""
    client = caches["redis"]._cache.get_client()
    client.config_resetstat()
    request()
    facts = client.info("stats")
    return facts["keyspace_hits"] + facts["keyspace_misses"]


@pytest.mark.parametrize("slots", [1, 3])
def test_a_page_of_selected_locks_reads_them_and_the_slots_that_they_have(operator, slots):
    holders = [put(f"lock {number}", slots=slots) for number in range(100)]
    selected = [f"{key_of(holder.name)} {holder.token}" for holder in holders]
    asked = []
    read = keys_read(lambda: asked.append(operator.post(CLEAR, {"lock": selected})))
    assert asked[0].content.decode().count('name="lock"') == 100
    assert 100 <= read <= 200 * slots + 50


def test_a_request_with_very_many_locks_that_nobody_holds_reads_no_more_than_these(operator):
    nobody = [f"{key_of(f'lock {number}')} t" for number in range(900)]
    answer = {"lock": nobody, "reason": ""}
    assert 900 <= keys_read(lambda: operator.post(CLEAR, answer)) <= 950


def test_of_the_selected_locks_those_with_another_holder_stay(operator, take):
    first, second = take("first"), take("second")
    query = {**query_of(first, second), "reason": ""}
    second.clear()
    with TaskLock("second") as other:
        content = operator.post(CLEAR, query, follow=True).content.decode()
        assert other.owned()
    assert "Cleared: first." in content
    assert f"Not freed: {second.key}." in content


def test_all_locks_of_dead_processes_are_cleared_and_no_other(operator, take):
    for number in range(3):
        put(f"dead {number}", **ended_process())
    lock = take("alive")
    assert "Clear the 3 locks of dead processes…" in content_of(operator)
    asked = operator.post(CLEAR, {"dead": "1", **query_of(lock)}).content.decode()
    assert '<input type="hidden" name="dead" value="1">' in asked
    assert asked.count("singletask-dead") == 3
    assert lock.key not in asked
    content = operator.post(CLEAR, {"dead": "1", "reason": ""}, follow=True).content.decode()
    assert "Cleared: dead" in content
    assert [held.name for held in inside.held_now()] == ["alive"]


def test_clear_of_all_dead_names_those_that_it_could_not_free(operator, monkeypatch):
    """A call took one of them over between the look at the locks and their clearing."""
    for number in range(2):
        put(f"dead {number}", **ended_process())
    other = TaskLock("dead 0")

    def take_over(**by):
        assert other.token or other.acquire()

    inside.before_each_clear(monkeypatch, take_over)
    content = operator.post(CLEAR, {"dead": "1", "reason": ""}, follow=True).content.decode()
    assert other.owned()
    assert "Cleared: dead 1." in content
    assert f"Not freed: {other.key}. The holder that was shown no longer has the lock" in content


def test_without_a_dead_process_there_is_no_button_for_them(operator, take):
    take()
    assert "dead process" not in content_of(operator)


# The page of one lock


def test_page_of_a_lock_says_what_why_says_and_offers_to_clear(operator, take):
    lock = take("nightly", timeout=30)
    content = content_of(operator, TIMELINE, {"name": "nightly"})
    assert re.search("state held held for .* by code outside a task on", text_of(content))
    assert '<span class="singletask-state singletask-held">held</span>' in content
    assert '<code class="singletask-code">manage.py locks clear' in content
    assert 'tabindex="-1" open>' in content  # the list of what is drawn
    assert text_of(content.partition("<body")[2]).split().count("nightly") == 1
    assert f'href="{CLEAR}?lock={lock.key.replace(":", "%3A")}+{lock.token}">Clear…' in content


def test_page_of_a_task_sums_up(operator):
    for number in (7, 8):
        put(f"feeds.import({number})", task="feeds.import")
        event(name=f"feeds.import({number})", task="feeds.import")
    content = content_of(operator, TIMELINE, {"task": "feeds.import"})
    assert "state 2 locks held" in text_of(content)
    assert f'href="{BASE}?q=feeds.import">Held now' in content


def test_page_of_a_lock_shows_its_history_while_the_cache_is_down(operator, settings, dead_redis):
    settings.SINGLETASK_CACHE = dead_redis
    event(name="nightly", outcome="lost", ended_at=timezone.now())
    content = content_of(operator, TIMELINE, {"name": "nightly"})
    assert "cannot be used: ConnectionError" in content
    assert "lost after" in text_of(content)


def test_event_is_shown_on_the_page_of_its_lock(operator):
    at = timezone.now() - timedelta(days=3)
    facts = {"outcome": "lost", "reason": "taken by another", "ended_at": at + timedelta(days=1)}
    row = event(name="nightly", at=at, **facts)
    event(name="nightly", at=at + timedelta(minutes=5), outcome="released", ended_at=at)
    response = operator.get(f"{BASE}{row.pk}/change/")
    assert response.url.startswith(f"{TIMELINE}?name=nightly&event={row.pk}&from=")
    content = content_of(operator, response.url)
    [chosen] = re.findall(r'<tr class="singletask-chosen">.*?</tr>', content, re.DOTALL)[:1]
    assert "taken by another" in chosen
    assert 'tabindex="-1" open>' in content


@pytest.mark.parametrize("odd", ["x", "-1", "9" * 30, "\u0661"])
def test_page_of_a_lock_with_an_odd_event_is_shown(operator, odd):
    event(name="nightly")
    assert "nightly" in content_of(operator, TIMELINE, {"name": "nightly", "event": odd})


# The timeline


@pytest.mark.parametrize(
    ("typed", "span"),
    [
        *[(span, span) for span in ("15m", "1h", "24h", "7d")],
        *[(odd, "1h") for odd in ("2h", "-1", "7d'", "15M", "99999999999999999d")],
    ],
)
def test_time_spans_of_the_timeline(operator, typed, span):
    content = content_of(operator, TIMELINE, {"range": typed})
    assert content.count('aria-current="true"') == 1
    assert f'range={span}" aria-current="true"' in content
    assert "Nothing is recorded" in content


@pytest.mark.parametrize(
    "query", [{"name": "no such"}, {"task": "none.such"}, {"name": "\0"}, {"range": "\0"}]
)
def test_timeline_of_an_unknown_name_is_empty(operator, query):
    response = operator.get(TIMELINE, query, follow=True)
    assert "Nothing is recorded" in response.content.decode()


@pytest.mark.parametrize(
    ("query", "lanes"), [({}, 3), ({"name": "feeds.import(7)"}, 1), ({"task": "feeds.import"}, 2)]
)
def test_timeline_of_one_lock_or_one_task(operator, query, lanes):
    for number in (7, 8):
        event(name=f"feeds.import({number})", task="feeds.import")
    event(name="nightly")
    content = content_of(operator, TIMELINE, query)
    assert content.count('class="singletask-lane"') == lanes


def test_other_time_spans_keep_the_lock_or_the_task(operator):
    content = content_of(operator, TIMELINE, {"name": "a(b=1)&c", "task": "t"})
    assert 'href="?range=7d&amp;name=a%28b%3D1%29%26c' in content
    assert 'href="?range=7d&amp;task=t"' in content_of(operator, TIMELINE, {"task": "t"})


def test_places_of_marks_are_written_for_the_browser_in_every_language(operator, settings):
    now = timezone.now()
    at, ended_at = now - timedelta(minutes=30), now - timedelta(minutes=15)
    event(name="nightly", at=at, ended_at=ended_at, outcome="released")
    settings.LANGUAGE_CODE = "de"
    content = content_of(operator, TIMELINE)
    assert 'lang="de"' in content
    assert re.search(r'x="(50|49)\.\d\d%" width="2[45]\.\d\d%"', content)


def test_timeline_that_leaves_out_locks_leads_to_the_tasks(operator, monkeypatch):
    inside.bound(monkeypatch, "lanes of the timeline", 1)
    event(name="a")
    event(name="b")
    content = content_of(operator, TIMELINE)
    assert "1 more lane is left out" in content
    assert content.count(f'<a href="{BASE}per-task/">a task</a>') == 1


def test_timeline_of_too_many_events_leads_to_shorter_windows(operator, monkeypatch):
    now = timezone.now()
    for seconds in (60, 30):
        at = now - timedelta(seconds=seconds)
        event(name="a", outcome="released", at=at, ended_at=at)
    assert "There are more than" not in content_of(operator, TIMELINE)
    inside.bound(monkeypatch, "marks of the timeline", 1)
    content = content_of(operator, TIMELINE, {"name": "a"})
    assert "There are more than 1 events: those since " in content
    windows = re.findall(r'<a href="\?from=([^&]*)&amp;to=([^&]*)&amp;name=a">', content)
    (middle, _end), (_start, same) = windows
    assert middle == same


def test_timeline_says_what_it_leaves_out_though_no_shorter_window_has_less(operator, monkeypatch):
    inside.bound(monkeypatch, "marks of the timeline", 1)
    now = timezone.now()
    start, end = now - timedelta(hours=2), now - timedelta(hours=1)
    window = {"from": start.isoformat(), "to": end.isoformat()}
    for _ in range(2):
        event(name="a", outcome="released", at=start - timedelta(hours=1), ended_at=now)
    content = content_of(operator, TIMELINE, window)
    assert "More than 1 events go on after this time: not all of them are drawn." in content
    for _ in range(2):
        event(name="b", outcome="lost", at=start)
    content = content_of(operator, TIMELINE, window)
    assert "There are more than 1 events: those since " in content
    assert "Only this time" not in content


# Windows


@pytest.mark.parametrize("page", [TIMELINE, LIST])
@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"from": "soon"}, "'soon' is not a time: write it as 20"),
        ({"to": "2026-13-01T00:00"}, "'2026-13-01T00:00' is not a time"),
        ({"to": "0001-01-01T00:00"}, "is not a time"),
        ({"from": "2026-01-02T03:00", "to": "2026-01-02T02:00"}, "after 2026-01-02 03:00:00"),
        ({"from": "<script>"}, "'&lt;script&gt;' is not a time"),
    ],
)
def test_wrong_window_is_a_message(operator, page, query, message):
    event(name="nightly")
    content = content_of(operator, page, query).replace("&#x27;", "'")
    assert message in content
    assert "nightly" in content


@pytest.mark.parametrize("page", [TIMELINE, LIST])
def test_window_is_shown_and_kept_in_the_link_to_the_other_page(operator, page, settings):
    settings.TIME_ZONE = "Europe/Berlin"
    at = datetime(2026, 1, 2, 2, 30, tzinfo=UTC)
    event(name="at night", at=at, ended_at=at, outcome="released", task="t")
    event(name="by day", task="t")
    content = content_of(
        operator, page, {"from": "2026-01-02T03:00", "to": "2026-01-02T04:00", "task": "t"}
    )
    assert "at night" in content
    assert "by day" not in content
    assert 'name="from" value="2026-01-02T03:00:00"' in content
    assert 'name="to" value="2026-01-02T04:00:00"' in content
    assert '<input type="hidden" name="task" value="t">' in content
    other = LIST if page == TIMELINE else TIMELINE
    window = "from=2026-01-02T02%3A00%3A00%2B00%3A00&amp;to=2026-01-02T03%3A00%3A00%2B00%3A00"
    assert f'href="{other}?{window}&amp;task=t"' in content
    assert content_of(operator, other, {"from": "2026-01-02T02:00:00+00:00"}).count("at night")


def test_legend_shows_the_marks(operator):
    event(name="nightly", outcome="lost", ended_at=timezone.now())
    event(name="nightly", kind="conflict", result="skipped")
    content = content_of(operator, TIMELINE)
    legend = content.partition("<figcaption")[2].partition("</figcaption>")[0]
    assert text_of(legend.partition(">")[2]) == "conflict lost"
    conflict, lost = legend.split('class="singletask-state')[1:]
    assert lost.count("<rect") == lost.count("<path d=") == 1
    assert (conflict.count("<rect"), conflict.count("<path")) == (1, 0)


def test_no_bar_hides_a_sign(operator):
    now = timezone.now()
    event(name="nightly", outcome="lost", at=now - timedelta(minutes=9), ended_at=now)
    event(name="nightly", outcome="released", at=now - timedelta(minutes=1), ended_at=now)
    figure = content_of(operator, TIMELINE).partition('class="singletask-lane"')[2]
    lane = figure.partition("</figure>")[0]
    assert lane.count("<path") == 2
    assert lane.rindex("<rect") < lane.index("<path")


def test_facts_of_a_mark_are_there_for_screen_reader_pointer_and_table(operator):
    facts = {"outcome": "cleared", "noticed_at": timezone.now(), "actor": "grace"}
    row = event(name="nightly", task_id="3f0c", host="web-1", pid=40, **facts)
    content = content_of(operator, TIMELINE)
    # The labels and the tips of the bar and of the sign, and the table.
    assert len(re.findall(r"cleared after [0-9.]+s, by grace, task 3f0c, web-1:40", content)) == 5
    assert content.count(f'href="{BASE}{row.pk}/change/"') == 3


def test_timeline_reads_a_bounded_number_of_rows_by_indexes(operator):
    fill_table()
    name = "feeds.tasks.import_feed(feed_id=1)"
    event(name=name, kind="conflict", blocked_by="b" * 32)
    addresses = [
        {"range": "7d"},
        {"range": "1h", "name": name},
        {"task": "tests.testapp.tasks.meet"},
    ]
    sent = plans("default", lambda: [operator.get(TIMELINE, query) for query in addresses])
    sent = [plan for plan in sent if TABLE in plan.sql]
    assert len(sent) >= 9
    for plan in sent:
        assert not plan.reads_the_table(), plan.sql
        assert "LIMIT" in plan.sql or "IN (" in plan.sql or "GROUP BY" in plan.sql


@pytest.mark.urls("tests.operators.test_pages")
def test_clear_on_another_admin_site_leads_back_to_its_page(operator, take):
    assert operator.post(f"{PREFIX}clear/", form_of(take())).url == PREFIX


# Links from an event to the run that blocked it


def test_event_links_to_the_run_that_blocked_it(operator, take):
    lock = take()
    run = TaskLockEvent.objects.get(ref=lock.token)
    conflict = event(kind="conflict", blocked_by=lock.token)
    assert conflict.blocked_by
    assert f'<a href="{BASE}{run.pk}/change/">' in content_of(operator, LIST)


def test_blocker_whose_row_was_pruned_is_named_without_a_link(operator):
    event(kind="conflict", blocked_by="f" * 32)
    content = content_of(operator, LIST)
    assert "f" * 32 in content
    assert f"{'f' * 32}</a>" not in content
