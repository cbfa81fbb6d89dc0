"""TaskLock: acquire, hold and release one lock; and what any process can ask about it."""

from __future__ import annotations

import asyncio
import functools
import re
import weakref
from typing import Any, Final, Literal

from celery._state import get_current_task

from django_singletask import clock
from django_singletask.arguments import check_choice, check_seconds
from django_singletask.conf import conf
from django_singletask.exceptions import LockConflict, LockError, LockLost
from django_singletask.holder import Holder
from django_singletask.locks.aio import GRACE, Attempts, in_thread, offer_in_thread, submit
from django_singletask.locks.keys import MAX_NAME, LockKey, check_slots, name_key
from django_singletask.locks.lease import Lease, Origin, current_lease, here
from django_singletask.locks.liveness import proof_of_death
from django_singletask.locks.ref import LockRef
from django_singletask.locks.renewal import renewers
from django_singletask.log import warn_once
from django_singletask.stores import get_store
from django_singletask.stores.base import Entry, Slots
from django_singletask.stores.keys import PREFIX, SLOT

HANDLE = re.compile(
    r"([1-9][0-9]{0,3}) ([0-9a-f]{32}) (.+?) "  # slots, token, cache
    rf"({PREFIX}[A-Za-z0-9_.:()=-]{{0,100}}:[0-9a-f]{{32}}(?:{SLOT}[0-9]{{1,4}})?) "
    rf"(.{{1,{MAX_NAME}}})"  # the name
)
"""What a receiver needs: the place and the token of a lock that was handed over."""
UNFILLED = re.compile(r"\{[A-Za-z_][\w.]*\}")
"""A field in a name: an f-string may have lost its f."""


def current_lock() -> TaskLock | None:
    """Return the lock of the innermost ``with`` block, function or task body here, or None."""
    lease = current_lease()
    if lease is None:
        return None
    if lease.task_lock is not None:
        lock: TaskLock | None = lease.task_lock()
        if lock is not None:
            return lock
    # The lock of a task gets its face when the body asks for it first.
    return show(lease)


class TaskLock:
    """Hold a lock by name, so that only one ``with`` block runs at a time in all processes.

    ::

        with TaskLock("nightly-import", wait=5):  # LockConflict after 5 seconds
            ...

    * ``timeout``: seconds of the lease, at most 30 days (default ``SINGLETASK_LOCK_TIMEOUT``).
    * ``renew``: renew the lease while the process lives; False needs ``timeout``.
    * ``wait``: seconds to wait for a held lock; ``math.inf``: no limit.
    * ``on_conflict``: if the lock is held, ``"raise"`` :class:`LockConflict`, or ``"skip"``: run
      the block with this object, which is then false.
    * ``cache``: an alias in ``CACHES`` (default ``SINGLETASK_CACHE``).
    * ``slots``: how many holders the lock can have, at most 1,000.
    * ``at_least``: seconds from the start for which the lock is kept, however its block ends.

    ``name`` is the name of the lock, and ``key`` its key in the cache. Create one object for each
    use. A ``with`` block cannot wait for its own lock: that raises :class:`LockConflict`.

    Raises ``TypeError`` and ``ValueError`` for invalid options. Each question to the cache is one
    request, and can raise :class:`LockUnavailable`.
    """

    _lock_key: LockKey
    _lease: Lease | None = None
    """The last acquisition."""
    _ref: LockRef | None = None
    """The lock as a task wants it; None for a lock of other code."""
    _user: Origin | None = None
    """The origin of the acquisition that uses this object now."""

    def __init__(
        self,
        name: str,
        *,
        timeout: float | None = None,
        renew: bool = True,
        wait: float = 0,
        on_conflict: Literal["raise", "skip"] = "raise",
        cache: str | None = None,
        slots: int = 1,
        at_least: float = 0,
    ) -> None:
        if isinstance(name, LockKey):
            self._lock_key = name
        else:
            self._lock_key = name_key(name)
            if UNFILLED.search(name):
                warn_once(
                    "TaskLock(%r) has an unfilled field: all values share one lock. "
                    "Use an f-string.",
                    name,
                )
        self.name: str = self._lock_key.name
        self.key: str = self._lock_key.key
        self.timeout = timeout
        self.cache = cache
        self.slots = slots
        self.at_least = at_least
        if type(slots) is not int or slots != 1:
            check_slots("slots", slots)
        if renew is not True:
            check_choice("renew", renew, (True, False))
        if timeout is not None:
            check_seconds("timeout", timeout)
        elif not renew:
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
        state = "not held"
        if self.token is not None:
            state = f"held, token {self.token}"
        return f"<TaskLock {self.name} ({state})>"

    def __bool__(self) -> bool:
        return self._lease is not None and self._lease.held

    @property
    def token(self) -> str | None:
        """The token of the acquisition; None if this object does not hold the lock."""
        if self._lease is None or not self._lease.held:
            return None
        return self._lease.token

    @property
    def blocker(self) -> Holder | None:
        """The :class:`Holder` that the last acquisition found; None if the lock was free."""
        if self._lease is None:
            return None
        return self._lease.blocker

    def _wanted(self) -> LockRef:
        """Return the lock, and which run wants it: that of the task whose body runs here, if any.

        The settings of this moment name the cache.
        """
        if self._ref is not None:
            return self._ref
        cache = self.cache
        if cache is None:
            cache = conf.cache
        task = get_current_task()  # celery.current_task is a slower proxy of the same task
        if task is None:
            return LockRef(cache, *self._lock_key)
        request = task.request
        retries = request.retries
        if retries is None:  # another program sent the message
            retries = 0
        return LockRef(cache, *self._lock_key, task.name, request.id, retries)

    # Taking

    def acquire(self, wait: float | None = None) -> bool:
        """Acquire the lock, waiting up to ``wait`` seconds; return whether it was acquired.

        If it was not, :attr:`blocker` is its holder. By default it does not wait. Raises
        :class:`LockConflict` if it would wait for a ``with`` block around it, :class:`LockError` if
        this object is in use, and :class:`LockUnavailable`.
        """
        return self._take(wait, in_block=False)

    async def aacquire(self, wait: float | None = None) -> bool:
        """Acquire the lock as :meth:`acquire` does, without stopping the event loop.

        A cancelled call releases what its last request may have taken.
        """
        return await self._take_in_threads(wait, in_block=False)

    def __enter__(self) -> TaskLock:
        self._take(None, in_block=True)
        return self

    async def __aenter__(self) -> TaskLock:
        await self._take_in_threads(None, in_block=True)
        return self

    # A received lock is entered, not taken
    #
    # A signal handler or another thread can release it while its block begins. Taken then, it would
    # have the token, the bytes and the fencing token of its first acquisition:
    #
    #   block:     reserves: held                        not held: takes it again    body
    #   handler:                     release(): deletes
    #
    # So ``taken_at`` decides, which stays, and not ``held``. The block begins without the lock.

    def _take(self, wait: float | None, *, in_block: bool) -> bool:
        origin = here()
        try:
            lease = self._reserve(wait, origin, in_block)
            if not lease.taken_at and lease.take() is not None:
                return self._meet_conflict(lease)
            self.key = lease.key
            if in_block:
                lease.enter()
            # Last, so that whatever ends the take before this keeps nothing.
            lease.began_at = clock.now()
            return True
        except BaseException as error:  # Python does not call __exit__
            self._stop(origin, error)
            raise

    async def _take_in_threads(self, wait: float | None, *, in_block: bool) -> bool:
        origin = here()
        attempts = None
        try:
            lease = self._reserve(wait, origin, in_block)
            if not lease.taken_at:
                attempts = Attempts(lease)
                if await attempts.take() is not None:
                    # The receivers of its event may write into a database.
                    meet_conflict = functools.partial(self._meet_conflict, lease)
                    return await in_thread(lease.cache, meet_conflict, grace=0)
            self.key = lease.key
            if in_block:
                lease.enter()
            lease.began_at = clock.now()
            return True
        except BaseException as error:
            if attempts is None:
                self._stop(origin, error)
                raise
            undone = attempts.undo(functools.partial(self._stop, origin, error))
            # After the end of the loop nothing can be awaited.
            if undone is not None and not isinstance(error, GeneratorExit):
                await asyncio.wait([undone], timeout=GRACE)
            raise

    def _new_lease(self, origin: Origin, in_block: bool) -> Lease:
        slots = None
        if self.slots > 1:
            # A body may take slots in several threads or asyncio tasks, so its task id is no mark
            # of an earlier delivery.
            keys = self._lock_key.slots(self.slots)
            slots = Slots(keys, self.slots)
        lease = Lease(self._wanted(), self.timeout, slots)
        lease.renews = self.renew
        lease.at_least = self.at_least
        lease.origin = origin
        lease.in_block = in_block
        lease.task_lock = weakref.ref(self)
        # Set before the take, so that the lock can release it after any error or signal.
        self._lease = lease
        return lease

    def _meet_conflict(self, lease: Lease) -> bool:
        """Do what the options say about a lock that is held by another holder; return False."""
        must_raise = lease.is_behind_itself
        if lease.in_block:
            if self.on_conflict == "raise":
                must_raise = True
            elif lease.is_behind_own_try():
                # To skip it would lose the work of the task.
                must_raise = True
                lease.note = "an earlier try of this task keeps it (at_least)"
        policy = "skip"
        if must_raise:
            policy = "raise"
        if lease.wait:
            policy = "wait"
        if must_raise:
            lease.report_conflict(policy, "failed")
            raise lease.conflict(self)
        lease.report_conflict(policy, "skipped")
        if not lease.in_block:
            vars(self).pop("_user", None)
        return False

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

    def _reserve(self, wait: float | None, origin: Origin, in_block: bool) -> Lease:
        """Let the caller use this object; return a lease to take, or that of a received lock."""
        lease = self._lease
        is_free = lease is None or not lease.held
        # What is held, although nothing uses the object, was received: a block may enter it.
        if is_free or in_block:
            is_free = vars(self).setdefault("_user", origin) is origin
        if not is_free:
            raise LockError(
                f"This TaskLock of {self.name} is in use: an object serves one acquisition at a "
                "time. Create one for each use: with TaskLock(…):"
            )
        if lease is not None and lease.held:
            lease.origin = origin
            lease.in_block = True
            if not lease.is_inherited():
                renewers[lease.cache].keep(lease)
            return lease
        if wait is None:
            wait = self.wait
        else:
            check_seconds("wait", wait, zero=True, infinite=True)
        lease = self._new_lease(origin, in_block)
        lease.wait = wait
        return lease

    def _stop(self, origin: Origin, error: BaseException) -> None:
        """End an acquisition that failed: by a conflict, or by a signal, perhaps after the take."""
        if self._user is origin:
            self.__exit__(None, error, None)

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        lease = self._lease
        try:
            if lease is not None:
                lease.__exit__(None, error, None)
        except BaseException:
            # A signal may have come before the release.
            if lease is not None:
                lease.__exit__(None, error, None)
            raise
        finally:
            vars(self).pop("_user", None)

    async def __aexit__(
        self, _type: object, error: BaseException | None, _traceback: object
    ) -> None:
        lease = self._lease
        assert lease is not None
        release = functools.partial(lease.leave_body, error)
        try:
            await in_thread(lease.cache, release)
        except BaseException:
            # The release may not have begun. To release twice does no harm.
            submit(lease.cache, release)
            raise
        finally:
            lease.leave_block()
            vars(self).pop("_user", None)

    # A lock that outlives its process

    @classmethod
    def receive(cls, handle: str, *, timeout: float | None = None, renew: bool = True) -> TaskLock:
        """Take a lock that was handed over, and return it, held and renewed; this works once.

        Use it in a ``with`` block, or :meth:`release` it. Raises :class:`LockLost` if the lock is
        gone or has another holder, ``ValueError`` for an invalid handle, and
        :class:`LockUnavailable`.
        """
        match = None
        if isinstance(handle, str):
            match = HANDLE.fullmatch(handle)
        if match is None:
            raise ValueError(f"handle must be what hand_over() returned, not {repr(handle)[:200]}.")
        slots, token, cache, key, name = match.groups()
        lock_key: Any = LockKey(name, key)  # which replaces a name here
        lock = cls(lock_key, timeout=timeout, renew=renew, cache=cache, slots=int(slots))
        lease = lock._new_lease(here(), in_block=False)
        # The handle names the slot.
        lease.slots = Slots((key,), lock.slots)
        try:
            lease.receive(token)
            return lock
        except BaseException:
            # If it is held, a signal came: nobody gets the lock.
            lease.leave_body(result="raised")
            raise

    # For any process

    def locked(self) -> bool:
        """Return whether the lock (all its slots) is held; a dead holder does not count."""
        deaths = [proof_of_death(Holder.decode(each.value)) for each in self._entries().values()]
        return deaths.count(None) == self.slots

    # Final: a type checker takes the parameters and the result from the right side.
    alocked: Final = offer_in_thread(locked)

    def holder(self) -> Holder | None:
        """Return the holder of the lock; of several, the one whose lease ends first.

        On memcached, it is the holder of the first slot that is held.
        """
        entry = self._first()
        if entry is None:
            return None
        return Holder.decode(entry.value)

    aholder: Final = offer_in_thread(holder)

    def remaining(self) -> float | None:
        """Return the seconds that the lease of :meth:`holder` has left.

        None if the lock is free, or if the cache does not report it.
        """
        entry = self._first()
        if entry is None:
            return None
        return entry.remaining

    aremaining: Final = offer_in_thread(remaining)

    def clear(self, *, token: str | None = None, actor: str = "", reason: str = "") -> bool:
        """Free the lock of any holder, or only of the holder with ``token``.

        Return whether a lock was freed. The holder is not stopped, so a second run can start beside
        it. The log shows ``actor`` and ``reason``. Raises ``TypeError`` for several slots without a
        token.
        """
        if token is None and self.slots > 1:
            raise TypeError(
                f"{self.name} has {self.slots} slots: choose a holder with clear(token=…)."
            )
        ref = self._wanted()
        if token is not None:
            ref = ref.of_token(token, self.slots)
        return ref.clear(token, actor, reason)

    aclear: Final = offer_in_thread(clear)

    def _entries(self) -> dict[str, Entry]:
        return get_store(self._wanted().cache).read_many(self._lock_key.slots(self.slots))

    def _first(self) -> Entry | None:
        entries = self._entries().values()
        return min(entries, key=lambda entry: entry.remaining or 0.0, default=None)

    # While this object holds it

    def release(self) -> bool:
        """Release the lock, from any thread; return whether this object still held it.

        Raises :class:`LockError` if it was not acquired, and :class:`LockUnavailable`: then the
        release is tried again until the lease has ended.
        """
        lease = self._held_lease()
        try:
            return lease.leave("returned")
        finally:
            self._end_use_outside_block(lease)

    arelease: Final = offer_in_thread(release)

    def hand_over(self, *, for_: float) -> str:
        """Leave the lock to another process; return a string with which it can :meth:`receive` it.

        The lock ends after ``for_`` seconds, unless a process receives it before. Raises
        :class:`LockError` if it was not acquired, :class:`LockLost` if it is gone, and
        :class:`LockUnavailable`: then the lock is freed.
        """
        lease = self._held_lease()
        try:
            return lease.hand_over(for_)
        finally:
            if not lease.held:
                self._end_use_outside_block(lease)

    @property
    def lost(self) -> bool:
        """Whether this object acquired the lock and has lost it since.

        This sends a request only in a forked child of the holder.
        """
        return self._lease is not None and self._lease.lost

    def check(self) -> None:
        """Raise :class:`LockLost` if :attr:`lost`, :class:`LockError` if it was not acquired."""
        if self._lease is not None and self._lease.is_unguarded:
            return  # on_outage="run": there is no lock that it could lose
        if self._held_lease().lost:
            raise LockLost(f"{self.name} is no longer held by this run.")

    def extend(self, timeout: float | None = None) -> None:
        """Let the lease end ``timeout`` seconds from now (default: the length of the lease).

        Renewals keep this length. Raises :class:`LockLost`, :class:`LockError` if the lock was not
        acquired or in a forked child, and :class:`LockUnavailable`.
        """
        lease = self._held_lease()
        if timeout is None:
            timeout = lease.length
        lease.extend(check_seconds("timeout", timeout))
        self.check()

    aextend: Final = offer_in_thread(extend)

    def fencing_token(self) -> int:
        """Return a number that is greater than that of every earlier holder, and below ``2**63``.

        Get it before you read the data, and write only if no greater number is stored with the
        data. The idea is Martin Kleppmann's. Only the first call sends a request.

        Raises :class:`LockError` if the lock was not acquired, :class:`LockLost` if it was lost or
        retaken, ``TypeError`` with several slots, :class:`LockUnavailable`, and
        ``NotImplementedError`` on memcached.
        """
        return self._held_lease().fencing_token()

    afencing_token: Final = offer_in_thread(fencing_token)

    def owned(self) -> bool:
        """Ask the cache whether this object holds the lock."""
        lease = self._lease
        if lease is None or not lease.held or not lease.is_there():
            return False
        return lease.held  # a signal handler may have released it meanwhile

    aowned: Final = offer_in_thread(owned)

    def _held_lease(self) -> Lease:
        if self._lease is None or not self._lease.held:
            raise LockError(f"{self.name} is not held by this TaskLock: acquire() it first.")
        return self._lease

    def _end_use_outside_block(self, lease: Lease) -> None:
        """Let the object be used again, unless a block uses it."""
        if lease.outer_block is None:
            vars(self).pop("_user", None)


def conflict_of(lock: TaskLock) -> LockConflict:
    """Return the error of the conflict that the last acquisition of a lock met."""
    lease = lock._lease  # noqa: SLF001
    assert lease is not None
    return lease.conflict(lock)


def lock_of_task(ref: LockRef, **options: Any) -> TaskLock:
    """Return a lock as a task wants it, not acquired; see :class:`TaskLock`."""
    lock_key: Any = ref.lock_key
    lock = TaskLock(lock_key, cache=ref.cache, **options)
    lock._ref = ref  # noqa: SLF001
    return lock


def show(lease: Lease) -> TaskLock:
    """Return the lock that shows a lease to the body of a task."""
    ref = lease.ref
    lock = lock_of_task(
        ref,
        timeout=lease.length,
        renew=lease.renews,
        slots=lease.slots.allowed,
        at_least=lease.at_least,
    )
    lock._lease = lease  # noqa: SLF001
    # Until its end the delivery uses this lock, so the body can neither enter nor acquire it.
    lock._user = lease.origin  # noqa: SLF001
    lease.task_lock = weakref.ref(lock)
    if lease.delivery is not None:
        lease.delivery().shown_lock = lock
    return lock
