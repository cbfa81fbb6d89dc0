"""Take, hold and give back one lock."""

from __future__ import annotations

import logging
import random
import threading
import time
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

from celery import current_task
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from django_singletask.conf import check_seconds, conf
from django_singletask.exceptions import LockConflict, LockError, LockLost, Postponed
from django_singletask.holder import Holder, this_process
from django_singletask.locks import renewal
from django_singletask.locks.keys import LockKey, name_key
from django_singletask.locks.liveness import proof_of_death
from django_singletask.locks.renewal import clock
from django_singletask.signals import LockEvent, lock_event
from django_singletask.stores import Entry, Outcome, Store, get_store
from django_singletask.stores.base import marker_key

__all__ = ["TaskLock", "current_lock"]

logger = logging.getLogger("django_singletask")

POLL = 0.05
MAX_POLL = 0.5
CORPSES = 3
"""Locks of dead holders that are freed for one that is to be taken."""

_current: ContextVar[TaskLock | None] = ContextVar("current_lock", default=None)


def current_lock() -> TaskLock | None:
    """Return the innermost lock whose ``with`` block, function or task body is running here."""
    return _current.get()


def _margin(lease: float) -> float:
    # Clocks of two machines run apart by far less than 1%; the 2 ms cover the store's rounding.
    return lease * 0.01 + 0.002


class TaskLock:
    """Hold a lock by name, so that one ``with`` block runs at a time in all processes.

    ``timeout`` is the length of the lease in seconds (default ``SINGLETASK_LOCK_TIMEOUT``); with
    ``renew`` it is extended at a third of that for as long as the process lives. ``wait`` is how
    many seconds an acquisition waits for a held lock. ``on_conflict`` says what ``with`` does
    with a lock that is held: ``"raise"`` :class:`LockConflict`, or ``"skip"``: it yields this
    object, which is then false. ``cache`` is an alias in ``CACHES`` (default
    ``SINGLETASK_CACHE``).

    The lock is an entry in the cache that ends by itself: see "What a lock of this kind cannot
    promise" in the README. It is not re-entrant. The words are those of ``redis.lock.Lock`` and
    ``threading.Lock``.

    Raises ``TypeError`` and ``ValueError`` for options that cannot work.
    """

    def __init__(
        self,
        name: str | LockKey,
        *,
        timeout: float | None = None,
        renew: bool = True,
        wait: float = 0,
        on_conflict: str = "raise",
        cache: str | None = None,
    ) -> None:
        self.name, self.key = name if isinstance(name, LockKey) else name_key(name)
        if timeout is not None:
            check_seconds("timeout", timeout)
        elif not renew:
            raise TypeError("renew=False needs a timeout: after it the lock ends under the run.")
        check_seconds("wait", wait, zero=True)
        if on_conflict not in ("raise", "skip"):
            raise ValueError(f'on_conflict must be "raise" or "skip", not {on_conflict!r}.')
        self.timeout = timeout
        self.renew = renew
        self.wait = wait
        self.on_conflict: str | None = on_conflict
        self.cache = cache
        self.token: str | None = None
        self.blocker: Holder | None = None
        self.took_over = False
        self._remaining: float | None = None
        self._run: tuple[str | None, str | None, int] | None = None
        self._quiet = False
        self._lost = False
        self._token: str | None = None
        self._context: Token[TaskLock | None] | None = None
        self._in_use = threading.Lock()
        self._in_block = False

    def __repr__(self) -> str:
        state = f"held, token {self.token}" if self.token else "not held"
        return f"<TaskLock {self.name} ({state})>"

    def __str__(self) -> str:
        return f"{self.name} ({self.key})"

    def __bool__(self) -> bool:
        return self.token is not None

    # Taking

    def acquire(self, wait: float | None = None) -> bool:
        """Take the lock, waiting up to ``wait`` seconds for it, and say whether it was taken.

        When it was not, ``blocker`` is the holder that was in the way. Raises
        :class:`LockConflict` instead of waiting for a lock that this very thread holds,
        :class:`LockError` if this object is in use already, and the errors of the cache's client.
        """
        if wait is not None:
            check_seconds("wait", wait, zero=True)
        self._begin_use()
        try:
            taken = self._acquire(self.wait if wait is None else wait)
            if not taken:
                self._report_conflict("skip")
            return taken
        finally:
            if self.token is None:
                self._in_use.release()

    # One object, two threads
    #
    # The object is in use from before the take until after the release, and for as long as a block
    # runs, also one that is skipped. Without that, the acquisition of one thread would let the
    # other thread in:
    #
    #   thread 1: with LOCK as lock: (taken)  body ...................... exit: frees it
    #   thread 2:     with LOCK as lock: (held by another)   if lock: True, by thread 1 -> body

    def _begin_use(self) -> None:
        if not self._in_use.acquire(blocking=False):
            raise LockError(
                f"This TaskLock of {self.name} is in use: one object serves one acquisition at a "
                "time. Make one for each use: with TaskLock(…):"
            )

    def _acquire(self, wait: float = 0) -> bool:
        until = clock() + wait
        pause = POLL
        while not self._take():
            left = until - clock()
            if self._run and self.blocker and self.blocker.task_id == self._run[1] is not None:
                return False  # an earlier run of the same message: not to be waited for here
            if wait and self.blocker and renewal.held_by_this_thread(self.blocker.token, self.key):
                self._report_conflict("wait")
                raise self._conflict()
            if left <= 0:
                return False
            time.sleep(min(left, pause * random.uniform(0.5, 1)))
            pause = min(pause * 1.5, MAX_POLL)
        return True

    def _take(self) -> bool:
        lease = self._lease()
        self._alias = self.cache or conf.cache
        holder = self._new_holder(lease)
        value = holder.encode()
        store = get_store(self._alias)
        self.took_over = False
        # The server grants the lease when it handles the request, which may be long before the
        # reply arrives here. So what this process trusts is counted from before the request:
        #
        #   here:    sent --------------------------- reply (late) ---- sent + lease: no trust
        #   server:        granted ------------------------------------------- ends: free
        try:
            for _ in range(CORPSES):
                sent = clock()
                entry = store.add(self.key, value, lease)
                if entry is None or entry.value == value:
                    break
                self.blocker, self._remaining = Holder.decode(entry.value), entry.remaining
                if not self._bury(store, entry, self.blocker):
                    return False
            else:
                return False
            self._begin(holder, value, lease, sent)
        except BaseException:
            # The request may have been carried out all the same: an error on the way back, a soft
            # time limit raised between the reply and here. Nobody would renew or free it.
            if self.token == holder.token:
                self.token = None
            renewal.drop(self, holder.token)
            renewal.owe(self._alias, self.key, value, lease)
            raise
        self._send("acquired", holder)
        return True

    def _new_holder(self, lease: float) -> Holder:
        task, task_id, retries = self._run or _running_task()
        return Holder.new(
            self.name, lease, task=task, task_id=task_id, retries=retries, token=self._token
        )

    def _begin(self, holder: Holder, value: bytes, lease: float, sent: float) -> None:
        self._holder = holder
        self._value = value
        self._leased = lease
        self._lost = False
        self._longest_gap = 0.0
        self.blocker = None
        self._trust(sent)
        self._renewed = sent
        self._retry_at = 0.0
        self.token = holder.token
        self.thread = threading.get_ident()
        renewal.keep(self)

    def _trust(self, sent: float) -> None:
        self._deadline = sent + self._leased - _margin(self._leased)

    def _shorten(self, sent: float, lease: float) -> None:
        until = self._deadline
        self._leased = lease
        self._trust(sent)
        self._deadline = min(self._deadline, until)

    def _bury(self, store: Store, entry: Entry, holder: Holder) -> bool:
        """Free a lock whose holder is proven dead; say whether to try to take it again.

        Of many that see the same corpse one frees it, and whoever comes first then takes it:

          A: add -> dead holder X         B: add -> dead holder X
          A: release X -> freed
          A: add -> taken
                                          B: release X -> it is A's by now: refused
                                          B: add -> conflict with A
        """
        how = proof_of_death(holder)
        if how is None:
            return False
        self.took_over = self._free(store, entry, holder, how)
        return True

    def bury(self, token: str, how: str) -> bool:
        """Free the lock if the holder with this token, which is known to be dead, still has it.

        ``how`` it is known goes into the history. Say whether it was freed.
        """
        entry = self._read()
        if entry is None:
            return False
        holder = Holder.decode(entry.value)
        return holder.token == token and self._free(self._store(), entry, holder, how)

    def _free(self, store: Store, entry: Entry, holder: Holder, how: str) -> bool:
        if store.release(self.key, entry.value) is not Outcome.OK:
            return False
        logger.warning("%s was held by %s: freed, since %s.", self, holder, how)
        self._send("expired", holder, outcome="dead", reason=how)
        return True

    def _lease(self) -> float:
        if self.timeout is not None:
            return self.timeout
        return check_seconds("SINGLETASK_LOCK_TIMEOUT", conf.lock_timeout)

    def _store(self) -> Store:
        return get_store(self.cache or conf.cache)

    # Giving back

    def release(self) -> bool:
        """Give the lock back; say whether it still was this object's own to give.

        Raises :class:`LockError` if it was not acquired, and the errors of the cache's client:
        then the lease frees it.
        """
        if self.token is None:
            raise LockError(f"{self.name} is not held by this TaskLock: acquire() it first.")
        try:
            return self._release("returned")
        finally:
            # A worker's sweep takes its lock without occupying the object.
            if not self._in_block and self._in_use.locked():
                self._in_use.release()

    def _release(self, result: str) -> bool:
        renewal.drop(self)
        self.token = None
        if self._holder.pid != this_process().pid:
            return False  # a fork of the holder: the lock is the parent's
        ending = {"result": result, "longest_renewal_gap": self._longest_gap or None}
        try:
            outcome = get_store(self._alias).release(self.key, self._value)
        except BaseException as error:
            # Down, or interrupted by a signal: tried again until the lease has ended.
            renewal.owe(self._alias, self.key, self._value, self._leased)
            reason = f"not given back at once: {type(error).__name__}: {error}"
            self._send("released", self._holder, outcome="released", reason=reason, **ending)
            raise
        if outcome is not Outcome.OK:
            self._lose(outcome)
        ended = "lost" if self._lost else "released"
        self._send("released", self._holder, outcome=ended, **ending)
        return outcome is Outcome.OK

    def _give_back(self, result: str) -> None:
        """Release at the end of a body, whose result or error stands whatever happens here."""
        try:
            self._release(result)
        except Exception:
            logger.exception("%s could not be given back; it is tried again.", self)

    # Holding

    @property
    def lost(self) -> bool:
        """Whether the lock was acquired here and can no longer be trusted; costs no request."""
        return self._lost or (self.token is not None and clock() >= self._deadline)

    def check(self) -> None:
        """Raise :class:`LockLost` if :attr:`lost`; for the loops of long bodies."""
        if self.lost:
            raise LockLost(f"{self.name} is no longer held by this run.")

    def extend(self, timeout: float | None = None) -> None:
        """Let the lease end ``timeout`` seconds from now (default: its own length).

        Raises :class:`LockError` if the lock was not acquired and :class:`LockLost` if it is gone.
        """
        if self.token is None:
            raise LockError(f"{self.name} is not held by this TaskLock: acquire() it first.")
        if timeout is not None:
            check_seconds("timeout", timeout)
        renewal.renew(self, self._leased if timeout is None else timeout)
        self.check()

    def _lose(self, outcome: Outcome) -> None:
        if self._lost:
            return
        self._lost = True
        blocker = self.holder() if outcome is Outcome.TAKEN else None
        reason = f"taken by {blocker}" if blocker else self._why_gone()
        logger.error("%s was lost by the run that held it: %s.", self, reason)
        self._send(
            "lost",
            self._holder,
            reason=reason,
            blocked_by=blocker.token if blocker else "",
            blocked_by_task_id=(blocker.task_id or "") if blocker else "",
        )

    def _why_gone(self) -> str:
        try:
            marked = get_store(self._alias).read(marker_key(self.key, self._value)) is not None
        except Exception:
            marked = False  # the store is down again; what is known is that the lock was gone
        return "cleared" if marked else "gone from the cache (evicted, flushed or expired)"

    # Asking

    def locked(self) -> bool:
        """Ask the cache whether anybody holds the lock; one who is proven dead does not."""
        entry = self._read()
        return entry is not None and proof_of_death(Holder.decode(entry.value)) is None

    def owned(self) -> bool:
        """Ask the cache whether this object holds the lock."""
        entry = self._read()
        return self.token is not None and entry is not None and entry.value == self._value

    def holder(self) -> Holder | None:
        """Ask the cache who holds the lock."""
        entry = self._read()
        return None if entry is None else Holder.decode(entry.value)

    def remaining(self) -> float | None:
        """Ask the cache for the seconds left of the lease; None if free or if it cannot tell."""
        entry = self._read()
        return None if entry is None else entry.remaining

    def clear(self, *, token: str | None = None, actor: str = "") -> bool:
        """Free the lock, whoever holds it; with ``token``, only if that one holds it.

        The holder, if it still runs, learns at its next renewal that the lock is lost, and
        another run can start beside it. Say whether a lock was freed.
        """
        entry = self._read()
        if entry is None:
            return False
        holder = Holder.decode(entry.value)
        if token is not None and holder.token != token:
            return False
        lease = holder.timeout or self._lease()
        if not self._store().clear(self.key, entry.value, lease):
            return False
        logger.warning("%s, held by %s, was cleared by %s.", self, holder, actor or "code")
        self._send("cleared", holder, actor=actor)
        return True

    def _read(self) -> Entry | None:
        return self._store().read(self.key)

    # With

    def __enter__(self) -> TaskLock:
        self._begin_use()
        self._in_block = True
        try:
            if self._acquire(self.wait):
                self._context = _current.set(self)
            elif self.on_conflict == "raise":
                self._report_conflict("wait" if self.wait else "raise")
                raise self._conflict()
            elif self.on_conflict == "skip":
                self._report_conflict("skip")
            # Else it is for the caller to see to.
            return self
        except BaseException:
            if self.token is not None:  # a signal struck here, and no __exit__ follows
                self._give_back("raised")
            self._in_block = False
            self._in_use.release()
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        context, self._context = self._context, None
        try:
            if self.token is not None:
                self._give_back(_result(exc))
        finally:
            self._in_block = False
            self._in_use.release()
            if context is not None:
                _current.reset(context)

    # Telling

    def _conflict(self) -> LockConflict:
        return LockConflict(self.name, self.blocker, self._remaining)

    def _report_conflict(self, reason: str, kind: str = "skipped") -> None:
        blocker = self.blocker
        if kind == "duplicate":
            logger.info("%s is queued already, as task %s.", self, blocker and blocker.task_id)
        else:
            logger.info("%s is held by %s: %s.", self, blocker, reason)
        task, task_id, _ = self._run or _running_task()
        self._send(
            kind,
            None,
            reason=reason,
            task=task or "",
            task_id=task_id or "",
            blocked_by=blocker.token if blocker else "",
            blocked_by_task_id=(blocker.task_id or "") if blocker else "",
        )

    def _send(self, kind: str, holder: Holder | None, **facts: Any) -> None:
        if lock_event.has_listeners(TaskLock):
            cache = self.cache or conf.cache
            event = LockEvent.about(
                kind, self.name, self.key, holder, cache=cache, quiet=self._quiet, **facts
            )
            for _receiver, error in lock_event.send_robust(sender=TaskLock, event=event):
                if isinstance(error, SoftTimeLimitExceeded):
                    raise error  # a signal's, meant for the task


def _result(exc: BaseException | None) -> str:
    if isinstance(exc, Retry):
        return "retried"
    if isinstance(exc, Postponed):
        return "postponed"
    if isinstance(exc, (Ignore, Reject)):
        return "ignored"
    return "raised" if exc else "returned"


def _running_task() -> tuple[str | None, str | None, int]:
    task = current_task._get_current_object()  # type: ignore[attr-defined] # it is a Proxy
    if task is None:
        return None, None, 0
    request = task.request
    return task.name, request.id, request.retries or 0
