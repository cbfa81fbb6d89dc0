"""TaskLock: acquire, hold and release one lock; and what any process can ask about it."""

from __future__ import annotations

import functools
import logging
import math
import random
import re
from contextvars import Token
from typing import Any, NoReturn

from django_singletask import clock
from django_singletask.conf import check_seconds, conf
from django_singletask.exceptions import LockConflict, LockError, LockLost
from django_singletask.holder import Holder
from django_singletask.locks import blocks
from django_singletask.locks.address import Address, lease_length
from django_singletask.locks.handover import Handle, hand_over, receive
from django_singletask.locks.keys import LockKey, check_slots, name_key
from django_singletask.locks.lease import Lease
from django_singletask.locks.liveness import proof_of_death
from django_singletask.locks.pool import Job
from django_singletask.locks.renewal import renewers
from django_singletask.locks.run import NO_RUN, Run, result_of
from django_singletask.locks.steps import do, do_in_threads, in_thread, offer_in_thread
from django_singletask.stores import get_store
from django_singletask.stores.base import Entry

logger = logging.getLogger("django_singletask")

POLL = 0.05
"""Seconds of the first pause at most; a short wait has shorter ones."""
MAX_POLL = 0.5
BEHIND_ITSELF = "the same code already holds it, and a lock is not re-entrant"


def current_lock() -> TaskLock | None:
    """Return the lock of the innermost ``with`` block, function or task body that runs here."""
    lock: TaskLock | None = blocks.innermost()
    return lock


@functools.lru_cache(maxsize=128)
def _report_field(name: str) -> None:
    """Log once that a name has an unfilled field: an f-string may have lost its f."""
    if re.search(r"\{[A-Za-z_][\w.]*\}", name):
        text = "TaskLock(%r) has an unfilled field, so all values share one lock. Use an f-string."
        logger.warning(text, name)


class Acquisition:
    """Take a lock, waiting up to ``wait`` seconds (None: the lock's own ``wait``).

    The steps may run in other threads, so the run and the place of the caller are read here.
    ``in_block``: it is for a ``with`` block, which uses the lock until its end. The lock refers to
    its acquisition, but not the reverse: a cycle would keep an unused lease alive.
    """

    def __init__(self, lock: TaskLock, wait: float | None, *, in_block: bool = False) -> None:
        if wait is not None:
            check_seconds("wait", wait, zero=True, infinite=True)
        self.wait = lock.wait if wait is None else wait
        self.until = clock.now() + self.wait
        self.pause = min(POLL, self.wait / 16)
        self.in_block = in_block
        self.run = lock.run or Run.current()
        self.place = blocks.here()
        lock.note = ""

    def step(self, lock: TaskLock) -> float | None:
        """Make an attempt; after the last one, handle a conflict as the options say."""
        pause = self.attempt(lock)
        if pause is None and lock.blocker is not None:
            if self.in_block:
                lock.meet_conflict()
            else:
                lock.report_conflict("skip", "skipped")
        return pause

    def attempt(self, lock: TaskLock) -> float | None:
        """Make an attempt; return the seconds until the next one, or None after the last one."""
        lease = lock.lease
        if lease is None or not lease.is_waiting:
            lease = self.new_lease(lock)
        around = blocks.around(lease, self.place) if len(lease.slots.keys) > 1 else None
        if around is None:
            pause = lease.attempt()
            if pause is not None:
                return pause
        else:
            lease.meet(around)
        lock.blocker, lock.blocker_remaining = lease.blocker, lease.blocker_remaining
        if lease.blocker is not None:
            return self._after_conflict(lock, lease, lease.blocker)
        lock.key = lease.key
        lease.address.tell("acquired", lease.holder)
        return None

    def _after_conflict(self, lock: TaskLock, lease: Lease, blocker: Holder) -> float | None:
        wait = self.wait
        if lock.run and blocker.is_run_of(lock.run.task_id):
            return None  # an earlier run of the same message
        is_own = renewers[lease.cache].took(blocker.token, lease.key, self.place)
        lock.note = BEHIND_ITSELF if is_own else ""
        if not wait:
            return None
        if blocks.outlast(blocker.token, lease.key, self.until, self.place):
            lock.refuse("wait")
        left = self.until - clock.now()
        if left <= 0:
            lock.say_gave_up(wait)
            return None
        if is_own and wait == math.inf and self.pause == POLL:
            text = "Endless wait for %s: %s. Only another thread can release it."
            logger.warning(text, lease.address, lock.note)
        pause = min(left, self.pause * random.uniform(0.5, 1))
        self.pause = min(self.pause * 1.5, MAX_POLL)
        return pause

    def new_lease(self, lock: TaskLock) -> Lease:
        """Return a new lease of the lock, with a new token."""
        holder = self.run.holder(lock.name, lease_length(lock.timeout), lock.slots)
        # Set before the take, so that the lock can release it after any error or signal.
        lock.lease = Lease(
            lock.address,
            holder,
            renews=lock.renew,
            at_least=lock.at_least,
            run=lock.run or NO_RUN,
            place=self.place,
        )
        return lock.lease


class TaskLock:
    """Hold a lock by name, so that only one ``with`` block runs at a time in all processes.

    ``timeout`` is the length of the lease in seconds (default ``SINGLETASK_LOCK_TIMEOUT``). With
    ``renew``, the lease is extended at each third of that while the process lives. ``wait`` is how
    many seconds an acquisition waits for a held lock; ``math.inf``: without end. ``on_conflict``
    is what ``with`` does if the lock is held: ``"raise"`` :class:`LockConflict`, or ``"skip"``: it
    returns this object, which is then false. ``cache`` is an alias in ``CACHES`` (default
    ``SINGLETASK_CACHE``). ``slots`` is how many holders the lock can have at once. ``run`` is for
    internal use.

    The lock is an entry in the cache that expires: see "What such a lock cannot promise" in the
    documentation. Use an object for one acquisition at a time. A lock is not re-entrant: waiting
    for the lock of a ``with`` block around the call raises at once. If the same code took the lock
    with ``acquire()``, the wait continues, because another thread may release the lock; an endless
    wait logs a warning. ``acquire()`` does not wait by default, as ``threading`` and redis-py do.
    Raises ``TypeError`` and ``ValueError`` for invalid options.

    Each question to the cache is one request, and can raise :class:`LockUnavailable`.
    """

    at_least: float = 0
    """A body that returns keeps the lock until so many seconds after its start."""
    lease: Lease | None = None
    """The last acquisition; ``lease.held`` tells whether it lasts."""
    _user: Acquisition | None = None
    """The acquisition, or the block, that uses this object now."""
    _received: Acquisition | None = None
    """The same, until a block enters a lock that was received."""
    blocker: Holder | None = None
    """The holder that the last acquisition met."""
    blocker_remaining: float | None = None
    note = ""
    """Details of the last conflict, for the log and :class:`LockConflict`."""
    _block: Token[Any] | None = None

    def __init__(
        self,
        name: str | LockKey,
        *,
        timeout: float | None = None,
        renew: bool = True,
        wait: float = 0,
        on_conflict: str = "raise",
        cache: str | None = None,
        slots: int = 1,
        run: Run | None = None,
    ) -> None:
        self.lock_key = name if isinstance(name, LockKey) else name_key(name)
        if isinstance(name, str) and "{" in name:
            _report_field(name)
        self.name, self.key = self.lock_key
        self.timeout = timeout
        self.cache = cache
        self.slots = check_slots("slots", slots)
        self.run = run
        if timeout is not None:
            check_seconds("timeout", timeout)
        elif not renew:
            raise TypeError("renew=False needs a timeout, a lease that is longer than any run.")
        check_seconds("wait", wait, zero=True, infinite=True)
        if on_conflict not in ("raise", "skip"):
            raise ValueError(
                f'on_conflict must be "raise" or "skip", not {on_conflict!r}. To wait, use wait=….'
            )
        self.renew = renew
        self.wait = wait
        self.on_conflict = on_conflict

    def __repr__(self) -> str:
        state = f"held, token {self.token}" if self.token else "not held"
        return f"<TaskLock {self.name} ({state})>"

    def __bool__(self) -> bool:
        return self.lease is not None and self.lease.held

    @property
    def token(self) -> str | None:
        """The token of the acquisition; None if the lock is not held by this object."""
        return self.lease.token if self.lease is not None and self.lease.held else None

    @property
    def address(self) -> Address:
        """Where the entry is, by the settings of this moment."""
        return Address(self.cache or conf.cache, self.lock_key, (self.run or NO_RUN).quiet)

    # Taking

    def acquire(self, wait: float | None = None) -> bool:
        """Acquire the lock, waiting up to ``wait`` seconds; return whether it was acquired.

        If it was not, ``blocker`` is its holder. Raises :class:`LockConflict` instead of waiting
        for the lock of a ``with`` block around this call, :class:`LockError` if this object is in
        use, and :class:`LockUnavailable`, also if the cache answers too late for the lease.
        """
        acquisition = Acquisition(self, wait)
        try:
            self._reserve(acquisition)
            do(acquisition.step, self)
            return self.blocker is None or self._end_use()
        except BaseException as error:
            self._end(acquisition, error)
            raise

    async def aacquire(self, wait: float | None = None) -> bool:
        """Acquire the lock as :meth:`acquire` does, without stopping the event loop.

        A cancelled call releases what its last request may have taken.
        """
        acquisition = Acquisition(self, wait)
        self._reserve(acquisition)
        await self._in_threads(acquisition)
        return self.blocker is None or self._end_use()

    async def _in_threads(self, acquisition: Acquisition) -> None:
        step = functools.partial(acquisition.step, self)
        undo = functools.partial(self._end, acquisition)
        await do_in_threads(self.address.cache, step, undo)

    def take(self, wait: float = 0) -> bool:
        """Acquire the lock, but report no conflict and do not reserve this object."""
        do(Acquisition(self, wait).attempt, self)
        return bool(self)

    def _end(self, acquisition: Acquisition, error: BaseException) -> None:
        """End an acquisition that failed, by a conflict or by a signal after the take."""
        if self._user is acquisition:
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        try:
            if (lease := self.lease) is not None:
                if lease.held:
                    lease.give_back(result_of(error))
                elif lease.is_waiting:
                    lease.abandon()
        finally:
            self._end_block()

    # A lock that outlives its process

    @classmethod
    def receive(cls, handle: str, *, timeout: float | None = None, renew: bool = True) -> TaskLock:
        """Take a lock that was handed over, and return it; it is held, and renewed from now on.

        Use it in a ``with`` block, or :meth:`release` it. A lock can be received once. Only a
        redelivery of the same Celery task can receive it again, if its first run is proven dead.
        The options are those of :class:`TaskLock`.

        Raises :class:`LockLost` if the lock is gone or has another holder, ``ValueError`` for an
        invalid handle, and :class:`LockUnavailable`.
        """
        name, key, cache, token, slots = Handle.decode(handle)
        lock_key = LockKey(name, key)
        lock = cls(lock_key, timeout=timeout, renew=renew, cache=cache, slots=slots)
        acquisition = Acquisition(lock, 0)
        lease = acquisition.new_lease(lock)
        try:
            receive(lease, token)
            lock.note_received(acquisition)
            return lock
        except BaseException:
            if lease.held:  # a signal came, and the caller does not get the lock
                lease.give_back("raised")
            raise

    def __enter__(self) -> TaskLock:
        block = Acquisition(self, None, in_block=True)
        try:
            if not self._reserve(block):
                do(block.step, self)
            if self.blocker is None:
                self._block = blocks.enter(self)
            return self
        except BaseException as error:
            # A conflict, or a signal after the take: Python does not call __exit__.
            if self._user is block:
                self.__exit__(type(error), error, None)
            raise

    def __exit__(self, _type: object, exc: BaseException | None, _traceback: object) -> None:
        try:
            self._leave(exc)
        except BaseException:
            if self:  # a signal, such as a soft time limit, came before the release began
                self._leave(exc)
            raise
        finally:
            self._leave_block()

    async def __aenter__(self) -> TaskLock:
        block = Acquisition(self, None, in_block=True)
        if not self._reserve(block):
            await self._in_threads(block)
        if self.blocker is None:
            self._block = blocks.enter(self)
        return self

    async def __aexit__(self, _type: object, exc: BaseException | None, _traceback: object) -> None:
        try:
            await in_thread(self.address.cache, functools.partial(self._leave, exc))
        except BaseException:
            if self:  # a signal, such as a soft time limit, came before the release began
                Job(self.address.cache, functools.partial(self._leave, exc)).submit()
            raise
        finally:
            self._leave_block()

    def _leave_block(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            blocks.leave(block)

    # Conflicts

    def meet_conflict(self) -> None:
        if self.on_conflict == "raise":
            self.refuse("wait" if self.wait else "raise")
        self.report_conflict("skip", "skipped")

    def say_gave_up(self, wait: float) -> None:
        """Note for the log and the error how long the call waited."""
        note = f"gave up after {wait:g} s ({'lock_wait' if self.run else 'wait'})"
        self.note = f"{self.note}; {note}" if self.note else note

    def refuse(self, reason: str) -> NoReturn:
        self.report_conflict(reason, "failed")
        raise LockConflict.of(self)

    def report_conflict(self, reason: str, result: str) -> None:
        """Log a conflict, and send its event; ``reason`` is the policy."""
        assert self.lease is not None  # the refused one
        why = f"{reason}; {self.note}" if self.note else reason
        logger.info("%s is held by %s; policy: %s.", self.lease.address, self.blocker, why)
        self.lease.address.tell_of_conflict(reason, result, self.lease.holder, self.blocker)

    # For any process

    def locked(self) -> bool:
        """Ask the cache whether the lock (all its slots) is held; a dead holder does not count."""
        holders = [Holder.decode(entry.value) for entry in self._entries().values()]
        return sum(proof_of_death(holder) is None for holder in holders) == self.slots

    alocked = offer_in_thread(locked)

    def holder(self) -> Holder | None:
        """Ask the cache for the holder of the lock; of several, the one whose lease ends first.

        memcached does not report ends: there it is the holder of the first slot that is held.
        """
        entry = self._first()
        return None if entry is None else Holder.decode(entry.value)

    aholder = offer_in_thread(holder)

    def remaining(self) -> float | None:
        """Ask the cache for the rest of the lease of :meth:`holder` in seconds.

        None if the lock is free, or if the cache does not report it.
        """
        entry = self._first()
        return None if entry is None else entry.remaining

    aremaining = offer_in_thread(remaining)

    def clear(self, *, token: str | None = None, actor: str = "", reason: str = "") -> bool:
        """Free the lock of any holder, or only of the holder with ``token``.

        ``actor`` and ``reason`` say who frees it and why, for the log and the history. If the
        holder is still running, it keeps running, and another run can start at the same time. The
        holder learns at its next renewal that the lock is lost. Return whether a lock was freed.
        Raises ``TypeError`` if the lock has several slots and there is no token.
        """
        if token is None and self.slots > 1:
            raise TypeError(
                f"{self.name} has {self.slots} slots: choose a holder with clear(token=…)."
            )
        return self.address_of(token).clear(token, actor, self.timeout, reason)

    aclear = offer_in_thread(clear)

    def address_of(self, token: str | None) -> Address:
        if self.slots > 1:
            for key, entry in self._entries().items():
                if Holder.decode(entry.value).token == token:
                    return self.address._replace(lock_key=LockKey(self.name, key))
        return self.address

    def _entries(self) -> dict[str, Entry]:
        return get_store(self.address.cache).read_many(self.lock_key.slots(self.slots))

    def _first(self) -> Entry | None:
        return min(self._entries().values(), key=lambda each: each.remaining or 0.0, default=None)

    # While this object holds it

    def release(self) -> bool:
        """Release the lock; return whether this object still held it.

        Any thread may do this. Raises :class:`LockError` if the lock was not acquired, and
        :class:`LockUnavailable`: then the release is tried again until the lease has ended.
        """
        lease = self._held_lease()
        try:
            return lease.release("returned")
        finally:
            self._end_use()

    arelease = offer_in_thread(release)

    def hand_over(self, *, for_: float) -> str:
        """Leave the lock to another process; return the handle with which it can :meth:`receive`.

        From then on the lock belongs to no process and is not renewed. It ends after ``for_``
        seconds, unless a process receives it before. This object no longer holds it, so the end
        of its ``with`` block frees nothing. The handle is a string.

        Raises :class:`LockError` if the lock was not acquired, and :class:`LockLost` if it is gone.
        If it raises :class:`LockUnavailable`, the lock cannot be received, and is freed.
        """
        try:
            return hand_over(self._held_lease(), for_)
        finally:
            if not self:
                self._end_use()

    @property
    def lost(self) -> bool:
        """Whether this object acquired the lock and has lost it since; sends no request."""
        return self.lease is not None and self.lease.lost

    def check(self) -> None:
        """Raise :class:`LockLost` if :attr:`lost`, :class:`LockError` if it was not acquired.

        Call it in the loops of long bodies. Only in a forked child of the holder it sends a
        request.
        """
        if self._held_lease().lost:
            raise LockLost(f"{self.name} is no longer held by this run.")

    def extend(self, timeout: float | None = None) -> None:
        """Let the lease end ``timeout`` seconds from now (default: the length of the lease).

        A lease that is renewed keeps the new length. Raises :class:`LockLost` if the lock is lost,
        :class:`LockError` if it was not acquired or belongs to the parent of this forked process,
        and :class:`LockUnavailable`.
        """
        lease = self._held_lease()
        lease.extend(lease.length if timeout is None else check_seconds("timeout", timeout))
        self.check()

    aextend = offer_in_thread(extend)

    def fencing_token(self) -> int:
        """Return a number that is greater than that of every earlier holder, and below ``2**63``.

        The number stays the same until the release; only the first call sends a request. Get it
        before you read the data, store it with the data, and write only if the stored number is
        not greater. Then a run that wakes up after its lease cannot overwrite newer data. The idea
        is Martin Kleppmann's.

        Raises :class:`LockError` if the lock was not acquired, :class:`LockLost` if it was lost or
        retaken, ``TypeError`` with several slots, ``NotImplementedError`` on memcached, and
        :class:`LockUnavailable`.
        """
        return self._held_lease().fencing_token()

    afencing_token = offer_in_thread(fencing_token)

    def owned(self) -> bool:
        """Ask the cache whether this object holds the lock."""
        lease = self.lease
        entry = lease.address.read() if lease is not None and lease.held else None
        return bool(self and lease and entry and entry.value == lease.value)

    aowned = offer_in_thread(owned)

    def _held_lease(self) -> Lease:
        if self.lease is None or not self.lease.held:
            raise LockError(f"{self.name} is not held by this TaskLock: acquire() it first.")
        return self.lease

    # Who uses this object
    #
    # It is in use from before the take until after the release, and while a block runs, also a
    # skipped one. Otherwise the acquisition of one thread would let another thread in:
    #
    #   thread 1: with LOCK as lock: (taken)  body ...................... exit: frees it
    #   thread 2:     with LOCK as lock: (held by another)   if lock: True, by thread 1 -> body
    #
    # setdefault() and pop() are atomic between threads.

    def note_received(self, user: Acquisition) -> None:
        """Reserve the object for an acquisition that has received the lock."""
        self._user = self._received = user

    def _reserve(self, user: Acquisition) -> bool:
        """Reserve the object; return whether a block enters a lock that was received.

        Raises :class:`LockError` if the object is in use.
        """
        if user.in_block and vars(self).pop("_received", None) is not None:
            self._user = user
            return True
        if vars(self).setdefault("_user", user) is not user:
            raise LockError(
                f"This TaskLock of {self.name} is in use: an object serves one acquisition at a "
                "time. Create one for each use: with TaskLock(…):"
            )
        return False

    def _end_use(self) -> bool:
        """Let the object be used again, unless a block uses it; return False."""
        if self._user is not None and not self._user.in_block:
            self._end_block()
        return False

    def _end_block(self) -> None:
        vars(self).pop("_received", None)
        vars(self).pop("_user", None)
