"""TaskLock: acquire, hold and release one lock; and what any process can ask about it."""

from __future__ import annotations

import asyncio
import functools
import math
import random
import re
import time
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable, Generator
from contextvars import ContextVar, Token
from operator import attrgetter
from typing import Any, NoReturn, TypeVar

from django_singletask import clock, threads
from django_singletask.arguments import check_choice, check_seconds
from django_singletask.conf import conf
from django_singletask.exceptions import LockConflict, LockError, LockLost, LockUnavailable
from django_singletask.holder import Holder, mark_of
from django_singletask.locks.address import NO_RUN, Address, Run
from django_singletask.locks.aio import GRACE, in_thread, offer_in_thread, submit
from django_singletask.locks.keys import MAX_NAME, LockKey, check_slots, lock_of_slot, name_key
from django_singletask.locks.lease import Lease
from django_singletask.locks.liveness import proof_of_death
from django_singletask.locks.renewal import renewers
from django_singletask.log import logger, warn_once
from django_singletask.stores import get_store
from django_singletask.stores.base import Entry, Slots
from django_singletask.stores.keys import MAX_SLOTS, PREFIX, SLOT

Origin = tuple[object, int | None]
"""A mark of a thread, and the id of the asyncio task that runs in it."""


def here() -> Origin:
    loop = _get_running_loop()  # without a loop, a tenth of the time of get_running_loop()
    # Mark each thread with an object, because the number of a thread can be used again.
    try:
        mark = threads.made["variables"].mark
    except (AttributeError, KeyError):
        mark = threads.put("mark", object())
    return mark, None if loop is None else id(asyncio.current_task(loop))


innermost: ContextVar[Callable[[], TaskLock | None]] = ContextVar("innermost", default=lambda: None)
"""The lock of the innermost block.

The reference is weak: if a signal strikes between a body and its ``__exit__``, the context would
otherwise keep the lock, and so its renewal, for ever.
"""

POLL = 0.05
"""Seconds of the first pause at most; a short wait has shorter ones."""
MAX_POLL = 0.5
L = TypeVar("L", bound="TaskLock")
Attempts = Generator[float, None, None]
"""An acquisition: it makes an attempt, and yields the seconds until the next one."""
HANDLE = re.compile(
    r"([1-9][0-9]{0,3}) ([0-9a-f]{32}) (.+?) "  # slots, token, cache
    rf"({PREFIX}[A-Za-z0-9_.:()=-]{{0,100}}:[0-9a-f]{{32}}(?:{SLOT}[0-9]{{1,4}})?) "
    rf"(.{{1,{MAX_NAME}}})"  # the name
)
"""What a receiver needs: the place and the token of a lock that was handed over."""
UNFILLED = re.compile(r"\{[A-Za-z_][\w.]*\}")
"""A field in a name: an f-string may have lost its f."""
BEHIND_ITSELF = "the same code already holds it, and a lock is not re-entrant"


def current_lock() -> TaskLock | None:
    """Return the lock of the innermost ``with`` block, function or task body that runs here."""
    lock = innermost.get()()
    # A signal at the end of a block can leave the lock here.
    return None if lock is None or lock._block is None else lock  # noqa: SLF001


class TaskLock:
    """Hold a lock by name, so that only one ``with`` block runs at a time in all processes.

    ``timeout`` is the length of the lease in seconds (default ``SINGLETASK_LOCK_TIMEOUT``). With
    ``renew``, the lease is extended at each third of that while the process lives. ``wait`` is how
    many seconds an acquisition waits for a held lock; ``math.inf``: without end. ``on_conflict``
    is what ``with`` does if the lock is held: ``"raise"`` :class:`LockConflict`, or ``"skip"``: it
    returns this object, which is then false. ``cache`` is an alias in ``CACHES`` (default
    ``SINGLETASK_CACHE``). ``slots`` is how many holders the lock can have at once. A block that
    ends without an error keeps the lock until ``at_least`` seconds after its start, and so does
    :meth:`release`.

    The lock is an entry in the cache that expires: see "Guarantees and limits" in the
    documentation. Use an object for one acquisition at a time. A lock is not re-entrant: waiting
    for the lock of a ``with`` block around the call raises at once. If the same code took the lock
    with ``acquire()``, the wait continues, because another thread may release the lock; an endless
    wait logs a warning. ``acquire()`` waits only if you set ``wait``; those of ``threading`` and
    redis-py wait by default. Raises ``TypeError`` and ``ValueError`` for invalid options.

    Each question to the cache is one request, and can raise :class:`LockUnavailable`.
    """

    _lease: Lease = object.__new__(Lease)
    """The last acquisition (at first, one that was never held)."""
    _run: Run | None = None
    """The run of a task whose lock this is; None for a lock of other code."""
    _user: Origin | None = None
    """The origin of the acquisition that uses this object now."""
    blocker: Holder | None = None
    """The holder that the last acquisition met."""
    _note = ""
    """Details of the last conflict, for the log and :class:`LockConflict`."""
    _block: Token[Any] | None = None
    """What restores the lock of the outer block, while a block runs."""

    def __init__(
        self,
        name: str,
        *,
        timeout: float | None = None,
        renew: bool = True,
        wait: float = 0,
        on_conflict: str = "raise",
        cache: str | None = None,
        slots: int = 1,
        at_least: float = 0,
    ) -> None:
        self._lock_key = name if isinstance(name, LockKey) else name_key(name)
        if isinstance(name, str) and UNFILLED.search(name):
            text = "TaskLock(%r) has an unfilled field: all values share one lock. Use an f-string."
            warn_once(text, name)
        self.name, self.key = self._lock_key
        self.timeout = timeout
        self.cache = cache
        self.slots = slots
        self.at_least = at_least
        if type(slots) is not int or slots != 1:
            check_slots("slots", slots)
        if timeout is not None:
            check_seconds("timeout", timeout)
        if renew is not True:
            check_choice("renew", renew, (True, False))
        if timeout is None and not renew:
            raise TypeError("renew=False needs a timeout, a lease longer than any run.")
        if wait != 0:
            check_seconds("wait", wait, zero=True, infinite=True)
        if at_least != 0:
            check_seconds("at_least", at_least, zero=True)
        if on_conflict != "raise":
            where = " (to wait, use wait=…)"
            check_choice("on_conflict", on_conflict, ("raise", "skip"), where)
        self.renew = renew
        self.wait = wait
        self.on_conflict = on_conflict

    def __repr__(self) -> str:
        state = f"held, token {self.token}" if self.token else "not held"
        return f"<TaskLock {self.name} ({state})>"

    def __bool__(self) -> bool:
        return self._lease.held

    @property
    def token(self) -> str | None:
        """The token of the acquisition; None if the lock is not held by this object."""
        return self._lease.token if self._lease.held else None

    @property
    def _address(self) -> Address:
        """Where the entry is, by the settings of this moment."""
        run = self._run or NO_RUN
        return Address(self.cache or conf.cache, self._lock_key, run.quiet)

    # Taking

    def acquire(self, wait: float | None = None) -> bool:
        """Acquire the lock, waiting up to ``wait`` seconds; return whether it was acquired.

        If it was not, ``blocker`` is its holder. Raises :class:`LockConflict` instead of waiting
        for the lock of a ``with`` block around this call, :class:`LockError` if this object is in
        use, and :class:`LockUnavailable`, also if the cache answers too late for the lease.
        """
        self._take(wait)
        return self.blocker is None

    async def aacquire(self, wait: float | None = None) -> bool:
        """Acquire the lock as :meth:`acquire` does, without stopping the event loop.

        A cancelled call releases what its last request may have taken.
        """
        await self._take_in_threads(wait)
        return self.blocker is None

    def _take(self, wait: float | None = None, *, in_block: bool = False) -> None:
        origin = here()
        attempts = self._try(wait, in_block, self._run or Run.current(), origin)
        try:
            self._reserve(origin, in_block)
            for pause in attempts:
                time.sleep(pause)
            if in_block and self.blocker is None:
                self._block = innermost.set(weakref.ref(self))
        except BaseException as error:  # Python does not call __exit__
            self._undo(attempts, origin, error)
            raise

    # In asyncio code, other threads make the attempts. The request of a call that fails or is
    # cancelled may still take the lock, so it is undone after the reply:
    #
    #   loop:    await    cancelled: CancelledError    waits at most GRACE      continues
    #   thread:  add ->                                -> added     undo: release ->

    async def _take_in_threads(self, wait: float | None = None, *, in_block: bool = False) -> None:
        cache, origin = self._address.cache, here()
        attempts = self._try(wait, in_block, self._run or Run.current(), origin)
        try:
            self._reserve(origin, in_block)
            step = functools.partial(next, attempts, None)
            while (pause := await in_thread(cache, step, grace=0)) is not None:
                await asyncio.sleep(pause)
            if in_block and self.blocker is None:
                self._block = innermost.set(weakref.ref(self))
        except BaseException as error:
            undone = submit(cache, functools.partial(self._undo, attempts, origin, error))
            # After the end of the loop nothing can be awaited.
            if undone is not None and not isinstance(error, GeneratorExit):
                await asyncio.wait([undone], timeout=GRACE)
            raise

    # Who uses this object
    #
    # It is in use from before the take until after the release, and while a block runs, also a
    # skipped one. Otherwise the acquisition of one thread would let another thread in:
    #
    #   thread 1: with LOCK as lock: (taken)  body ...................... exit: frees it
    #   thread 2:     with LOCK as lock: (held by another)   if lock: True, by thread 1 -> body
    #
    # setdefault() and pop() are atomic between threads. The first caller gets the object, whichever
    # thread makes its first request.

    def _reserve(self, origin: Origin, in_block: bool) -> None:
        # A lock that is held, although nothing uses the object, was received: a block may enter it.
        if (not in_block and self) or vars(self).setdefault("_user", origin) is not origin:
            raise LockError(
                f"This TaskLock of {self.name} is in use: an object serves one acquisition at a "
                "time. Create one for each use: with TaskLock(…):"
            )

    def _try(self, wait: float | None, in_block: bool, run: Run, origin: Origin) -> Attempts:
        """Try to take the lock; yield the seconds until each further attempt.

        After the last attempt, handle a conflict as the options say. ``wait`` is in seconds (None:
        the lock's own). ``in_block``: it is for a ``with`` block. The attempts of asyncio code are
        made in other threads than that of ``origin``.
        """
        if wait is None:
            wait = self.wait
        else:
            check_seconds("wait", wait, zero=True, infinite=True)
        lease = self._lease
        if lease.held:  # it was received
            lease.origin, lease.in_block = origin, True
            if not lease.is_inherited():
                renewers[lease.cache].keep(lease)
            return
        self._note = ""
        until = clock.now() + wait
        next_pause = min(POLL, wait / 16)
        while True:
            lease = self._new_lease(run, origin)
            lease.in_block = in_block
            outer = self._outer_lease(lease) if self.slots > 1 else None
            if outer is None:
                yield from lease.attempts()
            else:
                lease.key, lease.blocker = outer.key, outer.holder
                lease.blocker_remaining = max(0.0, outer.deadline - clock.now())
            blocker = self.blocker = lease.blocker
            if blocker is None:
                self.key = lease.key
                lease.tell("acquired", lease.holder)
                return
            if self._run and blocker.is_run_of(self._run.task_id):
                break  # an earlier run of the same message
            own = renewers[lease.cache].find(blocker.token, lease.key, origin)
            self._note = BEHIND_ITSELF if own else ""
            if not wait:
                break
            # A fixed lease may end before its block does.
            if own and own.in_block and (own.renews or own.deadline >= until):
                self._refuse("wait")
            left = until - clock.now()
            if left <= 0:
                self._note_wait(wait)
                break
            if own and wait == math.inf and next_pause == POLL:
                text = "Endless wait for %s: %s. Only another thread can release it."
                logger.warning(text, lease, self._note)
            own = outer = None  # otherwise they would be renewed as long as this waits
            yield min(left, next_pause * random.uniform(0.5, 1))
            next_pause = min(next_pause * 1.5, MAX_POLL)
        if in_block:
            self._meet_conflict()
        else:
            self._report_conflict("skip", "skipped")
            vars(self).pop("_user", None)

    # Processes that allow different numbers of slots
    #
    # A deploy that lowers the number from 5 to 2 leaves runs in the slots 3 to 5. A process that
    # allows 2 neither takes nor counts those slots. So until the old processes are gone, there are
    # at most 5 runs: the greatest number that a process allows. A redelivery reads all slots that
    # there can be, to find its own first run. With several slots a retry does so, too, because the
    # previous try may not have released its slot yet.

    def _new_lease(self, run: Run, origin: Origin) -> Lease:
        """Return a new lease of the lock, with a new token."""
        length = conf.lock_timeout if self.timeout is None else self.timeout
        holder = run.holder(self.name, length, slots=self.slots)
        slots = None
        if self.slots > 1 or run.redelivered:
            # A delivery takes no second slot for one message. Locks of a body have no mark, since
            # it may take slots in several threads or asyncio tasks.
            delivery = self._run or NO_RUN
            looks_at = MAX_SLOTS if delivery.redelivered or delivery.retries else self.slots
            slots = Slots(self._lock_key.slots(looks_at), self.slots, mark_of(delivery.task_id))
        # Set before the take, so that the lock can release it after any error or signal.
        lease = self._lease = Lease(self.cache or conf.cache, self._lock_key, holder, slots)
        lease.quiet, lease.at_least = run.quiet, self.at_least
        lease.renews, lease.origin = self.renew, origin
        return lease

    def _outer_lease(self, lease: Lease) -> Lease | None:
        """Return the lease of a block around this call that has another slot of the lock.

        Otherwise a nested call could take another slot, and would wait for itself when none is
        free. With one slot the store finds that.
        """
        other: Lease
        for other in renewers[lease.cache].held():
            is_outer = other.in_block and other.origin == lease.origin
            if is_outer and lock_of_slot(other.key) == lock_of_slot(lease.key) and not other.lost:
                return other
        return None

    def _undo(self, attempts: Attempts, origin: Origin, error: BaseException) -> None:
        """End an acquisition that failed: by a conflict, or by a signal, perhaps after the take."""
        while True:
            try:
                attempts.close()
                break
            except ValueError:  # in asyncio code, another thread may still wait for a reply
                time.sleep(0.01)
        if self._user is origin:
            self.__exit__(None, error, None)

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
        match = HANDLE.fullmatch(handle) if isinstance(handle, str) else None
        if not match:
            raise ValueError(f"handle must be what hand_over() returned, not {repr(handle)[:200]}.")
        slots, token, cache, key, name = match.groups()
        lock_key: Any = LockKey(name, key)  # which replaces a name here
        lock = cls(lock_key, timeout=timeout, renew=renew, cache=cache, slots=int(slots))
        lease = lock._new_lease(Run.current(), here())
        try:
            lease.receive(token)
            return lock
        except BaseException:
            lease.give_back(result="raised")  # if it is held, a signal came: nobody gets the lock
            raise

    def __enter__(self) -> TaskLock:
        self._take(in_block=True)
        return self

    def __exit__(self, _type: object, exc: BaseException | None, _traceback: object) -> None:
        try:
            self._lease.give_back(exc)
        except BaseException:
            # A signal, such as a soft time limit, may have come before the release.
            self._lease.give_back(exc)
            raise
        finally:
            block, self._block = self._block, None
            self._leave_block(block)

    async def __aenter__(self) -> TaskLock:
        await self._take_in_threads(in_block=True)
        return self

    async def __aexit__(self, _type: object, exc: BaseException | None, _traceback: object) -> None:
        cache, release = self._address.cache, functools.partial(self._lease.give_back, exc)
        try:
            await in_thread(cache, release)
        except BaseException:
            submit(cache, release)  # it may not have begun
            raise
        finally:
            block, self._block = self._block, None
            self._leave_block(block)

    # A signal handler runs when Python enters a function. So the block is forgotten before that:
    #
    #   __exit__:  released   enters _leave_block(): SIGUSR1   current_lock() -> a lock that is free

    def _leave_block(self, block: Token[Any] | None) -> None:
        """Note that the block, if there was one, has ended: the object can be used again."""
        try:
            if block is not None:
                innermost.reset(block)
        except ValueError:
            pass  # the loop may close an asynchronous generator in another context
        finally:
            vars(self).pop("_user", None)

    # Conflicts

    def _meet_conflict(self) -> None:
        """Do what a block does that does not get the lock."""
        if self.on_conflict == "raise":
            self._refuse("wait" if self.wait else "raise")
        self._report_conflict("skip", "skipped")

    def _note_wait(self, seconds: float) -> None:
        """Note for the log and the error how long the call waited; 0: its wait goes on."""
        note = f"gave up after {seconds:g} s ({'lock_wait' if self._run else 'wait'})"
        self._note = "; ".join(filter(None, [self._note, note])) if seconds else ""

    def _conflict(self) -> LockConflict:
        lease = self._lease
        return LockConflict(self.name, self.blocker, lease.blocker_remaining, self._note, self)

    def _refuse(self, reason: str) -> NoReturn:
        self._report_conflict(reason, "failed")
        raise self._conflict()

    def _report_conflict(self, reason: str, result: str) -> None:
        """Log a conflict, and send its event; ``reason`` is the policy."""
        lease, caller = self._lease, self._lease.holder
        why = f"{reason}; {self._note}" if self._note else reason
        text = "%s is held by %s; policy for %s: %s."
        logger.info(text, lease, self.blocker, caller, why)
        lease.tell("conflict", caller=caller, blocker=self.blocker, reason=reason, result=result)

    # For any process

    def locked(self) -> bool:
        """Ask the cache whether the lock (all its slots) is held; a dead holder does not count."""
        deaths = [proof_of_death(Holder.decode(each.value)) for each in self._entries().values()]
        return deaths.count(None) == self.slots

    alocked = offer_in_thread(locked)

    def holder(self) -> Holder | None:
        """Ask the cache for the holder of the lock; of several, the one whose lease ends first.

        memcached does not report ends: there it is the holder of the first slot that is held.
        """
        entry = self._first()
        return entry and Holder.decode(entry.value)

    aholder = offer_in_thread(holder)

    def remaining(self) -> float | None:
        """Ask the cache for the rest of the lease of :meth:`holder` in seconds.

        None if the lock is free, or if the cache does not report it.
        """
        entry = self._first()
        return entry and entry.remaining

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
        return self._address_of(token).clear(token, actor, reason)

    aclear = offer_in_thread(clear)

    def _address_of(self, token: str | None) -> Address:
        """Return where the holder with this token is, or the first slot."""
        address = self._address
        if self.slots > 1:
            for key, entry in self._entries().items():
                if Holder.decode(entry.value).token == token:
                    address.key = key
        return address

    def _entries(self) -> dict[str, Entry]:
        return get_store(self._address.cache).read_many(self._lock_key.slots(self.slots))

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
            return lease.leave("returned")
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
        lease = self._held_lease()
        try:
            return lease.hand_over(for_)
        finally:
            if not self:
                self._end_use()

    @property
    def lost(self) -> bool:
        """Whether this object acquired the lock and has lost it since.

        Only in a forked child of the holder it sends a request.
        """
        return self._lease.lost

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
        retaken, ``TypeError`` with several slots, :class:`LockUnavailable`, and
        ``NotImplementedError`` on memcached, which can lose a counter at any time.
        """
        return self._held_lease().fencing_token()

    afencing_token = offer_in_thread(fencing_token)

    def owned(self) -> bool:
        """Ask the cache whether this object holds the lock."""
        lease = self._lease
        return lease.held and lease.is_there() and lease.held

    aowned = offer_in_thread(owned)

    def _held_lease(self) -> Lease:
        if not self._lease.held:
            raise LockError(f"{self.name} is not held by this TaskLock: acquire() it first.")
        return self._lease

    def _end_use(self) -> None:
        """Let the object be used again, unless a block uses it."""
        if self._block is None:
            vars(self).pop("_user", None)


def lock_of(kind: type[L], key: Any, run: Run, **options: Any) -> L:
    """Return the lock of a task's run, not acquired."""
    lock = kind(key, **options)
    lock._run = run  # noqa: SLF001
    return lock


# For other modules of this package: what a lock does not show to users.
lease_of, address_of = attrgetter("_lease"), attrgetter("_address")
conflict_of, place_of = TaskLock._conflict, TaskLock._address_of  # noqa: SLF001
refuse, report_conflict = TaskLock._refuse, TaskLock._report_conflict  # noqa: SLF001
note_wait = TaskLock._note_wait  # noqa: SLF001


class DeliveryLock(TaskLock):
    """The lock of a delivery, which handles a conflict and an outage of the cache itself.

    ``outage`` is the error of a cache that could not be used. Then a body may run without the lock.
    """

    outage: LockUnavailable | None = None

    def _meet_conflict(self) -> None:
        """Do nothing: the delivery handles the conflict."""

    def __enter__(self) -> DeliveryLock:
        try:
            super().__enter__()
        except LockUnavailable as error:
            self.outage = error
            self._block = innermost.set(weakref.ref(self))
        return self

    def check(self) -> None:
        """Raise :class:`LockLost` if the lock is lost; do nothing if the body runs without it."""
        if self.outage is None:
            super().check()
