"""Workflows of locked tasks end on a real worker, also if a member finds its lock held."""

from __future__ import annotations

import os
import signal
import uuid
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import celery
import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import TimeoutError as NotInTime
from celery.result import AsyncResult

from django_singletask import DuplicateTask, TaskLock
from tests import canvases
from tests.command_line import hold, locks, locks_as_json
from tests.deadline import wait_for
from tests.testapp import workflow_tasks as tasks
from tests.testapp.celery import app
from tests.testapp.workflow_tasks import FLAVOURS, SKIPPED
from tests.worker.harness import get, new_queue

# Celery 5.4 with a redis-py of today.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")

LOCKED = [flavour for flavour in FLAVOURS if flavour != "plain"]
SKIPPING = ["skip", "start", "finish"]  # a member that finds its lock held is skipped
POSTPONING = ["requeue"]

ONE_BY_ONE = [name for name, shape in canvases.SHAPES.items() if shape.one_by_one]
SIDE_BY_SIDE = [name for name in canvases.SHAPES if name not in ONE_BY_ONE]
# A message of Celery's own calls their members, so these cannot be postponed.
CALLED = ["starmap", "chunks"]
SENT = [name for name in canvases.SHAPES if name not in CALLED]


class Flow:
    """What a test does with the worker."""

    def __init__(self, worker):
        self.worker, self.text, self.overlaps = worker, worker.text, worker.overlaps
        self.keys = []

    def key(self, name="key"):
        self.keys.append(f"{name}-{uuid.uuid4().hex[:8]}")
        return self.keys[-1]

    def distinct(self, name, first=None):
        """Return the function that gives another key to each member of a workflow."""
        return canvases.distinct(lambda: self.key(name), first)

    def send(self, signature, **options):
        return signature.apply_async(queue=self.worker.queue, **options)

    def get(self, signature, **options):
        return get(self.send(signature, **options))

    def send_all(self, flavour, keys_of, shapes):
        """Send a workflow of each shape."""
        workflows = {shape: canvases.make(shape, flavour, keys_of(shape)) for shape in shapes}
        return {shape: self.send(canvas) for shape, canvas in workflows.items()}

    def events(self, key, event="start"):
        return self.worker.events(event, key=key)

    def conflicts(self, *keys):
        """Count the conflicts about the locks of these keys, so far."""
        return sum(len(self.events(lock_of(key).key, "conflict")) for key in keys)

    def left_behind(self):
        """Return the names of the locks and queued calls of this test that are still held."""
        names = [lock["name"] for lock in locks_as_json("list")["locks"]]
        return [name for name in names if any(key in name for key in self.keys)]


def lock_of(key):
    return TaskLock(f"workflow:{key}")


@contextmanager
def held(*keys):
    """Let another holder have these locks; its record names a short lease, for short hops."""
    locks = [lock_of(key) for key in keys]
    for lock in locks:
        hold(key=lock.key, name=lock.name, token=lock.name, timeout=0.5)
    yield
    for lock in locks:
        lock.clear()


@pytest.fixture
def flow(worker):
    """Give what a test does with the worker; at the end of the test no entry may be left."""
    flow = Flow(worker)
    yield flow
    wait_for(lambda: not flow.left_behind(), "all is given back")


def get_all(results):
    return {shape: get(result) for shape, result in results.items()}


def results_of(shapes):
    return {name: canvases.SHAPES[name].gives for name in shapes}


def error_of(result):
    """Wait for a result, and return the name of its error, if any."""
    try:
        get(result)
    except NotInTime:
        raise
    except Exception as error:
        return type(error).__name__
    return None


# Members alike and not alike


@pytest.mark.parametrize("flavour", ["plain", "skip", "finish"])
def test_members_that_differ_give_what_unlocked_ones_give(flow, flavour):
    results = flow.send_all(flavour, flow.distinct, canvases.SHAPES)
    assert get_all(results) == results_of(canvases.SHAPES)


@pytest.mark.parametrize("flavour", ["skip", "wait", "finish"])
def test_equal_links_run_one_after_the_other(flow, flavour):
    keys = {shape: flow.key(shape) for shape in ONE_BY_ONE}
    results = flow.send_all(flavour, lambda shape: canvases.equal(keys[shape]), ONE_BY_ONE)
    assert get_all(results) == results_of(ONE_BY_ONE)
    assert len(flow.events(keys["chain"])) == 3
    assert len(flow.events(keys["immutable chain"])) == 2
    assert not flow.overlaps()
    assert not flow.conflicts(*keys.values())


@pytest.mark.parametrize("flavour", ["skip", "raise", "wait", "requeue", "finish"])
def test_equal_members_of_groups(flow, flavour):
    keys = {shape: flow.key(f"slow {shape}") for shape in SIDE_BY_SIDE}
    results = flow.send_all(flavour, lambda shape: canvases.equal(keys[shape]), SIDE_BY_SIDE)
    if flavour in POSTPONING:
        assert error_of(results.pop("chunks")) == "LockConflict"
    if flavour == "raise":
        errors = {error_of(result) for result in results.values()}
        assert errors <= {"LockConflict", "ChordError", None}
    elif flavour in ("wait", "requeue"):
        assert get_all(results) == results_of(results)
    else:
        for shape, numbers in get_all(results).items():
            assert len(tasks.flat(numbers)) == len(tasks.flat(canvases.SHAPES[shape].gives))
    assert not flow.overlaps()
    assert flavour == "wait" or flow.conflicts(*keys.values())


def test_equal_members_without_a_lock_overlap(flow):
    """Negative control: the log would show it."""
    keys = {shape: flow.key(f"slow {shape}") for shape in SIDE_BY_SIDE}
    results = flow.send_all("plain", lambda shape: canvases.equal(keys[shape]), SIDE_BY_SIDE)
    assert get_all(results) == results_of(SIDE_BY_SIDE)
    assert flow.overlaps()


# The first member finds its lock held


@pytest.fixture
def first_held(flow):
    """Send workflows, one of each shape, whose first member finds its lock held."""

    @contextmanager
    def send(flavour, shapes):
        first = {shape: flow.key(shape) for shape in shapes}
        with held(*first.values()):
            keys_of = lambda shape: flow.distinct(shape, first[shape])  # noqa: E731
            yield flow.send_all(flavour, keys_of, shapes), first

    return send


@pytest.mark.parametrize("flavour", ["skip", "finish"])
def test_a_skipped_member_gives_its_skip_result(flow, first_held, flavour):
    shapes = [shape for shape in canvases.SHAPES if shape != "immutable chain"]
    with first_held(flavour, shapes) as (results, first):
        numbers_of = get_all(results)
    # The next link, and the body of the chord, have received it and run.
    assert all(min(tasks.flat(numbers)) < SKIPPED / 2 for numbers in numbers_of.values())
    assert numbers_of["chain"] == SKIPPED + 2
    assert numbers_of["group"] == [SKIPPED, 11, 21]
    assert numbers_of["chord"] == SKIPPED + 11
    assert numbers_of["starmap"] == [SKIPPED, 2, 3]
    assert flow.conflicts(*first.values()) == len(first)


def test_a_raised_conflict_fails_what_waits_for_it(first_held):
    # Celery itself never ends a group in a chain, see the next test.
    shapes = [shape for shape in canvases.SHAPES if shape != "group in a chain"]
    with first_held("raise", shapes) as (results, _):
        errors = {shape: error_of(result) for shape, result in results.items()}
    assert set(errors.values()) <= {"LockConflict", "ChordError"}
    body = get(AsyncResult(results["chord"].id), propagate=False)
    assert type(body).__name__ == "ChordError"
    assert "LockConflict" in str(body)


@pytest.mark.parametrize("flavour", ["plain", "raise"])
def test_of_a_group_behind_a_failed_link_only_the_link_ends(flow, flavour):
    """Celery does not end the group, also if its tasks take no lock."""
    first = tasks.fail[flavour].s(0, flow.key())
    add = tasks.add[flavour]
    result = flow.send(chain(first, group(add.s(flow.key()), add.s(flow.key()))))
    assert error_of(result.parent) == "ZeroDivisionError"
    assert not result.ready()


@pytest.mark.parametrize("flavour", POSTPONING)
def test_a_member_that_is_postponed_gives_its_ordinary_result(flow, first_held, flavour):
    with first_held(flavour, SENT) as (results, first):
        conflicts = partial(flow.conflicts, *first.values())
        wait_for(lambda: conflicts() >= len(first), "each first member is postponed")
        assert not any(flow.events(key) for key in first.values())
    assert get_all(results) == results_of(SENT)
    assert all(len(flow.events(key)) == 1 for key in first.values())


@pytest.mark.parametrize("flavour", POSTPONING)
def test_what_is_called_by_map_or_chunks_raises_instead(first_held, flavour):
    with first_held(flavour, CALLED) as (results, _):
        assert {error_of(result) for result in results.values()} == {"LockConflict"}


def test_a_member_waits(flow, first_held):
    with first_held("wait", ["chain", "chord"]) as (results, _):
        received = f"{results['chain'].parent.parent.id}] received"
        wait_for(lambda: received in flow.text(), "it waits")
    assert get_all(results) == results_of(["chain", "chord"])


@pytest.mark.parametrize("flavour", ["skip", "raise", "wait", "requeue", "finish"])
def test_the_body_of_a_chord_finds_its_lock_held(flow, flavour):
    add, key = tasks.add["plain"], flow.key()
    header = group(add.si(0, flow.key()), add.si(10, flow.key()))
    with held(key):
        result = flow.send(chain(header, tasks.total[flavour].s(key), add.s(flow.key())))
        if flavour in SKIPPING:
            assert get(result) == SKIPPED + 1
        elif flavour == "raise":
            assert error_of(result) == "LockConflict"
        elif flavour == "wait":
            wait_for(lambda: "workflow.total.wait[" in flow.text(), "it waits")
        else:
            wait_for(lambda: flow.conflicts(key), "it is postponed")
    if flavour == "wait" or flavour in POSTPONING:
        assert get(result) == 13


# An equal call is queued


@contextmanager
def queued(task, *args):
    """Leave an equal call of a unique task in a queue that no worker reads."""
    with new_queue() as unread:
        result = task.apply_async(args, queue=unread)
        assert task.queued(*args).id == result.id
        yield result
        assert task.queued(*args).id == result.id  # no other process has freed it
        locks("clear", "--queued", "--yes", result.id)


@pytest.mark.parametrize("flavour", ["start", "finish"])
def test_a_member_is_sent_although_an_equal_call_is_queued(flow, flavour):
    add, strict = tasks.add[flavour], {"on_duplicate": "raise"}
    keys = {shape: flow.key(shape) for shape in [*canvases.SHAPES, "link"]}
    with ExitStack() as stack:
        waiting = [stack.enter_context(queued(add, 0, key)) for key in keys.values()]
        # No other call waits for the end of this one.
        assert flow.send(add.s(5, keys["link"])).id == waiting[-1].id
        with pytest.raises(DuplicateTask):
            flow.send(add.s(5, keys["link"]), lock_options=strict)
        results = flow.send_all(flavour, lambda name: canvases.equal(keys[name]), canvases.SHAPES)
        linked = tasks.add["plain"].s(flow.key())
        after = linked.freeze()
        assert flow.get(add.s(0, keys["link"]), link=linked, lock_options=strict) == 1
        assert get(after) == 2
        numbers_of = get_all(results)
    for name, numbers in numbers_of.items():
        shape = canvases.SHAPES[name]
        if shape.one_by_one:
            assert numbers == shape.gives
        assert len(tasks.flat(numbers)) == len(tasks.flat(shape.gives))


def test_what_is_left_behind_would_be_seen(flow):
    """Negative control of the end of every test here."""
    key = flow.key()
    assert not flow.left_behind()
    with held(key):
        assert flow.left_behind()
    with queued(tasks.add["finish"], 0, key):
        assert flow.left_behind()


# Links and errbacks


def test_the_links_of_a_skipped_and_of_a_postponed_call_run_once(flow):
    after = tasks.add["plain"]
    skipped, postponed = flow.key("skipped"), flow.key("postponed")
    links = {key: after.s(flow.key(f"after {key}")) for key in (skipped, postponed)}
    results = {key: link.freeze() for key, link in links.items()}
    with held(skipped, postponed):
        flow.get(tasks.add["skip"].s(0, skipped), link=links[skipped])
        assert get(results[skipped]) == SKIPPED + 1
        first = flow.send(tasks.add["requeue"].s(0, postponed), link=links[postponed])
        wait_for(lambda: flow.conflicts(postponed), "it is postponed")
    assert get(first) == 1
    assert get(results[postponed]) == 2
    for link in links.values():
        assert len(flow.events(link.args[-1])) == 1


def errbacks(key):
    """Return an errback for each way in which Celery calls one; the last two take a lock."""
    return [
        tasks.errback.s(key=key),
        tasks.locked_errback.s(key=key),
        tasks.sent_errback.s(key=key),
    ]


def calls_of_errbacks(flow, key):
    """Wait for the three errbacks, and return what they have written into the log."""
    wait_for(lambda: len(flow.events(key, "errback")) >= 3, "the errbacks are called")
    return flow.events(key, "errback")


def test_the_errbacks_of_a_raised_conflict_run(flow):
    key = flow.key()
    with held(key):
        result = flow.send(tasks.add["raise"].s(0, key), link_error=errbacks(key))
        assert error_of(result) == "LockConflict"
        lines = calls_of_errbacks(flow, key)
    assert {line["of"] for line in lines} == {result.id}
    assert {line["error"] for line in lines if "error" in line} == {"LockConflict"}
    assert sum("lock" in line for line in lines) == 2


def test_the_errbacks_of_a_chord_run(flow):
    key, body = flow.key(), flow.key("body")
    members = [tasks.add["raise"].s(0, key), tasks.add["raise"].s(10, flow.key())]
    last = tasks.total["raise"].s(body)
    for errback in errbacks(body):
        last.link_error(errback)
    with held(key):
        result = flow.send(chord(members, last))
        assert error_of(result) in ("ChordError", "LockConflict")
        lines = calls_of_errbacks(flow, body)
    assert result.id in {line["of"] for line in lines}
    assert not flow.events(body)


def test_the_errbacks_of_a_postponed_call_that_fails_run_once(flow):
    key = flow.key()
    with held(key):
        result = flow.send(tasks.fail["requeue"].s(0, key), link_error=errbacks(key))
        wait_for(lambda: flow.conflicts(key), "it is postponed")
        assert not flow.events(key, "errback")
    assert error_of(result) == "ZeroDivisionError"
    assert len(calls_of_errbacks(flow, key)) == 3
    assert len(flow.events(key)) == 1


@pytest.mark.parametrize(
    ("errback", "error"), [("raising", "LockConflict"), ("unlockable", "TypeError")]
)
def test_an_errback_that_gets_no_lock_fails_in_the_log(flow, errback, error):
    """Celery calls one with these parameters in the worker, so no message can be postponed."""
    key, task = flow.key(), getattr(tasks, errback)
    with task.lock(None, None, None, key) if errback == "raising" else nullcontext():
        failing = flow.send(tasks.fail["skip"].s(0, key), link_error=task.s(key=key))
        # Celery before 5.7 may replace the task's error by that of its errback.
        assert error_of(failing) in ("ZeroDivisionError", error)
        wait_for(lambda: error in flow.text(), "the worker logs it")
        assert not flow.events(key, "errback")


def test_a_postponed_call_without_a_result_has_none(flow):
    key = flow.key()
    with held(key):
        result = flow.send(tasks.add["requeue"].s(0, key), ignore_result=True)
        wait_for(lambda: flow.conflicts(key), "it is postponed")
    wait_for(lambda: flow.events(key, "end"), "it runs")
    flow.get(tasks.add["requeue"].s(0, key))  # after the end of the first
    assert AsyncResult(result.id).state == "PENDING"


# Replacing


@pytest.mark.parametrize("flavour", ["plain", "skip", "wait", "finish"])
def test_a_task_replaces_itself_by_what_wants_the_same_lock(flow, flavour):
    replace, add, total = (family[flavour] for family in (tasks.replace, tasks.add, tasks.total))
    numbers_of = {
        "one": 1,
        "itself": 1,
        "chain": 3,
        "group": [1, 11],
        "chord": 12,
        "group of chains": [2, 11],
    }
    if celery.VERSION >= (5, 7):  # earlier versions do not end it, also without locks
        numbers_of["chain into a group"] = [2, 11]
    results = {}
    for by, numbers in numbers_of.items():
        number = sum(tasks.flat(numbers))
        results[by] = flow.send(replace.s(0, flow.key(), by)), numbers
        results[f"{by} in a chain"] = (
            flow.send(chain(replace.s(0, flow.key(), by), total.s(flow.key()), add.s(flow.key()))),
            number + 1,
        )
        results[f"{by} in a chord"] = (
            flow.send(
                chord([replace.s(0, flow.key(), by), add.s(20, flow.key())], total.s(flow.key()))
            ),
            number + 21,
        )
    returned = {name: get(result) for name, (result, _) in results.items()}
    assert returned == {name: numbers for name, (_, numbers) in results.items()}
    assert flavour == "plain" or not flow.overlaps()


# Calls from inside a body


# Direct calls and apply() are in tests/task/test_workflows_eager.py.
@pytest.mark.parametrize("flavour", LOCKED)
def test_a_call_of_itself_from_its_body(flow, flavour):
    result = flow.send(tasks.call_itself[flavour].s(flow.key(), "delay"))
    again = AsyncResult(get(result))
    if flavour == "raise":
        assert error_of(again) == "LockConflict"
    else:
        answer = get(again)
        answers = {"skip": [SKIPPED], "start": [SKIPPED, "ran"], "finish": [SKIPPED]}
        assert answer in answers.get(flavour, ["ran"])
    assert not flow.overlaps()


def test_a_body_sends_the_next_page(flow):
    key = flow.key()
    assert flow.get(tasks.page.s(key, 0)) == 0
    wait_for(lambda: len(flow.events(key, "end")) >= 3, "all pages have run")
    assert [line["number"] for line in flow.events(key)] == [0, 1, 2]
    assert not flow.overlaps()


@pytest.mark.parametrize("flavour", ["skip", "requeue"])
def test_a_call_of_another_task_from_a_body(flow, flavour):
    """A direct call cannot be postponed, also in the body of a message."""
    outer, results = tasks.call_another[flavour], []
    for how in ("direct", "apply"):
        key = flow.key()
        differ = flow.send(outer.s(flow.key(), flow.key(), how))
        results.append((differ, flow.send(outer.s(key, key, how))))
    for differ, alike in results:
        assert get(differ) == 2
        conflict = f"conflict with {alike.id}"
        assert get(alike) == (SKIPPED if flavour in SKIPPING else conflict)


def test_map_takes_the_lock_for_each(flow):
    one, other = flow.key(), flow.key()
    once = tasks.once["skip"]
    assert flow.get(once.map([one, other, one])) == [one, other, one]
    with held(other):
        assert flow.get(once.map([one, other, one])) == [one, SKIPPED, one]
        assert error_of(flow.send(tasks.once["raise"].map([one, other]))) == "LockConflict"
    assert len(flow.events(one)) == 5


# Options of one member


def test_lock_options_of_a_link_travel_with_it(flow):
    key, add = flow.key(), tasks.add["skip"]
    asks = add.si(1, key).set(lock_options={"skip_result": 7})
    insists = add.si(1, key).set(lock_options={"on_conflict": "raise"})
    free = flow.key()
    with held(key):
        assert flow.get(add.si(0, free) | asks) == 7
        assert flow.get(chord([add.si(0, free), asks], tasks.total["plain"].s(free))) == 8
        assert error_of(flow.send(add.si(0, free) | insists)) == "LockConflict"


def test_a_link_whose_arguments_make_no_lock_fails_the_chain(flow):
    first, second = flow.key(), tasks.once["skip"].s(unknown=1)
    assert error_of(flow.send(tasks.once["skip"].s(first) | second)) == "TypeError"


# Kinds of tasks


def test_bound(flow):
    key = flow.key()
    result = flow.send(tasks.bound.s(key))
    assert get(result) == [
        result.id,
        tasks.bound.name,
        f"workflow.bound(key='{key}')",
    ]


def test_without_typing(flow):
    key = flow.key()
    name = flow.get(tasks.untyped.s(key, 1, x=2))
    assert name == f"workflow.untyped(key='{key}', rest=[1], x=2)"


def test_class_based(flow):
    keys = [flow.key(), flow.key()]
    by_class = tasks.by_class
    assert flow.get(by_class.s(0, keys[0]) | by_class.s(keys[0]) | by_class.s(keys[0])) == 3
    body = tasks.total["plain"].s(keys[0])
    assert flow.get(chord([by_class.s(0, key) for key in keys], body)) == 2
    assert not by_class.lock(0, keys[0]).locked()


def test_autoretry_keeps_its_place_in_the_workflow(flow):
    key = flow.key()
    impatient = tasks.impatient
    after = tasks.add["plain"].s(flow.key())
    assert flow.get(impatient.s(0, key, 3) | after) == 2
    assert [line["retries"] for line in flow.events(key)] == [0, 1, 2, 3]
    members = [impatient.s(0, flow.key(), 2), impatient.s(10, flow.key(), 1)]
    assert flow.get(chord(members, tasks.total["plain"].s(flow.key()))) == 12
    assert error_of(flow.send(impatient.s(0, flow.key(), 9))) == "ZeroDivisionError"


@pytest.mark.skipif(celery.VERSION < (5, 5), reason="Celery 5.4 knows no pydantic tasks")
def test_pydantic(flow):
    key = flow.key()
    modelled = tasks.modelled
    item = {"key": key, "number": 1}
    assert flow.get(modelled.s(item) | modelled.s() | modelled.s()) == {"key": key, "number": 4}
    (first, *_) = flow.events(key)
    assert first["lock"] == f"workflow.modelled(item={item})"
    # A model and what is sent of it are one call.
    lock = modelled.lock(tasks.Item(**item))
    assert lock.key == modelled.lock(item).key
    with lock:
        assert flow.get(modelled.s(item)) is None
    body = tasks.once["plain"].si(key)
    assert flow.get(chord([modelled.s(item), modelled.s({**item, "number": 5})], body)) == key


def test_a_task_with_another_request_class(flow):
    key = flow.key()
    result = flow.send(tasks.requested.s(key))
    assert get(result) == "ran"
    (accepted,) = wait_for(lambda: flow.events(result.id, "accepted"), "the process is noted")
    assert accepted["by"] == flow.events(key)[0]["pid"]
    # The main process still frees the lock of a killed run.
    lock = tasks.requested.lock(key, 60)
    flow.send(tasks.requested.s(key, 60))
    wait_for(lambda: len(flow.events(key)) == 2, "it runs")
    os.kill(flow.events(key)[1]["pid"], signal.SIGKILL)
    wait_for(lambda: not lock.locked(), "its lock is free")
    wait_for(lambda: flow.events(lock.key, "dead"), "the death is reported")


def test_a_shared_task_of_two_applications(flow):
    options = {"broker": app.conf.broker_url, "backend": app.conf.result_backend}
    with Celery("two", set_as_current=False, **options) as two:
        one_s, two_s = app.tasks["workflow.shared"], two.tasks["workflow.shared"]
        assert one_s is not two_s
        key = flow.key()
        lock = one_s.lock(key)
        assert two_s.lock(key).key == lock.key
        sent = two_s.apply_async((key,), queue=flow.worker.queue)
        assert get(sent) == lock.key
        linked = chain(two_s.si(key), two_s.si(key)).apply_async(queue=flow.worker.queue)
        assert get(linked) == lock.key
        assert two_s(key) == one_s(key) == lock.key
        with two_s.lock(key):
            assert one_s(key) == "skipped"
            assert flow.get(one_s.s(key)) == "skipped"
