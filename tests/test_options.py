"""Wrong lock options are refused alike in the body of a class, in one call and by the check."""

from __future__ import annotations

import enum
import json
import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from celery import Celery
from django.core.checks import Error

from django_singletask import SingletonTask, checks
from django_singletask.conf import DOCS
from django_singletask.task import base
from django_singletask.task.header import HEADER, VERSION, WAITS, Header
from django_singletask.task.options import NAMES, OF_RUN, LockOptions, check_value

NAME = "shop.buy"
OF_TASK = f"of {NAME}"
OF_CALL = f"in lock_options of {NAME}"


class Wrong(NamedTuple):
    """Wrong options, and what each of the three places says about them.

    ``text`` is the message with ``{}`` for the place. ``in_class`` and ``in_call`` are the errors
    that are raised; None: nothing is. ``check`` is the number of the system check.
    """

    options: dict[str, Any]
    text: str
    in_class: type[Exception] | None
    in_call: type[Exception] | None
    check: str


NAN, MONTH = float("nan"), 30 * 24 * 60 * 60
LEAST = {
    "lock_timeout": f"above 0 and at most {MONTH} (30 days)",
    "lock_wait": f"0 or more and at most {MONTH} (30 days), or math.inf",
    "lock_at_least": f"0 or more and at most {MONTH} (30 days)",
    "unique_for": f"above 0 and at most {MONTH} (30 days)",
}
TOO_SMALL = {"lock_timeout": 0, "lock_wait": -1, "lock_at_least": -1, "unique_for": 0}
CHOICES = {
    "on_conflict": "skip, raise, wait, requeue, rerun",
    "unique_until": "None, start, finish, expiry",
    "on_duplicate": "return, raise, replace",
    "on_outage": "raise, run, skip",
    "lock_renew": "True, False",
    "lock_history": "True, False",
}


def wrong_seconds(option: str) -> list[Wrong]:
    number = f"{option} {{}} must be a number of seconds, {LEAST[option]}, not"
    small = TOO_SMALL[option]
    return [
        Wrong({option: "60"}, f"{number} '60'.", TypeError, TypeError, "E008"),
        Wrong({option: True}, f"{number} True.", TypeError, TypeError, "E008"),
        Wrong({option: small}, f"{number} {small}.", None, ValueError, "E008"),
        Wrong({option: NAN}, f"{number} nan.", None, ValueError, "E008"),
        Wrong({option: MONTH + 1}, f"{number} {MONTH + 1}.", None, ValueError, "E008"),
    ]


def wrong_choices(option: str) -> list[Wrong]:
    text = f"{option}={{value!r}} {{{{}}}} is not one of {CHOICES[option]}."
    wrong = [Wrong({option: 1}, text.format(value=1), TypeError, TypeError, "E012")]
    never = text.format(value="never")
    if "True" in CHOICES[option]:  # a string has the wrong type
        wrong.append(Wrong({option: "never"}, never, TypeError, TypeError, "E012"))
    else:
        wrong.append(Wrong({option: "never"}, never, None, ValueError, "E012"))
    return wrong


SLOTS = "lock_slots {} must be a whole number from 1 to 1000, not"
LIST = "lock_on {} must be a list of argument names, not"
PROBLEMS = [
    *(wrong for option in LEAST for wrong in wrong_seconds(option)),
    *(wrong for option in CHOICES for wrong in wrong_choices(option)),
    Wrong(
        {"lock_on": "a"},
        "lock_on='a' {} is a string; did you mean ['a']?",
        TypeError,
        TypeError,
        "E009",
    ),
    Wrong({"lock_on": 3}, f"{LIST} 3.", TypeError, TypeError, "E009"),
    Wrong({"lock_on": [3]}, f"{LIST} [3].", TypeError, TypeError, "E009"),
    Wrong(
        {"lock_name": 3},
        "lock_name {} must be a format string or a callable, not 3.",
        TypeError,
        TypeError,
        "E010",
    ),
    Wrong(
        {"lock_on": ["a"], "lock_name": "x:{a}"},
        "lock_on=['a'] and lock_name='x:{{a}}' {} cannot be combined. "
        f"Change or remove one of them; see {DOCS}/reference/options.html#pairs",
        TypeError,
        TypeError,
        "E011",
    ),
    Wrong(
        {"lock_renew": False},
        "lock_renew=False {} needs lock_timeout, a lease longer than any run.",
        None,
        TypeError,
        "E011",
    ),
    Wrong(
        {"on_conflict": "wait"},
        'on_conflict="wait" {} needs lock_wait, the longest wait in seconds.',
        None,
        ValueError,
        "E011",
    ),
    Wrong(
        {"on_conflict": "rerun", "lock_wait": 5},
        "lock_wait=5 {} has no effect with on_conflict='rerun'.",
        None,
        None,
        "E011",
    ),
    *(
        Wrong({"lock_slots": value}, f"{SLOTS} {value!r}.", TypeError, TypeError, "E008")
        for value in ("2", 2.0, True)
    ),
    Wrong({"lock_slots": 0}, f"{SLOTS} 0.", None, ValueError, "E008"),
    Wrong(
        {"on_skip": "report"},
        "on_skip {} must be a plain function, not 'report'.",
        TypeError,
        TypeError,
        "E012",
    ),
    Wrong(
        {"skip_result": dict},
        "skip_result {} must be a value (for a function use on_skip), not dict.",
        TypeError,
        TypeError,
        "E012",
    ),
]

# What only the arguments of the task show: a call learns of it when its key is made, by a message
# of its own that begins in the same way.
WITH_ARGUMENTS = [
    Wrong(
        {"lock_on": ["a", "feed"]},
        "lock_on=['a', 'feed'] {} names 'feed', which is not an argument. Its arguments are: a, b.",
        None,
        TypeError,
        "E009",
    ),
    Wrong(
        {"lock_name": "{a}"},
        "lock_name='{{a}}' {} has no fixed text: two tasks could share a lock by accident.",
        None,
        ValueError,
        "E010",
    ),
    Wrong(
        {"lock_name": ""},
        "lock_name='' {} has no fixed text: two tasks could share a lock by accident.",
        None,
        ValueError,
        "E010",
    ),
    Wrong(
        {"lock_name": "x:{feed}"},
        "lock_name='x:{{feed}}' {} names 'feed', which is not an argument. "
        "Its arguments are: a, b.",
        None,
        TypeError,
        "E010",
    ),
    Wrong(
        {"lock_name": "x:{"},
        "lock_name='x:{{' {} is not a format string: Single '{{' encountered in format string.",
        None,
        ValueError,
        "E010",
    ),
]


def body(a, b=2): ...


@pytest.fixture
def app(monkeypatch):
    """Give a Celery application of the test's own, whose tasks alone are checked."""
    app = Celery("checked", set_as_current=False, broker="memory://")
    monkeypatch.setattr(checks, "current_app", app)
    monkeypatch.setattr(base, "current_app", app)
    monkeypatch.setattr(app, "send_task", lambda *args, **options: None)
    return app


@pytest.fixture
def define(app):
    """Make the task, with options in its decorator."""

    def define_task(**options):
        return app.task(body, base=SingletonTask, name=NAME, lazy=False, shared=False, **options)

    return define_task


def identify(wrong: Wrong) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in wrong.options.items())


@pytest.mark.parametrize("wrong", PROBLEMS + WITH_ARGUMENTS, ids=identify)
def test_what_the_body_of_a_class_says(define, wrong):
    if wrong.in_class is None:
        define(**wrong.options)
        return
    with pytest.raises(wrong.in_class) as caught:
        define(**wrong.options)
    assert str(caught.value) == wrong.text.format(OF_TASK)


@pytest.mark.parametrize("wrong", PROBLEMS, ids=identify)
def test_what_the_options_of_a_call_say(define, wrong):
    task = define()
    if wrong.in_call is None:
        task.apply_async((1,), lock_options=wrong.options)
        return
    with pytest.raises(wrong.in_call) as caught:
        task.apply_async((1,), lock_options=wrong.options)
    assert str(caught.value) == wrong.text.format(OF_CALL)


@pytest.mark.parametrize(
    "wrong",
    [wrong for wrong in PROBLEMS if wrong.in_call and wrong.options.keys() <= {*OF_RUN}],
    ids=identify,
)
def test_what_a_run_says_where_no_check_has_run(define, wrong):
    task = define()
    for option, value in wrong.options.items():
        setattr(task, option, value)
    for run in (task, lambda a: task.apply((a,), throw=True), task.lock):
        with pytest.raises(wrong.in_call) as caught:
            run(1)
        assert str(caught.value) == wrong.text.format(OF_TASK)


@pytest.mark.parametrize("wrong", WITH_ARGUMENTS, ids=identify)
def test_a_call_whose_options_do_not_fit_the_arguments_is_not_sent(define, wrong):
    with pytest.raises(wrong.in_call):
        define().apply_async((1,), lock_options=wrong.options)


@pytest.mark.parametrize("wrong", PROBLEMS + WITH_ARGUMENTS, ids=identify)
def test_what_the_system_check_says(define, wrong):
    task = define()
    for option, value in wrong.options.items():
        setattr(task, option, value)
    [message] = checks.check_tasks()
    assert message.id == f"django_singletask.{wrong.check}"
    assert isinstance(message, Error) == (wrong.in_call is not None)
    assert message.msg == wrong.text.format(OF_TASK)
    assert message.hint


def test_every_number_of_the_system_check_is_seen_here():
    numbers = {wrong.check for wrong in PROBLEMS + WITH_ARGUMENTS}
    assert numbers == {"E008", "E009", "E010", "E011", "E012"}


def test_good_options_are_accepted_everywhere(define):
    """Negative control."""
    options = {
        "lock_timeout": 30,
        "lock_renew": False,
        "lock_on": ["a"],
        "on_conflict": "wait",
        "lock_wait": 0.5,
        "lock_at_least": 0,
        "lock_slots": 1,
        "on_skip": None,
        "on_outage": "raise",
        "skip_result": None,
        "unique_until": "start",
        "unique_for": MONTH,
        "on_duplicate": "raise",
        "lock_history": False,
    }
    assert options.keys() == NAMES - {"lock_name"}
    task = define(**options)
    task.apply_async((1,), lock_options=options)
    assert checks.check_tasks() == []


def test_a_name_of_the_call_replaces_the_arguments_of_the_task(define):
    task = define(lock_on=["a"])
    assert LockOptions.of(task, {"lock_name": "x"}).lock_on is None
    assert LockOptions.of(task, {"lock_wait": 5}).lock_on == ["a"]


FULL = Header(
    "an id",
    NAME,
    name="name",
    key="singletask:key",
    options={"lock_wait": 5},
    queued="the entry",
    token="a token",
    due=1_700_000_000.5,
    hops=3,
    met="a holder",
    outage_hops=2,
    requeued_at=1_700_000_001.5,
    redelivered=WAITS,
    delay=60.5,
    marked=True,
    received=1_700_000_002.5,
    ticket=["epoch", 7],
    never_gives_way=True,
    was="singletask:before",
)
"""A header with a value in each field."""


class TestHeader:
    def test_the_full_header_leaves_no_field_empty(self):
        assert all(vars(FULL).values())

    @pytest.mark.parametrize("header", [FULL, Header("an id", NAME)], ids=["full", "empty"])
    def test_what_was_written_is_read_again(self, header):
        headers = header.into({"trace": "7"})
        assert headers["trace"] == "7"
        assert Header.of(headers, "an id", NAME) == header

    @pytest.mark.parametrize(
        ("task_id", "task"), [("another", NAME), (None, NAME), ("an id", "shop.sell")]
    )
    def test_the_header_of_another_call_is_none(self, task_id, task):
        assert Header.of(FULL.into({}), task_id, task) is None

    @pytest.mark.parametrize("headers", [None, {}, {HEADER: None}, {HEADER: "text"}], ids=str)
    def test_headers_without_it_are_none(self, headers):
        assert Header.of(headers, "an id", NAME) is None

    def test_what_has_no_value_is_not_sent(self):
        wire = {"id": "an id", "task": NAME, "version": VERSION}
        assert Header("an id", NAME).into(None) == {HEADER: wire}

    def test_the_next_message_drops_what_is_of_this_one(self):
        header = replace(FULL)
        header.forget_message()
        assert (header.token, header.hops, header.redelivered) == (None, 0, 0)
        assert header.due == header.requeued_at == header.outage_hops == 0
        fields = {"token": FULL.token, "met": FULL.met, "hops": 3, "outage_hops": 2}
        fields |= {"redelivered": WAITS, "marked": True, "received": FULL.received}
        assert replace(header, due=FULL.due, requeued_at=FULL.requeued_at, **fields) == FULL

    def test_a_wait_without_end_travels_as_json(self):
        header = replace(FULL, options={"lock_wait": math.inf, "on_conflict": "wait"})
        headers = json.loads(json.dumps(header.into({}), allow_nan=False))
        assert Header.of(headers, "an id", NAME) == header


class TestMessageOfAnotherVersion:
    """While workers are replaced one by one, each reads the messages of the other version."""

    BEFORE = {
        "id": "an id",
        "task": NAME,
        "name": "name",
        "key": "singletask:key",
        "options": {"lock_wait": 5},
        "queued": "the entry",
        "token": "a token",
        "due": 1_700_000_000.5,
        "hops": 3,
        "redelivered": WAITS,
        "ticket": ["epoch", 7],
        "was": "singletask:before",
    }
    """What the first version with this header wrote."""

    NEW = {"met": None, "outage_hops": 0, "requeued_at": 0.0, "never_gives_way": False}
    NEW |= {"version": VERSION, "delay": 0.0, "marked": False, "received": 0.0}

    def test_one_of_the_version_before_is_read(self):
        headers = {HEADER: self.BEFORE}
        assert Header.of(headers, "an id", NAME) == replace(FULL, **self.NEW)

    def test_the_version_before_finds_what_it_knows(self):
        wire = json.loads(json.dumps(FULL.into({})))[HEADER]
        assert {name: wire[name] for name in self.BEFORE} == self.BEFORE
        assert wire.keys() - self.BEFORE.keys() == self.NEW.keys()

    def test_to_the_version_before_a_call_that_never_gives_way_has_no_ticket(self):
        """That version would let it give way, and its work would be lost."""
        wire = replace(FULL, ticket=None).into({})[HEADER]
        assert "ticket" not in wire

    def test_fields_of_a_newer_version_are_ignored(self):
        headers = {HEADER: {**FULL.into({})[HEADER], "field_from_2030": [1]}}
        assert Header.of(headers, "an id", NAME) == FULL


def test_options_of_a_newer_version_are_ignored_by_the_worker():
    header = Header("id", NAME, options={"lock_wait": 3})
    headers = header.into({})
    headers[HEADER]["options"] = {**headers[HEADER]["options"], "lock_from_2030": 2}
    assert Header.of(headers, "id", NAME) == header


def test_no_value_is_shown_before_it_is_wrong(define):
    """To show a lazy translation at import raises, and to show a queryset asks the database."""

    class Hidden:
        def __repr__(self):
            raise AssertionError

    define(skip_result=Hidden())


def test_a_mixin_may_give_an_option_as_a_property():
    class Mixin:
        @property
        def lock_timeout(self):
            return 7

    class Task(Mixin, SingletonTask):
        pass

    assert LockOptions.of(Task()).lock_timeout == 7


def test_lock_options_are_not_blamed_for_what_is_wrong_with_the_task(define):
    task = define(unique_for=10**8)
    LockOptions.check_call(task, {"on_conflict": "raise"})
    with pytest.raises(ValueError, match="unique_for"):
        LockOptions.check_call(task, {"unique_for": 10**8})


@pytest.mark.parametrize(
    ("option", "help"),
    [
        ("lock_timout", "did you mean 'lock_timeout'?"),
        ("speed", f"the options are {', '.join(sorted(NAMES))}."),
    ],
)
def test_what_an_unknown_option_of_a_call_says(define, option, help):
    with pytest.raises(TypeError) as caught:
        define().apply_async((1,), lock_options={option: 3})
    assert str(caught.value) == f"{option!r} {OF_CALL} is unknown; {help}"


@pytest.mark.parametrize("use", [lambda task: task(), lambda task: task.lock()])
def test_an_unknown_policy_is_refused_where_no_checks_run(use):
    app = Celery("unchecked", set_as_current=False, broker="memory://")

    @app.task(base=SingletonTask, name=NAME, shared=False, on_conflict="skpi")
    def buy():
        pass

    with pytest.raises(ValueError, match=r"on_conflict='skpi' of shop\.buy is not one of skip"):
        use(buy)


def test_a_policy_can_be_a_member_of_an_enumeration():
    class Policy(str, enum.Enum):  # noqa: UP042 - str() of it is not its value
        WAIT = "wait"

    check_value("on_conflict", "of a test", Policy.WAIT)
