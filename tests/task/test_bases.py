"""Other bases of a task keep their say, in either order of the bases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from celery import Celery, Task
from celery.app.trace import _install_stack_protection, reset_worker_optimizations
from django.db import connection, transaction

from django_singletask import DuplicateTask, LockError, SingletonTask, current_lock
from tests.deliveries import collect_sent, deliver, held_by

pytestmark = [
    pytest.mark.django_db(databases="__all__", transaction=True),
    pytest.mark.usefixtures("on_redis"),
]


@pytest.fixture
def app() -> Iterator[Celery]:
    options = {"broker": "memory://", "backend": "cache+memory://"}
    with Celery("bases", set_as_current=False, **options) as app:
        yield app


@pytest.fixture
def sent(app: Celery, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect what would be published."""
    return collect_sent(app, monkeypatch)


def message(task: Any, *args: Any) -> Any:
    return deliver(task, *args).retval


def message_in_a_worker(task: Any, *args: Any) -> Any:
    """A worker replaces Celery's ``Task.__call__``."""
    _install_stack_protection()
    try:
        return message(task, *args)
    finally:
        reset_worker_optimizations()


def applied(task: Any, *args: Any) -> Any:
    return task.apply(args, task_id="mine").get()


def eager(task: Any, *args: Any) -> Any:
    task.app.conf.task_always_eager = True
    return task.apply_async(args, task_id="mine").get()


def direct(task: Any, *args: Any) -> Any:
    return task(*args)


WITH_A_REQUEST = [message, message_in_a_worker, applied, eager]
WAYS = [*WITH_A_REQUEST, direct]
on_all_ways = pytest.mark.parametrize("call", WAYS)
on_all_ways_with_a_request = pytest.mark.parametrize("call", WITH_A_REQUEST)

log: list[Any] = []


@pytest.fixture(autouse=True)
def empty_log() -> None:
    log.clear()


class InTransaction(Task):
    """As shops do it: the body in a transaction."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with transaction.atomic():
            log.append(("transaction", bool(current_lock())))
            return super().__call__(*args, **kwargs)


class ForTenant(Task):
    """As projects with many tenants do it: one argument chooses the tenant."""

    def __call__(self, tenant: str, *args: Any, **kwargs: Any) -> Any:
        with self.tenant(tenant):
            return super().__call__(f"object of {tenant}", *args, **kwargs)

    @contextmanager
    def tenant(self, tenant: str) -> Iterator[None]:
        log.append(("tenant", bool(current_lock())))
        yield
        log.append(("no tenant", bool(current_lock())))


class Traced(Task):
    """It calls the body by itself, and its own hooks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        log.append(("span", bool(current_lock())))
        return self.run(*args, **kwargs)


class TriesAgain(Task):
    """As projects do it whose database connection can break."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except OSError:
            return super().__call__(*args, **kwargs)


class Hooks(Task):
    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        log.append("sent")
        return super().apply_async(args, kwargs, **options)

    def before_start(self, *args: Any) -> None:
        log.append("before_start")

    def on_success(self, *args: Any) -> None:
        log.append("on_success")

    def on_failure(self, *args: Any) -> None:
        log.append("on_failure")

    def after_return(self, *args: Any) -> None:
        log.append("after_return")


class LockFirst(SingletonTask, InTransaction):
    pass


class LockLast(InTransaction, SingletonTask):
    pass


class Under(LockFirst):
    pass


def body_of(app: Celery, base: type, **options: Any) -> Any:
    @app.task(bind=True, base=base, shared=False, name="tests.body", **options)
    def body(self: Any, key: str) -> str:
        log.append((key, self.request.id, bool(current_lock()), connection.in_atomic_block))
        return "ran"

    return body


@on_all_ways
@pytest.mark.parametrize(("base", "inside"), [(LockFirst, True), (LockLast, False), (Under, True)])
def test_another_call_runs_once_on_its_side_of_the_lock(
    app: Celery, call: Callable[..., Any], base: type, inside: bool
) -> None:
    task = body_of(app, base)
    assert call(task, "a") == "ran"
    task_id = None if call is direct else "mine"
    assert log == [("transaction", inside), ("a", task_id, True, True)]
    assert not task.lock("a").locked()


class Noted(Task):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        log.append(self.request)
        return super().__call__(*args, **kwargs)


@on_all_ways_with_a_request
def test_the_body_has_the_request_of_the_message(app: Celery, call: Callable[..., Any]) -> None:
    """Celery itself pushes another one."""

    @app.task(bind=True, base=type("Base", (SingletonTask, Noted), {}), shared=False)
    def body(self: Any) -> None:
        log.append(self.request)

    call(body)
    before, inside = log
    assert inside is before


@on_all_ways
def test_two_others_are_called_in_their_order(app: Celery, call: Callable[..., Any]) -> None:
    class Both(InTransaction, SingletonTask, ForTenant):
        pass

    call(body_of(app, Both, lock_name="one"), "shop")
    expected = ["transaction", "tenant", "object of shop", "no tenant"]
    assert [entry[0] for entry in log] == expected
    assert [entry[1] for entry in log[:2]] == [False, True]


@on_all_ways
def test_one_that_calls_the_body_itself_runs_inside_the_lock(
    app: Celery, call: Callable[..., Any]
) -> None:
    class Locked(SingletonTask, Traced):
        pass

    assert call(body_of(app, Locked), "a") == "ran"
    assert [entry[0] for entry in log] == ["span", "a"]
    assert log[0] == ("span", True)


def test_one_that_is_no_task_is_refused_behind_the_lock() -> None:
    class Mixin:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    class Before(Mixin, SingletonTask):
        pass

    with pytest.raises(TypeError, match=r"Mixin\.__call__ would never be called .* before Single"):

        class Behind(SingletonTask, Mixin):
            pass


class Batches(Task):
    """As celery-batches does it: the messages of many calls are the argument of one body."""

    def Strategy(self, *args: Any) -> Any:
        raise AssertionError("no worker starts here")


@pytest.mark.parametrize("bases", [(SingletonTask, Batches), (Batches, SingletonTask)])
def test_one_that_receives_the_messages_itself_is_refused(bases: Any) -> None:
    with pytest.raises(TypeError, match="Both has a Strategy of its own, as with celery-batches"):
        type("Both", bases, {})


@pytest.mark.parametrize("options", [{}, {"lock_on": ["tenant"]}, {"lock_name": "all"}])
def test_the_tasks_of_celery_itself_take_no_lock(options: dict[str, Any]) -> None:
    with Celery("whole", task_cls=SingletonTask, set_as_current=False) as app:
        app.conf.task_annotations = {"*": options}
        accumulate = app.tasks["celery.accumulate"]
        assert accumulate.apply((["a"],), {"index": 0}).get() == ["a"]
        with pytest.raises(LockError, match="takes no lock"):
            accumulate.lock(["a"], index=0)


class ForUser(Task):
    """It sends an argument beside those of the body, and takes it away before the body."""

    typing = False

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        return super().apply_async(args, {**(kwargs or {}), "user": "ada"}, **options)

    def __call__(self, *args: Any, user: str = "", **kwargs: Any) -> Any:
        log.append(user)
        return super().__call__(*args, **kwargs)


def test_an_argument_that_another_base_sends_makes_no_other_lock(app: Celery) -> None:
    app.conf.task_always_eager = True
    task = body_of(app, type("Base", (SingletonTask, ForUser), {}), skip_result="skipped")
    assert task.delay("a").get() == "ran"
    assert [entry if isinstance(entry, str) else entry[0] for entry in log] == ["ada", "a"]
    with held_by("another", task=task):
        assert task.delay("a").get() == "skipped"


@on_all_ways_with_a_request
@pytest.mark.parametrize("base", [LockFirst, LockLast])
def test_a_conflict_is_met_once(app: Celery, call: Callable[..., Any], base: type) -> None:
    task = body_of(app, base, skip_result="skipped")
    with held_by("another", task=task):
        assert call(task, "a") == "skipped"
    assert log == ([] if base is LockFirst else [("transaction", False)])


@pytest.mark.parametrize("deliver_to", [message, message_in_a_worker, applied])
def test_the_second_try_of_a_base_around_the_lock_is_the_same_message(
    app: Celery, deliver_to: Callable[..., Any]
) -> None:
    base = type("TriesAgainAround", (TriesAgain, SingletonTask), {"abstract": True})

    @app.task(bind=True, base=base, shared=False)
    def body(self: Any) -> str:
        lock = current_lock()
        log.append((self.request.id, lock and lock.holder().task_id))
        if len(log) == 1:
            raise OSError
        return "ran"

    assert deliver_to(body) == "ran"
    assert log == [("mine", "mine")] * 2


@pytest.mark.parametrize("until", ["start", "finish", "expiry"])
def test_a_second_try_is_no_longer_queued(app: Celery, until: str, sent: list[Any]) -> None:
    base = type("TriesAgainAround", (TriesAgain, SingletonTask), {"abstract": True})

    @app.task(bind=True, base=base, shared=False, unique_until=until)
    def body(self: Any) -> str:
        log.append(self.request.id)
        if len(log) == 1:
            raise OSError
        return "ran"

    task_id = body.delay().id
    assert deliver(body, task_id=task_id, headers=sent[0]["headers"]).retval == "ran"
    assert log == [task_id] * 2
    assert body.queued() is None


@pytest.mark.parametrize("base", [LockFirst, LockLast])
@pytest.mark.parametrize("until", ["start", "finish", "expiry"])
def test_a_retry_sends_the_message_again_and_keeps_its_entry(
    app: Celery, base: type, until: str, sent: list[Any]
) -> None:

    @app.task(bind=True, base=base, shared=False, unique_until=until)
    def body(self: Any, key: str) -> None:
        raise self.retry(countdown=0)

    task_id = body.delay("a").id
    deliver(body, "a", task_id=task_id, headers=sent[0]["headers"])
    messages = [(message["task_id"], message.get("retries")) for message in sent]
    assert messages == [(task_id, None), (task_id, 1)]
    queued = body.queued("a")
    assert (queued and queued.id) == (task_id if until == "finish" else None)


@on_all_ways
def test_a_call_from_its_own_body_has_a_request_of_its_own(
    app: Celery, call: Callable[..., Any]
) -> None:
    requests = []

    @app.task(bind=True, base=LockFirst, shared=False)
    def body(self: Any, key: str) -> None:
        requests.append(self.request)
        if key == "a":
            body("b")
            requests.append(self.request)

    call(body, "a")
    before, inner, after = requests
    assert after is before
    assert inner is not before


@on_all_ways_with_a_request
def test_a_base_that_calls_the_body_by_itself_leaves_later_requests_alone(
    app: Celery, call: Callable[..., Any]
) -> None:
    base = type("LockedAndTraced", (SingletonTask, Traced), {"abstract": True})

    @app.task(bind=True, base=base, shared=False)
    def body(self: Any) -> Any:
        self.push_request(id="inner")
        try:
            return self.request.id
        finally:
            self.pop_request()

    assert call(body) == "inner"


@pytest.mark.parametrize("order", ["first", "last"])
def test_hooks_are_called_in_either_order(app: Celery, order: str) -> None:
    bases = (SingletonTask, Hooks) if order == "first" else (Hooks, SingletonTask)
    base = type("Hooked", bases, {"abstract": True})
    app.conf.task_always_eager = True

    @app.task(base=base, shared=False, unique_until="start")
    def body(fails: bool) -> None:
        if fails:
            raise ValueError

    body.delay(False)
    assert log == ["sent", "before_start", "on_success", "after_return"]
    log.clear()
    body.delay(True)
    assert log == ["sent", "before_start", "on_failure", "after_return"]


class Defaults(Task):
    """As projects set what holds for each of their calls."""

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        for option in ("producer", "link", "link_error", "shadow"):
            log.append(options.setdefault(option, f"default {option}"))
        return super().apply_async(args, kwargs, **options)


@pytest.mark.parametrize("bases", [(SingletonTask, Defaults), (Defaults, SingletonTask)])
def test_another_base_can_set_the_options_that_were_not_passed(
    app: Celery, bases: Any, sent: list[Any]
) -> None:
    task = body_of(app, type("Base", bases, {"abstract": True}))
    task.apply_async(("a",), link="passed link", shadow="passed shadow")
    expected = ["default producer", "passed link", "default link_error", "passed shadow"]
    assert log == expected
    [message] = sent
    # Celery's own Task.apply_async gives the shadow on as another option.
    assert [message[option] for option in ("producer", "link", "link_error")] == expected[:3]


def test_options_can_be_passed_by_position(app: Celery, sent: list[Any]) -> None:
    task = body_of(app, type("Base", (SingletonTask, Defaults), {"abstract": True}))
    task.apply_async(("a",), None, "mine", None, None, "on error")
    assert log == ["default producer", "default link", "on error", "default shadow"]
    assert [message["link_error"] for message in sent] == ["on error"]


@pytest.mark.parametrize(("rest", "link"), [([None] * 5, None), ([None, "one"], "another")])
def test_too_much_by_position_is_an_error(app: Celery, rest: Any, link: Any) -> None:
    with pytest.raises(TypeError):
        body_of(app, SingletonTask).apply_async(("a",), None, "mine", *rest, link=link)


class OnCommit(Task):
    """As projects do it that send nothing before the commit."""

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        send = super().apply_async
        transaction.on_commit(lambda: send(args, kwargs, **options))


LOCK_FIRST = (SingletonTask, OnCommit)
LOCK_LAST = (OnCommit, SingletonTask)


@pytest.mark.parametrize("bases", [LOCK_FIRST, LOCK_LAST])
class TestSentOnCommit:
    @pytest.fixture
    def make(self, app: Celery, bases: Any) -> Callable[..., Any]:
        return lambda **options: body_of(app, type("Base", bases, {"abstract": True}), **options)

    def roll_back(self, *calls: Callable[[], Any]) -> None:
        with transaction.atomic():
            for call in calls:
                call()
            transaction.set_rollback(True)

    @pytest.mark.parametrize("until", ["start", "finish", "expiry"])
    def test_a_rollback_leaves_no_entry(
        self, bases: Any, make: Callable[..., Any], sent: list[Any], until: str
    ) -> None:
        task = make(unique_until=until)
        self.roll_back(lambda: task.delay("a"))
        assert task.queued("a") is None
        task.delay("a")
        assert len(sent) == 1

    def test_only_a_base_before_the_lock_lets_duplicates_be_stopped(
        self, bases: Any, make: Callable[..., Any], sent: list[Any]
    ) -> None:
        task = make(unique_until="start")
        with transaction.atomic():
            task.delay("a")
            task.delay("a")
        assert len(sent) == {LOCK_FIRST: 2, LOCK_LAST: 1}[bases]
        assert bool(task.queued("a")) == (bases is LOCK_LAST)

    @pytest.mark.parametrize("until", ["start", "finish", "expiry"])
    def test_the_run_of_the_call_stops_duplicates_as_usual(
        self, bases: Any, make: Callable[..., Any], sent: list[Any], until: str
    ) -> None:
        task = make(unique_until=until, on_duplicate="raise")
        task.delay("a")
        deliver(task, "a", **message_of(sent[0]))
        assert log == [("a", sent[0]["task_id"], True, False)]
        stays = pytest.raises(DuplicateTask) if until == "expiry" else nullcontext()
        with stays:
            task.delay("a")

    def test_a_rollback_does_not_replace_the_call_before(
        self, bases: Any, make: Callable[..., Any], sent: list[Any]
    ) -> None:
        task = make(unique_until="start", on_duplicate="replace", skip_result="skipped")
        task.delay("a")
        self.roll_back(lambda: task.delay("a"))
        assert deliver(task, "a", **message_of(sent[0])).retval == "ran"

    @pytest.mark.parametrize("again", ["retry", "successor"])
    def test_what_a_body_sends_and_rolls_back_leaves_no_entry(
        self, app: Celery, bases: Any, sent: list[Any], again: str
    ) -> None:
        base = type("Base", bases, {"abstract": True})

        @app.task(bind=True, base=base, shared=False, unique_until="finish")
        def body(task: Any) -> None:
            sends = {"retry": lambda: task.retry(throw=False), "successor": task.delay}
            self.roll_back(sends[again])
            log.append(task.queued().id)

        body.delay()
        deliver(body, **message_of(sent[0]))
        assert log == [sent[0]["task_id"]]
        assert len(sent) == 1
        assert body.queued() is None


def message_of(options: dict[str, Any]) -> dict[str, Any]:
    return {"task_id": options["task_id"], "headers": options["headers"]}
