"""What the guides promise about periodic tasks, limits and single questions, without workers."""

from __future__ import annotations

import functools
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.beat import Scheduler, SchedulingError
from celery.exceptions import Ignore, Retry

from django_singletask import LockConflict, SingletonTask, TaskLock, current_lock
from tests.deadline import wait_for
from tests.deliveries import collect_sent, deliver, held_by, receive
from tests.guides import blocks
from tests.testapp import tasks

pytestmark = pytest.mark.usefixtures("on_redis")


@pytest.fixture
def app():
    with Celery("guides", set_as_current=False, broker="memory://") as app:
        yield app


@pytest.fixture
def limits(app):
    """Give what the page about limits defines."""
    names: dict[str, Any] = {
        "__name__": "limits",
        "shared_task": functools.partial(app.task, shared=False, lazy=False),
        **{each.__name__: each for each in (LockConflict, SingletonTask, TaskLock, current_lock)},
    }
    exec("\n".join(blocks("guides/rate-limits.rst")), names)
    return SimpleNamespace(names=names, **names)


def fail():
    raise ZeroDivisionError


@pytest.mark.parametrize(("fetch", "pause"), [(lambda: None, 600), (fail, 60)])
def test_a_pause_counts_from_the_end_and_depends_on_it(limits, fetch, pause):
    limits.names["fetch"] = fetch
    with suppress(ZeroDivisionError):
        limits.poll()
    assert pause - 30 < limits.poll.lock().remaining() <= pause
    limits.names["fetch"] = lambda: pytest.fail("it is the pause")
    limits.poll()
    assert limits.poll.lock().clear()


def test_a_short_pause_frees_a_lock_before_its_time(app):
    @app.task(base=SingletonTask, lock_at_least=600)
    def free_early():
        current_lock().hand_over(for_=0.1)

    free_early()
    wait_for(lambda: not free_early.lock().locked(), "it is free")


def test_a_429_pauses_the_calls_of_its_key_alone(limits):
    answer = SimpleNamespace(status_code=429, headers={"Retry-After": "30"})
    limits.names["requests"] = SimpleNamespace(get=lambda address: answer)
    with pytest.raises(Retry) as retry:
        receive(limits.fetch_orders, 7, "monday")
    assert retry.value.when == 30
    answer.status_code = 200
    with pytest.raises(Ignore):  # it is postponed
        receive(limits.fetch_orders, 7, "tuesday", task_id="another")
    receive(limits.fetch_orders, 8, "monday")
    assert limits.fetch_orders.lock(7).clear()


def test_a_postponed_call_keeps_its_id_its_queue_and_its_priority(app, monkeypatch):
    @app.task(base=SingletonTask, shared=False, on_conflict="requeue")
    def index(letter):
        pytest.fail("another run has the lock")

    sent = collect_sent(app, monkeypatch)
    facts = {"exchange": "", "routing_key": "slow", "priority": 7}
    with held_by("another", task=index), pytest.raises(Ignore):
        receive(index, "a", delivery_info=facts)
    [message] = sent
    assert (message["task_id"], message["queue"], message["priority"]) == ("mine", "slow", 7)


def test_calls_with_other_numbers_share_the_first_slots(take):
    """A plan of 1 waits for slot 1, although 2 and 3 are free for a plan of 3."""
    first = take("export", slots=3)
    with pytest.raises(LockConflict), TaskLock("export"):
        pass
    others = [take("export", slots=3) for _ in range(2)]
    assert not TaskLock("export", slots=3).acquire()
    first.release()
    with TaskLock("export") as lock:
        assert lock
        assert all(other.owned() for other in others)


def test_a_call_over_the_limit_for_all_is_tried_again(limits, take):
    for _ in range(50):
        take("all queries", slots=50)
    with pytest.raises(Retry):
        receive(limits.query, 7, "select 1")
    assert not limits.query.lock(7).locked()


class TestBeat:
    @pytest.fixture
    def schedule(self, app):
        """Give the two schedules of the page, with its task."""
        found: dict[str, Any] = {}
        names: dict[str, Any] = {
            "shared_task": functools.partial(
                app.task, shared=False, lazy=False, name="feeds.tasks.import_all_feeds"
            ),
            "SingletonTask": SingletonTask,
        }
        for block in blocks("guides/periodic-tasks.rst"):
            if "CELERY_BEAT_SCHEDULE" in block:
                exec(block, names)
                found |= names["CELERY_BEAT_SCHEDULE"]
        return found

    @pytest.fixture
    def send(self, app, schedule):
        scheduler = Scheduler(app, lazy=True)

        def send(name):
            entry = scheduler.Entry(name=name, app=app, **schedule[name])
            return scheduler.apply_async(entry, advance=False)

        return send

    def test_a_call_is_not_sent_while_one_is_queued(self, send):
        assert send("import-feeds").id == send("import-feeds").id

    def test_options_in_the_schedule_travel_with_the_call(self, app, send, monkeypatch):
        sent = collect_sent(app, monkeypatch)
        send("nightly")
        assert sent[0]["headers"]["singletask"]["options"] == {"on_conflict": "requeue"}

    def test_beat_reports_that_the_cache_is_down_and_continues(self, send, settings, dead_redis):
        settings.SINGLETASK_CACHE = dead_redis
        with pytest.raises(SchedulingError, match="dead"):
            send("import-feeds")


class TestLockName:
    """A function or a format string that names the lock of a call."""

    def test_a_method_gets_the_task_first(self, app):
        class Bill(SingletonTask):
            name = "bill"

            def lock_name(self, customer_id):
                return f"{self.name}:{customer_id}"

            def run(self, customer_id):
                pass

        assert app.register_task(Bill()).lock(7).name == "bill:7"

    def test_fields_can_be_arguments_in_kwargs(self, app):
        class Sync(SingletonTask):
            name = "sync"
            lock_name = "job:{repoid}"

            def run(self, **kwargs):
                pass

        task = app.register_task(Sync())
        assert task.lock(repoid=7, force=True).name == "job:7"
        with pytest.raises(TypeError, match="repoid"):
            task.lock(force=True)


def test_a_skipped_run_can_store_another_state(monkeypatch):
    def be_busy(conflict, key):
        tasks.hold.update_state(state="BUSY")
        raise Ignore

    stored = []
    monkeypatch.setattr(tasks.hold, "on_skip", be_busy)
    monkeypatch.setattr(
        tasks.hold.backend, "store_result", lambda *result, **facts: stored.append(result)
    )
    with held_by("other"):
        deliver(tasks.hold, "a")
    assert [(task_id, state) for task_id, _result, state in stored] == [("mine", "BUSY")]


def test_a_plain_task_runs_a_message_that_carries_a_lock(monkeypatch, tmp_path):
    """After an uninstallation, messages of before are in the queue."""
    monkeypatch.setenv("SINGLETASK_TEST_LOG", str(tmp_path / "log"))
    header = {"singletask": {"id": "mine", "task": tasks.plain.name, "name": "n", "key": "k"}}
    with held_by("other"):
        assert deliver(tasks.plain, "a", headers=header)[0] == "ran"
