"""What a run does if the cache cannot be used: ``on_outage``."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from django_singletask import LockError, LockUnavailable, SingletonTask, current_lock
from django_singletask.history import flush
from django_singletask.models import TaskLockEvent
from tests import inside
from tests.deliveries import collect_sent, deliver, held_by
from tests.entries import private_store
from tests.servers import Memcached, Redis, Server

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("empty_history"),
]

KINDS: dict[str, type[Server]] = {"redis": Redis, "pylibmc": Memcached, "pymemcache": Memcached}
POLICIES = ["skip", "raise", "wait", "requeue"]

WAITS, READS = 1, 2
"""What a header says of a redelivery, which waits for its first run, or reads its result."""

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


class Hops:
    """One message, which is delivered each time that it was published."""

    def __init__(self, app: Celery, sent: list[dict[str, Any]]) -> None:
        self.app, self.sent = app, sent

    def start(self, on_outage: str, header: Any = None, **options: Any) -> None:
        self.task = task_of(self.app, on_outage, **options)
        self.task.apply_async("a", task_id="mine")
        self.header.update(header or {})

    @property
    def header(self) -> dict[str, Any]:
        header: dict[str, Any] = self.sent[-1]["headers"]["singletask"]
        return header

    def deliver(self, **request: Any) -> Any:
        return deliver(self.task, "a", headers=self.sent[-1]["headers"], **request)

    def hop(self, **request: Any) -> Any:
        """Deliver the message, which is published again."""
        number = len(self.sent)
        end = self.deliver(**request)
        assert len(self.sent) == number + 1, end
        return end


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
    assert task.apply("a").get() == task("a") == result
    if (on_outage, policy) != ("skip", "requeue"):  # a message of it is postponed
        assert deliver(task, "a").retval == result


@pytest.mark.usefixtures("down")
@pytest.mark.parametrize("policy", POLICIES)
def test_by_default_each_policy_raises(app: Celery, sent: list[Any], policy: str) -> None:
    task = task_of(app, "raise", on_conflict=policy, lock_wait=0.1)
    for call in (lambda: task.apply("a", throw=True), lambda: task("a")):
        with pytest.raises(LockUnavailable):
            call()
    if policy != "requeue":
        assert type(deliver(task, "a").info.retval) is LockUnavailable
    assert not sent


@pytest.mark.usefixtures("down")
@pytest.mark.parametrize(
    ("on_outage", "row"),
    [("run", ("run", "unguarded", "", "mine")), ("skip", ("conflict", "", "skipped", "mine"))],
)
def test_the_history_shows_it(app: Celery, on_outage: str, row: Any) -> None:
    deliver(task_of(app, on_outage), "a")
    flush()
    event = TaskLockEvent.objects.get()
    assert (event.kind, event.outcome, event.result, event.task_id) == row
    reason = "The cache 'dead' cannot be used: ConnectionError" if on_outage == "run" else "outage"
    assert reason in event.reason


@pytest.mark.usefixtures("down")
def test_one_call_can_choose_it(app: Celery) -> None:
    task = task_of(app, "raise")
    assert task.apply("a", lock_options={"on_outage": "run"}).get() == "ran"
    assert task.apply("a", lock_options={"on_outage": "skip"}).get() == "skipped"


def test_a_wrong_value_is_refused(app: Celery) -> None:
    with pytest.raises(ValueError, match="on_outage='ignore' of"):
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
    store = inside.store_of("redis")
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
@pytest.mark.parametrize("on_outage", ["raise", "run", "skip"])
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
@pytest.mark.parametrize("on_outage", ["raise", "run", "skip"])
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


class TestPromised:
    """A message that was promised its turn is postponed while the cache cannot be asked."""

    @pytest.fixture
    def hops(self, app: Celery, sent: list[Any], down: None, monkeypatch: Any) -> Hops:
        monkeypatch.setattr("random.uniform", lambda low, high: high)
        return Hops(app, sent)

    @pytest.mark.parametrize("on_outage", ["raise", "skip"])
    @pytest.mark.parametrize("policy", POLICIES)
    def test_it_is_postponed(self, hops: Hops, on_outage: str, policy: str) -> None:
        """``"requeue"`` promises at once, the others when they postpone a message."""
        header = {} if policy == "requeue" else {"hops": 3}
        hops.start(on_outage, header, on_conflict=policy, lock_wait=60)
        assert hops.hop().info.state == "IGNORED"
        assert hops.header.get("hops") == header.get("hops")
        assert not log
        flush()
        assert not TaskLockEvent.objects.exists()

    def test_the_pauses_grow_to_a_quarter_of_the_lease(self, hops: Hops) -> None:
        hops.start("raise", {"hops": 9}, on_conflict="requeue", lock_timeout=8)
        for _hop in range(4):
            hops.hop()
        assert [message["countdown"] for message in hops.sent[1:]] == [1, 1, 1.5, 2]

    def test_it_is_logged_once(self, hops: Hops, caplog: Any) -> None:
        hops.start("raise", {"hops": 3, "ticket": ["epoch", 1]}, on_conflict="requeue")
        for _hop in range(3):
            hops.hop()
        [record] = [record for record in caplog.records if record.name == "django_singletask"]
        assert record.levelno == logging.WARNING
        text = record.getMessage()
        assert text.startswith("tests.raise(key='a') (singletask:tests.raise:")
        assert re.search(
            r"\): the call of task mine on .* is postponed\. The cache 'dead' cannot", text
        )
        assert text.endswith("'manage.py locks probe' tests it.")
        assert hops.header["ticket"] == ["epoch", 1]

    def test_the_next_outage_is_another(self, hops: Hops, caplog: Any, settings: Any) -> None:
        hops.start("raise", on_conflict="requeue")
        hops.hop()
        settings.SINGLETASK_CACHE = "redis"
        with held_by("another", task=hops.task):
            hops.hop()
        assert hops.header["hops"] == 1
        assert "outage_hops" not in hops.header
        flush()
        assert TaskLockEvent.objects.get().reason == "requeue"
        settings.SINGLETASK_CACHE = "dead"
        hops.hop()
        assert caplog.text.count("the call of task mine on") == 2
        settings.SINGLETASK_CACHE = "redis"
        assert hops.deliver().retval == "ran"

    @pytest.mark.parametrize("on_outage", ["raise", "skip"])
    def test_lock_wait_counts_from_the_first_hop(self, hops: Hops, on_outage: str) -> None:
        hops.start(on_outage, on_conflict="requeue", lock_wait=30)
        before = time.time()
        hops.hop()
        since = hops.header["requeued_at"]
        assert before <= since <= time.time()
        hops.hop()
        assert hops.header["requeued_at"] == since
        hops.header["requeued_at"] -= 31
        assert type(hops.deliver().info.retval) is LockUnavailable
        assert len(hops.sent) == 3

    def test_the_first_hop_can_be_that_of_a_conflict(self, hops: Hops) -> None:
        since = time.time() - 29.5
        header = {"hops": 9, "requeued_at": since}
        hops.start("raise", header, on_conflict="requeue", lock_wait=30)
        hops.hop()
        assert hops.header["requeued_at"] == since
        assert hops.sent[-1]["countdown"] < 0.51

    def test_lock_wait_limits_no_other_policy(self, hops: Hops) -> None:
        header = {"hops": 1, "requeued_at": time.time() - 10}
        hops.start("raise", header, on_conflict="raise", lock_wait=1)
        assert hops.hop().info.state == "IGNORED"

    def test_expires_is_kept(self, hops: Hops) -> None:
        hops.start("raise", on_conflict="requeue")
        hops.hop(expires="2030-01-01T00:00:00+00:00")
        assert hops.sent[-1]["expires"] == "2030-01-01T00:00:00+00:00"

    def test_run_keeps_no_message_waiting(self, hops: Hops) -> None:
        hops.start("run", {"hops": 3, "ticket": ["epoch", 1]}, on_conflict="requeue")
        assert hops.deliver().retval == "ran"
        assert log == [False]

    @pytest.mark.parametrize("seen", [WAITS, READS])
    def test_no_redelivery_runs(self, hops: Hops, seen: int) -> None:
        hops.start("run", {"hops": 3, "redelivered": seen}, on_conflict="requeue", lock_wait=1)
        assert hops.hop().info.state == "IGNORED"
        assert hops.header["redelivered"] == WAITS


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
