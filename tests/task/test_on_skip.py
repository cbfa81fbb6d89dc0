"""on_skip: code of the project's own for a call that is skipped."""

from __future__ import annotations

import functools

import pytest
from celery import Celery
from celery.exceptions import Reject, Retry

from django_singletask import LockConflict, SingletonTask, current_lock
from django_singletask.models import TaskLockEvent
from django_singletask.testing import hold
from tests import inside
from tests.deliveries import collect_sent, held_by, receive, receive_sent
from tests.testapp import tasks


@pytest.fixture
def define():
    app = Celery("skips", set_as_current=False, broker="memory://")

    def define_task(body=lambda a, b=2: "ran", **options):
        body.__name__ = "buy"
        options = {"base": SingletonTask, "lazy": False, "shared": False, **options}
        return app.task(body, name="shop.buy", **options)

    return define_task


def note(*args, **kwargs):
    return args, kwargs


def skipped(task, *args, **kwargs):
    with hold(task, *args, **kwargs):
        return task.apply(args, kwargs).get()


def test_the_result_is_that_of_on_skip(define):
    task = define(on_skip=note, skip_result="unused", on_outage="skip")
    (conflict, *args), kwargs = skipped(task, 1, b=3)
    assert (args, kwargs) == ([1], {"b": 3})
    assert isinstance(conflict, LockConflict)


def test_a_direct_call_may_update_its_state_which_it_has_not(define):
    def busy(task, conflict, *args):
        task.update_state(state="BUSY")
        return "busy"

    task = define(lambda task, a: None, on_skip=busy, bind=True)
    task.app.conf.result_backend = "cache+memory://"
    with hold(task, "a"):
        assert task("a") == "busy"


def test_a_direct_call_is_skipped_alike(define):
    task = define(on_skip=note)
    with hold(task, 1):
        (_conflict, *args), kwargs = task(1)
    assert (args, kwargs) == ([1], {})


def test_the_conflict_knows_holder_time_left_and_lock(define):
    def look(conflict, a):
        assert current_lock() is None
        with pytest.raises(LockConflict), conflict.lock:
            pass
        return conflict.name, conflict.holder.host, conflict.remaining, conflict.lock.holder()

    task = define(on_skip=look)
    with hold(task, 1) as holder:
        name, host, remaining, again = task.apply((1,)).get()
    assert (name, host, again) == ("shop.buy(a=1)", "elsewhere", holder)
    assert remaining > 80_000


def test_its_error_is_the_error(define):
    def refuse(conflict, a):
        raise ValueError("busy")

    with pytest.raises(ValueError, match="busy"):
        skipped(define(on_skip=refuse), 1)


class Noting:
    def __call__(self, *args):
        return args, {}


FUNCTIONS = pytest.mark.parametrize(
    "function", [note, functools.partial(note), Noting()], ids=["function", "partial", "callable"]
)


@FUNCTIONS
def test_a_function_of_the_decorator_takes_the_arguments_of_the_call(define, function):
    (conflict, *args), _kwargs = skipped(define(on_skip=function), 1)
    assert conflict.name == "shop.buy(a=1)"
    assert args == [1]


@FUNCTIONS
def test_a_function_of_the_decorator_takes_the_task_first_if_the_body_does(define, function):
    task = define(lambda self, a: "ran", bind=True, on_skip=function)
    (first, conflict, *args), _kwargs = skipped(task, 1)
    assert first is task
    assert conflict.name == "shop.buy(a=1)"
    assert args == [1]


@pytest.mark.parametrize("bind", [False, True])
def test_a_method_of_the_class_takes_the_task_first(define, bind):
    class Base(SingletonTask):
        abstract = True

        def on_skip(self, conflict, a):
            return self.name, conflict.name, a

    task = define((lambda self, a: "ran") if bind else (lambda a: "ran"), base=Base, bind=bind)
    assert skipped(task, 1) == ("shop.buy", "shop.buy(a=1)", 1)


def test_for_one_call_with_apply(define):
    task = define()
    with hold(task, 1):
        (_conflict, *args), _kwargs = task.apply((1,), lock_options={"on_skip": note}).get()
        assert args == [1]
        assert task.apply((1,)).get() is None


def test_for_one_call_none_brings_the_result_back(define):
    task = define(on_skip=note)
    with hold(task, 1):
        options = {"on_skip": None, "skip_result": "busy"}
        assert task.apply((1,), lock_options=options).get() == "busy"


def test_a_function_cannot_travel(define):
    with pytest.raises(TypeError, match="cannot send on_skip, a function: set it on the task"):
        define().apply_async((1,), lock_options={"on_skip": note})


def test_a_coroutine_function_is_refused(define):
    async def on_skip(conflict):
        pass

    with pytest.raises(TypeError, match=r"on_skip of shop\.buy must be a plain function"):
        define(on_skip=on_skip)


@pytest.mark.parametrize("policy", ["raise", "wait", "requeue"])
def test_other_policies_do_not_call_it(define, policy):
    task = define(on_skip=note, on_conflict=policy, lock_wait=0.01)
    with pytest.raises(LockConflict):
        skipped(task, 1)


# With the history and real stores

WITH_REDIS = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]


class TestMessages:
    pytestmark = WITH_REDIS

    @pytest.fixture
    def on_skip(self, monkeypatch):
        """Give the function that sets on_skip of a task of the test's application."""
        return lambda task, function: monkeypatch.setattr(task, "on_skip", function, raising=False)

    @pytest.fixture
    def queued(self, monkeypatch):
        """Send a call whose entry stops its equals, and give its header."""
        sent = collect_sent(tasks.unique.app, monkeypatch)
        tasks.unique.apply_async(("a",), task_id="mine")
        return sent

    def meet(self, queued, **request):
        with held_by("another", task=tasks.unique):
            return receive_sent(tasks.unique, queued[-1], **request)

    def test_it_is_still_a_skip_for_the_history(self, on_skip):
        on_skip(tasks.hold, lambda conflict, key: "noted")
        with held_by("another"):
            assert receive(tasks.hold, "a") == "noted"
        assert TaskLockEvent.objects.get(kind="conflict").reason == "skip"

    def test_the_entry_of_a_call_that_is_skipped_is_freed(self, on_skip, queued):
        on_skip(tasks.unique, lambda conflict, key: "noted")
        assert tasks.unique.queued("a").id == "mine"
        assert self.meet(queued) == "noted"
        assert tasks.unique.queued("a") is None

    @pytest.mark.parametrize("requeue", [True, False])
    def test_reject(self, on_skip, queued, monkeypatch, requeue):
        def reject(conflict, key):
            raise Reject(requeue=requeue)

        on_skip(tasks.unique, reject)
        monkeypatch.setattr(tasks.unique, "acks_late", True)
        with pytest.raises(Reject):
            self.meet(queued)
        assert (tasks.unique.queued("a") is not None) == requeue

    def test_a_retry_that_raises_nothing_keeps_the_entry(self, on_skip, queued):
        def again(conflict, key):
            tasks.unique.retry(countdown=1, throw=False)
            return "noted"

        on_skip(tasks.unique, again)
        assert self.meet(queued) == "noted"
        assert tasks.unique.queued("a").id == "mine"

    def test_a_retry_that_cannot_be_published_frees_the_entry(self, on_skip, queued, monkeypatch):
        def again(conflict, key):
            raise tasks.unique.retry(countdown=1)

        def send_task(*args, **options):
            raise OSError("the broker is away")

        on_skip(tasks.unique, again)
        monkeypatch.setattr(tasks.unique.app, "send_task", send_task)
        with pytest.raises(Reject):
            self.meet(queued)
        assert tasks.unique.queued("a") is None

    @pytest.mark.parametrize("until", ["start", "finish", "expiry"])
    def test_a_retry_keeps_the_entry_until_its_turn(self, on_skip, queued, monkeypatch, until):
        monkeypatch.setattr(tasks.unique, "unique_until", until)

        def again(conflict, key):
            raise tasks.unique.retry(countdown=9000)

        on_skip(tasks.unique, again)
        entry = inside.queued_entry(tasks.unique, "a")
        inside.write(entry, inside.read(entry).value, 300)  # some time has passed
        with pytest.raises(Retry):
            self.meet(queued)
        assert len(queued) == 2
        assert queued[1]["retries"] == 1
        # The end of "expiry" counts from the sending.
        end = 300 if until == "expiry" else 12_600
        assert end - 100 < entry.remaining() <= end
        assert tasks.unique.queued("a").id == "mine"
        on_skip(tasks.unique, None)
        assert self.meet(queued, retries=1) == "skipped"
        assert tasks.unique.queued("a") is None
