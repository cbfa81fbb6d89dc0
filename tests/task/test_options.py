"""Each option has the limits of the table tests/limits.py, wherever it is set.

In the body of a class, in one call, at the first use of a task, on an attribute as
``task_annotations`` set it, and, where they have the option, in ``TaskLock`` and ``only_one``. The
last part is about the header in which the options of a call travel.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery, current_app
from django.core.checks import Error

from django_singletask import SingletonTask, TaskLock, checks, only_one
from django_singletask.task import header
from django_singletask.testing import no_locks
from tests import inside
from tests.deliveries import collect_sent
from tests.limits import OF_FUNCTIONS, OF_LOCKS, OPTIONS, SETTINGS

NAME = "shop.buy"
OF_TASK = f" of {NAME}"
OF_CALL = f" in lock_options of {NAME}"
BESIDE: dict[str, dict[str, Any]] = {
    "lock_renew": {"lock_timeout": 60},
    "lock_wait": {"on_conflict": "requeue"},
    "on_conflict": {"lock_wait": 5},
}
"""What an option needs beside it to have an effect."""
WRONG = [
    (option, value, error)
    for option, limit in OPTIONS.items()
    for error, values in ((TypeError, limit.wrong_types), (ValueError, limit.wrong_values))
    for value in values
]
each_wrong_value = pytest.mark.parametrize(("option", "value", "error"), WRONG)


def body(a: Any, b: Any = 2) -> None: ...


def anything(**kwargs: Any) -> None: ...


def bound(self: Any, a: Any, b: Any = 2) -> None: ...


APP = Celery("checked", set_as_current=False, broker="memory://")


@pytest.fixture
def app() -> Iterator[Celery]:
    """Give a Celery application of these tests, whose tasks alone are checked."""
    before = current_app._get_current_object()
    APP.set_current()
    APP.tasks.pop(NAME, None)
    yield APP
    before.set_current()


@pytest.fixture
def sent(app: Celery, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    return collect_sent(app, monkeypatch)


@pytest.fixture
def define(app: Celery, sent: Any) -> Any:
    """Make the task, with options in its decorator; what is sent goes nowhere."""

    def define_task(function: Any = body, **options: Any) -> Any:
        app.tasks.pop(NAME, None)
        options = {"base": SingletonTask, "name": NAME, "lazy": False, "shared": False, **options}
        return app.task(function, **options)

    return define_task


def the_message_of_the_check(task: Any, **attributes: Any) -> Any:
    """Return what the check says, without the beginning of its id."""
    for option, value in attributes.items():
        setattr(task, option, value)
    [message] = checks.check_tasks()
    assert isinstance(message, Error)
    return message


def test_the_table_has_each_option_and_its_default():
    defaults = {name: option.default for name, option in inside.task_options().items()}
    assert {name: limit.usual[0] for name, limit in OPTIONS.items()} == defaults


def test_lock_x_of_a_task_is_x_elsewhere():
    """It has the same meaning. What only one of them has is in docs/guides/outside-tasks.rst."""
    of_lock = inspect.signature(TaskLock).parameters.keys()
    of_function = inspect.signature(only_one).parameters.keys()
    assert of_lock == {*OF_LOCKS.values(), "name", "cache"}
    assert of_function == {*OF_FUNCTIONS.values(), "function", "key"}


@pytest.mark.parametrize("option", OPTIONS)
def test_what_fits_is_accepted_everywhere(define, option):
    for value in [*OPTIONS[option].usual, *OPTIONS[option].extreme]:
        options = {**BESIDE.get(option, {}), option: value}
        task = define(**options)
        assert [message for message in checks.check_tasks() if isinstance(message, Error)] == []
        if option != "on_skip":  # a message cannot carry a function
            task.apply_async((1,), lock_options=options)


@pytest.mark.parametrize("option", OF_LOCKS)
def test_what_fits_a_task_fits_a_lock_and_a_function(option):
    name = OF_LOCKS[option]
    beside = {"timeout": 60} if name == "renew" else {}
    values = [*OPTIONS[option].usual, *OPTIONS[option].extreme]
    if name == "on_conflict":
        values = ["skip", "raise"]
    if name == "wait":
        values.remove(None)  # there it is 0
    for value in values:
        TaskLock("nightly", **beside, **{name: value})
        only_one(**beside, **{name: value})


@each_wrong_value
def test_the_body_of_a_class_refuses_a_wrong_type(define, option, value, error):
    """The check reports a wrong number, which a subclass may change."""
    if error is ValueError:
        define(**{option: value})
        return
    with pytest.raises(TypeError) as caught:
        define(**{option: value})
    assert str(caught.value) == OPTIONS[option].message(option, value, OF_TASK)


@each_wrong_value
def test_a_call_refuses_a_wrong_value(define, option, value, error):
    with pytest.raises(error) as caught:
        define().apply_async((1,), lock_options={option: value})
    assert str(caught.value) == OPTIONS[option].message(option, value, OF_CALL)


@each_wrong_value
def test_the_system_check_reports_a_wrong_value(define, option, value, error):
    message = the_message_of_the_check(define(), **{option: value})
    assert message.id == f"django_singletask.{OPTIONS[option].check}"
    assert message.msg == OPTIONS[option].message(option, value, OF_TASK)
    assert f" {option}, or remove it. See https://" in message.hint


@each_wrong_value
def test_each_use_refuses_a_wrong_value_where_no_check_has_run(define, sent, option, value, error):
    task = define()
    setattr(task, option, value)
    for use in (task, lambda a: task.apply((a,)).get(), task.delay, task.lock, task.queued):
        with pytest.raises(error) as caught:
            use(1)
        assert str(caught.value) == OPTIONS[option].message(option, value, OF_TASK)
    assert sent == []


def test_a_wrong_option_stops_neither_the_other_tasks_nor_the_check(app, monkeypatch):
    """Celery binds all tasks when something asks for the first of them."""
    app = Celery("annotated", broker="memory://")
    app.conf.task_annotations = {"shop.sell": {"lock_wait": -1}}
    sent = collect_sent(app, monkeypatch)
    for name, policy in {"shop.buy": "skips", "shop.sell": "requeue", "shop.pay": "raise"}.items():
        app.task(body, base=SingletonTask, name=name, shared=False, on_conflict=policy)
    texts = {message.obj: message.msg for message in checks.check_tasks()}
    assert texts.keys() == {"shop.buy", "shop.sell"}
    app.tasks["shop.pay"].delay(1)
    for name, text in texts.items():
        with pytest.raises(ValueError, match=f"of {name} ") as caught:
            app.tasks[name].delay(1)
        assert str(caught.value) == text
    assert [message["name"] for message in sent] == ["shop.pay"]


def test_options_are_checked_once_each_time_a_task_is_bound(define, app):
    task = define()
    task.lock(1)
    task.unique_for = 0
    task.lock(1)
    task.bind(app)
    with pytest.raises(ValueError, match="unique_for"):
        task.lock(1)


def test_the_first_use_needs_what_an_abstract_base_may_lack(define):
    base = type("Base", (SingletonTask,), {"abstract": True, "lock_renew": False})
    define(base=base, lock_timeout=60).lock(1)
    with pytest.raises(TypeError, match="needs lock_timeout"):
        define(base=base).lock(1)


@pytest.mark.parametrize(
    ("option", "value", "error"), [each for each in WRONG if each[0] in OF_FUNCTIONS]
)
def test_a_lock_and_a_function_refuse_a_wrong_value(option, value, error):
    """The message begins with the name that the user wrote."""
    name = OF_FUNCTIONS[option]
    with pytest.raises(error, match=f"^{name}[ =]"):
        only_one(**{name: value})
    if option in OF_LOCKS:
        with pytest.raises(error, match=f"^{name}[ =]"):
            TaskLock("nightly", **{name: value})


NO_TEXT = "has no fixed text: two tasks could share a lock by accident."
NO_FORMAT = "is not a format string: "
NO_ARGUMENT = "names {!r}, which is not an argument. Its arguments are: a, b."


@pytest.mark.parametrize(
    ("option", "value", "error", "text"),
    [
        ("lock_on", ["a", "feed"], TypeError, NO_ARGUMENT.format("feed")),
        ("lock_on", ["self"], TypeError, NO_ARGUMENT.format("self")),
        *(("lock_name", value, ValueError, NO_TEXT) for value in ("", " ", "{a}", "{a} {b}")),
        ("lock_name", "x{", ValueError, f"{NO_FORMAT}Single '{{' encountered in format string."),
        ("lock_name", "x{a", ValueError, f"{NO_FORMAT}expected '}}' before end of string."),
        *(
            ("lock_name", f"x:{{{field}}}", TypeError, NO_ARGUMENT.format(name))
            for field, name in (
                ("feed", "feed"),
                ("", ""),
                ("0", "0"),
                ("c.id", "c"),
                ("c[i]", "c"),
            )
        ),
    ],
)
def test_what_does_not_fit_the_arguments_is_reported_and_not_sent(
    define, sent, option, value, error, text
):
    with pytest.raises(error) as caught:
        define(bound, bind=True).apply_async((1,), lock_options={option: value})
    assert str(caught.value).endswith(f"{OF_TASK} {text}")
    assert sent == []
    message = the_message_of_the_check(define(bound, bind=True, **{option: value}))
    assert message.id == f"django_singletask.{OPTIONS[option].check}"
    assert message.msg == f"{option}={value!r}{OF_TASK} {text}"


def test_a_task_that_takes_any_argument_may_name_any(define):
    for option in ({"lock_on": ["feed"]}, {"lock_name": "x{feed}"}):
        define(anything, **option)
        assert checks.check_tasks() == []


def test_a_string_is_no_list_of_arguments(define):
    with pytest.raises(TypeError) as caught:
        define(lock_on="a")
    assert str(caught.value) == f"lock_on='a'{OF_TASK} is a string; did you mean ['a']?"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_has_its_limits(settings, name):
    limit = SETTINGS[name]
    for value in [*limit.usual, *limit.extreme]:
        setattr(settings, name, value)
        assert checks.check_settings() == []
    for value in [*limit.wrong_types, *limit.wrong_values]:
        setattr(settings, name, value)
        [message] = checks.check_settings()
        assert isinstance(message, Error)
        assert message.id == f"django_singletask.{limit.check}"
        assert message.msg == limit.message(name, value)
        assert message.hint.startswith(f"Set {name} to ")


def test_a_name_of_the_call_replaces_the_arguments_of_the_task(define, sent):
    task = define(lock_on=["a"])
    task.apply_async((1,), lock_options={"lock_name": "x{a}"})
    task.apply_async((1, 3), lock_options={"lock_wait": 5, "on_conflict": "wait"})
    names = [message["headers"][header.HEADER]["name"] for message in sent]
    assert names == ["x1", f"{NAME}(a=1)"]


def test_no_value_is_shown_before_it_is_wrong(define):
    """To show a lazy translation at import raises, and to show a queryset asks the database."""

    class Hidden:
        def __repr__(self) -> str:
            raise AssertionError

    define(skip_result=Hidden())


def test_a_mixin_may_give_an_option_as_a_property(app):
    class Mixin:
        @property
        def lock_timeout(self) -> float:
            return 7

    class Task(Mixin, SingletonTask):
        name = NAME

        def run(self) -> None: ...

    with no_locks(), app.register_task(Task()).lock() as lock:
        assert 6 < lock.remaining() <= 7


def test_lock_options_are_not_blamed_for_what_is_wrong_with_the_task(define):
    task = define(unique_for=10**8)
    with pytest.raises(ValueError, match="unique_for of shop"):
        task.apply_async((1,), lock_options={"on_conflict": "raise"})
    with pytest.raises(ValueError, match="unique_for in lock_options"):
        define().apply_async((1,), lock_options={"unique_for": 10**8})


@pytest.mark.parametrize(
    ("option", "help"),
    [
        ("lock_timout", "did you mean 'lock_timeout'?"),
        ("speed", f"the options are {', '.join(sorted(OPTIONS))}."),
    ],
)
def test_what_an_unknown_option_of_a_call_says(define, option, help):
    with pytest.raises(TypeError) as caught:
        define().apply_async((1,), lock_options={option: 3})
    assert str(caught.value) == f"{option!r}{OF_CALL} is unknown; {help}"


FULL = header.Header(
    "an id",
    NAME,
    name="name",
    key="singletask:key",
    options={"lock_wait": math.inf, "on_conflict": "wait"},
    queued="the entry",
    token="a token",
    due=1_700_000_000.5,
    hops=3,
    met="a holder",
    outage_hops=2,
    requeued_at=1_700_000_001.5,
    redelivered=header.WAITS,
    delay=60.5,
    marked=True,
    received=1_700_000_002.5,
    ticket=["epoch", 7],
    was="singletask:before",
)
"""A header with a value in each field, and an option that JSON has no number for."""


def read(headers: Any, task_id: str | None = "an id", task: str = NAME) -> header.Header | None:
    return header.Header.of(headers, task_id, task)


def wire(**fields: Any) -> dict[str, Any]:
    """Return the fields of the full header in a message, with others."""
    return {**json.loads(json.dumps(FULL.into({}), allow_nan=False))[header.HEADER], **fields}


class TestHeader:
    def test_the_full_header_leaves_no_field_empty(self):
        assert all(vars(FULL).values())

    @pytest.mark.parametrize("written", [FULL, header.Header("an id", NAME)], ids=["full", "empty"])
    def test_what_was_written_is_read_again(self, written):
        headers = json.loads(json.dumps(written.into({"trace": "7"}), allow_nan=False))
        assert headers["trace"] == "7"
        assert read(headers) == written

    @pytest.mark.parametrize(
        ("task_id", "task"), [("another", NAME), (None, NAME), ("an id", "shop.sell")]
    )
    def test_the_header_of_another_call_is_none(self, task_id, task):
        assert read(FULL.into({}), task_id, task) is None

    @pytest.mark.parametrize("headers", [None, {}, {"singletask": None}, {"singletask": "text"}])
    def test_headers_without_it_are_none(self, headers):
        assert read(headers) is None

    def test_what_has_no_value_is_not_sent(self):
        fields = {"id": "an id", "task": NAME, "version": header.VERSION}
        assert header.Header("an id", NAME).into(None) == {header.HEADER: fields}

    def test_the_next_message_drops_what_is_of_this_one(self):
        kept = replace(FULL)
        kept.forget_message()
        forgotten = {name for name, value in vars(FULL).items() if value != vars(kept)[name]}
        of_message = {"token", "met", "redelivered", "marked", "hops", "outage_hops", "due"}
        assert forgotten == {*of_message, "requeued_at"}
        assert not any(vars(kept)[name] for name in forgotten)


class TestMessageOfAnotherVersion:
    """While workers are replaced one by one, each reads the messages of the other version."""

    BEFORE = {"id", "task", "name", "key", "options", "queued", "token", "due", "hops"}
    BEFORE |= {"redelivered", "ticket", "was"}
    """What the first version with this header wrote, and finds in the messages of this one."""

    NEW = {"met": None, "outage_hops": 0, "requeued_at": 0.0}
    NEW |= {"version": header.VERSION, "delay": 0.0, "marked": False, "received": 0.0}
    """What this version makes of its messages."""

    def test_one_of_the_version_before_is_read(self):
        assert wire().keys() == self.BEFORE | self.NEW.keys()
        before = {name: wire()[name] for name in self.BEFORE}
        assert read({header.HEADER: before}) == replace(FULL, **self.NEW)

    def test_fields_and_options_of_a_newer_version_are_ignored(self):
        options = {**wire()["options"], "lock_from_2030": 2}
        newer = wire(field_from_2030=[1], options=options)
        assert read({header.HEADER: newer}) == FULL
