"""One acquisition of a lock: take the entry, trust it, notice its loss, and leave it.

The wing's docstring draws the life of a lease.

How an entry ends
-----------------

Four verbs: its holder *leaves* it or *owes* that, others *free* it or *clear* it.

===================  ==============================  ===========================  =================
who and how          request                         log                          raised
===================  ==============================  ===========================  =================
its holder:          delete its own bytes, or        only of a loss               LockUnavailable;
``Lease.leave``      replace them (``at_least``)                                  then it is owed
its body has ended:  the same                        an outage, as an error       nothing
``leave_body``
to a receiver:       replace its own bytes           only of a loss               LockLost,
``hand_over``                                                                     LockUnavailable
its thread, later:   the same as was owed, until     an outage, once              nothing
``Lease.owe``        the lease has ended
who finds it dead:   delete the dead holder's        a warning, with the proof    LockUnavailable
``LockRef.free_…``   bytes
an operator:         delete the bytes shown, leave   a warning, with the actor    LockUnavailable
``LockRef.clear``    a marker for the holder
===================  ==============================  ===========================  =================

Whatever interrupts a request of a holder (an error, a signal, a lost reply), the server may have
handled it. Then the entry is owed: the thread in :mod:`django_singletask.locks.renewal` leaves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import threading
import time
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from functools import lru_cache
from operator import itemgetter
from typing import Any

from celery.exceptions import Ignore, Reject, Retry

from django_singletask import clock, threads
from django_singletask.arguments import check_seconds
from django_singletask.conf import conf
from django_singletask.exceptions import LockConflict, LockError, LockLost, LockUnavailable
from django_singletask.holder import Holder, without_process
from django_singletask.locks import liveness
from django_singletask.locks.keys import lock_of_slot
from django_singletask.locks.ref import KEPT, LockRef
from django_singletask.locks.renewal import renewers
from django_singletask.log import in_words, logger
from django_singletask.stores import get_store
from django_singletask.stores.base import Entry, Outcome, Slots
from django_singletask.stores.epoch import Forgotten
from django_singletask.stores.keys import marker_key

MAX_RETRIES = 3
"""How often a take tries again: it has freed the entry of a dead holder, or its lease ended before
the reply came."""
MAX_HELD_BACK = 3
"""How often in a row a take waits because the cache has just forgotten its locks."""
POLL = 0.05
"""Seconds of the first pause at most; a short wait has shorter ones."""
MAX_POLL = 0.5
LONG_WAIT = 1.0
"""Seconds after which a call that waits tells that it does."""
TRUST = 0.99
"""The part of a lease that is trusted: the speed of two clocks differs by far less than 1 %."""
ROUNDING = 0.002
"""Seconds by which the store may round a lease."""
CHILD_ASKS = 1.0
"""Seconds between two requests of a forked child that check its parent's lock."""
BEHIND_ITSELF = "the same code already holds it, and a lock is not re-entrant"

Origin = tuple[object, int | None]
"""A mark of a thread, and the id of the asyncio task that runs in it."""


def here() -> Origin:
    # Mark each thread with an object, because the number of a thread can be used again.
    try:
        mark = threads.made["variables"].mark
    except (AttributeError, KeyError):
        mark = threads.put("mark", object())
    loop = _get_running_loop()  # without a loop, a tenth of the time of get_running_loop()
    if loop is None:
        return mark, None
    return mark, id(asyncio.current_task(loop))


@lru_cache(maxsize=1024)
def one_slot(key: str) -> Slots:
    """Return the only slot of an ordinary lock."""
    return Slots((key,))


innermost: ContextVar[Callable[[], Lease | None]] = ContextVar("innermost", default=lambda: None)
"""The lease of the innermost block, function or task body.

The reference is weak: if a signal strikes between a body and its ``__exit__``, the context would
otherwise keep the lease, and so its renewal, for ever.
"""


def current_lease() -> Lease | None:
    """Return the lease of the innermost ``with`` block, function or task body that runs here."""
    lease = innermost.get()()
    # A signal at the end of a block can leave its lease here.
    if lease is None or lease.outer_block is None:
        return None
    return lease


class Postponed(Ignore):
    """End this delivery of a message: the message was published again, with a delay."""


try:
    from greenlet import GreenletExit
except ImportError:
    ENDS_OF_PROCESSES: tuple[type[BaseException], ...] = (SystemExit, KeyboardInterrupt)
else:
    ENDS_OF_PROCESSES = (SystemExit, KeyboardInterrupt, GreenletExit)
"""Errors that end a process or a greenlet. All others end a body."""


def result_of(error: BaseException) -> str:
    """Return the history's word for the end of a body, given the error that ended it."""
    if isinstance(error, Retry):
        return "retried"
    if isinstance(error, Postponed):
        return "postponed"
    if isinstance(error, (Ignore, Reject)):
        return "ignored"
    if isinstance(error, ENDS_OF_PROCESSES):
        return "terminated"  # SystemExit, for example, by Celery's terminate
    return "raised"


class Lease:
    """One acquisition of the lock ``ref`` by this process.

    ``length`` is the lease in seconds (None: that of the settings). If ``renews`` is true, the
    thread in :mod:`django_singletask.locks.renewal` extends it at about each third of that. A body
    that began keeps the entry until ``at_least`` seconds after its begin, however it ends. ``held``
    is true from the take until the release. If the lock has several slots, the take moves ``key``
    to the slot that it took, or after a conflict to the slot of the blocker. Without ``slots`` it
    has one.

    The state of an acquisition is here; a :class:`TaskLock` or a delivery has the lease that it
    uses now.
    """

    held: bool = False
    renews = True
    at_least: float = 0
    deadline: float = 0.0
    """Until when this process trusts the lease; this and the next times are those of the clock."""
    renewed_at: float = 0.0
    taken_at: float = 0.0
    began_at: float = -math.inf
    """When the body began; before that, infinitely long ago."""
    longest_gap: float = 0.0
    retaken: int = 0
    """How often the cache forgot the entry and it was set again."""
    fence: int | None = None
    """The fencing token, after the first request."""
    reason: str = ""
    """Why the entry was lost, once that was reported."""
    _lost = False
    _is_missing = False
    _child_asked_at = 0.0
    took_over: bool = False
    """Whether the take has freed the entry of a dead run of the same task id."""
    kept: bool = False
    """Whether the release leaves the entry there because of ``at_least``."""
    was_handed_over: bool = False
    """Whether the body has handed it over, so that the end of the body is still to be told."""
    left_because: str = ""
    """Why it was left in this way, for the history."""
    origin: Origin | None = None
    """Where it was taken."""
    in_block = False
    """Whether it is for a ``with`` block of this origin, or a delivery; set before it is taken.

    Then the thread leaves the entry if nothing refers to this object any more.
    """
    outer_block: Token[Any] | None = None
    """What restores the lease of the outer block, while a block runs."""
    is_unguarded = False
    """Whether the body runs without the lock, because the cache cannot be used."""
    delivery: Callable[[], Any] | None = None
    """A weak reference to the delivery that has this lease; it keeps the lock that is shown."""
    task_lock: Callable[[], Any] | None = None
    """A weak reference to the :class:`TaskLock` that shows this lease to users."""

    # While the call waits
    wait: float = 0
    """How many seconds a take waits at most."""
    until: float = 0.0
    """Until when it waits, by the clock."""
    pause: float = 0.0
    """The last pause in seconds, before chance shortened it."""
    held_back: int = 0
    """How often in a row it waited because the cache had just forgotten its locks."""

    # After a conflict
    blocker: Holder | None = None
    """The other holder that was met last, until the entry is taken."""
    blocker_remaining: float | None = None
    """The rest of its lease in seconds; None where the cache does not report it."""
    free_in: float = math.inf
    """After how many seconds the first slot ends that was met; infinite if that is not known."""
    others: Sequence[Holder] = ()
    """The holders of all slots."""
    is_behind_itself: bool = False
    """Whether the wait would never end, because the blocker is a block around this call."""
    note: str = ""
    """Details of the conflict, for the log and :class:`LockConflict`."""
    has_warned: bool = False
    """Whether an endless wait was logged."""
    waits_since: float | None = None
    """Since when the call has waited for the lock; None without a wait. For a message that was
    postponed, that is the time of its first conflict."""
    tells_wait_at: float = math.inf
    """When to tell, at the earliest, that the call waits inside its process."""
    waits_behind: str | None = None
    """The token of the holder with which the call was last reported as waiting; of a message that
    was postponed, by an earlier delivery."""

    def __init__(self, ref: LockRef, length: float | None, slots: Slots | None = None) -> None:
        if length is None:
            length = conf.lock_timeout
        self.ref: LockRef = ref
        self.cache: str = ref.cache
        self.key: str = ref.key
        self.length: float = length
        if slots is None:
            slots = one_slot(ref.key)
        self.slots = slots
        self.sign()

    def __str__(self) -> str:
        return str(self.ref)

    def sign(self) -> None:
        """Make a new record of this process, which says that it takes the lock now."""
        self.holder: Holder = self.ref.holder(self.length, slots=self.slots.allowed)
        self.token: str = self.holder.token
        self.value: bytes = self.holder.encode()

    def move_to(self, key: str) -> None:
        """Note in which slot the entry is, or that of the blocker."""
        self.key = key
        self.ref = self.ref._replace(key=key)

    # Taking
    #
    # A call that waits inside its process is seen while it does: after LONG_WAIT it tells a
    # conflict, "waiting", with the holder that it meets then, and later with each next holder that
    # it meets. A short wait tells nothing.
    #
    #   holder:  A ---------------------- B ------------------------------ free
    #   call:    |---------|--------------|--------------------------------| acquired,
    #            LONG_WAIT waiting: A     waiting: B                       | waited = all of it
    #                                                                      |
    #                                                   or it gives up:    | failed: B,
    #                                                                        waited = all of it
    #
    # LONG_WAIT lies between two of these events, also if many holders come and go. So a call sends
    # at most one a second, and one for each holder. Of several slots the blocker would alternate
    # between holders, of which now one and now the other ends first, because both are renewed. But
    # the holder that was told stays the blocker while it has a slot: see _rank().
    #
    # A call that gives up is counted as "waiting" and then as "failed", as one that "requeue"
    # postpones: each number is one of calls, and only their sum counts a call twice. To count it
    # only at its end would hide those that wait behind a holder that hangs, and to count it only at
    # its begin would hide those that fail. ``was_waiting`` of its last event says whether this
    # holder has counted it as waiting, so that only such a call is subtracted from those that wait.

    def take(self) -> Holder | None:
        """Take the entry, waiting up to ``wait`` seconds; return None, or the holder that has it.

        The entry of a dead holder is freed first. Raises :class:`LockUnavailable`. If this raises,
        or a signal ends it, what a request may have taken is released in the background.

        ``Attempts.take()`` in aio.py is the same loop for asyncio code.
        """
        self.until = clock.now() + self.wait
        pause = self.attempt()
        while pause is not None:
            time.sleep(pause)
            pause = self.attempt()
        return self.blocker

    def attempt(self) -> float | None:
        """Try to take the entry now; return the pause before the next attempt in seconds.

        None: this was the last one. Then the entry is held, or the ``blocker`` has it.
        """
        # This attempt is after a conflict. Where the cache has forgotten its locks, the request is
        # the same again, because the first one may have added the entry.
        if self.blocker is not None and self.held_back == 0:
            self.sign()
        if self.slots.allowed > 1:
            outer = self._outer_lease()
            if outer is not None:
                self.move_to(outer.key)
                self.blocker = outer.holder
                self.blocker_remaining = max(0.0, outer.deadline - clock.now())
                return self._next_pause()
        try:
            for retries in range(MAX_RETRIES, -1, -1):
                store = get_store(self.cache)
                sent = clock.now()
                heeds_epoch = self.held_back < MAX_HELD_BACK
                taken = store.take(self.slots, self.value, self.length, heeds_epoch=heeds_epoch)
                if not isinstance(taken, str):
                    if self._free_or_note_blocker(taken, may_free=retries > 0):
                        continue
                    if sent >= self.tells_wait_at:
                        self._tell_wait(sent)
                    return self._next_pause()
                if taken != self.key:
                    self.move_to(taken)
                if self.begin(sent):
                    break
            else:
                raise LockUnavailable(
                    f"{self}: its lease of {self.length:g} s ended again and again before the "
                    f"cache {self.cache!r} answered. Give the lock a longer timeout (lock_timeout "
                    "of a task), or find out why the cache is slow: manage.py locks probe."
                )
        except Forgotten as forgotten:  # the cache has just forgotten its locks
            self.held_back += 1
            pause: float = forgotten.args[0]
            return pause
        except BaseException:
            self.owe()
            raise
        self.blocker = None
        waited = 0.0
        if self.waits_since is not None:
            waited = self.taken_at - self.waits_since
        self.ref.tell("acquired", self.holder, fixed=not self.renews, waited=waited)
        return None

    def _tell_wait(self, now: float) -> None:
        """Report that the call waits, unless that was reported with this holder."""
        assert self.blocker is not None
        if self.blocker.token != self.waits_behind:
            self.tells_wait_at = now + LONG_WAIT
            self.waits_behind = self.blocker.token
            self.report_conflict("wait", "waiting")

    def _outer_lease(self) -> Lease | None:
        """Return the lease of a block around this call that has another slot of the lock.

        Otherwise a nested call could take another slot, and would wait for itself when none is
        free. With one slot the store finds that.
        """
        lock = lock_of_slot(self.key)
        other: Lease
        for other in renewers[self.cache].held():
            if not other.in_block or other.origin != self.origin:
                continue
            if lock_of_slot(other.key) == lock and not other.lost:
                return other
        return None

    def _free_or_note_blocker(self, entries: dict[str, Entry], *, may_free: bool) -> bool:
        """Free the entry of a dead holder and return True: try again. Else note the ``blocker``.

        Of several slots the blocker is the run itself, else a dead holder, else the one with which
        the call was reported as waiting, else the first to end.
        """
        met = []
        others = []
        for key, entry in entries.items():
            holder = Holder.decode(entry.value)
            proof = liveness.proof_of_death(holder)
            met.append((self._rank(entry, holder, proof), key, holder, proof))
            others.append(holder)
        self.others = others
        rank, key, holder, proof = min(met, key=itemgetter(0))
        # A message that meets its own run waits for that slot, and others for any.
        is_other_run = rank[0]
        self.free_in = math.inf
        for (is_other, *_, ends_in), *_ in met:
            if is_other == is_other_run:
                self.free_in = min(self.free_in, ends_in)
        if key != self.key:
            self.move_to(key)
        if proof is None or not may_free:
            self.blocker = holder
            self.blocker_remaining = entries[key].remaining
            return False
        # If another process has freed the entry before, try again as well.
        if self.ref.free_dead(entries[key], holder, proof) and holder.is_run_of(self.ref.task_id):
            self.took_over = True
        return True

    def _rank(self, entry: Entry, holder: Holder, proof: str | None) -> tuple[Any, ...]:
        """Return how far behind an entry is when a blocker is chosen: the lowest comes first.

        memcached does not report when an entry ends. The record shows it only if the lock is kept
        or was handed over, because a living holder renews its lock. A holder that goes on may have
        ended when ``at_least`` is over:

            run:      begins   body ends: kept ........ ends
            message:     hop ------------------------> free: takes the lock
        """
        is_run_itself = self.slots.mark in entry.value  # without a mark, this is true of each
        ends_in = entry.remaining
        if ends_in is None:
            ends_in = math.inf
            if holder.token and not holder.pid:
                ends_in = holder.since + holder.timeout - time.time()
        if self.at_least and holder.pid:
            kept_for = holder.since + self.at_least - time.time()
            if kept_for > 0:
                ends_in = min(ends_in, kept_for)
        return not is_run_itself, proof is None, holder.token != self.waits_behind, ends_in

    def _next_pause(self) -> float | None:
        """Return the pause after a conflict in seconds; None: do not try again."""
        blocker = self.blocker
        assert blocker is not None
        self.note = ""
        if self.ref.is_delivery and blocker.is_run_of(self.ref.task_id):
            return None  # an earlier run of the same message
        own = renewers[self.cache].find(blocker.token, self.key, self.origin)
        if own is not None:
            self.note = BEHIND_ITSELF
        if self.wait == 0:
            return None
        # A fixed lease may end before its block does.
        if own is not None and own.in_block and (own.renews or own.deadline >= self.until):
            self.is_behind_itself = True
            return None
        now = clock.now()
        if now >= self.until:
            self.note_wait(self.wait)
            return None
        if self.waits_since is None:
            self.waits_since = now
            if self.wait > LONG_WAIT:
                self.tells_wait_at = now + LONG_WAIT
        if own is not None and self.wait == math.inf and not self.has_warned:
            self.has_warned = True
            text = "Endless wait for %s: %s. Only another thread can release it."
            logger.warning(text, self, self.note)
        self.held_back = 0
        first = min(POLL, self.wait / 16)
        self.pause = min(max(first, self.pause * 1.5), MAX_POLL)
        pause = self.pause * random.uniform(0.5, 1)
        return min(self.until - now, pause)

    def replace(self, value: bytes) -> bool:
        """Replace the bytes ``value`` by those of this lease; return whether the store did so.

        If this raises :class:`LockUnavailable`, it releases what it may have stored.
        """
        try:
            store = get_store(self.cache)
            sent = clock.now()
            if not store.replace(self.key, value, self.value, self.length):
                return False
            return self.begin(sent)
        except BaseException:
            self.owe()
            raise

    def begin(self, sent: float) -> bool:
        """Trust and renew the entry, which a request at the time ``sent`` has taken.

        Return whether the lease still lasts; if not, the entry is released.
        """
        deadline = sent + self.length * TRUST - ROUNDING
        if clock.now() >= deadline:
            get_store(self.cache).release(self.key, self.value)
            return False
        self.renewed_at = sent
        self.taken_at = sent
        self.deadline = deadline
        self.held = True
        renewers[self.cache].keep(self)
        return True

    # A block, or the body of a task

    def enter(self) -> None:
        """Be the lease of the block that begins here."""
        self.outer_block = innermost.set(weakref.ref(self))

    def __enter__(self) -> Lease:
        """Take nothing: take it inside, so that whatever ends the take leaves the entry."""
        return self

    # A signal handler runs when Python enters a function. So the block is forgotten before that:
    #
    #   __exit__:  released   enters another function: SIGUSR1   current_lock() -> a free lock

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        try:
            self.leave_body(error)
        except BaseException:
            # A signal, such as a soft time limit, may have come before the release.
            self.leave_body(error)
            raise
        finally:
            outer_block = self.outer_block
            self.outer_block = None
            if outer_block is not None:
                try:  # noqa: SIM105 - suppress() would call three more functions
                    innermost.reset(outer_block)
                except ValueError:
                    pass  # a generator may be closed in another context

    def leave_block(self) -> None:
        """End the block, if it has not ended: of asyncio code, or after a signal."""
        outer_block = self.outer_block
        self.outer_block = None
        if outer_block is not None:
            # The loop may close an asynchronous generator in another context.
            with contextlib.suppress(ValueError):
                innermost.reset(outer_block)

    # What is left after a conflict

    def is_behind_own_try(self) -> bool:
        """Return whether an earlier try of the same call keeps the lock, and has not returned."""
        blocker = self.blocker
        if blocker is None or not blocker.kept or blocker.returned:
            return False
        if not blocker.is_run_of(self.ref.task_id):
            return False
        return blocker.retries < self.ref.retries

    def note_wait(self, seconds: float) -> None:
        """Note for the log and the error how long the call waited."""
        option = "wait"
        if self.ref.is_delivery:
            option = "lock_wait"
        waited = f"gave up after {seconds:g} s ({option})"
        if self.note:
            waited = f"{self.note}; {waited}"
        self.note = waited

    def conflict(self, lock: Any) -> LockConflict:
        """Return the error of a conflict; ``lock`` is the :class:`TaskLock` that was refused."""
        return LockConflict(self.ref.name, self.blocker, self.blocker_remaining, self.note, lock)

    def report_conflict(self, reason: str, result: str) -> None:
        """Log a conflict, and send its event; ``reason`` is the policy."""
        why = reason
        if self.note:
            why = f"{reason}; {self.note}"
        text = "%s is held by %s; policy for %s: %s."
        logger.info(text, self, self.blocker, self.holder, why)
        waited = 0.0
        was_waiting = False
        if result != "waiting":
            if self.waits_since is not None:
                waited = clock.now() - self.waits_since
            if self.blocker is not None:
                was_waiting = self.blocker.token == self.waits_behind
        self.ref.tell(
            "conflict",
            self.holder,
            of_call=True,
            blocker=self.blocker,
            reason=reason,
            result=result,
            waited=waited,
            was_waiting=was_waiting,
        )

    # Leaving

    def owe(self, new: bytes = b"", until: float = 0.0) -> None:
        """Leave the entry in the background, in each slot where the request may have stored it.

        The server may have handled the request despite the error, or a signal such as a soft time
        limit came between the reply and the next line here:

          here:    add ->                 SIGUSR1 (otherwise the entry would stay)
          server:         added -> reply
        """
        self.held = False
        renewer = renewers[self.cache]
        renewer.drop(self)
        keys: Sequence[str] = self.slots.keys[: self.slots.allowed]
        if self.taken_at:
            keys = (self.key,)
        renewer.owe(keys, self.value, self.length, new, until)

    def leave_body(self, error: BaseException | None = None, result: str = "") -> None:
        """Leave the entry at the end of a body, if it is held; log that the cache cannot be asked.

        ``error`` has ended the body; ``result`` is another end of it, for the history.
        """
        if not self.held and not self.was_handed_over:
            return
        if error is not None:
            result = result_of(error)
            if isinstance(error, Retry) and error.is_eager:  # type: ignore[attr-defined]
                self.at_least = 0  # apply() runs the next try here, now: nobody could wait
        has_returned = not result
        if has_returned:
            result = "returned"
        if self.was_handed_over:
            self.was_handed_over = False
            self.ref.tell("released", self.holder, outcome="released", result=result)
            return
        try:
            self.leave(result, has_returned=has_returned)
        except LockUnavailable:
            logger.exception("%s could not be released; trying again.", self)

    # A body that began keeps its lock, however it ends (at_least)
    #
    # The time is counted from the begin of the body, because a limit counts bodies, and the reply
    # to the take may come late:
    #
    #   body A: take -> (no reply for 5 s) ...... begins ............ ends: kept
    #   from the take:  |---------- at_least ----------| free
    #   body B:                                          begins: two within at_least
    #   from the begin:                           |---------- at_least ----------| free
    #
    # The run's bytes are replaced by bytes without a process, so that the holder never counts as
    # dead. They have the run's token, so that the history counts conflicts against that run. If the
    # reply is lost, the replacement is made again, and the end stays the same:
    #
    #   run:    ends   replace -> (no reply)            replace -> is there already: OK
    #   store:                    replaced, until X                until X

    def leave(self, result: str = "", *, has_returned: bool = False) -> bool:
        """Delete the entry, and report the end of the lease; return whether it was still there.

        A body that began, and whose process goes on, keeps the entry for the rest of ``at_least``.
        ``result`` is the end of the body for the history. If this raises, the entry is owed.
        """
        # What was postponed, skipped or superseded has not begun.
        kept_until = self.began_at + self.at_least
        is_kept = clock.now() < min(kept_until, self.deadline) and not self._lost
        if not is_kept or result == "terminated" or self.is_inherited():
            return self.leave_to(b"", 0.0, result=result)
        self.kept = True
        kept = without_process(self.holder, self.at_least, kept=True, returned=has_returned)
        new = kept.encode()
        reason = f"{KEPT} {self.at_least:g} s from its start"
        return self.leave_to(new, kept_until, result=result, reason=reason)

    def leave_to(self, new: bytes, until: float, *, result: str = "", reason: str = "") -> bool:
        """Replace the entry by ``new`` until then; report the end of the lease, as :meth:`leave`.

        If this raises, the entry is owed: replaced if it is ``kept``, and otherwise deleted,
        because nobody learns that ``new`` is there.
        """
        if self.holder.pid != os.getpid():  # in a forked child: the parent has it
            self.held = False
            return False
        self.left_because = reason
        sent = clock.now()
        try:
            renewers[self.cache].drop(self)
            self.held = False
            store = get_store(self.cache)
            try:
                outcome = store.release(self.key, self.value, new, until)
            except LockUnavailable as error:
                if not self.kept or not isinstance(error.__cause__, store.refusals):
                    raise
                outcome = self._keep_own_bytes(until, error)
            if outcome is Outcome.SENT_TWICE:
                outcome = Outcome.OK
                if sent >= self.deadline:
                    outcome = Outcome.GONE
            if outcome is not Outcome.OK or self._lost:
                self.kept = False
                self.lose()
                self.left_because = self.reason
            return outcome is Outcome.OK
        except BaseException as error:
            if self.kept:
                self.owe(new, until)
            else:
                self.owe()
            self.left_because = f"not released at once: {in_words(error)}"
            raise
        finally:
            end = "released"
            if self._lost:
                end = "lost"
            self.ref.tell(
                "released",
                self.holder,
                outcome=end,
                result=result,
                reason=self.left_because,
                longest_renewal_gap=self.longest_gap or None,
                retaken=self.retaken,
                held_for=clock.now() - self.taken_at,
            )

    def _keep_own_bytes(self, until: float, refusal: LockUnavailable) -> Outcome:
        """Keep the entry with a longer lease: a full server refuses other bytes, but not this."""
        self.left_because += f", if its process lives so long: {in_words(refusal)}"
        text = "%s is kept only while its process lives: the cache refuses other bytes: %s"
        logger.warning(text, self, in_words(refusal))
        store = get_store(self.cache)
        return store.change(self.key, self.value, self.value, until - clock.now())

    # Who has a lock that is handed over
    #
    # Its entry has no process. So it never counts as dead, it is not renewed, and it ends after the
    # seconds passed to hand_over(). Each holder has a separate token, and replaces the bytes of the
    # holder before it atomically:
    #
    #   command:   bytes A -> token H, no process     exits
    #   receiver:                                             bytes with H -> its own, renewed
    #   twice:                                                         bytes with H? gone: LockLost

    def hand_over(self, seconds: float) -> str:
        """Leave the entry to a receiver for so many seconds; return the handle that it needs."""
        check_seconds("for_", seconds)
        token = os.urandom(16).hex()
        holder = without_process(self.holder, seconds, token=token, since=time.time())
        value = holder.encode()
        reason = f"handed over for {seconds:g} s"
        try:
            # In a fork, the parent has it.
            is_mine = not self.is_inherited() and not self.lost
            if is_mine and self.leave_to(value, clock.now() + seconds, reason=reason):
                self.was_handed_over = True
                self.ref.tell("acquired", holder, fixed=True)
                return f"{holder.slots} {token} {self.cache} {self.key} {self.ref.name}"
        except BaseException:
            # The caller does not get the handle, so free the entry even if it was handed over.
            renewers[self.cache].owe((self.key,), value, seconds)
            raise
        raise LockLost(f"{self} is not held by this process: nothing to hand over.")

    def receive(self, token: str) -> None:
        """Take the entry that was handed over with this token."""
        entry, holder = self.ref.read_holder()
        proof = None
        # A redelivered message finds the bytes of its own first run, which received the lock.
        if holder.token != token and holder.is_run_of(self.ref.task_id):
            proof = liveness.proof_of_death(holder)
        received = False
        if entry is not None and (holder.token == token or proof is not None):
            received = self.replace(entry.value)
        if not received:
            raise LockLost(
                f"{self} can no longer be received: it was already received, was cleared, or was "
                "lost by the cache, or the time that hand_over() gave is over."
            )
        if proof is not None:
            text = "%s was received by %s, but %s: this process receives the lock again."
            logger.warning(text, self, holder, proof)
            self.ref.tell("dead", holder, reason=proof)
        else:
            reason = f"received by {self.holder}"
            self.ref.tell("released", holder, outcome="released", reason=reason)
        self.ref.tell("acquired", self.holder, fixed=not self.renews)

    # Holding

    # Two simultaneous renewals could settle in another order than in the store:
    #
    #   thread: asks for 9 s -> granted second                      settles first: trusts 9 s
    #   extend: asks for 600 s -> granted first, cut to 9 s          settles last: trusts 600 s
    #
    # Re-entrant, because a receiver of an event of a renewal may extend the lock. A short run has
    # no renewal. setdefault() is atomic between threads.

    @property
    def renewing(self) -> Any:
        return vars(self).setdefault("_renewing", threading.RLock())

    @property
    def due_at(self) -> float:
        return self.renewed_at + self.length / 3

    def is_inherited(self) -> bool:
        """Return whether this process is a fork of the holder, so that its parent has the lock."""
        return self.holder.pid != os.getpid()

    @property
    def lost(self) -> bool:
        """Whether the entry is lost for good.

        A forked child of the holder asks the cache, at most once a second, because its parent keeps
        renewing the lock. That can raise :class:`LockUnavailable`. Other processes send no request.
        """
        if self.held and not self._lost:
            if self.is_inherited():
                self._ask_whether_parent_has_it()
            elif clock.now() >= self.deadline:
                self._lost = True
        return self._lost

    def _ask_whether_parent_has_it(self) -> None:
        now = clock.now()
        if now - self._child_asked_at >= CHILD_ASKS:
            self._child_asked_at = now
            was_missing = self._is_missing
            entry = self.ref.read()
            # The parent may take a forgotten entry again, so look twice.
            self._is_missing = entry is None
            if entry is None:
                self._lost = was_missing
            else:
                self._lost = entry.value != self.value

    def has_ended(self) -> bool:
        """Return whether the lease is lost; if it is, call :meth:`lose`."""
        if self.lost:
            self.lose()
        return self.lost

    def extend(self, length: float) -> None:
        """Let the lease end ``length`` seconds from now, unless it is lost; see TaskLock.extend."""
        if self.is_inherited():
            raise LockError(f"{self}: only the parent process, its holder, can extend it.")
        with self.renewing:
            if self.has_ended():
                return
            store = get_store(self.cache)
            sent = clock.now()
            if self.held and length < self.length:
                # Trust only the shorter lease from now on: the request may fail, although the
                # server has handled it.
                self.deadline = min(self.deadline, sent + length * TRUST - ROUNDING)
                self.length = length
                renewers[self.cache].keep(self)
            if self.renews:
                outcome = store.renew(self.key, self.value, length)
            else:  # do not set a missing entry again
                outcome = store.change(self.key, self.value, self.value, length)
            self.settle(sent, length, outcome)

    def settle(self, sent: float, length: float, outcome: Outcome) -> None:
        """Note the outcome of a renewal that was sent at ``sent`` for ``length`` seconds."""
        if outcome is Outcome.RETAKEN and not (self.held and clock.now() < self.deadline):
            # The renewal set an entry that must be released. Either the body released the lock:
            #
            #   renewal: request on its way                    -> taken again -> released again
            #   body:                          release -> freed
            #
            # Or the lease had ended, so that another run may have run:
            #
            #   renewal: request on its way                                -> taken again -> ...
            #   others:            the lease ends   take   run   release
            renewers[self.cache].owe((self.key,), self.value, length)
            outcome = Outcome.GONE
        if not self.held:
            return
        self.longest_gap = max(self.longest_gap, sent - self.renewed_at)
        self.renewed_at = max(self.renewed_at, sent)
        if self._lost or outcome in {Outcome.GONE, Outcome.TAKEN}:
            self.lose()
            return
        if outcome is Outcome.RETAKEN:
            self.retaken += 1
            logger.warning(
                "%s was missing from the cache (evicted, flushed or restarted empty), and was "
                "taken again; another run may have started meanwhile.",
                self,
            )
            self.ref.tell("retaken", self.holder, retaken=self.retaken)
        # A signal handler, or a receiver of this event, may have extended the lock meanwhile.
        # Nobody knows which of the two requests the server handled last:
        #
        #   extend:    asks for 600 s -> granted first                  settles last: trusts 600 s
        #   handler:                       extend: 5 s -> granted second, settles first
        deadline = sent + length * TRUST - ROUNDING
        if self.renewed_at > sent:
            deadline = min(deadline, self.deadline)
            length = min(length, self.length)
        self.length = length
        self.deadline = deadline

    def fencing_token(self) -> int:
        if self.holder.slots > 1:
            raise TypeError(
                f"{self} has {self.holder.slots} slots, so several runs hold it at once, "
                "and a fencing token cannot order their writes. Use a lock with one slot."
            )
        # Not during a renewal, which may take a forgotten entry again. If this process draws a
        # token before it knows that, the token is greater than that of the run in between:
        #
        #   renewal:    (entry gone)                      taken again ................. retaken = 1
        #   body:                                                       draws 9, writes stale data
        #   other run:               draws 8, writes, ends
        with self.renewing:
            if self.fence is None and not self.lost and not self.retaken:
                self.fence = get_store(self.cache).fence(self.key, self.value)
                if self.fence is None and not self.is_inherited():
                    self.extend(self.length)  # find out what happened to the entry, and report it
            if self.retaken and not self.lost:
                what = "was lost by the cache meanwhile, and another run may have held it"
            elif self.fence is None or self.lost:
                what = "is no longer held by this run"
            else:
                return self.fence
        raise LockLost(f"{self} {what}: there is no fencing token.")

    def is_there(self) -> bool:
        """Ask the cache whether this lease has the entry."""
        entry = self.ref.read()
        return entry is not None and entry.value == self.value

    def lose(self) -> None:
        """Note for good that the entry is lost: report it once, and stop renewing it."""
        renewers[self.cache].drop(self)
        ended = clock.now() >= self.deadline
        self._lost = True
        if self.reason:
            return  # the loss was already reported
        self.reason = f"its lease of {self.length:g} s ended before it could be renewed"
        if self.ref.silent:
            text = "%s: the cache lost this entry, so duplicates of the running call are possible."
            logger.warning(text, self)
            return
        blocker = None
        if not ended:
            self.reason = "gone from the cache (evicted, flushed or restarted empty)"
        elif not self.renews:
            self.reason = f"its fixed lease of {self.length:g} s ended first"
        try:
            entry = self.ref.read()
            if entry and entry.value != self.value:
                blocker = Holder.decode(entry.value)
                self.reason = f"taken by {blocker}"
            elif get_store(self.cache).read(marker_key(self.key, self.value)):
                self.reason = "cleared"
        except LockUnavailable:
            # The loss itself must be reported, even if the store is down again.
            logger.warning("%s is lost, but the reason cannot be read.", self)
        if ended and not self.renews:
            # The user chose a fixed length.
            logger.info("%s expired before its run ended: %s.", self, self.reason)
            return
        logger.error("%s was lost while its run continued: %s.", self, self.reason)
        self.ref.tell("lost", self.holder, reason=self.reason, blocker=blocker)
