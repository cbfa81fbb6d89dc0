"""The base class: when it takes the lock, what it sends, and what it refuses."""

from __future__ import annotations

import functools
import uuid
from decimal import Decimal
from unittest.mock import ANY

import pytest
from celery import Celery, shared_task
from celery.exceptions import Ignore, Reject, Retry

from django_singletask import LockConflict, LockError, SingletonTask, TaskLock, current_lock
from django_singletask.models import TaskLockEvent
from tests import inside
from tests.deliveries import collect_sent, header_of, receive, refuse
from tests.inside import headers_for

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]


class PrivateApp(Celery):
    """An application whose tasks are not shared with every other application."""

    def task(self, *args, **options):
        return super().task(*args, **{"shared": False, **options})


@pytest.fixture
def app():
    options = {"broker": "memory://", "backend": "cache+memory://"}
    with PrivateApp("one", set_as_current=False, **options) as app:
        yield app


@pytest.fixture
def sent(app, monkeypatch):
    """Collect what would be published."""
    return collect_sent(app, monkeypatch)


def takes_a(a):
    return a


@pytest.fixture
def task(app):
    @app.task(base=SingletonTask, bind=True, skip_result="skipped")
    def add(self, a, b=2):
        assert current_lock().owned()
        return a + b

    return add


class TestRunning:
    @pytest.fixture(params=["apply", "direct", "eager"])
    def call(self, app, task, request):
        """Give each way to call a task without a message."""
        app.conf.task_always_eager = True
        ways = {"apply": task.apply, "eager": task.apply_async}
        if request.param == "direct":
            return task
        return lambda *args: ways[request.param](args).get()

    def test_a_call_takes_the_lock_and_gives_it_back(self, task, call):
        assert call(1) == 3
        assert not task.lock(1).locked()

    def test_a_call_is_skipped_while_the_lock_is_held(self, task, call):
        call(2)
        before = dict(vars(task))
        with task.lock(1):
            assert call(1) == "skipped"
        assert vars(task) == before  # no state stays on the task

    def test_run_is_the_bare_body(self, app):
        @app.task(base=SingletonTask)
        def bare():
            return current_lock()

        assert bare.run() is None

    def test_other_arguments_are_another_lock(self, task):
        with task.lock(1):
            assert task(2) == 4

    def test_raise(self, app):
        @app.task(base=SingletonTask, on_conflict="raise")
        def work():
            pass

        with work.lock() as held:
            with pytest.raises(LockConflict) as caught:
                work()
            assert caught.value.holder.token == held.token
            assert work.apply().state == "FAILURE"

    def test_wait_raises_after_its_seconds(self, app):
        @app.task(base=SingletonTask, on_conflict="wait", lock_wait=0.2)
        def work():
            return "ran"

        lock = work.lock()
        inside.write(lock, inside.holder_of(lock).encode())
        with pytest.raises(LockConflict):
            work()
        row = TaskLockEvent.objects.get()
        assert (row.reason, row.result) == ("wait", "failed")
        lock.clear()
        assert work() == "ran"

    @pytest.mark.parametrize(
        ("error", "result"),
        [
            (ZeroDivisionError(), "raised"),
            (SystemExit(), "terminated"),
            (Ignore(), "ignored"),
            (Reject(), "ignored"),
            (Retry(), "retried"),
        ],
    )
    def test_the_history_says_how_it_ended(self, app, error, result):
        @app.task(base=SingletonTask)
        def work():
            raise error

        with pytest.raises(type(error)):
            work()
        assert not work.lock().locked()
        assert TaskLockEvent.objects.get().result == result

    def test_a_store_that_goes_down_leaves_the_result_alone(self, app, monkeypatch, caplog):
        @app.task(base=SingletonTask, lock_timeout=1)
        def work():
            inside.answer(monkeypatch, "release", refuse)
            return "done"

        assert work.apply().get() == "done"
        assert "could not be released" in caplog.text

    def test_apply_honours_the_options_of_the_call(self, app):
        @app.task(base=SingletonTask)
        def work():
            return current_lock().timeout, current_lock().name

        options = {"lock_timeout": 5, "lock_name": "other"}
        result = work.apply(task_id="an id", lock_options=options)
        assert (result.id, result.get()) == ("an id", (5, "other"))

    def test_a_lock_in_the_body_of_any_task_names_that_task(self, app):
        @app.task
        def plain():
            with TaskLock("inner") as lock:
                return lock.holder()

        holder = plain.apply(task_id="an id").get()
        assert (holder.task, holder.task_id) == (plain.name, "an id")


class TestKinds:
    def test_class_based(self, app):
        class Import(SingletonTask):
            name = "tests.Import"
            lock_on = ("url",)

            def run(self, url, depth=1):
                return current_lock().name

        task = app.register_task(Import())
        assert task("x", depth=2) == "tests.Import(url='x')"

    def test_a_body_that_is_a_partial_has_only_the_arguments_of_the_call(self, app):
        class Import(SingletonTask):
            name = "tests.Import"
            run = staticmethod(functools.partial(lambda kind, url: current_lock().key, "full"))

        task = app.register_task(Import())
        assert task.apply(("x",)).get() == task("x") == task.lock("x").key

    def test_shared_task_of_two_applications(self):
        @shared_task(base=SingletonTask, name=f"shared.{uuid.uuid4().hex}")
        def work():
            return current_lock().key

        with Celery("one", set_as_current=False) as one, Celery("two", set_as_current=False) as two:
            assert one.tasks[work.name]() == two.tasks[work.name]()


class TestSending:
    def test_the_key_travels_in_one_header(self, task, sent):
        result = task.delay(1)
        header = header_of(sent[0])
        assert header == {
            "id": result.id,
            "task": task.name,
            "version": 1,
            "due": ANY,
            "key": task.lock(1).key,
            "name": f"{task.name}(a=1)",
        }

    def test_a_default_that_the_body_changes_keeps_the_key(self, app, sent):
        class Collect(SingletonTask):
            name = "collect"

            def __init__(self, *numbers):
                pass  # as a task class may: nothing of the base is called

            def run(self, a, seen=[]):  # noqa: B006 - the mistake that is tested
                seen.append(a)

        task = app.register_task(Collect(7))
        before = task.lock(1, []).key
        task.run(1)
        task.delay(1)
        assert header_of(sent[0])["key"] == before
        assert header_of(sent[0])["name"] == "collect(a=1)"

    def test_the_callers_headers_stay(self, task, sent):
        headers = {"trace": "7"}
        task.apply_async((1,), headers=headers)
        assert sent[0]["headers"]["trace"] == "7"
        assert headers == {"trace": "7"}

    def test_a_header_that_was_passed_on_is_not_honoured(self, task, sent):
        task.delay(1)
        task.apply_async((5,), headers=sent[0]["headers"])
        assert header_of(sent[1])["key"] == task.lock(5).key

    def test_the_header_of_another_task_with_the_same_id_is_not_honoured(self, app, task, sent):
        """``replace(other.s().set(headers=self.request.headers))`` keeps the id."""

        @app.task(base=SingletonTask)
        def other(a):
            pass

        first = task.delay(1)
        other.apply_async((1,), task_id=first.id, headers=sent[0]["headers"])
        assert header_of(sent[1])["key"] == other.lock(1).key

    def test_a_retry_keeps_the_key(self, task, sent):
        first = task.delay(1)
        headers = headers_for(task, **{**header_of(sent[0]), "key": "singletask:kept"})
        task.apply_async((1,), task_id=first.id, headers=headers)
        assert header_of(sent[1])["key"] == "singletask:kept"

    def test_a_retry_with_other_arguments_has_another_key(self, app, sent):
        @app.task(base=SingletonTask, bind=True)
        def work(self, x):
            self.retry(args=(x + 1,), countdown=0)

        header = {"key": work.lock(1).key, "name": "n", "options": {"lock_wait": 1}}
        with pytest.raises(Retry):
            receive(work, 1, header=header)
        header = header_of(sent[0])
        assert header["key"] == work.lock(2).key
        assert header["options"] == {"lock_wait": 1}

    def test_the_worker_honours_the_header(self, app):
        @app.task(base=SingletonTask, bind=True)
        def work(self):
            return current_lock().key, current_lock().timeout

        options = {"lock_timeout": 9}
        headers = headers_for(work, "i", key="singletask:k", name="k", options=options)
        result = work.apply(task_id="i", headers=headers).get()
        assert result == ("singletask:k", 9)
        other = work.apply(task_id="j", headers=headers).get()
        assert other == (work.lock().key, 60)

    def test_a_callable_name_need_not_travel(self, app, sent):
        @app.task(base=SingletonTask)
        def work(x):
            pass

        work.apply_async((1,), lock_options={"lock_name": lambda x: f"number {x}"})
        header = header_of(sent[0])
        assert header["name"] == "number 1"
        assert "options" not in header

    def test_a_hidden_argument_is_not_shown(self, task, sent):
        task.apply_async(("secret",), argsrepr="(…)")
        assert "secret" not in str(header_of(sent[0]))
        assert header_of(sent[0])["key"] == task.lock("secret").key

    def test_an_unknown_lock_option_is_refused(self, task):
        with pytest.raises(TypeError, match="'on_conflct'"):
            task.apply_async((1,), lock_options={"on_conflct": "skip"})

    def test_an_unstable_argument_fails_at_enqueue(self, task):
        with pytest.raises(TypeError, match="argument 'a'"):
            task.delay(object())

    def test_before_and_after_the_serializer(self, task):
        value = {"when": Decimal("1.50"), 2: (1, 2)}
        assert task.lock(value).key == task.lock({"2": [1, 2], "when": "1.50"}).key


class TestDecoration:
    @pytest.mark.parametrize(
        ("option", "here"),
        [
            ("once", "lock_on, unique_until, unique_for and on_duplicate"),
            ("unique_on", "lock_on"),
            ("lock_expiry", "unique_for"),
            ("raise_on_duplicate", "on_duplicate"),
        ],
    )
    def test_an_option_of_another_library_is_named(self, app, task, sent, option, here):
        with pytest.raises(TypeError, match=f"no option '{option}': use {here}"):
            app.task(base=SingletonTask, lazy=False, **{option: 1})(takes_a)
        with pytest.raises(TypeError, match=f"no option '{option}': use {here}"):
            task.apply_async((1,), **{option: 1})
        assert not sent

    @pytest.mark.parametrize(
        ("option", "here"), [("slots", "lock_slots"), ("lock_key", "lock_name")]
    )
    def test_an_option_of_only_one_is_named(self, app, option, here):
        with pytest.raises(TypeError, match=f"no option '{option}': use {here}"):
            app.task(base=SingletonTask, lazy=False, **{option: 1})(takes_a)

    @pytest.mark.parametrize("option", ["lock_ttl", "unique_by"])
    def test_what_looks_like_an_option_of_locks_and_is_none_is_refused(self, app, option):
        with pytest.raises(TypeError, match=f"no option '{option}': the options are lock_at_least"):
            app.task(base=SingletonTask, lazy=False, **{option: 1})(takes_a)

    def test_a_lock_option_of_a_call_belongs_into_lock_options(self, task, sent):
        with pytest.raises(TypeError, match=r"write lock_options=\{'on_conflict': …\}"):
            task.apply_async((1,), on_conflict="raise")
        with pytest.raises(TypeError, match="must be a dict, not 'raise'"):
            task.apply_async((1,), lock_options="raise")
        assert not sent

    def test_a_misspelt_option_suggests_the_right_one(self, app):
        with pytest.raises(TypeError, match=r"'on_conflit': did you mean 'on_conflict'\?"):
            app.task(base=SingletonTask, lazy=False, on_conflit="raise")(takes_a)

    @pytest.mark.parametrize(
        ("option", "hint"),
        [
            ("lock_timout", "'lock_timeout'"),
            ("unique_untill", "'unique_until'"),
            ("on_konflict", "'on_conflict'"),
            ("lock_wiat", "'lock_wait'"),
            ("on_sikp", "'on_skip'"),
        ],
    )
    def test_a_misspelt_option_of_a_subclass_is_refused(self, option, hint):
        name = f"{__name__}.Own"
        with pytest.raises(TypeError, match=f"{name} has no option '{option}': .*{hint}"):
            type("Own", (SingletonTask,), {option: 5, "__module__": __name__})

    def test_a_subclass_may_have_attributes_of_its_own(self):
        class Own(SingletonTask):
            lock_timeout = 5
            lock_owner = "billing"
            lock_color = "red"
            timeout = 7
            once = True
            on_success_mail = "a@example.org"
            _lock_timeout = 9

            def on_success(self, *args):
                pass

            def on_skipped(self):
                pass

        assert Own.lock_owner == "billing"

    def test_an_attribute_that_is_no_option_is_accepted(self, app):
        task = app.task(base=SingletonTask, lazy=False, rate_limit="9/s", owner="me")(takes_a)
        assert task.owner == "me"

    def test_coroutine_and_generator_functions_are_refused(self, app):
        async def coroutine():
            pass

        def generator():
            yield

        for function in (coroutine, generator):
            with pytest.raises(TypeError, match=function.__name__):
                app.task(base=SingletonTask, lazy=False)(function)

    def test_the_conflict_is_added_to_throws(self, app):
        @app.task(base=SingletonTask, throws=(KeyError,))
        def work():
            pass

        assert work.throws == (KeyError, LockConflict)

    def test_lock_name_as_a_format_string(self, app):
        @app.task(base=SingletonTask, lock_name="customer:{customer_id}")
        def bill(customer_id, month):
            return current_lock().name

        @app.task(base=SingletonTask, lock_name="customer:{customer_id}", skip_result="skipped")
        def remind(customer_id):
            pass

        assert bill(7, "may") == "customer:7"
        with TaskLock("customer:7"):
            assert remind(7) == "skipped"


class TestLockOfTheBody:
    """The lock that a body sees is in use by its delivery, which alone ends it."""

    def test_a_block_in_the_body_does_not_end_it(self, app):
        @app.task(base=SingletonTask)
        def work():
            with pytest.raises(LockError, match="in use"), current_lock():
                pass
            return current_lock().owned()

        assert work.apply(throw=True).get()

    def test_a_body_that_released_it_cannot_take_it_again(self, app):
        @app.task(base=SingletonTask)
        def work():
            lock = current_lock()
            lock.release()
            with pytest.raises(LockError, match="in use"):
                lock.acquire()

        work.apply(throw=True)
        assert not work.lock().locked()

    def test_it_is_one_object(self, app):
        @app.task(base=SingletonTask)
        def work():
            current_lock().mark = "mine"
            return current_lock().mark

        assert work.apply(throw=True).get() == "mine"
