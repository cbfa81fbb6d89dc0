"""Workflows without a worker: eager tasks, apply(), direct calls, with locks in local memory."""

from __future__ import annotations

import uuid
from contextlib import contextmanager

import celery
import pytest
from celery import chord, chunks, group

from django_singletask import LockConflict, SingletonTask, TaskLock, current_lock
from django_singletask.stores import get_store
from tests import canvases
from tests.testapp import log
from tests.testapp import workflow_tasks as tasks
from tests.testapp.celery import app
from tests.testapp.workflow_tasks import FLAVOURS, SKIPPED

pytestmark = pytest.mark.needs("redis")  # the results of groups

LOCKED = [flavour for flavour in FLAVOURS if flavour != "plain"]
SKIPPING = ["skip", "start", "finish"]  # the others raise: no message can be postponed


@pytest.fixture(autouse=True)
def in_local_memory(settings, empty_cache, monkeypatch, tmp_path):
    """Keep the locks in local memory; none may be left there at the end of a test."""
    settings.SINGLETASK_CACHE = "locmem"
    settings.SINGLETASK_HISTORY = "off"
    empty_cache("locmem")
    monkeypatch.setenv("SINGLETASK_TEST_LOG", str(tmp_path / "runs.log"))
    yield
    assert list(get_store("locmem").entries()) == []
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


@pytest.fixture
def held():
    @contextmanager
    def hold(key):
        with TaskLock(f"workflow:{key}"):
            yield

    return hold


def runs(key):
    return [line for line in read("start") if line["key"] == key]


def read(event):
    return [line for line in log.read(log.path()) if line["event"] == event]


def new():
    return f"key-{uuid.uuid4().hex[:8]}"


@pytest.mark.parametrize("alike", [False, True], ids=["distinct", "equal"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_all_members_run_one_after_the_other(start, flavour, alike):
    workflows = {
        name: canvases.make(name, flavour, canvases.equal(new()) if alike else new)
        for name in canvases.SHAPES
    }
    numbers = {name: start(canvas) for name, canvas in workflows.items()}
    assert numbers == {name: shape.gives for name, shape in canvases.SHAPES.items()}


@pytest.mark.parametrize("flavour", LOCKED)
def test_a_member_that_finds_its_lock_held(start, held, flavour):
    key, other, body = new(), new(), tasks.total["plain"].s(new())
    add = tasks.add[flavour]
    workflows = [
        add.s(0, key) | add.s(other),
        group(add.s(0, key), add.s(10, other)),
        chord([add.s(0, key), add.s(10, other)], body),
        add.starmap([(0, key), (10, other)]),
    ]
    with held(key):
        if flavour in SKIPPING:
            numbers = [start(workflow) for workflow in workflows]
            assert numbers == [SKIPPED + 1, [SKIPPED, 11], SKIPPED + 11, [SKIPPED, 11]]
        elif flavour != "wait":  # it would wait for its own thread, see the next test
            for workflow in workflows:
                with pytest.raises(LockConflict):
                    start(workflow)
    assert not runs(key)


def test_a_call_that_would_wait_for_its_own_thread_raises_at_once(start, held):
    key = new()
    with held(key), pytest.raises(LockConflict):
        start(tasks.add["wait"].s(0, key))


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("flavour", LOCKED)
def test_apply_of_a_task_that_replaces_itself_under_the_same_lock(flavour):
    assert tasks.replace[flavour].apply((0, new(), "one")).get() == 1


@pytest.mark.parametrize("flavour", LOCKED)
@pytest.mark.parametrize("by", ["one", "chain", "group", "chord"])
def test_what_replaces_a_task_ends_as_without_locks(start, flavour, by):
    """Celery refuses its own get() for most of them."""
    plain = outcome(start, tasks.replace["plain"].s(0, new(), by))
    assert outcome(start, tasks.replace[flavour].s(0, new(), by)) == plain


@pytest.mark.parametrize("how", ["direct", "apply"])
@pytest.mark.parametrize("flavour", LOCKED)
def test_a_call_of_itself_from_its_body(start, flavour, how):
    key = new()
    answer = start(tasks.call_itself[flavour].s(key, how))
    (line,) = runs(key)
    assert answer == (SKIPPED if flavour in SKIPPING else f"conflict with {line['task_id']}")


@pytest.mark.parametrize("flavour", LOCKED)
def test_an_eager_delay_of_itself_from_its_body(eager, flavour):
    key = new()
    answer = tasks.call_itself[flavour].delay(key, "delay").get()
    assert answer in [line["task_id"] for line in read("conflict")]
    assert len(runs(key)) == 1


@pytest.mark.parametrize("how", ["direct", "apply"])
@pytest.mark.parametrize("flavour", LOCKED)
def test_a_call_of_another_task_from_a_body(start, flavour, how):
    key, outer = new(), tasks.call_another[flavour]
    assert start(outer.s(key, new(), how)) == 2
    answer = start(outer.s(key, key, how))
    assert answer == SKIPPED if flavour in SKIPPING else answer.startswith("conflict with ")


@pytest.mark.parametrize("flavour", LOCKED)
def test_direct_calls(flavour, held):
    key, add = new(), tasks.add[flavour]
    assert add(add(0, key), key) == 2
    assert add.s(0, key)() == 1
    with held(key):
        if flavour in SKIPPING:
            assert add(0, key) == SKIPPED
        else:
            with pytest.raises(LockConflict):
                add(0, key)


def test_links_and_errbacks(eager, held):
    key, after = new(), new()
    tasks.add["skip"].apply_async((0, key), link=tasks.add["plain"].s(after)).get()
    with held(key):
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
