from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.sites import AdminSite
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import path, reverse
from django.utils import timezone, translation

from django_singletask import TaskLock
from django_singletask.admin import pages
from django_singletask.admin.history import TaskLockEventAdmin
from django_singletask.history.queries import ENOUGH
from django_singletask.holder import Holder
from django_singletask.locks.keys import QUEUED, name_key
from django_singletask.models import TaskLockEvent
from django_singletask.operators import held as registry
from django_singletask.operators import timeline
from django_singletask.operators.marks import SIGNS
from django_singletask.operators.starving import Starving
from django_singletask.stores import get_store
from tests.test_admin import BASE, LIST, TABLE, away, drop_table, make, plans, text_of

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]

TIMELINE, CLEAR = f"{BASE}timeline/", f"{BASE}clear/"
SCRIPT = "<script>alert(1)</script>"


@pytest.fixture
def log_in():
    def as_user_with(*codenames, name="ada"):
        user = User.objects.create_user(name, is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
        client = Client()
        client.force_login(user)
        return client

    return as_user_with


@pytest.fixture
def operator(log_in):
    return log_in("view_tasklockevent", "clear_lock")


def put(name, key=None, **facts):
    """Write an entry as another process would have; returns its holder."""
    holder = Holder.new(name, 60, task=None, task_id=None, retries=0)
    holder = dataclasses.replace(holder, **facts)
    get_store("redis").add(key or name_key(name).key, holder.encode(), 60)
    return holder


def end_process():
    """Return the pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def held(client):
    response = client.get(BASE)
    assert response.status_code == 200
    table = response.content.decode().partition('class="singletask-table')[2]
    body = table.partition("<tbody>")[2].partition("</tbody>")[0]
    return [text_of(row) for row in body.split("<tr>")[1:]]


def asked(lock):
    return {"key": lock.key, "token": lock.token}


# Held now


def test_index_of_the_admin_leads_to_what_is_held(operator):
    assert f'href="{BASE}"' in operator.get("/admin/").content.decode()
    assert "<h1>Held now</h1>" in operator.get(BASE).content.decode()


@pytest.mark.parametrize("page", ["", "timeline/", "history/"])
def test_pages_are_for_viewers(log_in, page):
    assert log_in("clear_lock", "delete_tasklockevent").get(BASE + page).status_code == 403
    assert log_in("view_tasklockevent", name="eve").get(BASE + page).status_code == 200
    assert Client().get(BASE + page).status_code == 302


def test_held_lock_is_shown(operator, take):
    lock = take("nightly", timeout=30)
    [row] = held(operator)
    assert row.startswith("nightly held ")
    assert f"{lock.holder().host}:{os.getpid()}" in row


def test_skips_and_the_usual_hold_are_shown(operator, take):
    start = timezone.now() - timezone.timedelta(hours=1)
    for seconds in (4, 8, 90):
        ended = start + timezone.timedelta(seconds=seconds)
        make(name="nightly", at=start, outcome="released", result="returned", ended_at=ended)
    lock = take()
    for _ in range(3):
        TaskLock("nightly").acquire()
    [row] = held(operator)
    assert "usual 8.00s, longest 1m 30s" in row
    assert " 3 " in row
    assert "slow" not in row
    assert lock.owned()


def hold_often():
    now = timezone.now()
    ended = now + timezone.timedelta(seconds=4)
    for _ in range(ENOUGH):
        make(name="nightly", outcome="released", result="returned", at=now, ended_at=ended)


def test_hold_longer_than_the_longest_is_slow(operator):
    hold_often()
    put("nightly", since=time.time() - 3600)
    [row] = held(operator)
    assert "1h 00m slow usual 4.00s, longest 4.00s" in row


def test_dead_holder_is_not_slow(operator):
    hold_often()
    put("nightly", since=time.time() - 3600, pid=end_process())
    [row] = held(operator)
    assert "slow" not in row


def test_dead_holder_is_called_dead(operator):
    put("nightly", pid=end_process())
    [row] = held(operator)
    assert row.startswith("nightly dead ")


def test_expired_row_is_shown_without_a_button(operator):
    at = timezone.now() - timezone.timedelta(hours=1)
    make(name="gone", key="singletask:gone:0", token="t", cache="redis", timeout=60, at=at)
    [row] = held(operator)
    assert row.startswith("gone expired ")
    assert "Clear" not in row


def test_queued_call_is_shown(operator):
    key = name_key("nightly").beside(QUEUED, "nightly").key
    holder = put("nightly", key, pid=0, task_id="5d1cb1f6-9f3c")
    [row] = held(operator)
    assert row.startswith("nightly queued ")
    assert " queued 5d1cb1f6… since " in row
    assert holder.host not in row  # no process has it
    assert row.endswith("Forget…")


def test_task_of_a_holder_is_linked_where_a_search_finds_it(operator):
    put("known", token="t", task_id="3f0c")
    put("unknown", task_id="4e1d")
    make(name="known", token="t", task_id="3f0c")
    content = operator.get(BASE).content.decode()
    assert f'<a href="{LIST}?q=3f0c">3f0c</a>' in content
    assert "?q=4e1d" not in content
    assert "4e1d" in content


def test_entry_of_something_else_is_shown(operator):
    put("odd", since=1e300, pid=10**6, host="")
    get_store("redis").add(name_key("foreign").key, b"no record", 60)
    assert len(held(operator)) == 2


@pytest.mark.parametrize("bad", ["\ud800", "\0"])
@pytest.mark.parametrize("field", ["name", "task", "task_id", "host", "start"])
def test_entry_with_text_that_no_database_takes_is_shown_and_cleared(operator, field, bad):
    put(**{"name": "odd", "key": name_key("odd").key, "token": "t", field: f"a{bad}b"})
    [row] = held(operator)
    if field not in ("start", "task"):
        assert "a\N{REPLACEMENT CHARACTER}b" in row
    query = {"key": name_key("odd").key, "token": "t"}
    assert operator.get(CLEAR, query).status_code == 200
    content = operator.post(CLEAR, query, follow=True).content.decode()
    assert "was freed" in content
    assert get_store("redis").read(name_key("odd").key) is None
    assert LogEntry.objects.exists()


def test_nothing_held(operator):
    assert "No lock is held." in operator.get(BASE).content.decode()


def test_long_lists_are_cut(operator, monkeypatch):
    monkeypatch.setattr(pages, "SHOWN", 2)
    for name in "abc":
        put(name)
    assert len(held(operator)) == 2
    assert "1 more lock is held" in operator.get(BASE).content.decode()


def test_starving_locks_stand_above(operator):
    at = timezone.now() - timezone.timedelta(hours=3)
    make(name="nightly", kind="skipped", count=7, at=at, last_at=timezone.now())
    content = operator.get(BASE).content.decode()
    assert "Starving" in content
    assert "7 calls came to nothing in 3h 00m" in content


def test_starving_lock_that_was_completed_once_says_when(operator, monkeypatch):
    state = Starving("a", "", 1, 7200.0, 3700.0, 2.0)
    monkeypatch.setattr(pages, "starving", lambda longer_than: [state] * 30)
    content = operator.get(BASE).content.decode()
    assert (
        "1 call came to nothing in 1h 01m, the last 2s ago. Last completed 2h 00m ago." in content
    )
    assert "And 10 more" in content


@pytest.mark.parametrize("page", ["", "timeline/", "clear/"])
def test_names_and_ids_are_escaped(operator, page):
    lock = put(SCRIPT, task_id=SCRIPT, host=SCRIPT)
    make(name=SCRIPT, task=SCRIPT, task_id=SCRIPT, host=SCRIPT)
    make(name=SCRIPT, kind="lost", reason=SCRIPT, actor=SCRIPT)
    make(name=SCRIPT, kind="skipped", blocked_by_task_id=SCRIPT)
    query = {"key": name_key(SCRIPT).key, "token": lock.token} if page == "clear/" else {}
    content = operator.get(BASE + page, query).content.decode()
    assert "alert(1)" in content
    assert SCRIPT not in content


def test_arguments_that_are_hidden_are_on_no_page(operator, settings):
    settings.SINGLETASK_RECORD_ARGUMENTS = False
    from tests.testapp.tasks import hold

    lock = hold.lock("my secret")
    assert lock.acquire()
    try:
        for page in ("", "history/", "timeline/"):
            content = operator.get(BASE + page).content.decode()
            assert "tests.testapp.tasks.hold" in content
            assert "secret" not in content
        assert "secret" not in operator.get(CLEAR, asked(lock)).content.decode()
    finally:
        lock.release()


def test_store_that_is_down_is_told_and_the_history_still_works(operator, settings, dead_redis):
    settings.SINGLETASK_CACHE = dead_redis
    make(name="nightly")
    content = operator.get(BASE).content.decode()
    assert (
        "The cache &#x27;dead&#x27; (SINGLETASK_CACHE) cannot be asked: ConnectionError" in content
    )
    assert "nightly" in operator.get(LIST).content.decode()
    assert "nightly" in operator.get(TIMELINE).content.decode()
    for ask in (operator.get, operator.post):
        response = ask(CLEAR, {"key": "singletask:a:0", "token": "t"}, follow=True)
        assert "cannot be asked" in response.content.decode()


def test_passwords_of_the_cache_are_struck_out(operator, settings, monkeypatch):
    location = "redis://:s3cret@127.0.0.1:1/0"
    settings.CACHES = {**settings.CACHES, "other": {"BACKEND": "x", "LOCATION": location}}

    def refuse():
        raise ConnectionError(f"cannot connect to {location}")

    monkeypatch.setattr(registry, "held", refuse)
    content = operator.get(BASE).content.decode()
    assert "cannot connect to redis://:***@127.0.0.1" in content
    assert "s3cret" not in content


def test_sentence_with_links_is_translated_as_one(operator, settings, dead_redis, monkeypatch):
    settings.SINGLETASK_CACHE = dead_redis
    asked_for = []
    monkeypatch.setattr(translation, "gettext", lambda text: asked_for.append(text) or text)
    content = operator.get(BASE).content.decode()
    sentence = (
        'What is held cannot be shown. <a href="%(events_url)s">The history</a> and '
        '<a href="%(timeline_url)s">the timeline</a> say what was.'
    )
    assert sentence in asked_for
    assert sentence % {"events_url": LIST, "timeline_url": TIMELINE} in content


def test_without_history_what_is_held_is_still_shown(operator, settings, take):
    settings.SINGLETASK_HISTORY = "off"
    take()
    assert held(operator)[0].startswith("nightly held")
    assert "nothing is being recorded" in operator.get(BASE).content.decode()


def test_memcached_without_history_says_that_it_cannot_list(operator, settings, empty_cache):
    empty_cache("pymemcache")
    settings.SINGLETASK_CACHE, settings.SINGLETASK_HISTORY = "pymemcache", "off"
    content = operator.get(BASE).content.decode()
    assert "cannot list its entries" in content
    assert "No lock is held" not in content


def test_links_to_filters_of_the_list_lead_to_the_history(operator):
    response = operator.get(BASE, {"q": "nightly"})
    assert response.status_code == 302
    assert response.url == f"{LIST}?q=nightly"


def test_queries_do_not_grow_with_the_locks(operator):
    def count():
        with CaptureQueriesContext(connection) as queries:
            operator.get(BASE)
        return len(queries)

    put("nightly-0", task="feeds.tasks.import_feed")
    count()
    few = count()
    for number in range(1, 9):
        put(f"nightly-{number}", task="feeds.tasks.import_feed")
    assert count() == few


# Clear


def test_page_names_the_holder_and_how_to_stop_the_task(operator):
    holder = put("nightly", task="t", task_id="3f0c")
    response = operator.get(CLEAR, {"key": name_key("nightly").key, "token": holder.token})
    text = text_of(response.content.decode())
    assert f"task 3f0c on {holder.host}, process {os.getpid()}" in text
    assert "Alive , on this host since 20" in text
    assert "a second run can then start beside it" in text
    assert "app.control.revoke(&quot;3f0c&quot;, terminate=True)" in text
    assert TaskLock("nightly").locked()  # to look frees nothing


def test_page_says_that_the_holder_is_dead_and_how_that_is_known(operator):
    pid = end_process()
    holder = put("nightly", pid=pid)
    response = operator.get(CLEAR, {"key": name_key("nightly").key, "token": holder.token})
    text = text_of(response.content.decode())
    assert f"Dead : process {pid} is gone." in text
    assert "beside" not in text


@pytest.mark.parametrize("facts", [{"boot_id": "another"}, {"pid": 0}])
def test_page_says_what_cannot_be_known(operator, facts):
    holder = put("nightly", **facts)
    response = operator.get(CLEAR, {"key": name_key("nightly").key, "token": holder.token})
    text = text_of(response.content.decode())
    assert "Not known : it cannot be seen from here" in text
    assert "Alive" not in text


def test_clear_frees_the_lock_and_is_recorded(operator, take):
    lock = take()
    response = operator.post(CLEAR, asked(lock), follow=True)
    assert response.redirect_chain == [(BASE, 302)]
    assert "The lock nightly was freed." in response.content.decode()
    assert not lock.locked()
    event = TaskLockEvent.objects.get(kind="cleared")
    assert (event.actor, event.token, event.name) == ("ada", lock.token, "nightly")
    entry = LogEntry.objects.get()
    assert entry.user.username == "ada"
    assert entry.object_repr == "nightly: cleared"
    assert lock.token in entry.get_change_message()
    assert TaskLockEvent.objects.get(pk=entry.object_id).kind == "acquired"
    assert operator.get("/admin/").status_code == 200  # which lists recent actions


def test_clear_of_a_holder_without_a_row(operator):
    holder = put("nightly")
    operator.post(CLEAR, {"key": name_key("nightly").key, "token": holder.token})
    assert LogEntry.objects.get().object_id is None
    assert not TaskLock("nightly").locked()


def test_clear_is_reported_while_the_database_of_the_history_is_away(operator):
    holder = put("nightly")
    query = {"key": name_key("nightly").key, "token": holder.token}
    with connection.execute_wrapper(away):
        response = operator.post(CLEAR, query)
    assert response.url == BASE
    assert LogEntry.objects.get().object_id is None
    assert not TaskLock("nightly").locked()


def test_locks_are_shown_and_cleared_while_the_history_has_no_table(operator):
    """The test is one transaction, as a request is with ATOMIC_REQUESTS."""
    holder = put("nightly", task="t")
    query = {"key": name_key("nightly").key, "token": holder.token}
    drop_table()
    assert held(operator)[0].startswith("nightly held ")
    assert operator.get(CLEAR, query).status_code == 200
    content = operator.post(CLEAR, query, follow=True).content.decode()
    assert "The lock nightly was freed." in content
    assert "in the admin&#x27;s own log only, for now. The history cannot be read: rel" in content
    assert LogEntry.objects.get().object_repr == "nightly: cleared"
    assert not TaskLock("nightly").locked()


def test_history_that_is_off_is_not_missed(operator, settings):
    settings.SINGLETASK_HISTORY = "off"
    holder = put("nightly")
    query = {"key": name_key("nightly").key, "token": holder.token}
    drop_table()
    content = operator.post(CLEAR, query, follow=True).content.decode()
    assert "The lock nightly was freed." in content
    assert "cannot be read" not in content


@pytest.mark.parametrize("codename", ["view_tasklockevent", "clear_lock", "delete_tasklockevent"])
def test_clear_wants_its_own_permission_and_that_to_view(log_in, take, codename):
    lock, client = take(), log_in(codename)
    assert client.get(CLEAR, asked(lock)).status_code == 403
    assert client.post(CLEAR, asked(lock)).status_code == 403
    assert lock.owned()


def test_viewer_is_offered_no_clear(log_in, take):
    take()
    assert "Clear" not in held(log_in("view_tasklockevent"))[0]


def test_get_frees_nothing(operator, take):
    lock = take()
    assert operator.get(CLEAR, asked(lock)).status_code == 200
    assert lock.owned()


def test_clear_wants_the_token_of_the_form(operator, take):
    lock = take()
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(User.objects.get(username="ada"))
    assert strict.post(CLEAR, asked(lock)).status_code == 403
    assert lock.owned()


@pytest.mark.parametrize("method", ["get", "post"])
def test_lock_that_another_run_has_by_now_stays(operator, take, method):
    query = asked(take())
    assert TaskLock("nightly").clear()
    other = take()
    response = getattr(operator, method)(CLEAR, query, follow=True)
    assert "Nothing was freed" in response.content.decode()
    assert other.owned()
    assert not LogEntry.objects.exists()


def test_of_two_who_clear_at_once_the_second_is_told(operator, log_in, take, monkeypatch):
    lock = take()
    second = log_in("view_tasklockevent", "clear_lock", name="grace")
    really, answers = registry.clear, []

    def meanwhile(held, *, actor):
        # After this one has looked and before it frees, the other frees.
        if actor == "ada":
            answers.append(second.post(CLEAR, asked(lock), follow=True))
        return really(held, actor=actor)

    monkeypatch.setattr(registry, "clear", meanwhile)
    answers.append(operator.post(CLEAR, asked(lock), follow=True))
    first, late = (answer.content.decode() for answer in answers)
    assert "was freed" in first
    assert "Nothing was freed" in late
    assert TaskLockEvent.objects.get(kind="cleared").actor == "grace"
    assert LogEntry.objects.get().user.username == "grace"


@pytest.mark.parametrize(
    "query",
    [{"key": "x"}, {"key": "singletask:x:0", "token": "\0"}, {"key": "a(", "token": ""}],
)
def test_odd_addresses_free_nothing(operator, take, query):
    lock = take()
    for ask in (operator.get, operator.post):
        assert "Nothing was freed" in ask(CLEAR, query, follow=True).content.decode()
    assert lock.owned()


def test_clear_of_nothing_says_what_to_do(operator):
    for ask in (operator.get, operator.post):
        response = ask(CLEAR, follow=True)
        assert response.redirect_chain == [(BASE, 302)]
        assert "choose here which lock to clear" in response.content.decode()


def test_lock_that_memcached_without_history_no_longer_has(operator, settings, empty_cache):
    empty_cache("pymemcache")
    settings.SINGLETASK_CACHE, settings.SINGLETASK_HISTORY = "pymemcache", "off"
    response = operator.post(CLEAR, {"key": "singletask:x:0", "token": "t"})
    assert response.url == BASE


def test_queued_call_is_forgotten(operator):
    key = name_key("nightly").beside(QUEUED, "nightly").key
    sent = time.time() - 95
    holder = put("nightly", key, pid=0, task="t", task_id="5d1c", since=sent)
    make(kind="duplicate", count=3, blocked_by=holder.token)
    query = {"key": key, "token": holder.token}
    text = text_of(operator.get(CLEAR, query).content.decode())
    assert "Forget this queued call?" in text
    assert "Queued call task 5d1c of t Since 20" in text
    assert ", for 1m 35s Equal calls stopped 3 Stops them for " in text
    assert "This does not take the call out of the queue." in text
    assert "app.control.revoke(&quot;5d1c&quot;)" in text
    assert "Process" not in text
    response = operator.post(CLEAR, query, follow=True)
    assert "The queued call of nightly is forgotten" in response.content.decode()
    assert get_store("redis").read(key) is None
    for ask in (operator.get, operator.post):
        content = ask(CLEAR, query, follow=True).content.decode()
        assert "Nothing was forgotten: this call stops no equal ones any more." in content
        assert "Nothing was freed" not in content


# The timeline's page


@pytest.mark.parametrize("span", ["15m", "1h", "24h", "7d"])
def test_ranges(operator, span):
    content = operator.get(TIMELINE, {"range": span}).content.decode()
    assert content.count('aria-current="true"') == 1
    assert "Nothing happened" in content


@pytest.mark.parametrize("span", ["", "2h", "-1", "7d'", "15M", "\0", "99999999999999999d"])
def test_odd_range_is_an_hour_and_says_so(operator, span):
    response = operator.get(TIMELINE, {"range": span})
    assert response.status_code == 200
    content = response.content.decode()
    assert "this is the last hour" in content
    assert 'range=1h" aria-current="true"' in content


@pytest.mark.parametrize("query", [{"name": "no such"}, {"task": "none.such"}, {"name": "\0"}])
def test_odd_names(operator, query):
    response = operator.get(TIMELINE, query, follow=True)
    assert "Nothing happened" in response.content.decode()


def test_timeline_without_its_table_says_so(operator):
    drop_table()
    response = operator.get(TIMELINE)
    content = response.content.decode()
    assert response.status_code == 200
    assert "The history cannot be read: relation" in content
    assert 'aria-current="page">Timeline' in content


def test_timeline_whose_database_is_away_says_so(operator):
    with connection.execute_wrapper(away):
        content = operator.get(TIMELINE).content.decode()
    assert "The history cannot be read: connection already closed" in content


def test_what_is_held_is_shown_while_the_database_of_the_history_is_away(operator):
    put("nightly")
    with connection.execute_wrapper(away):
        content = operator.get(BASE).content.decode()
    assert "nightly" in content
    assert "The history cannot be read: connection already closed" in content


def test_timeline_of_one_lock_and_of_one_task(operator):
    make(name="feeds.import(7)", task="feeds.import")
    make(name="feeds.import(8)", task="feeds.import")
    make(name="nightly")

    def lanes(**query):
        return operator.get(TIMELINE, query).content.decode().count('class="singletask-lane"')

    assert lanes() == 3
    assert lanes(name="feeds.import(7)") == 1
    assert lanes(task="feeds.import") == 2


def test_timeline_that_leaves_out_locks_leads_to_the_tasks(operator, monkeypatch):
    monkeypatch.setattr(timeline, "LANES", 1)
    monkeypatch.setattr(timeline, "ROWS", 2)
    make(name="a")
    make(name="b")
    content = operator.get(TIMELINE).content.decode()
    assert "1 more lock is left out" in content
    assert "There is more than can be drawn" in content
    assert content.count('<a href="#singletask-tasks">a task</a>') == 2
    assert '<h2 id="singletask-tasks">' in content


def test_legend_shows_the_marks(operator):
    make(name="nightly", kind="lost")
    make(name="nightly", kind="skipped")
    make(name="nightly", outcome="lost", ended_at=timezone.now())
    content = operator.get(TIMELINE).content.decode()
    legend = content.partition("<figcaption")[2].partition("</figcaption>")[0]
    assert text_of(legend.partition(">")[2]) == "lost skipped"
    lost, skipped = legend.split('class="singletask-state')[1:]
    assert lost.count("<rect") == lost.count(f'<path d="{SIGNS["lost"]}"') == 1
    assert (skipped.count("<rect"), skipped.count("<path")) == (1, 0)


def test_timeline_has_no_inline_script_or_style(operator):
    make(name="nightly")
    make(name="nightly", kind="lost")
    make(name="nightly", kind="skipped")
    for page in ("", "timeline/", "history/"):
        content = operator.get(BASE + page).content.decode()
        assert " style=" not in content
        assert "<style" not in content
        assert "<script>" not in content
        assert " onclick=" not in content


def test_facts_of_a_mark_are_told_thrice(operator):
    """To the screen reader, to pointer and keyboard, and in the table."""
    make(name="nightly", kind="cleared", actor="grace", task_id="3f0c", host="web-1", pid=40)
    content = operator.get(TIMELINE).content.decode()
    assert content.count("cleared, by grace, task 3f0c, web-1:40") == 3
    assert 'href="#event-1"' in content
    assert 'id="event-1"' in content


def test_timeline_reads_by_indexes_and_bounded(operator):
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {TABLE} (kind, outcome, result, name, key, cache, task, task_id, token, "
            "host, pid, at, timeout, count, blocked_by, blocked_by_task_id, actor, reason) "
            "SELECT 'acquired', 'released', '', 'a' || n % 50, 'k', 'c', 't' || n % 9, '', "
            "md5(n::text), 'h', 1, now() - n * interval '1 second', 60, 1, '', '', '', '' "
            "FROM generate_series(30000, 1, -1) n"
        )
        cursor.execute(f"ANALYZE {TABLE}")
    make(name="a1", kind="skipped", blocked_by="b" * 32)
    with plans() as found:
        for query in ({"range": "7d"}, {"range": "1h", "name": "a1"}, {"task": "t3"}):
            assert operator.get(TIMELINE, query).status_code == 200
    assert len(found) >= 9
    for sql, plan in found:
        assert "Seq Scan" not in plan, sql
        assert "LIMIT" in sql or "IN (" in sql


# A site of one's own

own = AdminSite(name="operations")
own.register(TaskLockEvent, TaskLockEventAdmin)
urlpatterns = [path("here/it/is/", own.urls)]


@pytest.mark.urls("tests.test_pages")
def test_all_pages_work_on_a_site_of_ones_own(operator, take):
    prefix = "/here/it/is/django_singletask/tasklockevent/"
    assert reverse("operations:django_singletask_tasklockevent_changelist") == prefix
    lock = take()
    event = make(kind="skipped", blocked_by=lock.token)
    clear = f"clear/?key={lock.key}&token={lock.token}"
    for page in ("", "history/", "timeline/", f"{event.pk}/change/", clear):
        response = operator.get(prefix + page)
        assert response.status_code == 200, page
        assert "/admin/django" not in response.content.decode()
        assert prefix in response.content.decode()
    response = operator.post(f"{prefix}clear/", asked(lock))
    assert response.url == prefix


def test_page_of_the_event_links_to_its_holder(operator, take):
    lock = take()
    row = TaskLockEvent.objects.get(token=lock.token)
    event = make(kind="skipped", blocked_by=lock.token)
    link = f'<a href="{BASE}{row.pk}/change/">'
    assert link in operator.get(f"{BASE}{event.pk}/change/").content.decode()
    assert link in operator.get(LIST).content.decode()


def test_blocker_whose_row_is_pruned_is_named_without_a_link(operator):
    event = make(kind="skipped", blocked_by="f" * 32)
    assert "f" * 32 in operator.get(LIST).content.decode()
    assert "f" * 32 in operator.get(f"{BASE}{event.pk}/change/").content.decode()


def test_revoke_line_is_quoted_as_python(operator):
    holder = put("nightly", task_id='a"b\n')
    response = operator.get(CLEAR, {"key": name_key("nightly").key, "token": holder.token})
    assert json.dumps('a"b\n').replace('"', "&quot;") in response.content.decode()
