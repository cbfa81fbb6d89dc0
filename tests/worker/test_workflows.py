"""Workflows of locked tasks on real workers: all end, whatever becomes of a member."""

from __future__ import annotations

import json
import os
import signal
import uuid
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from math import inf
from operator import itemgetter

import celery
import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import TimeoutError as NotInTime
from celery.result import AsyncResult

from django_singletask import DuplicateTask, TaskLock
from django_singletask.history.queries import SWEEPER
from django_singletask.holder import Holder
from django_singletask.locks.keys import LATEST, QUEUED, LockKey
from django_singletask.stores import CannotList, get_store
from tests import canvases
from tests.deadline import wait_for
from tests.testapp import workflow_tasks as tasks
from tests.testapp.celery import app
from tests.testapp.workflow_tasks import FLAVOURS, SKIPPED
from tests.worker.harness import Worker

# Celery 5.4 with a redis-py of today.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")

TIMEOUT = 30  # seconds: far longer than any of it takes
until = partial(wait_for, deadline=TIMEOUT)

LOCKED = [flavour for flavour in FLAVOURS if flavour != "plain"]
DROPPING = ["skip", "start", "finish"]  # what finds the lock held is skipped
PUT_OFF = ["requeue", "rerun"]

ONE_BY_ONE = [name for name, shape in canvases.SHAPES.items() if shape.one_by_one]
SIDE_BY_SIDE = [name for name in canvases.SHAPES if name not in ONE_BY_ONE]
# Their members are called by a message of Celery's own, and cannot be put off.
CALLED = ["starmap", "chunks"]
SENT = [name for name in canvases.SHAPES if name not in CALLED]
CACHES = pytest.mark.parametrize("cache", ["redis", "pymemcache"])


def on_caches(*flavours):
    """Run each flavour on Redis, and those that do more than add and release on memcached."""
    also = [flavour for flavour in flavours if flavour in ("rerun", "finish")]
    values = [(flavour, "redis") for flavour in flavours]
    values += [(flavour, "pymemcache") for flavour in also]
    return pytest.mark.parametrize(("flavour", "cache"), values)


class Fleet:
    """Start a worker for a cache when it is first asked for; they serve all tests of the module."""

    def __init__(self, folder):
        self.folder = folder
        self.workers = {}

    def __call__(self, cache):
        if cache not in self.workers:
            queue = f"test-{cache}-{uuid.uuid4().hex[:12]}"
            worker = Worker(self.folder, queue, cache=cache, name=cache, concurrency=4)
            worker.log.touch()
            self.workers[cache] = worker
            worker.start()
        return self.workers[cache]

    def stop(self):
        for worker in self.workers.values():
            worker.kill_group()
            delete(worker.queue)


def delete(queue):
    with app.connection_or_acquire() as connection:
        connection.default_channel.queue_delete(queue)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, django_db_setup):
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    yield fleet
    fleet.stop()


class Flow:
    """What a test does with the worker for one cache."""

    def __init__(self, worker, cache):
        self.worker, self.cache, self.queue = worker, cache, worker.queue
        self.begun = worker.log.stat().st_size
        self.printed = len(worker.text())
        self.keys = []

    def key(self, name="key"):
        self.keys.append(f"{name}-{uuid.uuid4().hex[:8]}")
        return self.keys[-1]

    def distinct(self, name, first=None):
        """Give a key of its own to each member of a workflow."""
        return canvases.distinct(lambda: self.key(name), first)

    def send(self, signature, **options):
        return signature.apply_async(queue=self.queue, **options)

    def get(self, signature, **options):
        return self.send(signature, **options).get(timeout=TIMEOUT)

    def send_all(self, flavour, keys_of, shapes):
        """Send a workflow of each shape."""
        made = {shape: canvases.make(shape, flavour, keys_of(shape)) for shape in shapes}
        return {shape: self.send(canvas) for shape, canvas in made.items()}

    def text(self):
        """Return what the worker has printed since the test began."""
        return self.worker.text()[self.printed :]

    def log(self):
        """Return what tasks have written since the test began; the file serves the module."""
        with self.worker.log.open("rb") as file:
            file.seek(self.begun)
            return [json.loads(line) for line in file if line.endswith(b"\n")]

    def events(self, key, event="start"):
        return [line for line in self.log() if (line["event"], line.get("key")) == (event, key)]

    def overlaps(self):
        """Count the pairs of runs of one key, of all that the test has used, at the same time."""
        ends = {line["run"]: line["t"] for line in self.log() if line["event"] == "end"}
        latest, count = {}, 0
        for line in sorted(self.log(), key=itemgetter("t")):
            if line["event"] == "start":
                key = line["key"]
                count += line["t"] < latest.get(key, 0)
                latest[key] = max(latest.get(key, 0), ends.get(line["run"], inf))
        return count

    def conflicts(self, *keys):
        """Count the conflicts about the locks of these keys, so far."""
        names = {lock_of(key).name for key in keys}
        return sum(line["event"] == "skipped" and line["name"] in names for line in self.log())

    def left_behind(self):
        """Return the locks and the entries of queued calls that the cache still has."""
        store = get_store(self.cache)
        try:
            entries = list(store.entries())
        except CannotList:
            locks = [lock_of(key).key for key in self.keys]
            names = [f"workflow.{task}.{kind}" for task in ("add", "total") for kind in DROPPING]
            beside = [
                LockKey("", lock).beside(QUEUED, name).key for lock in locks for name in names
            ]
            return [key for key in locks + beside if store.read(key)]
        holders = [Holder.decode(entry.value) for key, entry in entries if LATEST not in key]
        return [str(holder) for holder in holders if holder.name != SWEEPER]


def lock_of(key):
    return TaskLock(f"workflow:{key}")


@contextmanager
def held(flow, *keys):
    """Let somebody else have these locks, whose lease, short on paper, makes for short hops."""
    store = get_store(flow.cache)
    values = {}
    for key in keys:
        lock = lock_of(key)
        holder = Holder.new(lock.name, 0.5, task="other", task_id="other", retries=0)
        values[lock.key] = holder.encode()
        assert store.add(lock.key, values[lock.key], 120) is None
    try:
        yield
    finally:
        for key, value in values.items():
            store.release(key, value)


@pytest.fixture
def on(fleet, settings, empty_cache, monkeypatch):
    """Give a flow on the worker for a cache; when the test ends nothing may be left there."""
    flows = []

    def use(cache):
        settings.SINGLETASK_CACHE = cache
        empty_cache(cache)
        flows.append(Flow(fleet(cache), cache))
        monkeypatch.setenv("SINGLETASK_TEST_LOG", str(flows[0].worker.log))
        return flows[-1]

    yield use
    until(lambda: not any(flow.left_behind() for flow in flows), "all is given back")


@pytest.fixture
def flow(on):
    return on("redis")


def get_all(results):
    return {shape: result.get(timeout=TIMEOUT) for shape, result in results.items()}


def given_by(shapes):
    return {name: canvases.SHAPES[name].gives for name in shapes}


def error_of(result):
    """Wait for a result, and return the name of its error, if any."""
    try:
        result.get(timeout=TIMEOUT)
    except NotInTime:
        raise
    except Exception as error:
        return type(error).__name__
    return None


# Members alike and not alike


@on_caches(*FLAVOURS)
def test_members_that_differ_give_what_unlocked_ones_give(on, flavour, cache):
    flow = on(cache)
    results = flow.send_all(flavour, flow.distinct, canvases.SHAPES)
    assert get_all(results) == given_by(canvases.SHAPES)


@on_caches(*LOCKED)
def test_equal_links_run_one_after_the_other(on, flavour, cache):
    flow = on(cache)
    keys = {shape: flow.key(shape) for shape in ONE_BY_ONE}
    results = flow.send_all(flavour, lambda shape: canvases.equal(keys[shape]), ONE_BY_ONE)
    assert get_all(results) == given_by(ONE_BY_ONE)
    assert len(flow.events(keys["chain"])) == 3
    assert len(flow.events(keys["immutable chain"])) == 2
    assert not flow.overlaps()
    assert not flow.conflicts(*keys.values())


@on_caches(*LOCKED)
def test_equal_members_of_groups(on, flavour, cache):
    flow = on(cache)
    keys = {shape: flow.key(f"slow {shape}") for shape in SIDE_BY_SIDE}
    results = flow.send_all(flavour, lambda shape: canvases.equal(keys[shape]), SIDE_BY_SIDE)
    if flavour in PUT_OFF:
        assert error_of(results.pop("chunks")) == "LockConflict"
    if flavour == "raise":
        errors = {error_of(result) for result in results.values()}
        assert errors <= {"LockConflict", "ChordError", None}
    elif flavour in ("wait", "requeue"):
        assert get_all(results) == given_by(results)
    else:
        for shape, numbers in get_all(results).items():
            assert len(tasks.flat(numbers)) == len(tasks.flat(canvases.SHAPES[shape].gives))
    assert not flow.overlaps()
    assert flavour == "wait" or flow.conflicts(*keys.values())


def test_equal_members_without_a_lock_overlap(flow):
    """Negative control: the log would show it."""
    keys = {shape: flow.key(f"slow {shape}") for shape in SIDE_BY_SIDE}
    results = flow.send_all("plain", lambda shape: canvases.equal(keys[shape]), SIDE_BY_SIDE)
    assert get_all(results) == given_by(SIDE_BY_SIDE)
    assert flow.overlaps()


# The first member finds its lock held


@pytest.fixture
def first_held(on):
    """Send workflows, one of each shape, whose first member finds its lock held."""

    @contextmanager
    def send(flavour, cache, shapes):
        flow = on(cache)
        first = {shape: flow.key(shape) for shape in shapes}
        with held(flow, *first.values()):
            keys_of = lambda shape: flow.distinct(shape, first[shape])  # noqa: E731
            yield flow, flow.send_all(flavour, keys_of, shapes), first

    return send


@on_caches(*DROPPING)
def test_a_skipped_member_gives_its_skip_result(first_held, flavour, cache):
    shapes = [shape for shape in canvases.SHAPES if shape != "immutable chain"]
    with first_held(flavour, cache, shapes) as (flow, results, first):
        given = get_all(results)
    # The next link, and the body of the chord, have received it and run.
    assert all(min(tasks.flat(numbers)) < SKIPPED / 2 for numbers in given.values())
    assert given["chain"] == SKIPPED + 2
    assert given["group"] == [SKIPPED, 11, 21]
    assert given["chord"] == SKIPPED + 11
    assert given["starmap"] == [SKIPPED, 2, 3]
    assert flow.conflicts(*first.values()) == len(first)


@CACHES
def test_a_raised_conflict_fails_what_waits_for_it(first_held, cache):
    # There Celery itself never ends the group, see below.
    shapes = [shape for shape in canvases.SHAPES if shape != "group in a chain"]
    with first_held("raise", cache, shapes) as (_, results, _):
        errors = {shape: error_of(result) for shape, result in results.items()}
    assert set(errors.values()) <= {"LockConflict", "ChordError"}
    body = AsyncResult(results["chord"].id).get(timeout=TIMEOUT, propagate=False)
    assert type(body).__name__ == "ChordError"
    assert "LockConflict" in str(body)


@pytest.mark.parametrize("flavour", ["plain", "raise"])
def test_a_failed_link_before_a_group_is_told_by_the_link_alone(flow, flavour):
    """Celery does not end the group, with a plain task neither."""
    first = tasks.fail[flavour].s(0, flow.key())
    add = tasks.add[flavour]
    result = flow.send(chain(first, group(add.s(flow.key()), add.s(flow.key()))))
    assert error_of(result.parent) == "ZeroDivisionError"
    assert not result.ready()


@on_caches(*PUT_OFF)
def test_a_member_that_is_put_off_gives_what_it_would_have_given(first_held, flavour, cache):
    with first_held(flavour, cache, SENT) as (flow, results, first):
        put_off = lambda: flow.conflicts(*first.values()) >= len(first)  # noqa: E731
        until(put_off, "each first member is put off")
        assert not any(flow.events(key) for key in first.values())
    assert get_all(results) == given_by(SENT)
    assert all(len(flow.events(key)) == 1 for key in first.values())


@pytest.mark.parametrize("flavour", PUT_OFF)
def test_what_is_called_by_map_or_chunks_raises_instead(first_held, flavour):
    with first_held(flavour, "redis", CALLED) as (_, results, _):
        assert {error_of(result) for result in results.values()} == {"LockConflict"}


def test_a_member_waits(first_held):
    with first_held("wait", "redis", ["chain", "chord"]) as (flow, results, _):
        received = f"{results['chain'].parent.parent.id}] received"
        until(lambda: received in flow.text(), "it waits")
    assert get_all(results) == given_by(["chain", "chord"])


@CACHES
def test_superseded_members_give_way_and_the_bodies_run(on, cache):
    flow = on(cache)
    add, total = tasks.add["rerun"], tasks.total["rerun"]
    keys = [flow.key() for _ in range(3)]
    with held(flow, *keys):
        results = [
            flow.send(chord([add.s(n, key) for n in (0, 10, 20)], total.s(flow.key())))
            for key in keys
        ]
        until(lambda: flow.conflicts(*keys) >= 9, "all have met the conflict")
    for key, result in zip(keys, results, strict=True):
        assert result.get(timeout=TIMEOUT) in [2 * SKIPPED + number for number in (1, 11, 21)]
        assert len(flow.events(key)) == 1


@pytest.mark.parametrize("flavour", LOCKED)
def test_the_body_of_a_chord_finds_its_lock_held(flow, flavour):
    add, key = tasks.add["plain"], flow.key()
    header = group(add.si(0, flow.key()), add.si(10, flow.key()))
    with held(flow, key):
        result = flow.send(chain(header, tasks.total[flavour].s(key), add.s(flow.key())))
        if flavour in DROPPING:
            assert result.get(timeout=TIMEOUT) == SKIPPED + 1
        elif flavour == "raise":
            assert error_of(result) == "LockConflict"
        elif flavour == "wait":
            until(lambda: "workflow.total.wait[" in flow.text(), "it waits")
        else:
            until(lambda: flow.conflicts(key), "it is put off")
    if flavour == "wait" or flavour in PUT_OFF:
        assert result.get(timeout=TIMEOUT) == 13


# An equal call is queued


@pytest.fixture
def queued():
    """Leave an equal call of a unique task in a queue that no worker reads."""
    queue = f"test-unread-{uuid.uuid4().hex[:12]}"

    @contextmanager
    def leave(flow, task, *args):
        result = task.apply_async(args, queue=queue)
        assert task.queued(*args).id == result.id
        beside = task.lock_key(args, {}).beside(QUEUED, task.name).key
        store = get_store(flow.cache)
        value = store.read(beside).value
        yield result
        assert store.read(beside).value == value  # nobody else has freed it
        store.release(beside, value)

    yield leave
    delete(queue)


@on_caches("start", "finish")
def test_a_member_is_sent_although_an_equal_call_is_queued(on, queued, flavour, cache):
    flow = on(cache)
    add, strict = tasks.add[flavour], {"on_duplicate": "raise"}
    keys = {shape: flow.key(shape) for shape in [*canvases.SHAPES, "link"]}
    with ExitStack() as stack:
        waiting = [stack.enter_context(queued(flow, add, 0, key)) for key in keys.values()]
        # Nobody waits for this one.
        assert flow.send(add.s(5, keys["link"])).id == waiting[-1].id
        with pytest.raises(DuplicateTask):
            flow.send(add.s(5, keys["link"]), lock_options=strict)
        results = flow.send_all(flavour, lambda name: canvases.equal(keys[name]), canvases.SHAPES)
        linked = tasks.add["plain"].s(flow.key())
        after = linked.freeze()
        assert flow.get(add.s(0, keys["link"]), link=linked, lock_options=strict) == 1
        assert after.get(timeout=TIMEOUT) == 2
        given = get_all(results)
    for name, numbers in given.items():
        shape = canvases.SHAPES[name]
        if shape.one_by_one:
            assert numbers == shape.gives
        assert len(tasks.flat(numbers)) == len(tasks.flat(shape.gives))


@CACHES
def test_what_is_left_behind_would_be_seen(on, queued, cache):
    """Negative control of the end of every test here."""
    flow = on(cache)
    key = flow.key()
    assert not flow.left_behind()
    with held(flow, key):
        assert flow.left_behind()
    with queued(flow, tasks.add["finish"], 0, key):
        assert flow.left_behind()


# Links and errbacks


def test_links_of_what_is_skipped_or_put_off_run_once(flow):
    after = tasks.add["plain"]
    skipped, put_off = flow.key("skipped"), flow.key("put off")
    links = {key: after.s(flow.key(f"after {key}")) for key in (skipped, put_off)}
    given = {key: link.freeze() for key, link in links.items()}
    with held(flow, skipped, put_off):
        flow.get(tasks.add["skip"].s(0, skipped), link=links[skipped])
        assert given[skipped].get(timeout=TIMEOUT) == SKIPPED + 1
        first = flow.send(tasks.add["requeue"].s(0, put_off), link=links[put_off])
        until(lambda: flow.conflicts(put_off), "it is put off")
    assert first.get(timeout=TIMEOUT) == 1
    assert given[put_off].get(timeout=TIMEOUT) == 2
    for link in links.values():
        assert len(flow.events(link.args[-1])) == 1


def errbacks(key):
    """One of each way in which Celery calls them; the last two want a lock."""
    return [tasks.told.s(key=key), tasks.locked_told.s(key=key), tasks.sent.s(key=key)]


def told(flow, key):
    """Wait for the three errbacks, and return what they were told about."""
    until(lambda: len(flow.events(key, "told")) >= 3, "the errbacks are called")
    return flow.events(key, "told")


def test_the_errbacks_of_a_raised_conflict_run(flow):
    key = flow.key()
    with held(flow, key):
        result = flow.send(tasks.add["raise"].s(0, key), link_error=errbacks(key))
        assert error_of(result) == "LockConflict"
        lines = told(flow, key)
    assert {line["of"] for line in lines} == {result.id}
    assert {line["error"] for line in lines if "error" in line} == {"LockConflict"}
    assert sum("lock" in line for line in lines) == 2


def test_the_errbacks_of_a_chord_run(flow):
    key, body = flow.key(), flow.key("body")
    members = [tasks.add["raise"].s(0, key), tasks.add["raise"].s(10, flow.key())]
    last = tasks.total["raise"].s(body)
    for errback in errbacks(body):
        last.link_error(errback)
    with held(flow, key):
        result = flow.send(chord(members, last))
        assert error_of(result) in ("ChordError", "LockConflict")
        lines = told(flow, body)
    assert result.id in {line["of"] for line in lines}
    assert not flow.events(body)


def test_the_errbacks_of_what_was_put_off_and_fails_run_once(flow):
    key = flow.key()
    with held(flow, key):
        result = flow.send(tasks.fail["requeue"].s(0, key), link_error=errbacks(key))
        until(lambda: flow.conflicts(key), "it is put off")
        assert not flow.events(key, "told")
    assert error_of(result) == "ZeroDivisionError"
    assert len(told(flow, key)) == 3
    assert len(flow.events(key)) == 1


@pytest.mark.parametrize(
    ("errback", "error"), [("raising", "LockConflict"), ("unlockable", "TypeError")]
)
def test_an_errback_that_gets_no_lock_fails_in_the_log(flow, errback, error):
    """Celery calls one with these parameters in the worker: there is no message to put off."""
    key, task = flow.key(), getattr(tasks, errback)
    with task.lock(None, None, None, key) if errback == "raising" else nullcontext():
        failing = flow.send(tasks.fail["skip"].s(0, key), link_error=task.s(key=key))
        # Celery before 5.7 may replace the task's error by that of its errback.
        assert error_of(failing) in ("ZeroDivisionError", error)
        until(lambda: error in flow.text(), "the worker tells")
        assert not flow.events(key, "told")


def test_a_call_without_a_result_has_none_after_it_was_put_off(flow):
    key = flow.key()
    with held(flow, key):
        result = flow.send(tasks.add["requeue"].s(0, key), ignore_result=True)
        until(lambda: flow.conflicts(key), "it is put off")
    until(lambda: flow.events(key, "end"), "it runs")
    flow.get(tasks.add["requeue"].s(0, key))  # after the end of the first
    assert AsyncResult(result.id).state == "PENDING"


# Replacing


@on_caches(*FLAVOURS)
def test_a_task_replaces_itself_by_what_wants_the_same_lock(on, flavour, cache):
    flow = on(cache)
    replace, add, total = (family[flavour] for family in (tasks.replace, tasks.add, tasks.total))
    gives = {
        "one": 1,
        "itself": 1,
        "chain": 3,
        "group": [1, 11],
        "chord": 12,
        "group of chains": [2, 11],
    }
    if celery.VERSION >= (5, 7):  # earlier ones do not end it, of plain tasks neither
        gives["chain into a group"] = [2, 11]
    results = {}
    for by, given in gives.items():
        number = sum(tasks.flat(given))
        results[by] = flow.send(replace.s(0, flow.key(), by)), given
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
    given = {name: result.get(timeout=TIMEOUT) for name, (result, _) in results.items()}
    assert given == {name: gives for name, (_, gives) in results.items()}
    assert flavour == "plain" or not flow.overlaps()


# Calls from inside a body


@pytest.mark.parametrize("flavour", LOCKED)
def test_a_call_of_itself_from_its_body(flow, flavour):
    keys = {how: flow.key(how) for how in ("direct", "apply", "delay")}
    results = {how: flow.send(tasks.call_itself[flavour].s(key, how)) for how, key in keys.items()}
    answers = get_all(results)
    for how in ("direct", "apply"):
        conflict = f"conflict with {results[how].id}"
        assert answers[how] == (SKIPPED if flavour in DROPPING else conflict)
    again = AsyncResult(answers["delay"])
    if flavour == "finish":
        assert again.id == results["delay"].id  # not to be sent before this one has finished
    elif flavour == "raise":
        assert error_of(again) == "LockConflict"
    else:
        answer = again.get(timeout=TIMEOUT)
        assert answer in {"skip": [SKIPPED], "start": [SKIPPED, "ran"]}.get(flavour, ["ran"])
    assert not flow.overlaps()


@pytest.mark.parametrize("flavour", LOCKED)
def test_a_call_of_another_task_from_a_body(flow, flavour):
    outer, results = tasks.call_another[flavour], []
    for how in ("direct", "apply"):
        key = flow.key()
        differ = flow.send(outer.s(flow.key(), flow.key(), how))
        results.append((differ, flow.send(outer.s(key, key, how))))
    for differ, alike in results:
        assert differ.get(timeout=TIMEOUT) == 2
        conflict = f"conflict with {alike.id}"
        assert alike.get(timeout=TIMEOUT) == (SKIPPED if flavour in DROPPING else conflict)


def test_map_takes_the_lock_for_each(flow):
    one, other = flow.key(), flow.key()
    once = tasks.once["skip"]
    assert flow.get(once.map([one, other, one])) == [one, other, one]
    with held(flow, other):
        assert flow.get(once.map([one, other, one])) == [one, SKIPPED, one]
        assert error_of(flow.send(tasks.once["raise"].map([one, other]))) == "LockConflict"
    assert len(flow.events(one)) == 5


# Options of one member


def test_lock_options_of_a_link_travel_with_it(flow):
    key, add = flow.key(), tasks.add["skip"]
    asks = add.si(1, key).set(lock_options={"skip_result": 7})
    insists = add.si(1, key).set(lock_options={"on_conflict": "raise"})
    free = flow.key()
    with held(flow, key):
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
    assert result.get(timeout=TIMEOUT) == [
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


def test_a_request_class_of_the_projects_own(flow):
    key = flow.key()
    result = flow.send(tasks.requested.s(key))
    assert result.get(timeout=TIMEOUT) == "ran"
    (accepted,) = until(lambda: flow.events(result.id, "accepted"), "it is told")
    assert accepted["by"] == flow.events(key)[0]["pid"]
    # And the main process still frees the lock of a killed run.
    lock = tasks.requested.lock(key, 60)
    flow.send(tasks.requested.s(key, 60))
    until(lambda: len(flow.events(key)) == 2, "it runs")
    os.kill(flow.events(key)[1]["pid"], signal.SIGKILL)
    until(lambda: not lock.locked(), "its lock is free")
    until(lambda: [line for line in flow.log() if line["event"] == "expired"], "it is told as dead")


def test_a_shared_task_of_two_applications(flow):
    options = {"broker": app.conf.broker_url, "backend": app.conf.result_backend}
    with Celery("two", set_as_current=False, **options) as two:
        one_s, two_s = app.tasks["workflow.shared"], two.tasks["workflow.shared"]
        assert one_s is not two_s
        key = flow.key()
        lock = one_s.lock(key)
        assert two_s.lock(key).key == lock.key
        sent = two_s.apply_async((key,), queue=flow.queue)
        assert sent.get(timeout=TIMEOUT) == lock.key
        linked = chain(two_s.si(key), two_s.si(key)).apply_async(queue=flow.queue)
        assert linked.get(timeout=TIMEOUT) == lock.key
        assert two_s(key) == one_s(key) == lock.key
        with two_s.lock(key):
            assert one_s(key) == "skipped"
            assert flow.get(one_s.s(key)) == "skipped"
