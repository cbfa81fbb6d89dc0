"""Random load while processes and servers are killed at random, and what became of each call."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress

import redis
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import AsyncResult
from kombu import Connection, Producer
from kombu.exceptions import OperationalError

from django_singletask import LockLost
from tests import intervals
from tests.deadline import wait_for
from tests.intervals import Hold, Line, Recording
from tests.servers import Redis, Server
from tests.testapp import tasks
from tests.testapp.celery import app
from tests.worker.harness import Worker

GAPS = {"pool process": 2, "worker": 10, "store": 8, "broker": 12}
"""Mean seconds from one kill to the next."""
FULL = (0.4, 0.5)
"""Between which parts of the load a Redis store has no memory left."""
OUTAGES = [0.2, 0.2, 0.5, 1, 4]  # seconds; the longest outlasts the short leases
SHORT_KEYS, LONG_KEYS, LONG_SHARE = "abcdef", "xyz", 0.1
LIMIT_SHARE, LIMITS = 0.1, (0.05, 0.5)
"""How many calls have a soft time limit, and of how many seconds."""
LEASE = 3  # of the long runs, which renew it several times
STORE_CLIENT = 1
"""Seconds for which a client of the store can still fail when the store is back."""
DELAY = 0.5
"""Seconds until a worker handles a message, or until the broker sees that a worker is dead."""

RAN = "ran"
SKIPPED = "skipped: an identical call ran"
NOT_SENT = "not sent: the broker was down"
STORE_DOWN = "failed: the lock store was down"
OLD_CONNECTION = "failed: first request since the store was down"
STOPPED = "stopped: the lock was lost"
LIMITED = "stopped by a soft time limit"
WORKER_KILLED = "lost by the broker as a worker was killed"
BROKER_KILLED = "lost by the broker as it was killed"
EXPECTED = [RAN, SKIPPED, NOT_SENT, STORE_DOWN, OLD_CONNECTION, STOPPED, LIMITED]
FATES = [*EXPECTED, WORKER_KILLED, BROKER_KILLED]

Call = tuple[float, "AsyncResult[str]"]  # when it was sent


class Soak:
    """Send calls to workers, and kill what they need, for some seconds; then judge.

    ``forgets`` says whether the store comes back empty.
    """

    def __init__(
        self, workers: list[Worker], store: Server, broker: Server, *, forgets: bool, seconds: float
    ) -> None:
        self.workers = workers
        self.servers = {"store": store, "broker": broker}
        self.forgets = forgets
        self.seconds = seconds
        self.rng = random.Random(seconds)
        self.calls: list[Call] = []
        self.refused = 0
        self.killed: Counter[str] = Counter()
        self.ended_by_themselves = 0
        self.down: dict[str, tuple[float, float]] = {}  # since when, and until when
        self.full_since: float | None = None

    # Load and kills

    def run(self) -> None:
        """Do all this, then wait for the answers."""
        began = now()
        ends = began + self.seconds
        due = {victim: now() + gap / 2 for victim, gap in GAPS.items()}
        with Connection(self.servers["broker"].url) as connection:
            producer = app.amqp.Producer(connection)
            while now() < ends:
                self.send(producer)
                self.pause(self.rng.uniform(0.03, 0.1))
                self.fill_store((now() - began) / self.seconds)
                for victim, at in due.items():
                    if now() > at:
                        due[victim] = now() + GAPS[victim] * self.rng.uniform(0.5, 1.5)
                        self.kill(victim)
                self.start_servers(now())
                self.start_workers()
        self.fill_store(1)
        self.start_servers(float("inf"))
        self.wait_for_answers()

    def fill_store(self, part: float) -> None:
        """Fill the store in one part of the load: it then refuses what needs memory."""
        store, (start, end) = self.servers["store"], FULL
        if type(store) is not Redis or "store" in self.down:
            return
        is_full = self.full_since is not None
        if is_full == (start <= part < end):
            return
        with redis.Redis.from_url(store.url) as client:
            if is_full:
                client.config_set("maxmemory", 0)
                intervals.note("store full", since=self.full_since)
                self.full_since = None
            else:
                client.config_set("maxmemory-policy", "noeviction")
                client.config_set("maxmemory", 1)
                self.full_since = now()

    def send(self, producer: Producer) -> None:
        call = (self.rng.choice(SHORT_KEYS), self.rng.uniform(0, 0.5))
        options: dict[str, object] = {}
        if self.rng.random() < LONG_SHARE:
            call = (self.rng.choice(LONG_KEYS), self.rng.uniform(1, 2 * LEASE))
            options = {"lock_timeout": LEASE}
        limit = self.rng.uniform(*LIMITS) if self.rng.random() < LIMIT_SHARE else None
        at = now()
        try:
            result = tasks.careful.apply_async(
                call,
                queue=self.workers[0].queue,
                producer=producer,
                lock_options=options,
                soft_time_limit=limit,
            )
        except OperationalError:
            self.refused += 1
        else:
            app.backend.add_pending_result(result)
            self.calls.append((at, result))

    def pause(self, seconds: float) -> None:
        """Take the answers that come meanwhile."""
        until = now() + seconds
        while (left := until - now()) > 0:
            app.backend.result_consumer.drain_events(timeout=left)

    def kill(self, victim: str) -> None:
        if victim in self.servers:
            is_full = victim == "store" and self.full_since is not None
            if victim not in self.down and not is_full:
                since = now()
                self.servers[victim].kill()
                self.down[victim] = since, since + self.rng.choice(OUTAGES)
                self.killed[victim] += 1
            return
        worker = self.rng.choice(self.workers)
        if victim == "pool process":
            if children := worker.children():
                intervals.kill(self.rng.choice(children))
                self.killed[victim] += 1
            return
        if worker.process.poll() is None:
            # Stop it first, so that it starts no child that is not noted as killed.
            os.kill(worker.process.pid, signal.SIGSTOP)
            intervals.kill(worker.process.pid, *worker.children())
            worker.process.wait()
            self.killed[victim] += 1
            self.start_again(worker)

    def start_servers(self, due: float) -> None:
        """Start each server that should be back by this time."""
        for name, (since, until) in list(self.down.items()):
            if until <= due:
                self.servers[name].start()
                intervals.note(f"{name} down", since=since)
                if name == "store" and self.forgets:
                    intervals.note("forgot", since=since)
                del self.down[name]

    def start_workers(self) -> None:
        """Start the workers again that ended by themselves."""
        for worker in self.workers:
            if worker.process.poll() is not None:
                self.ended_by_themselves += 1
                self.start_again(worker)

    def start_again(self, worker: Worker) -> None:
        intervals.note("worker ended", victim=worker.process.pid)
        worker.start(ready=False)

    def wait_for_answers(self) -> None:
        """Return when the broker has had no message for a second: no call can be answered then.

        Between Redis and kombu's record of what is not acknowledged, a message is in neither, for
        some milliseconds of each hop of a postponed call.
        """
        with Connection(self.servers["broker"].url) as connection:
            client, busy_at = connection.default_channel.client, now()

            def is_drained() -> bool:
                nonlocal busy_at
                self.start_workers()
                if client.exists(self.workers[0].queue, "unacked"):
                    busy_at = now()
                return now() > busy_at + 1

            with suppress(AssertionError):  # the table says which calls are not answered
                wait_for(is_drained, "the broker has no message", deadline=60)

    # Judgement

    def table(self, recording: Recording) -> dict[str, str]:
        """Return what happened, in the lines of a table."""
        forgotten = sum(map(recording.is_forgotten, recording.both_trusted()))
        return {
            "seconds of load": f"{self.seconds:,}",
            "killed: pool processes": f"{self.killed['pool process']:,}",
            "killed: whole workers": f"{self.killed['worker']:,}",
            "killed: the lock store": f"{self.killed['store']:,}",
            "killed: the broker": f"{self.killed['broker']:,}",
            "workers that ended by themselves": f"{self.ended_by_themselves:,}",
            "seconds for which the lock store was full": f"{self.seconds_full(recording):,.0f}",
            "calls": f"{len(self.calls) + self.refused:,}",
            **{f"- {fate}": f"{number:,}" for fate, number in self.fates(recording).items()},
            "locks taken": f"{len(recording.holds):,}",
            "- renewals of these": f"{sum(len(hold.renewals) for hold in recording.holds):,}",
            "- retaken, after the store forgot them": f"{len(recording.of('retaken')):,}",
            "- lost, or not renewed in time": f"{sum(map(is_lost, recording.holds)):,}",
            "two holders trusted one lock": f"{len(recording.both_trusted()):,}",
            "- because the store forgot": f"{forgotten:,}",
            "- others beside one holder, at most": f"{recording.beside_one():,}",
            "two bodies ran at a time": f"{len(recording.both_ran()):,}",
            "fencing tokens": f"{sum(hold.fence is not None for hold in recording.holds):,}",
            "- not greater than an earlier one": f"{len(recording.wrong_fences()):,}",
            "a dead holder blocked for, at most": f"{recording.longest_block():.2f} s",
        }

    def seconds_full(self, recording: Recording) -> float:
        return sum(line["at"] - line["since"] for line in recording.of("store full"))

    def fates(self, recording: Recording) -> dict[str, int]:
        """Count what became of the calls; a fate in capitals must not be."""
        fates = dict.fromkeys(FATES, 0) | {NOT_SENT: self.refused}
        trace = Trace(recording, self.calls, len(self.workers))
        for number, (sent, result) in enumerate(self.calls):
            fate = trace.fate_of(number)
            if fate not in EXPECTED:
                print(f"{fate}: {result.id}, sent at {sent:.3f}: {result.state} {result.result!r}")
            fates[fate] = fates.get(fate, 0) + 1
        return fates


class Trace:
    """Trace each call to what became of it, or to what lost it."""

    def __init__(self, recording: Recording, calls: list[Call], workers: int) -> None:
        self.recording, self.calls, self.workers = recording, calls, workers
        self.received = {line["task_id"]: line for line in reversed(recording.of("received"))}
        self.failed = {line["task_id"]: line for line in reversed(recording.of("failed"))}
        self.lost = {hold.task_id for hold in recording.holds if is_lost(hold)}

    def fate_of(self, number: int) -> str:
        result = self.calls[number][1]
        if not result.ready():
            return self.why_unanswered(number)
        if result.state == "SUCCESS":
            return {"ran": RAN, None: SKIPPED}.get(result.result, "ANSWERED WRONGLY")
        if isinstance(result.result, SoftTimeLimitExceeded):
            return LIMITED
        if isinstance(result.result, LockLost):
            return STOPPED if result.id in self.lost else "STOPPED WITHOUT A REASON"
        # A process that was killed between its answer and its note has only the first of the two.
        return self.why_failed(self.failed.get(result.id, self.received[result.id]))

    def why_unanswered(self, number: int) -> str:
        """Say what lost a message.

        Redis gives a message to the client that waits for it, and forgets it; then kombu records it
        as not acknowledged. While all processes of a worker are busy, kombu does not even read what
        Redis has given. If worker or broker is killed meanwhile, nobody has the message. It was
        given before those that were sent later, so when each worker has received one of these, the
        message was lost already. A call that is postponed is sent again.
        """
        sent, result = self.calls[number]
        lines = [
            line
            for event in ("received", "postponed")
            for line in self.recording.of(event)
            if line["task_id"] == result.id
        ]
        last = max(lines, key=at, default={"event": "sent", "at": sent})
        if last["event"] == "received":
            # If the worker that received it ends, the broker delivers it again, with the same gap.
            ended = [line["victim"] for line in self.recording.of("worker ended")]
            return WORKER_KILLED if last["pid"] in ended else "RECEIVED AND NOT ANSWERED"
        sent = last["at"]
        first_later: dict[int, float] = {}  # of each worker
        for sent_at, later in self.calls[number + 1 :]:
            if sent_at > sent and len(first_later) < self.workers and later.id in self.received:
                line = self.received[later.id]
                first_later.setdefault(line["pid"], line["at"])
        until = now()
        if len(first_later) == self.workers:
            until = max(first_later.values())
        ends = map(at, self.recording.of("worker ended"))
        if any(sent - DELAY <= end <= until + DELAY for end in ends):
            return WORKER_KILLED
        return BROKER_KILLED if self.was_down("broker", sent, until) else "LOST WITHOUT A REASON"

    def why_failed(self, failed: Line) -> str:
        if self.was_down("store", failed["at"] - STORE_CLIENT, failed["at"]):
            return STORE_DOWN
        lines = self.recording.lines
        replies = [line["at"] for line in lines if is_reply(line, failed["pid"])]
        for outage in self.recording.of("store down"):
            if not any(outage["since"] < reply < failed["at"] for reply in replies):
                return OLD_CONNECTION
        return "FAILED WITHOUT A REASON"

    def was_down(self, server: str, start: float, end: float) -> bool:
        """Say whether a server was down at some time of a period."""
        outages = self.recording.of(f"{server} down") + self.recording.of(f"{server} full")
        return any(line["since"] <= end and start <= line["at"] for line in outages)


def now() -> float:
    """Return the time of the host's boot clock, as the recording does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def at(line: Line) -> float:
    return line["at"]


def is_reply(line: Line, pid: int) -> bool:
    """Say whether a line shows that a process had a reply of the store."""
    return line["pid"] == pid and line["event"] in ("taken", "trusted", "conflict")


def is_lost(hold: Hold) -> bool:
    return hold.ended_by in ("lost", "its deadline")
