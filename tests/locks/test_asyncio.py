"""Locks in asyncio code: exclusion, a loop that goes on, and calls that are cancelled."""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import functools
import inspect
import os
import random
import signal
import threading
import time
from contextlib import AsyncExitStack, ExitStack, closing, suppress

import pytest
from asgiref.sync import async_to_sync
from django.db import connections

from django_singletask import (
    LockConflict,
    LockError,
    LockLost,
    LockUnavailable,
    TaskLock,
    current_lock,
    only_one,
)
from django_singletask.locks import aio
from django_singletask.models import TaskLockEvent
from tests import inside, servers
from tests.entries import eventually, in_child, listening, private_store

NAME = "nightly"


@pytest.fixture(autouse=True)
def no_history(settings):
    settings.SINGLETASK_HISTORY = "off"


def run(function, *args):
    """Run a coroutine function in a loop; fail if that takes long."""
    return asyncio.run(asyncio.wait_for(function(*args), 30))


def pool_threads():
    return sum(each.threads for each in aio.pools.values())


class TestExclusion:
    def most_at_once(self, number, slots=1):
        """Let tasks of a loop take a lock; return how many were in its block at once."""
        inside = most = ran = 0
        full = asyncio.Event()

        async def one():
            nonlocal inside, most, ran
            async with TaskLock(NAME, wait=20, slots=slots):
                inside += 1
                most = max(most, inside)
                if inside == slots:
                    full.set()
                await full.wait()
                await asyncio.sleep(0.02)
                ran += 1
                inside -= 1

        async def main():
            await asyncio.gather(*(one() for _ in range(number)))

        run(main)
        assert ran == number
        return most

    @pytest.mark.parametrize(
        "cache_alias", ["redis", "pymemcache", "db_postgres", "db_sqlite", "locmem"], indirect=True
    )
    def test_tasks_of_a_loop_run_one_at_a_time(self, cache_alias):
        assert self.most_at_once(10) == 1

    def test_as_many_tasks_run_as_there_are_slots(self, on_redis):
        assert self.most_at_once(9, slots=3) == 3

    def test_threads_and_tasks_exclude_each_other(self, on_redis):
        async def main():
            with TaskLock(NAME):
                lock = TaskLock(NAME)
                assert not await lock.aacquire()
                assert lock.blocker.pid == os.getpid()
            async with TaskLock(NAME):
                assert not TaskLock(NAME).acquire()

        run(main)

    def test_a_take_that_was_held_back_uses_the_store_of_its_thread(self, on_redis):
        """Its next step may be done in another thread; a client of a cache serves one."""
        users, attempts = {}, {}

        def hold_back_once(take, slots, value, *args, **options):
            users.setdefault(take.__self__, set()).add(threading.get_ident())
            attempts[value] = attempts.get(value, 0) + 1
            if attempts[value] == 1:
                raise inside.held_back(random.uniform(0, 0.05))
            return take(slots, value, *args, **options)

        async def one(number):
            async with TaskLock(f"{NAME}-{number}"):
                pass

        async def main():
            await asyncio.gather(*(one(number) for number in range(20)))

        with inside.handled("take", hold_back_once, of_all_threads=True):
            run(main)
        assert [*attempts.values()] == [2] * 20
        assert [len(threads) for threads in users.values()] == [1] * len(users)

    def test_a_block_meets_a_conflict_as_its_options_say(self, on_redis):
        async def main():
            async with TaskLock(NAME):
                async with TaskLock(NAME, on_conflict="skip") as lock:
                    assert not lock
                with pytest.raises(LockConflict):
                    async with TaskLock(NAME):
                        raise AssertionError

        run(main)

    def test_a_nested_block_of_one_task_does_not_wait_for_itself(self, on_redis):
        async def main():
            async with TaskLock(NAME):
                began = time.monotonic()
                with pytest.raises(LockConflict):
                    await TaskLock(NAME).aacquire(wait=20)
                assert time.monotonic() - began < 10

        run(main)

    @pytest.mark.parametrize("outer", ["with", "async with"])
    def test_a_task_that_is_made_in_a_block_waits_for_its_end(self, on_redis, outer):
        """It has a copy of the context, with the block of the other task."""

        async def main():
            waiting = TaskLock(NAME)
            async with AsyncExitStack() as block:
                if outer == "with":
                    block.enter_context(TaskLock(NAME))
                else:
                    await block.enter_async_context(TaskLock(NAME))
                task = asyncio.create_task(waiting.aacquire(wait=30))
                await asyncio.sleep(0.1)
            assert await task
            assert await waiting.arelease()

        run(main)

    def test_two_tasks_cannot_use_one_object(self, on_redis):
        async def main():
            lock = TaskLock(NAME)
            answers = await asyncio.gather(
                *(lock.aacquire(wait=1) for _ in range(2)), return_exceptions=True
            )
            assert [type(answer) for answer in answers] == [bool, LockError]
            await lock.arelease()

        run(main)


class TestQuestions:
    def test_each_asynchronous_method_does_what_its_twin_does(self, on_redis):
        async def main():
            lock = TaskLock(NAME, timeout=30)
            assert not await lock.alocked()
            assert await lock.aholder() is None
            assert await lock.aacquire()
            assert await lock.alocked()
            assert await lock.aowned()
            assert (await lock.aholder()).token == lock.token
            await lock.aextend(500)
            assert 490 < await lock.aremaining() <= 500
            assert await lock.afencing_token() == lock.fencing_token()
            lock.check()
            assert await lock.aclear(actor="tests")
            with pytest.raises(LockLost):
                await lock.aextend()
            assert not await lock.arelease()

        run(main)

    def test_they_have_names_of_their_own(self):
        assert TaskLock.aextend.__name__ == "aextend"
        assert inspect.iscoroutinefunction(TaskLock.aextend)

    def test_current_lock_is_that_of_the_block(self, on_redis):
        async def main():
            async with TaskLock(NAME) as lock:
                assert current_lock() is lock
                await asyncio.sleep(0)
                assert current_lock() is lock
            assert current_lock() is None

        run(main)

    def test_a_received_lock_is_entered(self, on_redis):
        lock = TaskLock(NAME)
        lock.acquire()
        handle = lock.hand_over(for_=60)

        async def main():
            async with TaskLock.receive(handle) as received:
                assert await received.aowned()
            assert not await received.alocked()

        run(main)

    def test_a_received_lock_that_a_signal_handler_frees_meanwhile_is_not_taken(self, on_redis):
        lock = TaskLock(NAME)
        lock.acquire()
        received = TaskLock.receive(lock.hand_over(for_=60))

        async def main():
            with inside.signal_while_entering(received.release):
                async with received:
                    assert not received
                    assert not await received.alocked()

        run(main)


class TestOnlyOne:
    def test_a_coroutine_function_holds_the_lock_around_its_awaits(self, on_redis):
        @only_one(key="sync-{user_id}", skip_result="skipped")
        async def sync(user_id):
            assert current_lock().name == "sync-7"
            await asyncio.sleep(0.2)
            return "ran"

        assert inspect.iscoroutinefunction(sync)

        async def main():
            assert sorted(await asyncio.gather(sync(7), sync(7))) == ["ran", "skipped"]
            assert await sync(7) == "ran"

        run(main)

    @pytest.mark.parametrize(
        ("options", "answers"),
        [
            ({"on_conflict": "raise"}, ["LockConflict", "ran"]),
            ({"wait": 10}, ["ran", "ran"]),
            ({"on_skip": lambda conflict, n: f"plain {n}"}, ["plain", "ran"]),
        ],
    )
    def test_a_conflict_is_met_as_the_options_say(self, on_redis, options, answers):
        @only_one(**options)
        async def work(n):
            await asyncio.sleep(0.1)
            return "ran"

        async def main():
            results = await asyncio.gather(work(1), work(2), return_exceptions=True)
            names = [r.split()[0] if isinstance(r, str) else type(r).__name__ for r in results]
            assert sorted(names) == answers

        run(main)

    def test_on_skip_may_be_a_coroutine_function(self, on_redis):
        async def report(conflict, n):
            await asyncio.sleep(0)
            return conflict.name, n

        @only_one(key="work", on_skip=report)
        async def work(n):
            raise AssertionError

        async def main():
            async with TaskLock("work"):
                assert await work(3) == ("work", 3)

        run(main)

    def test_nobody_would_await_the_on_skip_of_a_plain_function(self):
        async def report(conflict): ...

        with pytest.raises(TypeError, match=r"is a coroutine function, but .* is not"):

            @only_one(on_skip=report)
            def work(): ...


class TestTheLoopGoesOn:
    """Only the loop lets the server go on: if it stood still, no reply would come."""

    @pytest.fixture
    def pause(self, request, settings):
        """Give the function that stops the server until a timer of the loop is due.

        A parameter is how many seconds a request waits for its reply.
        """
        server = servers.Redis()
        options = {"socket_timeout": getattr(request, "param", 10)}

        def pause_until_the_loop_goes_on():
            server.pause()
            asyncio.get_running_loop().call_later(0.2, server.resume)

        with servers.running([server]):
            with private_store(settings, "redis", server.url, options=options):
                yield pause_until_the_loop_goes_on
                server.resume()

    def test_while_20_wait_for_a_server_that_stands_still(self, pause):
        async def wait():
            async with TaskLock(NAME, cache="redis", wait=20, timeout=60):
                pass

        async def main():
            holder = TaskLock(NAME, cache="redis")
            await holder.aacquire()
            pause()
            await asyncio.gather(*(wait() for _ in range(20)), holder.arelease())

        run(main)

    @pytest.mark.parametrize("pause", [0.5], indirect=True)
    def test_control_a_plain_acquire_stops_the_loop(self, pause):
        async def main():
            pause()
            with pytest.raises(LockUnavailable):
                TaskLock(NAME, cache="redis").acquire()

        run(main)


class Gate:
    """Hold each request to the store, before or after it is made, until it is opened."""

    def __init__(self):
        self.closed = None
        self.reached = threading.Event()
        self.open = threading.Event()

    def close(self, point):
        self.closed = point
        self.reached.clear()
        self.open.clear()

    def __call__(self, point):
        if point == self.closed:
            self.reached.set()
            assert self.open.wait(30)


@pytest.fixture
def gate(on_redis):
    gate = Gate()

    def wait_at_the_gate(request, send, *args, **options):
        gate(f"before the {request}")
        reply = send(*args, **options)
        gate(f"after the {request}")
        return reply

    with ExitStack() as requests:
        for request in ("take", "release"):
            handle = functools.partial(wait_at_the_gate, request)
            requests.enter_context(inside.handled(request, handle, of_all_threads=True))
        yield gate
        gate.open.set()


async def cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def takes(lock):
    with suppress(LockError):  # it is in use until the cancelled take is undone
        return lock.acquire()


class TestCancelled:
    @pytest.mark.parametrize("point", ["before the take", "after the take"])
    @pytest.mark.parametrize("way", ["aacquire", "async with"])
    def test_a_take_that_is_cancelled_is_given_back(self, gate, monkeypatch, point, way):
        inside.hurry_cancelled_calls(monkeypatch)
        gate.close(point)
        lock = TaskLock(NAME)

        async def take():
            if way == "aacquire":
                await lock.aacquire()
            else:
                async with lock:
                    raise AssertionError

        async def main():
            task = asyncio.create_task(take())
            await asyncio.to_thread(gate.reached.wait, 30)
            await cancelled(task)

        run(main)
        gate.open.set()
        eventually(lambda: takes(lock))  # the object can be used again
        assert lock.release()

    def test_a_cancelled_take_is_given_back_before_the_caller_goes_on(self, gate):
        """It waits for the reply, unless that takes long."""
        gate.close("before the take")
        lock = TaskLock(NAME)

        async def main():
            task = asyncio.create_task(lock.aacquire())
            await asyncio.to_thread(gate.reached.wait, 30)
            asyncio.get_running_loop().call_later(0.1, gate.open.set)
            await cancelled(task)
            assert await lock.aacquire()
            await lock.arelease()

        run(main)

    def test_a_release_that_is_cancelled_is_carried_out(self, gate):
        async def main():
            lock = TaskLock(NAME)
            await lock.aacquire()
            gate.close("before the release")
            task = asyncio.create_task(lock.arelease())
            await asyncio.to_thread(gate.reached.wait, 30)
            asyncio.get_running_loop().call_later(0.1, gate.open.set)
            await cancelled(task)
            assert not await TaskLock(NAME).alocked()

        run(main)

    def test_a_wait_that_is_cancelled_between_two_looks_ends_at_once(self, on_redis):
        async def main():
            async with TaskLock(NAME):
                waiting = TaskLock(NAME)
                task = asyncio.create_task(waiting.aacquire(wait=30))
                await asyncio.sleep(0.2)
                began = time.monotonic()
                await cancelled(task)
                assert time.monotonic() - began < 15
                assert not waiting
            assert not await waiting.alocked()

        run(main)

    def test_a_cancelled_body_gives_the_lock_back(self, on_redis):
        async def main():
            entered = asyncio.Event()

            async def body():
                async with TaskLock(NAME):
                    entered.set()
                    await asyncio.sleep(30)

            task = asyncio.create_task(body())
            await entered.wait()
            await cancelled(task)
            assert not await TaskLock(NAME).alocked()

        run(main)

    @pytest.mark.parametrize("alias", ["redis", "pymemcache"])
    def test_many_that_are_cancelled_at_random_leave_nothing(self, alias, empty_cache, monkeypatch):
        empty_cache(alias)
        taken, given_back, inside = set(), set(), 0

        def receive(event):
            {"acquired": taken, "released": given_back}.get(event.kind, set()).add(event.token)

        async def one():
            nonlocal inside
            async with TaskLock(NAME, wait=30, cache=alias):
                assert not inside
                inside += 1
                try:
                    await asyncio.sleep(random.random() * 0.002)
                finally:
                    inside -= 1

        async def cancel_soon(turns):
            task = asyncio.create_task(one())
            for _ in range(turns):
                await asyncio.sleep(random.choice([0, 0, 0.0005, 0.002]))
            task.cancel()
            await asyncio.wait([task])

        async def main():
            for turns in range(60):
                await asyncio.gather(*(cancel_soon(turns % 20) for _ in range(5)))
                assert not await TaskLock(NAME, cache=alias).alocked()

        with listening(receive):
            run(main)
        assert taken
        assert given_back == taken

    def test_a_block_that_another_task_closes_ends(self, on_redis):
        """A loop closes asynchronous generators in tasks of its own."""

        async def generate():
            async with TaskLock(NAME):
                yield current_lock().name

        async def main():
            generator = generate()
            assert await anext(generator) == NAME
            await asyncio.create_task(generator.aclose())
            assert not await TaskLock(NAME).alocked()

        run(main)

    def test_a_cache_that_is_down_is_an_error(self, dead_redis):
        async def main():
            lock = TaskLock(NAME, cache=dead_redis)
            for _ in range(2):  # the object can be used again
                with pytest.raises(LockUnavailable):
                    await lock.aacquire(wait=5)

        run(main)

    def test_a_loop_that_ends_meanwhile_leaves_nothing(self, gate, monkeypatch):
        inside.hurry_cancelled_calls(monkeypatch)
        gate.close("after the take")
        lock = TaskLock(NAME)

        async def main():
            lock.pending = asyncio.create_task(lock.aacquire())  # asyncio.run() cancels it
            await asyncio.to_thread(gate.reached.wait, 30)

        run(main)
        gate.open.set()
        eventually(lambda: not lock and not TaskLock(NAME).locked())

    def test_a_loop_that_is_closed_under_it_leaves_nothing(self, gate):
        gate.close("after the take")
        loop = asyncio.new_event_loop()
        coroutine = TaskLock(NAME).aacquire()

        async def begin():
            coroutine.send(None)

        loop.run_until_complete(begin())
        assert gate.reached.wait(30)
        loop.close()
        coroutine.close()
        gate.open.set()
        eventually(lambda: not TaskLock(NAME).locked())

    @pytest.mark.parametrize("point", ["before the take", "after the take"])
    def test_an_interrupt_leaves_nothing(self, gate, point):
        gate.close(point)

        async def main():
            loop = asyncio.get_running_loop()
            loop.call_later(0.2, os.kill, os.getpid(), signal.SIGINT)
            loop.call_later(0.3, gate.open.set)
            async with TaskLock(NAME):
                await asyncio.sleep(30)

        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
        gate.open.set()
        eventually(lambda: not TaskLock(NAME).locked())


class TestThreads:
    def test_a_job_can_be_added_inside_another_addition(self, monkeypatch):
        """The garbage collector can close a coroutine there, which then adds its release."""
        pool, done, begin = aio.Threads(), [], _thread.start_new_thread

        def collect_and_begin(*arguments):
            monkeypatch.setattr(_thread, "start_new_thread", begin)
            pool.add(lambda: done.append("inside"))
            return begin(*arguments)

        monkeypatch.setattr(_thread, "start_new_thread", collect_and_begin)
        job = functools.partial(pool.add, lambda: done.append("outside"))
        begin(job, ())  # which must not wait for itself
        eventually(lambda: {*done} == {"inside", "outside"})

    def test_idle_threads_end(self, on_redis, monkeypatch):
        monkeypatch.setattr(aio, "IDLE", 0.05)

        before = pool_threads()

        async def main():
            jobs = [aio.in_thread("idle", functools.partial(time.sleep, 0)) for _ in range(30)]
            await asyncio.gather(*jobs)
            assert pool_threads() > before

        run(main)
        eventually(lambda: pool_threads() <= before)

    def test_many_requests_share_a_few_threads(self, on_redis):
        seen = set()

        def look(_):
            seen.add(threading.current_thread())
            time.sleep(0.001)

        async def main():
            jobs = [aio.in_thread("redis", functools.partial(look, n)) for n in range(100)]
            await asyncio.gather(*jobs)

        run(main)
        assert 1 < len(seen) <= aio.MAX_THREADS

    def test_a_job_sees_the_context_of_its_caller(self):
        variable = contextvars.ContextVar("variable")

        async def main():
            variable.set(7)
            assert await aio.in_thread("redis", variable.get) == 7

        run(main)

    def test_a_forked_child_has_threads_of_its_own(self, on_redis):
        async def main():
            assert not await TaskLock(NAME).alocked()

        run(main)
        assert in_child(lambda: run(main) or pool_threads())


@pytest.mark.django_db
def test_the_history_of_a_test_is_in_its_transaction(on_redis, settings):
    settings.SINGLETASK_HISTORY = "inline"

    async def main():
        async with TaskLock("in a transaction"):
            pass

    async_to_sync(main)()
    assert TaskLockEvent.objects.get(name="in a transaction").outcome == "released"
    outside = connections.create_connection("default")
    with closing(outside), outside.cursor() as cursor:
        table = TaskLockEvent._meta.db_table
        cursor.execute(f"SELECT count(*) FROM {table} WHERE name = 'in a transaction'")
        assert cursor.fetchone() == (0,)


@pytest.mark.django_db
def test_a_conflict_is_told_in_another_thread(on_redis, settings):
    """A receiver, such as the history, may write into a database, which the loop must not do."""
    settings.SINGLETASK_HISTORY = "inline"
    told_in = []

    def note_thread(event, **kwargs):
        if event.name == "told":  # a lock of an earlier test may end now
            told_in.append((event.kind, threading.get_ident()))

    async def main():
        async with TaskLock("told"), TaskLock("told", on_conflict="skip") as lock:
            assert not lock
        return threading.get_ident()

    with listening(note_thread):
        of_loop = async_to_sync(main)()
    assert [kind for kind, _ in told_in] == ["acquired", "conflict", "released"]
    assert of_loop not in {thread for _, thread in told_in}
    assert TaskLockEvent.objects.filter(kind="conflict", name="told").count() == 1
