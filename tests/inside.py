"""What tests need of the inside of the package: the one place that changes when its walls move.

Each function says what a test asks or does, in the words of the docs. Other files of tests use the
public names and these; only the tests of one module itself import that module, as a whole.
"""

from __future__ import annotations

import argparse
import inspect
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
from celery.app.task import Context
from django.conf import settings
from django.test import override_settings

from django_singletask import (
    Holder,
    LockUnavailable,
    TaskLock,
    admin,
    checks,
    clock,
    conf,
    process,
    stores,
)
from django_singletask.history import queries, recorder, sweep, writing
from django_singletask.locks import keys, lease, liveness, parameters, ref, renewal
from django_singletask.locks import lock as locking
from django_singletask.management.commands import locks
from django_singletask.operators import explain, held, names, recorded, timeline, words
from django_singletask.operators import starving as starvation
from django_singletask.signals import LockEvent
from django_singletask.stores import base, epoch
from django_singletask.task import delivery, ended, header, latest, options, unique
from django_singletask.worker import startup, watcher
from tests.deadline import wait_for
from tests.proxy import Interposed

# == Stores and the epoch


def slot_keys(lock: TaskLock) -> Sequence[str]:
    """Return the keys of all slots that the lock of this name can have."""
    return lock._lock_key.slots()


def marker_of(key: str, value: bytes) -> str:
    """Return the key of the marker that is left if somebody clears the entry ``value``."""
    return f"{key}:cleared:{Holder.decode(value).token}"


def store_of(cache: str) -> Any:
    """Return the store with which this thread keeps its locks in a cache."""
    return stores.get_store(cache)


def family(alias: str) -> str:
    """Return the family of the store that this thread uses for a cache."""
    return stores.get_store(alias).family


def is_empty(cache: str) -> bool:
    """Say whether a cache has no lock and no entry of a queued call."""
    return list(stores.get_store(cache).entries()) == []


def close_connections() -> None:
    """Close the connections to the lock caches that this thread has opened."""
    stores.close_stores()


# Entries


def take(
    store: Any, value: bytes, *slots: str, allowed: int = 1, mark: bytes = b"", waits: bool = False
) -> str | dict[str, bytes]:
    """Take one of the ``allowed`` first slots, as a run does whose message has the ``mark``.

    Return its key, or what is in the slots. ``waits``: raise an error, as for a run that waits, if
    the cache has just forgotten its locks.
    """
    wanted = base.Slots(slots, allowed, mark)
    taken = store.take(wanted, value, 60, heeds_epoch=waits)
    return taken if isinstance(taken, str) else {key: taken[key].value for key in taken}


def read(lock: Any) -> base.Entry | None:
    """Return value and rest of an entry in Redis."""
    return stores.get_store("redis").read(lock.key)


def write(lock: Any, value: bytes, seconds: float = 60) -> None:
    """Write the value of an entry in Redis, whoever has it."""
    store, entry = stores.get_store("redis"), read(lock)
    if entry is None:
        assert store.add(lock.key, value, seconds) is None
    else:
        assert store.replace(lock.key, entry.value, value, seconds)


def free(lock: Any, value: bytes) -> None:
    """Free an entry in Redis, if it has this value."""
    stores.get_store("redis").release(lock.key, value)


def forget(lock: TaskLock) -> None:
    """Let the cache forget a lock that is held, as by an eviction."""
    store = stores.get_store(lock.cache or settings.SINGLETASK_CACHE)
    store.release(lock.key, store.read(lock.key).value)


def put_entry(key: str, value: bytes, seconds: float = 60, alias: str = "redis") -> None:
    """Write an entry into a cache that holds locks, as another process would."""
    assert stores.get_store(alias).add(key, value, seconds) is None


def has_entry(key: str) -> bool:
    """Say whether Redis has an entry of a lock, or of a queued call, under a key."""
    return stores.get_store("redis").read(key) is not None


# Requests


def answer(patch: pytest.MonkeyPatch, request: str, reply: Callable[..., Any]) -> None:
    """Let a function answer the requests of one kind to Redis; the real request is its first
    argument."""
    store = stores.get_store("redis")
    patch.setattr(store, request, partial(reply, getattr(store, request)))


@contextmanager
def handled(
    request: str, handle: Callable[..., Any], *, cache: str = "redis", of_all_threads: bool = False
) -> Iterator[None]:
    """Let ``handle(send, *arguments)`` handle this kind of request to a cache; ``send`` sends it.

    Each thread has a store of its own, so this is for the requests of this thread alone, or for
    those of all threads to caches of this kind.
    """
    store = stores.get_store(cache)
    place = type(store) if of_all_threads else store
    real = getattr(type(store), request)

    def instead(*arguments: Any, **options: Any) -> Any:
        asked = store
        if of_all_threads:
            asked, *arguments = arguments
        return handle(real.__get__(asked), *arguments, **options)

    with mock.patch.object(place, request, instead):
        yield


@contextmanager
def failing(
    request: str, error: Exception | None = None, *, sent: bool = False, **where: Any
) -> Iterator[None]:
    """Let a kind of request fail; with ``sent``, the server handles it and the reply is lost.

    ``where`` is as for :func:`handled`.
    """

    def fail(send: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        if sent:
            send(*arguments, **options)
        raise error or LockUnavailable("down")

    with handled(request, fail, **where):
        yield


def collect_trips(patch: pytest.MonkeyPatch) -> list[bytes]:
    """Collect what the store sends to Redis from now on."""
    store, sent = stores.get_store("redis"), []
    store.look()  # connects
    connection = store.connections[-1]
    patch.setattr(connection, "_sock", connection._sock)

    def sendall(packed: bytes) -> None:
        sent.append(packed)
        interposed.sock.sendall(packed)

    interposed = Interposed(connection, sendall=sendall)
    return sent


@contextmanager
def signal_while_opening(handle: Callable[[], object]) -> Iterator[None]:
    """Let a signal handler run where the next store is opened."""
    signals = [handle]

    def open_store(cache: str) -> Any:
        while signals:
            signals.pop()()
        return stores.open_store(cache)

    stores.open_with(open_store)
    try:
        yield
    finally:
        stores.open_with(None)


def share_connections(patch: pytest.MonkeyPatch, cache: str) -> None:
    """Let a signal handler use the connection of the request that it interrupts: a broken lock."""
    never = property(lambda store: False, lambda store, value: None)
    patch.setattr(type(stores.get_store(cache)), "is_asking", never)


# The epoch


def knows_the_epoch(alias: str) -> bool:
    """Say whether this process knows the epoch of a cache, or of all servers of a cluster."""
    known = epoch.epoch_of(alias)
    servers = [*known.map.epochs] if hasattr(known, "map") else [known]
    return bool(servers) and all(server.value is not None for server in servers)


def emptied_long_ago(cache: str) -> None:
    """Let no take wait because the cache was emptied: that seems to be long ago."""
    epoch.epoch_of(cache).changed_at = -math.inf


@contextmanager
def outside_of_tests() -> Iterator[None]:
    """Hold takes back in a cache that has forgotten its locks, which is not done in tests."""
    with override_settings(SINGLETASK_TESTING=False):
        yield


def held_back(seconds: float) -> Exception:
    """Return the error of a take that must wait, since the cache has forgotten its locks."""
    return epoch.Forgotten(seconds)


# == Locks, leases, renewal


def stop_clock(patch: pytest.MonkeyPatch) -> Any:
    """Stop the clock by which this process counts its leases; add seconds to ``now`` of the result.

    The caches have clocks of their own, which go on.
    """
    stopped = SimpleNamespace(now=clock.now())
    patch.setattr(clock, "now", lambda: stopped.now)
    return stopped


@contextmanager
def later(seconds: float) -> Iterator[None]:
    """Let the clock of the locks be so many seconds ahead."""
    now = clock.now
    with mock.patch.object(clock, "now", side_effect=lambda: now() + seconds):
        yield


def call_dead(patch: pytest.MonkeyPatch, is_dead: Callable[[Holder], object]) -> None:
    """Let the process of each holder for which this is true be proven dead, and no other."""
    patch.setattr(liveness, "proof_of_death", lambda holder: "gone" if is_dead(holder) else None)


def lock_of_run(lock: TaskLock, *, token: str = "5a3e", **options: Any) -> TaskLock:
    """Return the lock that a run of a task takes, whose token the worker's main process chose."""
    wanted = ref.LockRef(lock.cache or settings.SINGLETASK_CACHE, *lock._lock_key, token=token)
    return locking.lock_of_task(wanted, **options)


def free_killed(lock: TaskLock, token: str) -> bool:
    """Free a lock for a process that was killed, as the worker's main process does."""
    return lock._wanted().of_token(token, lock.slots).free_killed(token, "its process was killed")


@contextmanager
def signal_before_release(error: BaseException) -> Iterator[None]:
    """Let a signal raise an error where the first release of a lock begins."""
    signals, leave = [error], lease.Lease.leave

    def strike(held: lease.Lease, *arguments: Any, **options: Any) -> bool:
        if signals:
            raise signals.pop()
        return leave(held, *arguments, **options)

    with mock.patch.object(lease.Lease, "leave", strike):
        yield


@contextmanager
def signal_after_take(error: BaseException) -> Iterator[None]:
    """Let a signal raise an error where a block begins, which has taken its lock."""
    with mock.patch.object(lease.Lease, "enter", side_effect=error):
        yield


@contextmanager
def signal_while_entering(handle: Callable[[], object]) -> Iterator[None]:
    """Let a signal handler run once, where the block of a lock that was received begins."""
    signals, keep = [handle], renewal.Renewer.keep

    def keep_and_strike(renewer: renewal.Renewer, held: lease.Lease) -> None:
        keep(renewer, held)
        while signals:
            signals.pop()()

    with mock.patch.object(renewal.Renewer, "keep", keep_and_strike):
        yield


def hurry_cancelled_calls(patch: pytest.MonkeyPatch) -> None:
    """Let a cancelled call of asyncio code hardly wait for the reply to its request."""
    patch.setattr(locking, "GRACE", 0.05)


# Leases


def lease_of(lock: TaskLock) -> Any:
    """Return what a process knows of its lease: its ``deadline``, and when a renewal is due."""
    return lock._lease


def renewed_at(lock: TaskLock) -> float:
    """Return when the last renewal of a held lock was sent, by the clock of its process."""
    return lease_of(lock).renewed_at


def wait_for_renewals(lock: TaskLock, seconds: float) -> None:
    """Wait until a lock is renewed that many seconds after its last renewal, or is lost."""
    until = renewed_at(lock) + seconds
    wait_for(lambda: lock.lost or renewed_at(lock) > until, "renewals")
    assert not lock.lost


def kept_leases(cache: str = "redis") -> list[tuple[str, str]]:
    """Return token and key of the entries that this process keeps in a cache."""
    return [*renewal.renewers[cache].leases]


def renewed_keys() -> set[str]:
    """Return the keys of the leases that this process renews."""
    return {key for renewer in renewal.renewers.values() for _token, key in renewer.leases}


def stop_renewal(lock: TaskLock) -> None:
    """Let this process no longer keep the lease of a lock, as if the process was gone."""
    renewal.renewers[lock.cache or "redis"].drop(lease_of(lock))


def keep_nothing() -> None:
    """Let the threads of this process renew and leave nothing more; return when they sleep."""
    for each in renewal.renewers.values():
        each.leases.clear()
        each.owed.clear()
        each.wake()
    threads = [each for each in renewal.renewers.values() if each.thread is not None]
    idle = (math.inf, math.inf)
    wait_for(lambda: all((e.shortest, e.late_at) == idle for e in threads), "they sleep")


# Releases that are owed


def free_in_background(lock: Any, value: bytes) -> None:
    """Let the background free an entry in Redis, after all that it had to free before."""
    renewal.renewers["redis"].owe([lock.key], value, 60)


def make_owed_releases(cache: str = "redis") -> None:
    """Leave now the entries that the background thread has to leave, if no thread runs."""
    renewal.renewers[cache].release_some()


def wait_as_a_process_that_ends(seconds: float) -> None:
    """Wait until this process has left all entries that it must, at most for so long."""
    renewal.release_owed(seconds)


# Simulated stores, and broken leases


@contextmanager
def simulation(
    store: Callable[[], base.Store],
    now: Callable[[], float],
    owe: Callable[[Sequence[str], bytes, float], object],
    proof_of_death: Callable[[Holder], str | None],
) -> Iterator[None]:
    """Let the locks of this thread use this store and clock, and be renewed by the test alone.

    ``owe`` gets the keys, the value and the lease of an entry that must be left later. Other
    threads, such as one of an earlier test, keep the real time.
    """
    real, here = clock.now, threading.get_ident()

    def time_of_thread() -> float:
        return now() if threading.get_ident() == here else real()

    renewer = SimpleNamespace(
        keep=lambda lease: None,
        drop=lambda lease: None,
        find=lambda token, key, origin: None,
        owe=lambda keys, value, length, *new: owe(keys, value, length),
    )
    every_cache = mock.MagicMock(return_value=renewer)
    stores.open_with(lambda alias: store())
    try:
        with (
            mock.patch.object(clock, "now", time_of_thread),
            mock.patch.object(renewal.Renewers, "__getitem__", every_cache, create=True),
            mock.patch.object(liveness, "proof_of_death", proof_of_death),
        ):
            yield
    finally:
        stores.open_with(None)


@contextmanager
def renewals_that_count_from_the_reply() -> Iterator[None]:
    """Break leases: trust a renewal as if it had been sent when its reply came."""
    settle = lease.Lease.settle

    def settle_now(held: lease.Lease, _sent: float, length: float, outcome: base.Outcome) -> None:
        settle(held, clock.now(), length, outcome)

    with mock.patch.object(lease.Lease, "settle", settle_now):
        yield


@contextmanager
def losses_that_a_renewal_undoes() -> Iterator[None]:
    """Break leases: one that has ended is renewed, and then trusted again."""
    lost = property(lambda held: held.held and clock.now() >= held.deadline)
    with (
        mock.patch.object(lease.Lease, "lost", lost),
        mock.patch.object(lease.Lease, "has_ended", return_value=False),
    ):
        yield


# == Tasks, messages, headers

WAITS = {"redelivered": header.WAITS}
"""What the header says of a message that waits for the end of its first run."""
READS = {"redelivered": header.READS}
"""What the header says of a message that looks for the result of its first run the last time."""


def header_of(headers: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a message's headers that the package has written."""
    part: dict[str, Any] = headers[header.HEADER]
    return part


def headers_for(task: Any, task_id: str = "mine", /, **fields: Any) -> dict[str, Any]:
    """Return the headers of a message of this call; ``fields`` are those of the package's part."""
    return {header.HEADER: {"id": task_id, "task": task.name, **fields}}


def holder_of(lock: Any, task: Any = None, task_id: str | None = None, retries: int = 0) -> Holder:
    """Return the record with which a run in this process has this lock for a minute."""
    wanted = ref.LockRef("", lock.name, lock.key, task and task.name, task_id, retries)
    return wanted.holder(60)


# What ends a delivery


def postponed() -> Any:
    """Expect that the message was published again."""
    return pytest.raises(lease.Postponed)


def dropped() -> Any:
    """Expect that the delivery ends because another one does the work or has done it."""
    return pytest.raises(delivery.Dropped)


def wait_longer_before_postponing(patch: pytest.MonkeyPatch) -> None:
    """Let a call of "requeue" wait 5 seconds for its lock: a busy machine needs its time."""
    patch.setattr(delivery, "SHORT_WAIT", 5)


# Entries of queued calls


def ref_of(lock: TaskLock) -> ref.LockRef:
    """Return where the entry of a lock is."""
    return ref.LockRef(lock.cache or settings.SINGLETASK_CACHE, lock.name, lock.key)


def beside(lock: TaskLock, kind: str, whose: str) -> ref.LockRef:
    """Return where another entry next to that of a lock is."""
    place = ref_of(lock)
    return ref.LockRef(place.cache, *place.lock_key.beside(kind, whose))


def queued_entry(task: Any, *args: Any) -> TaskLock:
    """Return a lock that reads and clears the entry of a queued call."""
    place = beside(task.lock(*args), keys.QUEUED, task.name)
    return TaskLock(place.lock_key, cache=place.cache)


def queued_key(key: str, task: str) -> str:
    """Return the key of the entry that a queued call of a task has beside its lock."""
    return keys.LockKey("", key).beside(keys.QUEUED, task).key


def send_before_adding_entries(patch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """Break the order of a sender: collect what adds the entry, for after the message."""
    later: list[Callable[[], Any]] = []

    def add(call: unique.QueuedCall, message: header.Header, seconds: float) -> None:
        later.append(partial(real, call, message, seconds))

    real = unique.QueuedCall.add
    patch.setattr(unique.QueuedCall, "add", add)
    return later


def pass_entries_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """Break the order of a body's successor: its entry passes to it when the run ends."""

    def take_over(call: unique.QueuedCall, blocker: Holder, seconds: float) -> bool:
        entry, until = call.sender.running, clock.now() + 60
        patch.setattr(entry, "leave_body", lambda *_: entry.leave_to(call.value, until))
        call.is_there = True
        return True

    patch.setattr(unique.QueuedCall, "_take_over", take_over)


class _Striking:
    """The lock of a lease's renewals, at whose first release a signal raises an error."""

    def __init__(self, error: Exception) -> None:
        self.signals = [error]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        if self.signals:
            raise self.signals.pop()


def signal_after_taking_over(task: Any, error: Exception) -> None:
    """Let a signal raise an error in the body of a task, when a successor has its entry."""
    vars(task.request.singletask_queued_call.running)["_renewing"] = _Striking(error)


# The numbers of calls that replace each other


def numbers(lock: TaskLock, task: Any) -> tuple[int, int] | None:
    """Return the highest number that a call has taken, and the highest noted; None: no entry."""
    entry = beside(lock, keys.LATEST, task.name).read()
    if entry is None:
        return None
    state = latest.State.decode(entry.value)
    return state.taken, max(state.noted, state.received)


def spoil_numbers(lock: TaskLock, task: Any, nonsense: bytes) -> None:
    """Write something else where the numbers are."""
    write(beside(lock, keys.LATEST, task.name), nonsense)


def of_task(lock: TaskLock, task: Any) -> ref.LockRef:
    return ref_of(lock)._replace(task=task.name)


def take_number(lock: TaskLock, task: Any) -> list[Any] | None:
    """Take the next number, as a call does before its message is published."""
    state = latest.take_number(of_task(lock, task), header.Header("", task.name), None)
    return state and [state.epoch, state.taken]


def note_number(lock: TaskLock, task: Any, ticket: Any) -> bool:
    """Note a number, as a call does after its message is published; say whether one is higher."""
    return latest.gives_way(of_task(lock, task), ticket, is_sent=True)


def forget_numbers(lock: TaskLock, task: Any) -> None:
    """Let the cache forget the numbers."""
    entry = beside(lock, keys.LATEST, task.name)
    free(entry, read(entry).value)


def series_that_wait(lock: TaskLock, task: Any) -> int:
    """Return of how many series before the last one a call is kept that was not received."""
    state = latest.State.decode(beside(lock, keys.LATEST, task.name).read().value)
    return sum(last > state.received for last in state.lasts)


def keep_no_last_call(patch: pytest.MonkeyPatch) -> None:
    """Break the series: let a published call replace all calls before it."""
    take = latest.State.take

    def take_and_forget(state: latest.State, *args: Any) -> latest.State:
        return take(state, *args)._replace(lasts=())

    patch.setattr(latest.State, "take", take_and_forget)


@contextmanager
def killed_before_publishing(app: Any, *, notes: bool = False) -> Iterator[None]:
    """Let a process end when it has taken the entry of a queued call, before it publishes its own.

    With ``notes`` it notes its number in the wrong order: before the message.
    """

    def end(name: str, *args: Any, **message: Any) -> None:
        if notes:
            fields = header_of(message["headers"])
            place = ref.LockRef("redis", fields["name"], fields["key"], name)
            latest.gives_way(place, fields["ticket"], is_sent=True)
        raise SystemExit

    with (
        mock.patch.object(app, "send_task", end),
        mock.patch.object(unique.QueuedCall, "_withdraw"),
        suppress(SystemExit),
    ):
        yield


@contextmanager
def killed_before_the_note() -> Iterator[None]:
    """Let a process publish messages and end, before it notes their numbers."""
    with (
        mock.patch.object(delivery, "gives_way", return_value=False),
        mock.patch.object(unique, "gives_way", return_value=False),
    ):
        yield


# The notes of runs that have ended


def note_death(lock: Any, task_id: str) -> None:
    """Note that the process of a run has died, as the worker's main process does."""
    ended.note(lock._lock_key, task_id, ended.DIED)


def end_is_noted(lock: Any, task_id: str) -> bool:
    """Say whether a run has noted its end for other deliveries of its message."""
    return beside(lock, keys.ENDED, task_id).read() is not None


# The main process of a worker


def accepted(task: Any, headers: dict[str, Any], *args: Any) -> Any:
    """Return what the main process notes of a message that a process of the pool runs."""
    request = SimpleNamespace(task=task, _payload=(args, {}, {}))
    task_id = header_of(headers)["id"]
    return watcher.Accepted(request, header.Header.of(headers, task_id, task.name))


def receive_in_main_process(task: Any, fields: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """Receive a message, as the main process does; return it as a process of the pool gets it."""
    request = SimpleNamespace(task=task, id="mine", request_dict=fields, **facts)
    request.on_accepted = request.on_success = lambda *args: None
    pool = type("TaskPool", (), {"__module__": "celery.concurrency.prefork"})()
    startup.hand_out_token(SimpleNamespace(pool=pool), request)
    return request.request_dict


def discard(task: Any, fields: dict[str, Any], task_id: str = "mine") -> None:
    """Discard a message of a revoked call, as the main process does."""
    startup.free_revoked(task, Context(fields, id=task_id), terminated=False)


# == Options, settings, checks


class Option(NamedTuple):
    """An option of a task; without choices any value of its kind may fit."""

    kind: str
    default: Any
    choices: tuple[Any, ...]


def task_options() -> dict[str, Option]:
    return {
        name: Option(kind, getattr(options.Attributes, name), options.CHOICES.get(name, ()))
        for name, kind in options.Attributes.__annotations__.items()
    }


def problems_of(where: str, **values: Any) -> list[Exception]:
    """Return what is wrong with these options together; a ``UserWarning`` is only reported."""
    return [error for _names, error in options.LockOptions(**values).problems(where)]


def setting_defaults() -> dict[str, Any]:
    """Return the settings by their short names, without ``SINGLETASK_``."""
    return conf.DEFAULTS


def setting(name: str) -> Any:
    """Return what is in effect for ``SINGLETASK_…``, by its short name."""
    return getattr(conf.conf, name)


def check_numbers() -> list[str]:
    """Return the numbers in the code of the system checks."""
    return re.findall(r'[."]([EW]\d{3})"', inspect.getsource(checks))


def header_fields() -> list[str]:
    """Return the fields of the header in a message."""
    return ["id", "task", *sorted(header.TYPES)]


# == The history


def history_mode() -> str:
    """Return how the history is written, by the settings of now."""
    conf.conf.forget()
    return conf.conf.history


@contextmanager
def new_history() -> Iterator[None]:
    """Let a new thread of this process write the history, and try again soon after a failure."""
    with (
        mock.patch.object(recorder, "writer", recorder.Writer()),
        mock.patch.object(recorder, "RETRY", 0.01),
    ):
        yield
        recorder.stop()


def stop_history() -> None:
    """Let the thread write all events, close its connections and end."""
    recorder.stop()


def write_events(events: list[LockEvent]) -> None:
    """Write many events at once, in this thread."""
    writing.write(events)


def write_in_the_order_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a batch lock its rows in the order of its events, instead of one order for all."""
    monkeypatch.setattr(writing, "sorted", list, raising=False)


def take_turn_to_sweep() -> bool:
    """Let this process be the one that sweeps next; return whether no other one has the turn."""
    return sweep.take_turn()


# == Operators: held now, names, words, the command, the admin


def this_process() -> dict[str, Any]:
    """Return what the entry of a lock says of the process that holds it, if it is this one."""
    return vars(process.this_process())


def start_of(pid: int) -> str:
    """Return when a process of this host began, as the entry of a lock says it."""
    return process.start_time(pid)


AS_SHOWN = parameters.Parameters(inspect.signature(lambda **arguments: None))
"""The parameters of any task, without defaults, for arguments as the name of a lock shows them."""


def call_lock(task: str, **arguments: Any) -> tuple[str, str]:
    """Return the name and the key of the lock of a call, whose task no project need have."""
    return keys.call_key(task, AS_SHOWN, (), arguments)


def held_now(*typed: str) -> list[Any]:
    """Return what the operators are shown: all that is held, or what some texts mean."""
    return held.add_states(held.list_held([names.Selector(text) for text in typed]))


def starving(longer_than: float, *typed: str) -> list[Any]:
    """Return what has starved for so many seconds: all of it, or what some texts mean."""
    return starvation.starving(longer_than, [names.Selector(text) for text in typed])


def before_each_clear(monkeypatch: pytest.MonkeyPatch, act: Callable[..., None]) -> None:
    """Let something happen after an operator was shown a lock and before it is freed."""
    really = held.clear

    def clear(lock: Any, **by: Any) -> bool:
        act(**by)
        return really(lock, **by)

    monkeypatch.setattr(held, "clear", clear)


def actions_of_the_command() -> list[str]:
    return [*locks.ACTIONS]


def options_of_the_command(action: str) -> dict[str, Any]:
    """Return the options of one action of the command, and their defaults."""
    parser = argparse.ArgumentParser(add_help=False)
    if action in locks.ADD_OPTIONS:
        locks.ADD_OPTIONS[action](parser)
    return {option.option_strings[0]: option.default for option in parser._actions}


def words_of_the_history() -> list[str]:
    return [*words.WORDS]


def states_of_a_lock() -> list[str]:
    return [*words.STATES]


def in_words(error: Exception) -> str:
    """Return what the command and the admin print of an error of a cache's client."""
    return held.cannot_ask(error)


def forget_tasks_of_the_history() -> None:
    """Let the history's page ask for the tasks of the history, as it does each minute."""
    admin.tasks_of_history.cache_clear()


BOUNDS = {
    "locks on a page": (admin, "SHOWN"),
    "lanes of the timeline": (timeline, "LANES"),
    "marks of the timeline": (timeline, "ROWS"),
    "tokens of a question": (queries, "BATCH"),
    "rows of a search": (recorded, "SCANNED"),
    "open rows": (recorded, "OPEN"),
    "rows of a list": (recorded, "LISTED"),
    "recorded tasks": (names, "RECORDED"),
    "rows of a task": (explain, "NEWEST"),
    "conflicts of what starves": (starvation, "NEWEST"),
    "usual holds": (held, "USUAL"),
}
"""How much the pages and the command read or show, at most."""


def bound(monkeypatch: pytest.MonkeyPatch, what: str, most: int) -> None:
    """Let this be the most that is read or shown, which otherwise needs many rows."""
    monkeypatch.setattr(*BOUNDS[what], most)
