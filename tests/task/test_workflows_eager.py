"""Workflows without a worker: eager tasks, apply(), direct calls, with locks in local memory."""

from __future__ import annotations

import uuid

import celery
import pytest
from celery import chord, chunks, group

from django_singletask import LockConflict, SingletonTask, TaskLock, current_lock
from tests import canvases, inside
from tests.testapp import log
from tests.testapp import workflow_tasks as tasks
from tests.testapp.celery import app
from tests.testapp.workflow_tasks import FLAVOURS, SKIPPED

pytestmark = pytest.mark.needs("redis")  # the results of groups

LOCKED = [flavour for flavour in FLAVOURS if flavour != "plain"]
SKIPPING = ["skip", "start", "finish"]
CONFLICT = "conflict"
"""The others raise it: no message can be postponed, and a call would wait for its own thread."""


@pytest.fixture(autouse=True)
def in_local_memory(settings, empty_cache, monkeypatch, tmp_path):
    """Keep the locks in local memory; none may be left there at the end of a test."""
    settings.SINGLETASK_CACHE = "locmem"
    settings.SINGLETASK_HISTORY = "off"
    empty_cache("locmem")
    monkeypatch.setenv("SINGLETASK_TEST_LOG", str(tmp_path / "runs.log"))
    yield
    assert inside.is_empty("locmem")
    assert current_lock() is None


@pytest.fixture
def eager():
    app.conf.task_always_eager = True
    yield
    app.conf.task_always_eager = False


@pytest.fixture(params=["apply_async", "apply"])
def start(request):
    """Run a workflow in each of the two eager ways, and return what it gives."""
    app.conf.task_always_eager = request.param == "apply_async"

    def run(canvas, **options):
        if request.param == "apply" and isinstance(canvas, chunks):
            canvas = canvas.group()  # Celery has no apply() for chunks
        return getattr(canvas, request.param)(**options).get()

    yield run
    app.conf.task_always_eager = False


def runs(key):
    return [line for line in read("start") if line["key"] == key]


def read(event):
    return [line for line in log.read(log.path()) if line["event"] == event]


def new():
    return f"key-{uuid.uuid4().hex[:8]}"


def outcome(function, *arguments):
    """Return the result, or what it says of an error."""
    try:
        answer = function(*arguments)
    except LockConflict:
        return CONFLICT
    except Exception as error:
        return type(error)
    return CONFLICT if str(answer).startswith("conflict with ") else answer


def conflicts(flavour, held, own):
    """Return the table of all workflows that meet a lock: each, and what it gives after a skip.

    The lock of the key ``held`` is held. That of ``own`` is held by the body that calls.
    """
    add, other, total = tasks.add[flavour], new(), tasks.total["plain"]
    itself, another = tasks.call_itself[flavour], tasks.call_another[flavour]
    return {
        "call": (add.s(0, held), SKIPPED),
        "chain": (add.s(0, held) | add.s(other), SKIPPED + 1),
        "group": (group(add.s(0, held), add.s(10, other)), [SKIPPED, 11]),
        "chord": (chord([add.s(0, held), add.s(10, other)], total.s(new())), SKIPPED + 11),
        "starmap": (add.starmap([(0, held), (10, other)]), [SKIPPED, 11]),
        "direct call of itself": (itself.s(own, "direct"), SKIPPED),
        "apply() of itself": (itself.s(own, "apply"), SKIPPED),
        "direct call of another": (another.s(own, own, "direct"), SKIPPED),
        "apply() of another": (another.s(own, own, "apply"), SKIPPED),
    }


@pytest.mark.parametrize("flavour", LOCKED)
def test_a_workflow_that_meets_a_lock(start, flavour):
    held, own = new(), new()
    table = conflicts(flavour, held, own)
    with TaskLock(f"workflow:{held}"):
        found = {name: outcome(start, workflow) for name, (workflow, _skipped) in table.items()}
        direct = outcome(tasks.add[flavour], 0, held)
    if flavour in SKIPPING:
        assert found == {name: skipped for name, (_workflow, skipped) in table.items()}
    else:
        assert found == dict.fromkeys(table, CONFLICT)
    assert direct == found["call"]
    assert not runs(held)
    assert [line["how"] for line in runs(own)] == ["direct", "apply"]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_all_members_run_one_after_the_other(start, flavour):
    for keys in (new, canvases.equal(new())):
        workflows = {name: canvases.make(name, flavour, keys) for name in canvases.SHAPES}
        numbers = {name: start(canvas) for name, canvas in workflows.items()}
        assert numbers == {name: shape.gives for name, shape in canvases.SHAPES.items()}


@pytest.mark.parametrize("flavour", LOCKED)
def test_what_replaces_a_task_ends_as_without_locks(start, flavour):
    """Celery refuses its own get() for most of them."""
    for by in ("one", "chain", "group", "chord"):
        plain = outcome(start, tasks.replace["plain"].s(0, new(), by))
        assert outcome(start, tasks.replace[flavour].s(0, new(), by)) == plain
    assert tasks.replace[flavour].apply((0, new(), "one")).get() == 1


@pytest.mark.parametrize("flavour", ["skip", "requeue"])
def test_an_eager_delay_of_itself_from_its_body(eager, flavour):
    key = new()
    answer = tasks.call_itself[flavour].delay(key, "delay").get()
    assert answer in [line["task_id"] for line in read("conflict")]
    assert len(runs(key)) == 1


def test_calls_from_code_and_from_a_body_that_has_another_lock(start):
    for flavour in LOCKED:
        key, add = new(), tasks.add[flavour]
        assert add(add(0, key), key) == 2
        assert add.s(0, key)() == 1
        for how in ("direct", "apply"):
            assert start(tasks.call_another[flavour].s(key, new(), how)) == 2


def test_links_and_errbacks(eager):
    key, after = new(), new()
    tasks.add["skip"].apply_async((0, key), link=tasks.add["plain"].s(after)).get()
    with TaskLock(f"workflow:{key}"):
        tasks.add["skip"].apply_async((0, key), link=tasks.add["plain"].s(after)).get()
        errbacks = [
            task.s(key=key) for task in (tasks.errback, tasks.locked_errback, tasks.sent_errback)
        ]
        failed = tasks.add["raise"].apply_async((0, key), link_error=errbacks)
    assert len(runs(after)) == 2
    assert type(failed.result) is LockConflict
    assert [line["of"] for line in read("errback")] == [failed.id] * 3


def test_kinds_of_tasks(start):
    key = new()
    assert start(tasks.bound.s(key))[2] == f"workflow.bound(key='{key}')"
    assert start(tasks.untyped.s(key, 1, x=2)) == f"workflow.untyped(key='{key}', rest=[1], x=2)"
    by_class = tasks.by_class
    assert start(by_class.s(0, key) | by_class.s(key)) == 2
    assert start(chord([by_class.s(0, key)] * 2, tasks.total["skip"].s(key))) == 2
    assert start(tasks.impatient.s(0, key, 3) | tasks.add["plain"].s(key)) == 2
    assert start(tasks.requested.s(key)) == "ran"


@pytest.mark.skipif(celery.VERSION < (5, 5), reason="Celery 5.4 knows no pydantic tasks")
def test_pydantic(start):
    key = new()
    item, modelled = {"key": key, "number": 1}, tasks.modelled
    assert start(modelled.s(item) | modelled.s()) == {"key": key, "number": 3}
    assert modelled(tasks.Item(**item)) == modelled(item) == {"key": key, "number": 2}
    with modelled.lock(tasks.Item(**item)):
        assert modelled(item) is None


def test_a_task_that_replaces_itself_keeps_the_locks_that_its_body_has_taken():
    held = []

    @app.task(base=celery.Task, shared=False)
    def replacement():
        held.append(TaskLock("inner").locked())

    @app.task(base=SingletonTask, shared=False, bind=True)
    def replaced(self):
        with TaskLock("inner"):
            return self.replace(replacement.s())

    replaced.apply()
    assert held == [True]
