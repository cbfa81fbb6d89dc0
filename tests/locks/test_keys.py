"""The name and the key of a lock: the same for one call, wherever and however it is made."""

from __future__ import annotations

import datetime
import enum
import hashlib
import inspect
import pickle
import re
import uuid
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import AppRegistryNotReady
from django.utils.functional import lazy, lazystr
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kombu.serialization import dumps, loads

from django_singletask.locks import keys, parameters

TASK = "feeds.tasks.import_feed"


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Name(str, enum.Enum):  # noqa: UP042 - str() of it is not its value
    FIRST = "first"


class Number(int): ...


class Feet(float): ...


class Zero(enum.IntEnum):
    NONE = 0


Point = namedtuple("Point", "x y")


def f(a: Any, b: Any = 2, *, c: Any = None) -> None: ...


def anything(*args: Any, **kwargs: Any) -> None: ...


def no_arguments() -> None: ...


def positional_only(a: Any, /, **kwargs: Any) -> None: ...


def made_of(
    options: dict[str, Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> keys.LockKey:
    """Return the lock of a call of a task with this body and these options."""
    taken = parameters.Parameters(inspect.signature(function))
    facts = {"task": TASK, "parameters": taken, **options}
    return keys.call_key(args=args, kwargs=kwargs, **facts)


call = partial(made_of, {})


def key_of(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> str:
    return call(function, *args, **kwargs).key


def name_of(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> str:
    return call(function, *args, **kwargs).name


def named(lock_name: Any, *args: Any, shown: str | None = None, **kwargs: Any) -> keys.LockKey:
    return made_of({"lock_name": lock_name, "shown": shown}, f, *args, **kwargs)


def sent(value: Any, serializer: str = "json") -> Any:
    """Return what arrives of a value that is sent in a message."""
    content_type, encoding, payload = dumps(value, serializer)
    return loads(payload, content_type, encoding, accept={content_type})


# One call, one key


def test_positional_keyword_and_default_arguments_are_one_call():
    whole = key_of(f, 1, 2, c=None)
    assert whole == key_of(f, 1) == key_of(f, 1, b=2) == key_of(f, a=1) == key_of(f, b=2, a=1)
    assert len({whole, key_of(f, 1, 3), key_of(f, 1, c=3), key_of(f, 1, c=4)}) == 4


FORMS: list[tuple[Any, list[Any], list[Any]]] = [
    # A value, its other forms, and other values.
    (0, [Zero.NONE], [False, None, 0.0, -0.0, "0", ""]),
    (1, [], [True, 1.0, "1", Decimal(1), 2]),
    (3, [Level.HIGH, Number(3)], [3.0]),
    (1.5, [Feet(1.5)], ["1.5"]),
    (0.0, [], [-0.0]),
    (float("nan"), [float("nan")], [None]),
    (None, [], [False, "", [], "None"]),
    (10**300, [10**300], [10**300 + 1]),
    ("red", [Color.RED, mark_safe("red"), lazystr("red")], [b"red"]),
    ("Yes", [gettext_lazy("Yes")], []),  # in the current language
    ("\ud800", [], ["\ud801"]),
    ("a" * 10_000, [], ["a" * 9_999]),
    (b"\xff", [bytearray(b"\xff"), memoryview(b"\xff")], ["\xff"]),
    ((), [[]], [{}, set("a")]),
    ([1, [0]], [(1, (0,))], [[[0], 1], [True, [0]], [1, [False]], [1.0, [0]], [[1], 0]]),
    ([1, 2], [Point(1, 2)], [["1,2"]]),
    (["a,b"], [], [["a", "b"]]),
    ({"x": 1, "y": {"1": 2}}, [{"y": {1: 2}, "x": 1}], [{"x": True, "y": {1: 2}}, {"x": 1}]),
    ({"x": {"p": 1, "q": 2}}, [OrderedDict(x=OrderedDict(q=2, p=1))], [[["x", {}]]]),
    ({"null": 1, "true": 2, "1.5": 3}, [{None: 1, True: 2, 1.5: 3}], []),
    ({"3": 1, "first": 2}, [{Name.FIRST: 2, Level.HIGH: 1}], []),
    ({1, 2, 10}, [frozenset([10, 2, 1])], [{1, 2}]),
    ({(1, 2), (1, 3)}, [{(1, 3), (1, 2)}], []),
    (Decimal("1.10"), ["1.10"], [1.1, Decimal("1.1")]),
    (PurePosixPath("a/b"), [PurePosixPath("a/./b"), "a/b"], ["a", ["a", "b"]]),
    (datetime.date(2026, 1, 2), ["2026-01-02"], [datetime.datetime(2026, 1, 2)]),
    (datetime.timedelta(seconds=1), [], [datetime.timedelta(microseconds=1)]),
]


each_value = pytest.mark.parametrize(
    ("value", "forms", "others"), FORMS, ids=lambda value: repr(value)[:30]
)


@each_value
def test_forms_of_one_value_are_one_call(value, forms, others):
    assert {key_of(f, form) for form in forms} <= {key_of(f, value)}
    assert key_of(f, value) not in {key_of(f, other) for other in others}


@each_value
def test_only_a_form_of_the_default_equals_it(value, forms, others):
    def body(b: Any = value) -> None: ...

    assert {call(body, form) for form in [value, *forms]} == {call(body)}
    assert call(body) not in {call(body, other) for other in others}


zones = st.sampled_from([datetime.UTC, datetime.timezone(datetime.timedelta(hours=5))])
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.uuids(),
    st.dates(),
    st.times(),
    st.datetimes(timezones=st.none() | zones),
    st.decimals(),
    st.binary(),
    st.sampled_from([Level.HIGH, Name.FIRST, lazystr("later")]),
)
values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner, inner), st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=10,
)


@settings(deadline=None)
@given(values)
def test_any_json_message_keeps_name_and_key(value):
    assume(not has_equal_names(value))
    for function in (f, lambda a=value: None):
        assert call(function, *sent([value])) == call(function, value)


@settings(deadline=None)
@given(values | st.just(Color.RED) | st.timedeltas() | st.sets(st.text() | st.integers()))
def test_any_pickled_message_keeps_the_key(value):
    assert key_of(f, pickle.loads(pickle.dumps(value))) == key_of(f, value)


def has_equal_names(value: Any) -> bool:
    """Say whether a JSON object would have one name twice; the order decides which one stays."""
    if isinstance(value, dict):
        twice = len({str(name) for name in value}) < len(value)
        return twice or any(map(has_equal_names, value.values()))
    return isinstance(value, (list, tuple)) and any(map(has_equal_names, value))


@pytest.mark.only_all("it tries many calls")
@settings(deadline=None)
@given(st.lists(values, max_size=3), st.dictionaries(st.text(), values, max_size=3))
def test_calls_of_any_signature_have_a_safe_key_and_name(args, kwargs):
    assert_safe(call(anything, *args, **kwargs))


# Arguments that equal their defaults


def test_name_leaves_out_what_equals_its_default():
    assert name_of(f, 1, 2, c=None) == name_of(f, 1) == f"{TASK}(a=1)"


def test_argument_that_is_added_with_a_default_changes_no_key():
    def first(a: Any) -> None: ...

    def second(a: Any, b: Any = 2) -> None: ...

    assert key_of(first, 1) == key_of(second, 1) == key_of(second, 1, b=2)


def test_changed_default_splits_only_calls_that_pass_it():
    def old(a: Any, b: Any = 2) -> None: ...

    def new(a: Any, b: Any = 3) -> None: ...

    assert key_of(old, 1) == key_of(new, 1)
    assert key_of(old, 1, 2) != key_of(new, 1, 2)
    assert key_of(old, 1, 3) != key_of(new, 1, 3)


@pytest.mark.parametrize("added", [anything, lambda a, *args, b=2, **kwargs: None])
def test_added_variable_arguments_change_no_key(added):
    def first(a: Any) -> None: ...

    assert key_of(added, a=1) == key_of(first, 1)


def test_default_that_the_body_changes_is_compared_as_it_was_before():
    def append(a: Any, seen: list[Any] = []) -> None:  # noqa: B006 - the mistake that is tested
        seen.append(a)

    body = parameters.Parameters(inspect.signature(append))
    before = keys.call_key(TASK, body, (1, []), {})
    append(1)
    assert keys.call_key(TASK, body, (1,), {}) == before
    assert keys.call_key(TASK, body, (1, []), {}) == before
    assert keys.call_key(TASK, body, (1, [1]), {}) != before


def unready() -> str:
    raise AppRegistryNotReady("Apps aren't loaded yet.")


@pytest.mark.parametrize(
    "default",
    [object(), [object()], User(pk=1), 10**5000, [10**5000], lazy(unready, str)()],
    ids=["object", "list", "model", "number", "numbers", "not ready"],
)
def test_default_without_stable_form_equals_only_itself(default):
    def body(a: Any, b: Any = default) -> None: ...

    assert name_of(body, 1) == f"{TASK}(a=1)"
    assert call(body, 1, default) == call(body, 1)
    assert call(body, 1, [0]) != call(body, 1)
    with pytest.raises(TypeError, match=f"argument 'b' of {TASK} contains a builtins.object"):
        call(body, 1, object())


def test_arguments_as_a_name_shows_them_give_the_key_of_the_call():
    signature = inspect.signature(lambda **arguments: None)
    shown = {"parameters": parameters.Parameters(signature)}
    assert made_of(shown, f, a=1, c=[3]) == call(f, 1, 2, c=[3])


# Distinct calls, distinct keys


def test_the_same_value_in_another_argument_is_another_call():
    assert len({key_of(f, 1, 1, c=2), key_of(f, 1, 2, c=1), key_of(f, 2, 1, c=1)}) == 3


def test_tasks_calls_and_names_do_not_share_keys():
    lock = call(no_arguments)
    assert made_of({"task": "another"}, no_arguments).key != lock.key
    assert keys.name_key(lock.name).name == lock.name
    assert lock.key not in {keys.name_key(lock.name).key, keys.name_key(TASK).key}


@settings(deadline=None)
@given(st.tuples(st.lists(st.integers()), st.dictionaries(st.text(), st.integers())))
def test_each_extra_argument_counts(call):
    args, kwargs = call
    found = {key_of(anything, *args, **kwargs), key_of(anything, *args, 0, **kwargs)}
    found.add(key_of(anything, *args, **{**kwargs, "one more": 1}))
    assert len(found) == 3 - ("one more" in kwargs)


def test_order_of_extra_keyword_arguments_does_not_matter():
    assert call(anything, x=1, y=2) == call(anything, y=2, x=1)


@pytest.mark.parametrize("function", [anything, positional_only])
def test_keyword_arguments_that_are_called_as_a_parameter_count(function):
    names = ["a", "args", "kwargs", "**a", "****a"]
    calls = [{}, {"a": 2, "**a": 2}, *({name: value} for name in names for value in (1, 2, {}))]
    assert len({key_of(function, 1, **kwargs) for kwargs in calls}) == len(calls)
    assert name_of(positional_only, 1, a=2) == f"{TASK}(a=1, **a=2)"


def test_arguments_that_do_not_fit_name_the_task():
    with pytest.raises(TypeError, match=rf"^{TASK}: missing a required .*argument: 'a'"):
        key_of(f)


# lock_on


def test_lock_on_counts_only_its_arguments():
    key = partial(made_of, {"lock_on": ["a", "b"]}, f)
    assert key(1) == key(1, 2, c=3) == key(1, b=2)
    assert len({key(1).key, key(2).key, key(1, 3).key}) == 3
    assert key(1).name == f"{TASK}(a=1)"


def test_lock_on_knows_extra_arguments():
    assert made_of({"lock_on": ["x"]}, anything, 1, x=1, y=2).name == f"{TASK}(x=1)"


def test_empty_lock_on_is_one_lock_for_the_task():
    key = partial(made_of, {"lock_on": []}, f)
    assert key(1) == key(2, 3, c=4) == key(object())
    assert key(1).name == f"{TASK}()"


def needed(a, /, b, *args, c, d=4, **kwargs): ...


@pytest.mark.parametrize(
    ("options", "args", "kwargs"),
    [
        ({"lock_on": []}, (), {}),
        ({"lock_on": ["a"]}, (1,), {}),
        ({"lock_on": ["b"]}, (), {"b": 2}),
        ({"lock_on": ["c", "d"]}, (), {"c": 3}),
        ({"lock_on": ["args"]}, (), {}),
        ({"lock_on": ["x"]}, (), {"x": 3}),
        ({"lock_name": "all"}, (), {}),
        ({"lock_name": "c:{c}"}, (), {"c": 3}),
        ({"lock_name": "d:{d}"}, (), {}),
    ],
    ids=str,
)
def test_to_ask_needs_only_the_arguments_that_make_the_lock(options, args, kwargs):
    lock = made_of({**options, "partial": True}, needed, *args, **kwargs)
    assert made_of(options, needed, *(args or (0,)), **{"b": 0, "c": 0, **kwargs}) == lock


@pytest.mark.parametrize(
    ("options", "args", "kwargs", "text"),
    [
        ({}, (1,), {"b": 2}, "missing a required argument: 'c'"),
        ({"lock_on": ["b"]}, (1,), {}, "missing a required argument: 'b'"),
        ({"lock_on": ["a"]}, (), {"b": 2}, "missing a required argument: 'a'"),
        ({"lock_on": ["x"]}, (1,), {}, "names 'x', which is not an argument"),
        ({"lock_name": "c:{c}"}, (1,), {}, "cannot be filled from the arguments .*: KeyError: 'c'"),
    ],
    ids=str,
)
def test_to_ask_needs_the_arguments_that_make_the_lock(options, args, kwargs, text):
    with pytest.raises(TypeError, match=text):
        made_of({**options, "partial": True}, needed, *args, **kwargs)


@pytest.mark.parametrize("argument", ["x", "kwargs"])
def test_lock_on_of_an_extra_argument_that_is_not_passed_names_it(argument):
    with pytest.raises(TypeError, match=rf"lock_on of {TASK} names '{argument}'.*are: args\."):
        made_of({"lock_on": [argument]}, anything, 1)


# lock_name


def test_format_string_is_filled_from_the_bound_arguments():
    assert named("customer:{a}:{b}", 7) == keys.name_key("customer:7:2")


def test_format_string_sees_a_default_without_stable_form():
    default = Plain()
    options = {"lock_name": "customer:{b.number}"}
    assert made_of(options, lambda a, b=default: None, 7) == keys.name_key("customer:9")


def test_two_tasks_share_a_lock_by_its_name():
    other = made_of({"task": "another", "lock_name": "customer:{a}"}, f, a=7)
    assert other == named("customer:{a}", 7)


@pytest.mark.parametrize(
    "value",
    [(1, (2, 3)), {"z": 1, "a": (1,)}, Level.HIGH, Name.FIRST, uuid.UUID(int=1), Decimal("1.10")],
    ids=repr,
)
def test_message_keeps_the_formatted_name(value):
    assert named("of {a}", sent(value)) == named("of {a}", value)


@pytest.mark.parametrize(
    ("template", "value", "name"),
    [
        ("of {a}", {Color.RED, "x"}, "of ['red', 'x']"),
        ("of {a}", [datetime.date(2020, 1, 1)], "of [datetime.date(2020, 1, 1)]"),
        ("day {a:%d.%m.}", datetime.date(2026, 2, 1), "day 01.02."),
        ("x {a.x}", Point(1, 2), "x 1"),
    ],
)
def test_format_string_sees_the_parts_of_a_value(template, value, name):
    assert named(template, value).name == name


@pytest.mark.parametrize("template", ["x{a.y}", "x{c[d]}", "x{a[9]}", "x{a:d}", "x{b:>9}"])
def test_format_string_that_cannot_be_filled_names_option_and_task(template):
    expected = f"lock_name={template!r} of {TASK} cannot be filled from the arguments (a, b, c)"
    with pytest.raises(TypeError, match=re.escape(expected)):
        named(template, "text", [1], c={})


def test_name_of_a_self_referencing_argument_is_refused():
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match=r"lock_name='of \{a\}'.*RecursionError"):
        named("of {a}", loop)


@pytest.mark.parametrize(
    "lock_name",
    [
        lambda *args, **kwargs: f"of {args} {kwargs}",
        lambda *args: f"of {args}",
        lambda a, b, **rest: f"of {a} {b} {rest}",
        lambda b, a: f"of {a} {b}",
    ],
)
def test_a_function_gets_the_same_however_the_call_is_written(lock_name: Any) -> None:
    lock = partial(made_of, {"lock_name": lock_name}, lambda a, b=2: None)
    assert lock(1, 2) == lock(1, b=2) == lock(b=2, a=1) == lock(1)
    assert lock(1, 3) != lock(1)


@pytest.mark.parametrize(
    "lock_name",
    [
        lambda a, b, c, /: f"of {(a, b, c)}",
        lambda *values: f"of {values}",
        lambda first, *others: f"of {(first, *others)}",
    ],
)
@pytest.mark.parametrize("body", [lambda a, b, c: None, lambda a, *rest: None])
def test_a_function_that_takes_places_gets_the_values(lock_name: Any, body: Any) -> None:
    assert made_of({"lock_name": lock_name}, body, 1, 2, 3).name == "of (1, 2, 3)"


def test_a_function_may_take_fewer_arguments_than_the_body() -> None:
    options = {"lock_name": lambda c, a: f"of {a} {c}"}
    assert made_of(options, lambda a, *rest, b=2, **more: None, 1, 5, c=3).name == "of 1 3"


@pytest.mark.parametrize("lock_name", ["of {a}", lambda a: f"of {a}"])
def test_memory_address_in_a_name_is_refused(lock_name):
    with pytest.raises(TypeError, match=f"lock_name.* of {TASK} contains the memory address"):
        named(lock_name, object())


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        (0, TypeError, "must be a string, not 0"),
        (b"x", TypeError, "must be a string, not b'x'"),
        (" ", ValueError, "is empty"),
    ],
)
def test_callable_that_makes_no_name_is_refused(result, error, text):
    with pytest.raises(error, match=f"the result of lock_name of {TASK} {text}"):
        named(lambda a: result, 1)


def test_a_filled_name_that_is_too_long_is_shortened_and_still_tells_calls_apart():
    one, other = (named("x{a}", f"{'y' * 300}{number}") for number in (1, 2))
    assert one.key != other.key
    assert one.name != other.name
    assert len(one.name) == keys.MAX_NAME


# Without a stable form


class Plain:
    number = 9


def self_referencing() -> list[Any]:
    loops: list[Any] = [[], {}]
    loops[0].append(loops[0])
    loops[1]["self"] = loops[1]
    return loops


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (User(pk=1), "contains a django.contrib.auth.models.User, which has no stable form"),
        (object(), "contains a builtins.object, which"),
        (Plain(), "contains a tests.locks.test_keys.Plain, which"),
        (Plain, "contains a builtins.type, which"),
        ([{"x": object()}], "contains a builtins.object, which"),
        ({object(): 1}, "contains a builtins.object, which"),
        (range(3), "contains a builtins.range, which"),
        (1j, "contains a builtins.complex, which"),
        (self_referencing()[0], "refers to itself or is nested"),
        (self_referencing()[1], "refers to itself or is nested"),
        (nested(100_000), "refers to itself or is nested"),
        ([10**5000], "contains an integer with too many digits"),
    ],
    ids=range(12),
)
def test_value_without_stable_form_names_argument_task_and_type(value, text):
    with pytest.raises(TypeError, match=re.escape(f"argument 'b' of {TASK} {text}")):
        key_of(f, 1, value)


def test_extra_argument_without_stable_form_is_named():
    with pytest.raises(TypeError, match="argument 'x' of"):
        key_of(anything, x=object())
    with pytest.raises(TypeError, match="argument 'args' of"):
        key_of(anything, object())


def test_object_that_says_its_values_is_its_values():
    class OfKombu:
        def __json__(self) -> Any:
            return {"x": (1, 2)}

    class OfPydantic:
        def model_dump(self) -> Any:
            return {"x": (1, 2)}

    assert key_of(f, OfKombu()) == key_of(f, sent([OfKombu()])[0]) == key_of(f, {"x": [1, 2]})
    assert key_of(f, OfPydantic()) == key_of(f, {"x": [1, 2]})


# Names


def test_name_shows_the_arguments():
    assert name_of(f, 1, "x") == f"{TASK}(a=1, b='x')"


def test_name_of_a_long_call_is_cut():
    name = name_of(f, ["x" * 100] * 9)
    assert len(name) == keys.MAX_NAME
    assert name.endswith("…)")


def test_hidden_arguments_are_in_neither_name_nor_key(settings):
    before = key_of(f, "secret")
    settings.SINGLETASK_RECORD_ARGUMENTS = False
    lock = call(f, "secret")
    assert re.fullmatch(rf"{re.escape(TASK)}\(#[0-9a-f]{{8}}\)", lock.name)
    assert "secret" not in lock.key
    assert lock.key == before
    assert name_of(no_arguments) == f"{TASK}()"


@pytest.mark.parametrize("lock_name", ["of {a}", lambda a: f"of {a}"])
def test_hidden_arguments_are_not_in_formatted_names(settings, lock_name):
    settings.SINGLETASK_RECORD_ARGUMENTS = False
    lock = named(lock_name, "secret")
    assert "secret" not in lock.name + lock.key
    assert lock.name != named(lock_name, "other").name


def test_hidden_arguments_are_not_in_errors(settings):
    settings.SINGLETASK_RECORD_ARGUMENTS = False
    with pytest.raises(ValueError, match="control characters") as caught:
        named("of {a}", "secret\n")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("recorded", [True, False])
def test_representation_given_by_the_caller_replaces_the_arguments(settings, recorded):
    settings.SINGLETASK_RECORD_ARGUMENTS = recorded
    assert made_of({"shown": "***"}, f, "secret") == (f"{TASK}(***)", key_of(f, "secret"))


def test_representation_given_by_the_caller_hides_a_formatted_name():
    lock = named("of {a}", "secret", shown="***")
    assert "secret" not in lock.name
    assert lock.key == named("of {a}", "secret").key


def test_representation_given_by_the_caller_may_hold_anything():
    assert_safe(made_of({"shown": "x\n\x00\x1b[31m\ud800" + "y" * 300}, f, 1))


def assert_safe(lock: keys.LockKey) -> None:
    """Check that the key fits memcached's 250 bytes with a prefix and a cleared lock's marker."""
    assert re.fullmatch(r"singletask:[!-~]*:[0-9a-f]{32}", lock.key)
    assert len(lock.key) <= 150
    assert 0 < len(lock.name) <= keys.MAX_NAME
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", lock.name)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=keys.MAX_NAME))
def test_any_name_without_control_characters_gives_a_safe_key(name):
    assume(name.strip())
    assert keys.name_key(name).name == name
    assert keys.name_key(name).key != keys.name_key(f"{name}x").key
    assert_safe(keys.name_key(name))


@settings(deadline=None)
@given(st.text(st.characters(), max_size=300))
def test_any_task_name_gives_a_safe_key(task):
    assert_safe(made_of({"task": task}, no_arguments))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("", ValueError, "name is empty"),
        (" \u00a0", ValueError, "name is empty"),
        ("a\nb", ValueError, r"name contains control characters .*'a\\nb'"),
        ("a\x85", ValueError, "name contains control characters"),
        ("a\ud800", ValueError, "lone surrogates"),
        (None, TypeError, "name must be a string, not None"),
        (b"x", TypeError, "name must be a string, not b'x'"),
    ],
)
def test_unusable_name_says_why(name, error, message):
    with pytest.raises(error, match=message):
        keys.name_key(name)


def test_a_long_name_is_shown_shortened():
    lock = keys.name_key("x" * 256)
    assert re.fullmatch(r"x{245}…#[0-9a-f]{8}", lock.name)
    assert lock.key != keys.name_key("x" * 9999).key


# Entries beside a lock


def test_each_kind_and_task_has_an_entry_of_its_own_beside_a_lock():
    lock = keys.name_key("x" * 255)
    entries = {
        lock.beside(kind, task) for kind in (keys.QUEUED, keys.LATEST) for task in ("a", "b")
    }
    assert len(entries) == 4
    for entry in entries:
        assert entry.name == lock.name
        assert re.fullmatch(r"singletask:@[!-~]*:[0-9a-f]{32}", entry.key)
        assert len(entry.key) <= len(lock.key)


# FIPS


def test_keys_need_no_md5(monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("disabled for FIPS")

    monkeypatch.setattr(hashlib, "md5", refuse)
    monkeypatch.setattr(hashlib, "new", refuse)
    monkeypatch.setattr(hashlib, "sha1", refuse)
    key_of(f, 1)
    keys.name_key("nightly")


def test_keys_stay_the_same_from_release_to_release():
    # If a release changed the keys, old and new workers would not exclude each other.
    assert key_of(f, 7, [b"x", {"y": Decimal("1.1")}]) == (
        "singletask:feeds.tasks.import_feed:2c2f991a7b7a34f3c5c090a1ec7fb765"
    )
    assert (
        keys.name_key("customer:7").key == "singletask:customer:7:e38968b6c8064af128e98ea29efc197d"
    )
