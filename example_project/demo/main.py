"""The demo: import feeds many times over with real workers, and measure what ran when."""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
import textwrap
import time
from collections import Counter
from typing import Any

from django.conf import settings
from django.core.management import CommandError
from django.db.models import Count, Sum

from django_singletask.models import TaskLockEvent
from example_project.demo import report, servers, states
from example_project.demo.admin_site import AdminSite
from example_project.demo.calls import Calls
from example_project.demo.interrupt import Interrupt, Interrupted
from example_project.demo.measure import RunLog, find_overlaps, most_at_once
from example_project.demo.screen import Screen
from example_project.demo.site import FeedSite, feeds
from example_project.demo.workers import Workers
from example_project.feeds.models import Entry
from example_project.feeds.tasks import import_feed, import_feed_without_lock

WORKERS, CONCURRENCY = 2, 4
ROUNDS, BURSTS, CALLS_A_BURST = 3, 3, 4
# The time that the feed site takes to answer: long enough that calls meet a running import.
ANSWER_SECONDS = 0.3
# If no call ends for so many seconds, the calls that are still pending are lost.
PATIENCE = 15.0

LIVE = "{:<10} {:<30} {:>6}  {:>5} {:>8} {:>7}"


def run(options: dict[str, Any]) -> int:
    """Run the demo and return the exit code: 0 if nothing overlapped and nothing was lost."""
    interrupt = Interrupt()
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        # An ASCII terminal cannot show the ellipsis. The demo must not fail for that.
        stream.reconfigure(errors="replace")
    try:
        with contextlib.ExitStack() as stack:
            return Demo(options, Screen(stream), interrupt).run(stack)
    except Interrupted as interrupted:
        with contextlib.suppress(OSError):
            stream.write(
                "\nInterrupted: the workers have ended, the temporary folder is removed.\n"
            )
        return 128 + interrupted.number
    except BrokenPipeError:
        # The reader has gone (`| head`). Python must not try to flush the output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class Demo:
    def __init__(self, options: dict[str, Any], screen: Screen, interrupt: Interrupt) -> None:
        self.locked = not options["no_lock"]
        self.port = options["serve"]
        self.screen = screen
        self.interrupt = interrupt
        self.began = time.monotonic()
        self.site = FeedSite(feeds(), delay=ANSWER_SECONDS)
        self.calls = Calls(import_feed if self.locked else import_feed_without_lock)
        self.log = RunLog(settings.FEEDS_RUN_LOG)
        self.workers = Workers(settings.HOME, count=WORKERS, concurrency=CONCURRENCY)
        self.round = ""

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def run(self, stack: contextlib.ExitStack) -> int:
        say = self.screen.say
        admin = AdminSite(self.port) if self.port is not None else None
        cache = servers.without_password(settings.CACHE) or "DatabaseCache in an SQLite file"
        broker = servers.without_password(settings.BROKER) or "files"
        say(f"Locks: {cache if self.locked else 'none'}. Broker: {broker}.")
        servers.prepare()
        self.interrupt.check()
        stack.callback(servers.remove_queue)
        if settings.CACHE:
            stack.callback(states.free)
        stack.callback(self.workers.stop)
        self.workers.start()
        say(f"Starting {WORKERS} Celery workers with {CONCURRENCY} processes each …")
        self.wait_for_workers()
        stack.enter_context(self.site)

        # Without locks every call runs, also those of the slow feed. One round is proof enough.
        rounds = ROUNDS if self.locked else 1
        total = len(self.site.feeds) * rounds * BURSTS * CALLS_A_BURST
        how_often = f"{rounds} round{'s' * (rounds > 1)}"
        say(f"Sending {total} imports of {len(self.site.feeds)} feeds in {how_often}.")
        for number in range(rounds):
            self.round = f"round {number + 1} of {rounds}"
            self.site.publish(number)
            self.send(BURSTS, CALLS_A_BURST)
            self.follow()
            if self.calls.pending:
                break

        code = self.report()
        if admin and not code:
            # Ctrl-C is the normal end here.
            with contextlib.suppress(Interrupted):
                self.serve(admin, stack)
        say("Ending the workers …")
        return code

    def wait_for_workers(self) -> None:
        deadline = time.monotonic() + 60
        while not self.workers.ready():
            self.check_workers()
            if time.monotonic() > deadline:
                raise CommandError("The workers did not start within 60 seconds.")
            self.interrupt.sleep(0.05)

    def check_workers(self) -> None:
        if trouble := self.workers.trouble():
            raise CommandError(trouble)

    def send(self, bursts: int, calls: int) -> None:
        """In each burst, import each feed `calls` times in a row, in a random order of feeds."""
        for _ in range(bursts):
            for feed in random.sample(self.site.feeds, len(self.site.feeds)):
                for _ in range(calls):
                    self.calls.send(feed.url)
                self.interrupt.check()
                self.show()

    def follow(self) -> None:
        """Show who holds which lock, until all calls are done or none has ended for PATIENCE."""
        last = time.monotonic()
        while self.calls.pending and time.monotonic() - last < PATIENCE:
            if self.calls.update():
                last = time.monotonic()
            self.check_workers()
            self.show()
            self.interrupt.sleep(0.05)

    def show(self) -> None:
        self.screen.show(self.live_table, self.live_line)

    def holders(self) -> dict[str, Any]:
        """Ask the locks for their holders: feed name -> holder."""
        if not self.locked:
            return {}
        holders = {f.name: import_feed.lock(feed_url=f.url).holder() for f in self.site.feeds}
        return {name: holder for name, holder in holders.items() if holder}

    def live_table(self) -> list[str]:
        holders = self.holders()
        runs = Counter(run.feed for run in self.log.update())
        lines = [self.progress(), ""]
        lines.append(LIVE.format("FEED", "HOLDER", "FOR", "RUNS", "SKIPPED", "FAILED"))
        for feed in self.site.feeds:
            who, seconds = "-", ""
            if holder := holders.get(feed.name):
                who = f"task {holder.task_id[:8]} in process {holder.pid}"
                seconds = f"{max(0.0, time.time() - holder.since):.1f} s"
            failed = self.calls.failed[feed.url].total()
            counts = runs[feed.url], self.calls.skipped[feed.url], failed
            lines.append(LIVE.format(feed.name, who, seconds, *counts))
        return lines

    def live_line(self) -> str:
        held = [f"{name} by {holder.pid}" for name, holder in self.holders().items()]
        locks, colon = f"{len(held)} lock{'s' * (len(held) != 1)}", ": " if held else ""
        return f"{self.progress()}, {locks} held{colon}{', '.join(held)}"

    def progress(self) -> str:
        done = f"{self.calls.done}/{self.calls.sent.total()}"
        return f"{self.elapsed:5.1f} s  {self.round}  {done} done"

    def report(self) -> int:
        runs = self.log.update()
        overlaps = find_overlaps(runs)
        per_feed = Entry.objects.values_list("feed__url").annotate(Count("pk"))
        stored = dict(per_feed.order_by())
        history = TaskLockEvent.objects.filter(kind="conflict", task=import_feed.name)
        in_history = history.aggregate(total=Sum("count"))["total"] or 0
        parts = (self.site.feeds, self.calls, runs, overlaps, stored)
        say = self.screen.say
        self.screen.clear()
        say()
        for line in report.final_table(*parts):
            say(line)
        answers = self.site.answers
        ok, same = f"{answers[200]} times 200 (OK)", f"{answers[304]} times 304 (not modified)"
        say(f"The site answered {ok}, and {same}.")
        say()
        if problems := report.problems(*parts, in_history):
            for problem in problems:
                say(textwrap.fill(f"FAILED: {problem}", 80))
            return 1
        say(
            f"The {len(runs)} runs recorded their times: no two runs of one feed overlapped.\n"
            f"Up to {most_at_once(runs)} feeds were imported at the same time. No call was lost.\n"
            f"The demo took {self.elapsed:.1f} s."
        )
        return 0

    def serve(self, admin: AdminSite, stack: contextlib.ExitStack) -> None:
        states.show(stack, self.site.feeds[0].url)
        admin.start()
        stack.callback(admin.stop)
        self.screen.say(
            f"\nAdmin: {admin.url}  name: {admin.name}  password: {admin.password}\n"
            f"The locks in another terminal:\n{command_line('locks')}\n"
            '"Held now" shows a lock in each state. Search "price update" in the History:\n'
            "it was cleared, and its holder lost it. Imports continue; Ctrl-C ends the demo.\n"
        )
        self.site.delay = 1.0
        # A line each second would scroll the address and the password out of sight.
        self.screen.every = 60.0
        self.round = "serving"
        while True:
            self.send(1, 2)
            self.follow()
            for _ in range(30):
                self.show()
                self.check_workers()
                self.interrupt.sleep(0.1)


def command_line(command: str) -> str:
    names = ["EXAMPLE_HOME", "EXAMPLE_CACHE", "EXAMPLE_BROKER", "EXAMPLE_PREFIX"]
    values = [f"{name}={os.environ[name]}" for name in names if os.environ[name]]
    return f"  {' '.join(values)} \\\n    python manage.py {command}"
