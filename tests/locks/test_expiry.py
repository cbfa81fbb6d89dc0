"""``unique_until="expiry"``: no equal call for a time from the sending, however the run ends."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
from celery.exceptions import Reject, Retry
from django.db.models import F

from django_singletask.models import TaskLockEvent
from tests import inside
from tests.admin_pages import BASE, CLEAR, log_in, rows_of, text_of
from tests.command_line import locks
from tests.deliveries import collect_sent, held_by, receive, wait_for_debts
from tests.entries import eventually
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]

task = tasks.hold
DAILY = {"unique_until": "expiry", "unique_for": 1000}


@pytest.fixture
def sent(monkeypatch):
    return collect_sent(task.app, monkeypatch, SimpleNamespace)


@pytest.fixture(autouse=True)
def runs_log(monkeypatch, tmp_path):
    monkeypatch.setenv("SINGLETASK_TEST_LOG", str(tmp_path / "log"))


def send(**options):
    lock_options = {**DAILY, **options.pop("lock_options", {})}
    return task.apply_async(("a",), lock_options=lock_options, **options)


def deliver(message, **request):
    header = inside.header_of(message.headers)
    return receive(task, *message.args, task_id=message.task_id, header=header, **request)


def entry():
    return inside.queued_entry(task, "a")


def end_in(seconds, **changes):
    """Let the entry end in so many seconds; ``changes`` are those of its record."""
    holder = replace(entry().holder(), **changes)
    inside.write(entry(), holder.encode(), seconds)
    return holder


def test_the_entry_stays_after_the_run_and_its_end_does_not_move(cache_alias, sent):
    first = send()
    assert task.queued("a").id == first.id
    sent_at, before = entry().holder().since, entry().remaining()
    assert deliver(sent[0]) == "ran"
    assert task.queued("a") is None
    left = entry().remaining()
    assert left is None or before - 30 < left <= before  # memcached cannot tell
    assert (entry().holder().since, entry().holder().timeout) == (sent_at, 1000)
    assert send().id == first.id
    assert len(sent) == 1


def test_the_store_says_when_it_ends_and_not_the_clock_of_the_sender(sent):
    send()
    end_in(400)
    deliver(sent[0])
    assert 390 < entry().remaining() <= 400


def test_memcached_is_asked_for_the_rest(settings, empty_cache, sent, monkeypatch):
    settings.SINGLETASK_CACHE = "pymemcache"
    empty_cache("pymemcache")
    send()
    now, leases = time.time(), []

    def note(replace, key, old, new, seconds):
        leases.append(seconds)
        return replace(key, old, new, seconds)

    monkeypatch.setattr(time, "time", lambda: now + 600)  # the cache cannot tell the rest
    with inside.handled("replace", note, cache="pymemcache"):
        deliver(sent[0])
    assert leases == [pytest.approx(400, abs=1)]


def test_the_call_is_not_queued_any_more_once_it_has_its_lock(sent, monkeypatch):
    seen = []
    monkeypatch.setattr(tasks, "body", lambda *args, **facts: seen.append(task.queued("a")))
    send()
    deliver(sent[0])
    assert seen == [None]


@pytest.mark.parametrize("error", [ValueError(), Reject(requeue=True)])
def test_it_stays_if_the_run_does_not_return(sent, monkeypatch, error):
    def body(*args, **facts):
        raise error

    monkeypatch.setattr(tasks, "body", body)
    first = send()
    with pytest.raises(type(error)):
        deliver(sent[0])
    assert send().id == first.id


def test_a_countdown_does_not_move_its_end(sent):
    send(countdown=500)
    assert 990 < entry().remaining() <= 1000


def test_a_retry_does_not_move_its_end_and_a_revoked_one_does_not_free_it(sent):
    first = send()
    deliver(sent[0])
    begun = end_in(400, since=entry().holder().since - 600)
    deliver(sent[0], retries=1)
    inside.discard(task, sent[0].headers, first.id)
    wait_for_debts()
    assert entry().holder() == begun
    assert entry().remaining() <= 400


def test_a_call_that_has_ended_is_not_said_to_be_queued(sent, caplog):
    first = send()
    deliver(sent[0])
    with caplog.at_level("INFO", "django_singletask"):
        send()
    address = f"hold(key='a') ({task.lock('a').key})"
    assert f"{address}: not sent, duplicate of task {first.id}" in caplog.text
    assert "is queued" not in caplog.text


def test_a_retry_does_not_bring_back_what_an_operator_has_cleared(sent):
    first = send()
    deliver(sent[0])
    assert entry().clear()
    deliver(sent[0], retries=1)
    assert send().id != first.id


class TestExpires:
    """``expires`` limits the entry until the call begins."""

    def test_a_queued_call_blocks_until_it_expires(self, sent):
        send(expires=100)
        assert 40 < entry().remaining() <= 105

    def test_a_call_that_has_begun_blocks_for_unique_for(self, cache_alias, sent):
        first = send(expires=100)
        sent_at = entry().holder().since
        deliver(sent[0])
        left = entry().remaining()
        assert left is None or 900 < left <= 1000  # memcached cannot tell
        assert (entry().holder().since, entry().holder().timeout) == (sent_at, 1000)
        assert send().id == first.id

    def test_a_later_delivery_or_retry_does_not_move_its_end(self, sent):
        send(expires=100)
        deliver(sent[0])
        end_in(400)
        for retries in (0, 1):
            deliver(sent[0], retries=retries)
        assert entry().remaining() <= 400

    def test_a_retry_of_a_call_that_has_not_begun_does_not_move_its_end(self, sent, monkeypatch):
        def try_again(conflict, *args):
            raise task.retry(countdown=1)

        monkeypatch.setattr(task, "on_skip", try_again)
        send(expires=100)
        with held_by("another"), pytest.raises(Retry):
            deliver(sent[0], expires=sent[0].expires)
        assert task.queued("a")
        assert entry().remaining() <= 105


class TestNeverBegun:
    def test_not_published(self, monkeypatch):
        def fail(*args, **options):
            raise OSError("the broker is away")

        monkeypatch.setattr(task.app, "send_task", fail)
        with pytest.raises(OSError, match="away"):
            send()
        assert entry().holder() is None

    def test_revoked_or_expired(self, sent):
        first = send()
        inside.discard(task, sent[0].headers, first.id)
        eventually(lambda: entry().holder() is None)

    def test_skipped(self, sent):
        send()
        with held_by("another"):
            assert deliver(sent[0]) == "skipped"
        assert entry().holder() is None

    def test_control_postponed_it_may_still_begin(self, sent):
        first = send(lock_options={"on_conflict": "requeue"})
        with held_by("another"), inside.postponed():
            deliver(sent[0])
        assert task.queued("a").id == first.id


class TestEntryIsGone:
    """It was killed before it began, and its message is delivered again; or the cache forgot."""

    @pytest.mark.parametrize("expires", [None, 100])
    def test_it_is_added_for_the_rest_when_the_call_begins(self, sent, expires):
        """With ``expires`` it may have ended: a call can wait for a thread of a pool."""
        first = send(expires=expires)
        entry().clear()
        deliver(sent[0])
        assert 900 < entry().remaining() <= 1000
        assert send().id == first.id

    def test_nothing_is_added_when_its_time_is_over(self, sent, monkeypatch):
        send(lock_options={"unique_for": 100})
        entry().clear()
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 101)
        deliver(sent[0])
        assert entry().holder() is None

    def test_that_of_another_call_stays(self, sent):
        send()
        entry().clear()
        second = send()
        deliver(sent[0])
        assert task.queued("a").id == second.id


def test_an_error_of_the_cache_costs_no_run(sent, caplog):
    send()
    with inside.failing("read"):
        assert deliver(sent[0]) == "ran"
    assert "duplicates of this call are not stopped" in caplog.text


def test_duplicates_of_a_call_that_has_run_starve_nobody(sent):
    send()
    deliver(sent[0])
    for _ in range(3):
        send()
    TaskLockEvent.objects.update(at=F("at") - timedelta(hours=2))
    duplicate = TaskLockEvent.objects.get(kind="duplicate")
    assert duplicate.reason == "kept"
    assert duplicate.name in locks("list", "--fail-if-starving", "1h")


class TestOperators:
    pytestmark = pytest.mark.usefixtures("eighty_columns")

    def test_list(self, sent):
        send()
        assert "queued" in locks()
        deliver(sent[0])
        assert re.search(r"\nblocking .* \d+s ", locks())

    def test_why(self, sent):
        first = send()
        deliver(sent[0])
        text = " ".join(locks("why", task.lock("a").name).split())
        assert f" queued task {first.id} on " in text
        assert " and begun; stops identical calls for 16m 39s more" in text

    def test_clear_queued_forgets_it(self, sent):
        send()
        deliver(sent[0])
        locks("clear", "--queued", task.lock("a").name, "--yes")
        send()
        assert len(sent) == 2

    def test_the_admin(self, sent):
        send()
        deliver(sent[0])
        client = log_in("view_tasklockevent", "clear_lock")
        (row,) = rows_of(client.get(BASE), "singletask-held")
        assert "blocking" in row
        query = {"lock": f"{entry().key} {entry().holder().token}"}
        page = text_of(client.get(CLEAR, query).content.decode())
        assert "blocking" in page


def test_control_until_start_the_entry_is_freed_by_the_run(sent):
    send(lock_options={"unique_until": "start"})
    deliver(sent[0])
    send()
    assert len(sent) == 2
