"""What a run does if the cache cannot be used: ``on_outage``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from django_singletask import LockError, LockUnavailable, SingletonTask, current_lock
from django_singletask.history.recorder import flush
from django_singletask.models import TaskLockEvent
from django_singletask.stores import get_store
from django_singletask.task.header import WAITS
from tests.deliveries import collect_sent, deliver, held_by
from tests.entries import private_store
from tests.servers import Memcached, Redis, Server

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("empty_history"),
]

KINDS: dict[str, type[Server]] = {"redis": Redis, "pylibmc": Memcached, "pymemcache": Memcached}
POLICIES = ["skip", "raise", "wait", "requeue", "rerun"]

log: list[Any] = []


@pytest.fixture
def app() -> Iterator[Celery]:
    options = {"broker": "memory://", "backend": "cache+memory://"}
    with Celery("outage", set_as_current=False, **options) as app:
        log.clear()
        yield app


@pytest.fixture
def down(settings: Any, dead_redis: str) -> None:
    settings.SINGLETASK_CACHE = dead_redis


@pytest.fixture
def sent(app: Celery, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Collect what would be published."""
    return collect_sent(app, monkeypatch)


def run(key: str) -> str:
    lock = current_lock()
    assert lock is not None
    lock.check()
    log.append(bool(lock))
    return "ran"


def task_of(app: Celery, on_outage: str, body: Any = run, **options: Any) -> Any:
    options = {"skip_result": "skipped", **options, "on_outage": on_outage}
    return app.task(base=SingletonTask, shared=False, name=f"tests.{on_outage}", **options)(body)


@pytest.mark.parametrize("alias", KINDS)
def test_a_cache_that_goes_down(app: Celery, alias: str, settings: Any, caplog: Any) -> None:
    """And comes back: each of the three policies, before, during and after the outage."""
    with KINDS[alias]() as server:
        location = f"127.0.0.1:{server.port}"
        if KINDS[alias] is Redis:
            location = f"redis://{location}/0"
        settings.SINGLETASK_CACHE = alias
        with private_store(settings, alias, location):
            task = task_of(app, "run")
            assert deliver(task, "a").retval == "ran"
            server.kill()
            assert deliver(task, "a").retval == "ran"
            assert deliver(task_of(app, "skip"), "a").retval == "skipped"
            assert type(deliver(task_of(app, "raise"), "a").info.retval) is LockUnavailable
            server.start()
            assert deliver(task, "a").retval == "ran"
    assert log == [True, False, True]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    [error] = [record for record in errors if record.name == "django_singletask"]
    assert "tests.run(key='a')" in error.getMessage()
    assert f"runs without its lock (on_outage='run'). The cache '{alias}'" in error.getMessage()


@pytest.mark.usefixtures("down")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("on_outage", "result"), [("run", "ran"), ("skip", "skipped")])
def test_it_holds_for_each_policy(app: Celery, policy: str, on_outage: str, result: str) -> None:
    task = task_of(app, on_outage, on_conflict=policy, lock_wait=0.1)
    for call in (
        lambda: deliver(task, "a").retval,
        lambda: task.apply("a").get(),
        lambda: task("a"),
    ):
        assert call() == result


@pytest.mark.usefixtures("down")
@pytest.mark.parametrize(
    ("on_outage", "row"), [("run", ("unguarded", "mine", 1)), ("skip", ("skipped", "mine", 1))]
)
def test_the_history_shows_it(app: Celery, on_outage: str, row: Any) -> None:
    deliver(task_of(app, on_outage), "a")
    flush()
    event = TaskLockEvent.objects.get()
    assert (event.kind, event.task_id, event.count) == row
    reason = "The cache 'dead' cannot be used: ConnectionError" if on_outage == "run" else "outage"
    assert reason in event.reason


@pytest.mark.usefixtures("down")
def test_one_call_can_choose_it(app: Celery) -> None:
    task = task_of(app, "raise")
    assert task.apply("a", lock_options={"on_outage": "run"}).get() == "ran"
    assert task.apply("a", lock_options={"on_outage": "skip"}).get() == "skipped"


@pytest.mark.usefixtures("down")
def test_a_wrong_value_raises_as_the_default_does(app: Celery) -> None:
    with pytest.raises(LockUnavailable):
        task_of(app, "ignore")("a")


@pytest.mark.usefixtures("down")
def test_what_needs_the_lock_raises_in_the_body(app: Celery) -> None:
    def body() -> None:
        lock = current_lock()
        assert lock is not None
        assert not lock.lost
        for use in (lock.extend, lock.fencing_token, lock.release):
            with pytest.raises(LockError):
                use()

    task_of(app, "run", body)()


@pytest.mark.usefixtures("on_redis")
@pytest.mark.parametrize("on_outage", ["run", "skip"])
def test_a_call_that_has_met_a_holder_never_runs_beside_it(
    app: Celery, on_outage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    holder:  has the lock, goes on .......................
    call:       waits for it             would run
    cache:                       down
    """
    task = task_of(app, on_outage, on_conflict="wait", lock_wait=20)
    store = get_store("redis")
    take, answers = store.take, [True]

    def go_down(*arguments: Any, **options: Any) -> Any:
        if not answers:
            raise LockUnavailable("down")
        answers.pop()
        return take(*arguments, **options)

    with held_by("another", task=task):
        monkeypatch.setattr(store, "take", go_down)
        end = deliver(task, "a")
    if on_outage == "run":
        assert type(end.info.retval) is LockUnavailable
    else:
        assert end.retval == "skipped"
    assert not log


@pytest.mark.usefixtures("on_redis")
def test_an_outage_in_the_body_is_the_body_s_own(
    app: Celery, settings: Any, dead_redis: str
) -> None:
    def body() -> None:
        log.append("ran")
        settings.SINGLETASK_CACHE = dead_redis
        other.lock("a").locked()

    other = task_of(app, "raise")
    task = task_of(app, "run", body)
    with pytest.raises(LockUnavailable):
        task()
    assert log == ["ran"]


@pytest.mark.usefixtures("down")
@pytest.mark.parametrize("on_outage", ["run", "skip"])
def test_a_message_that_the_broker_delivers_again_waits_for_the_cache(
    app: Celery, sent: list[Any], on_outage: str
) -> None:
    """
    first run:    takes the lock   goes on ...................
    cache:                         down
    redelivery:                          can see no first run
    """
    task = task_of(app, on_outage)
    assert deliver(task, "a", delivery_info={"redelivered": True}).info.state == "IGNORED"
    assert [message["headers"]["singletask"]["redelivered"] for message in sent] == [WAITS]
    assert not log


@pytest.mark.usefixtures("down")
@pytest.mark.parametrize("on_outage", ["run", "skip"])
def test_a_message_that_waits_for_its_own_run_goes_on_waiting(
    app: Celery, sent: list[Any], on_outage: str
) -> None:
    task = task_of(app, on_outage)
    task.apply_async("a", task_id="mine")
    headers = sent.pop()["headers"]
    headers["singletask"]["redelivered"] = WAITS
    assert deliver(task, "a", headers=headers).info.state == "IGNORED"
    [message] = sent
    assert message["headers"]["singletask"]["redelivered"] == WAITS
    assert not log


@pytest.mark.parametrize("until", ["start", "finish", "expiry"])
class TestSending:
    @pytest.mark.usefixtures("down")
    @pytest.mark.parametrize("on_outage", ["run", "skip"])
    def test_a_call_is_sent_without_its_entry(
        self, app: Celery, sent: list[Any], until: str, on_outage: str, caplog: Any
    ) -> None:
        task = task_of(app, on_outage, unique_until=until)
        assert task.delay("a").id != task.delay("a").id
        assert [message["headers"]["singletask"].get("queued") for message in sent] == [None, None]
        assert f"tests.{on_outage}(key='a')" in caplog.text
        assert "duplicates of it are not stopped: The cache 'dead'" in caplog.text

    @pytest.mark.usefixtures("down")
    def test_by_default_it_is_not_sent(self, app: Celery, sent: list[Any], until: str) -> None:
        with pytest.raises(LockUnavailable):
            task_of(app, "raise", unique_until=until).delay("a")
        assert not sent

    @pytest.mark.usefixtures("on_redis")
    def test_a_queued_call_runs_during_an_outage(
        self, app: Celery, sent: list[Any], until: str, settings: Any, dead_redis: str
    ) -> None:
        task = task_of(app, "run", unique_until=until)
        task_id = task.delay("a").id
        settings.SINGLETASK_CACHE = dead_redis
        headers = sent[0]["headers"]
        assert deliver(task, "a", task_id=task_id, headers=headers).retval == "ran"
