"""``autoretry_for`` holds for the errors of the lock as for those of the body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from django_singletask import LockConflict, LockError, LockUnavailable, SingletonTask
from tests import inside
from tests.deliveries import collect_sent, deliver, held_by
from tests.entries import private_store
from tests.servers import Memcached

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis"),
]


@pytest.fixture
def app() -> Iterator[Celery]:
    options = {"broker": "memory://", "backend": "cache+memory://"}
    with Celery("autoretry", set_as_current=False, **options) as app:
        yield app


@pytest.fixture
def sent(app: Celery, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Collect what would be published."""
    return collect_sent(app, monkeypatch)


def run(key: str) -> str:
    return "ran"


def divide(key: str) -> float:
    return 1 / 0


def task_of(app: Celery, body: Any = run, **options: Any) -> Any:
    options = {"on_conflict": "raise", "default_retry_delay": 1, **options}
    return app.task(base=SingletonTask, shared=False, name="tests.body", **options)(body)


@pytest.mark.parametrize("errors", [(LockConflict,), (LockError,), (Exception,)])
@pytest.mark.parametrize("policy", ["raise", "wait"])
def test_a_conflict_is_retried(app: Celery, sent: list[Any], errors: Any, policy: str) -> None:
    task = task_of(app, on_conflict=policy, lock_wait=0.01, autoretry_for=errors)
    with held_by("another", task=task):
        assert deliver(task, "a").info.state == "RETRY"
    [message] = sent
    facts = (message["task_id"], message["args"], message["retries"], message["countdown"])
    assert facts == ("mine", ("a",), 1, 1)
    assert deliver(task, "a", retries=1, headers=message["headers"]).retval == "ran"


def test_after_the_last_retry_it_fails_with_the_conflict(app: Celery, sent: list[Any]) -> None:
    task = task_of(app, autoretry_for=(LockConflict,), max_retries=3)
    with held_by("another", task=task):
        assert deliver(task, "a", retries=2).info.state == "RETRY"
        failed = deliver(task, "a", retries=3).info
    assert (failed.state, type(failed.retval)) == ("FAILURE", LockConflict)
    assert failed.retval.holder.task_id == "another"
    assert len(sent) == 1


def test_the_options_of_a_retry_are_celerys(app: Celery, sent: list[Any]) -> None:
    options = {"retry_backoff": 5, "retry_jitter": False, "retry_kwargs": {"max_retries": 4}}
    task = task_of(app, autoretry_for=(LockConflict,), max_retries=9, **options)
    with held_by("another", task=task):
        deliver(task, "a", retries=3)
        assert deliver(task, "a", retries=4).info.state == "FAILURE"
    assert [message["countdown"] for message in sent] == [40]
    assert not hasattr(task, "override_max_retries")


@pytest.mark.parametrize(
    "options",
    [{}, {"autoretry_for": (Exception,), "dont_autoretry_for": (LockConflict,)}],
)
def test_what_is_not_to_be_retried_fails_at_once(
    app: Celery, sent: list[Any], options: Any
) -> None:
    task = task_of(app, **options)
    with held_by("another", task=task):
        assert deliver(task, "a").info.state == "FAILURE"
    assert not sent


def test_a_cache_that_is_down_is_retried(
    app: Celery, sent: list[Any], settings: Any, dead_redis: str
) -> None:
    settings.SINGLETASK_CACHE = dead_redis
    task = task_of(app, autoretry_for=(LockUnavailable,), max_retries=1)
    assert deliver(task, "a").info.state == "RETRY"
    failed = deliver(task, "a", retries=1).info
    assert type(failed.retval) is LockUnavailable
    assert type(failed.retval.__cause__).__name__ == "ConnectionError"


def test_it_runs_when_the_cache_is_back(app: Celery, sent: list[Any], settings: Any) -> None:
    settings.SINGLETASK_CACHE = "pymemcache"
    task = task_of(app, autoretry_for=(LockUnavailable,))
    with Memcached() as server, private_store(settings, "pymemcache", server.address):
        server.kill()
        assert deliver(task, "a").info.state == "RETRY"
        server.start()
        [message] = sent
        assert deliver(task, "a", retries=1, headers=message["headers"]).retval == "ran"


@pytest.mark.parametrize("errors", [(ZeroDivisionError,), (LockConflict, ZeroDivisionError)])
def test_an_error_of_the_body_is_retried_once(app: Celery, sent: list[Any], errors: Any) -> None:
    task = task_of(app, divide, autoretry_for=errors)
    assert deliver(task, "a").info.state == "RETRY"
    assert [message["retries"] for message in sent] == [1]
    assert deliver(task, "a", retries=3).info.state == "FAILURE"
    assert not task.lock("a").locked()


def test_a_message_that_waits_for_its_own_run_uses_up_no_retry(
    app: Celery, sent: list[Any]
) -> None:
    task = task_of(app, autoretry_for=(Exception,))
    with held_by("mine", task=task):
        assert deliver(task, "a").info.state == "IGNORED"
    assert [message["retries"] for message in sent] == [0]


@pytest.mark.parametrize("until", ["start", "finish", "expiry"])
def test_the_call_stays_queued_meanwhile(app: Celery, sent: list[Any], until: str) -> None:
    task = task_of(app, unique_until=until, autoretry_for=(LockConflict,), max_retries=1)
    task_id = task.delay("a").id
    with held_by("another", task=task):
        deliver(task, "a", task_id=task_id, headers=sent[0]["headers"])
        assert task.queued("a").id == task_id
        assert task.delay("a").id == task_id
        _first, retry = sent
        # After the last retry nobody comes back for it.
        deliver(task, "a", task_id=task_id, headers=retry["headers"], retries=1)
        assert task.queued("a") is None


def test_an_eager_call_is_retried_at_once(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(app, autoretry_for=(LockConflict,), max_retries=2)
    tries = []

    def free_at_last(take: Any, *arguments: Any, **options: Any) -> Any:
        tries.append(arguments)
        if len(tries) == 3:
            lock.free()
        return take(*arguments, **options)

    inside.answer(monkeypatch, "take", free_at_last)
    with held_by("another", task=task) as lock:
        assert task.apply(("a",)).get() == "ran"
    assert len(tries) == 3


def test_a_direct_call_raises_the_conflict(app: Celery, sent: list[Any]) -> None:
    task = task_of(app, autoretry_for=(LockConflict,))
    with held_by("another", task=task), pytest.raises(LockConflict):
        task("a")
    assert not sent


def test_a_direct_call_in_its_own_body_does_not_retry_the_message_around_it(
    app: Celery, sent: list[Any]
) -> None:
    def body(key: str) -> str:
        if key == "b":
            with pytest.raises(LockConflict):
                task("a")
        return "ran"

    task = task_of(app, body, autoretry_for=(LockConflict,))
    with held_by("another", task=task):
        assert deliver(task, "b").retval == "ran"
    assert not sent
