"""Say which locks are held, and clear them: for the command and the admin alike."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from operator import attrgetter
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext as _

from django_singletask.conf import conf
from django_singletask.exceptions import LockUnavailable
from django_singletask.history.queries import BATCH, NEWEST, OPEN, NoHistory, UsualHold, reading
from django_singletask.holder import Holder, clean
from django_singletask.locks.keys import QUEUED, LockKey, lock_of_slot
from django_singletask.locks.liveness import is_alive, is_stopped, proof_of_death
from django_singletask.locks.ref import KEPT, LockRef
from django_singletask.log import in_words, logger
from django_singletask.models import TaskLockEvent, is_over
from django_singletask.operators.names import Selector, UnknownName, unknown
from django_singletask.operators.words import STATES, place
from django_singletask.process import Process
from django_singletask.stores import get_store
from django_singletask.stores.base import CannotList, Entry, NotMarked
from django_singletask.stores.database import CURES, trouble
from django_singletask.stores.keys import MAX_SLOTS, is_key

ENOUGH = 5
"""Runs whose length says what is usual: with fewer, no run is slow."""
CLEARLY = 10.0
"""Seconds by which a slow run is longer than the usual one, at least."""


@dataclasses.dataclass(kw_only=True)
class HeldLock(Holder):
    """A lock that the store holds now, or what looks like one, with its holder.

    ``state`` is ``"held"``; ``"dead"``, held by a process that is proven gone; ``"handed_over"``,
    left to a process that has not received it yet; ``"kept"`` by a run that has returned
    (``lock_at_least``); ``"queued"``, not a lock but the entry of a call that stops its duplicates;
    ``"blocking"``, such an entry of a call that has begun; or ``"expired"``, an open row of the
    history whose first lease is over and whose token the store no longer has. A worker's sweep
    closes the row, unless its process lives and takes the lock again, as it may when the cache has
    forgotten the lock.

    ``key`` is that of the slot if the lock has several, ``lock_key`` that of the lock. Each holder
    of such a lock is a lock here, and ``slots_held`` counts them. ``held_for`` and ``remaining``
    are seconds, ``remaining`` None where the store cannot tell. ``alive`` says whether the process
    of the holder is there, None if that cannot be told from this host; ``death`` is the proof that
    it is gone, and ``stopped`` says that it is seen to stand still. ``conflicts`` counts the calls
    that met this holder (of a queued call: its duplicates), ``waiting`` those of them that were
    postponed; :func:`with_history` sets these and ``usual``. They are None without a history.
    """

    key: str
    state: str
    held_for: float = dataclasses.field(init=False)
    remaining: float | None = None
    alive: bool | None = None
    death: str | None = None
    stopped: bool = False
    slots_held: int = 1
    conflicts: int | None = None
    waiting: int | None = None
    usual: UsualHold | None = None

    def __post_init__(self) -> None:
        if not self.name:
            self.name = clean(self.key, 255)
        self.held_for = 0.0
        if self.since:
            self.held_for = max(0.0, time.time() - self.since)

    @property
    def lock_key(self) -> str:
        return lock_of_slot(self.key)

    def mentions(self, text: str) -> bool:
        """Say whether the lock's name, task, ids or process have a text in them, in any case."""
        facts = (self.name, self.task, self.task_id, self.token, self.key, place(self, ""))
        return any(text.lower() in fact.lower() for fact in facts if fact)

    @property
    def queued(self) -> bool:
        """Whether this is not a lock, but the entry of a call that stops its duplicates."""
        return self.state in {"queued", "blocking"}

    @property
    def left(self) -> float:
        """Seconds until an entry ends that nobody renews, by clocks if the store cannot tell."""
        if self.remaining is None:
            return max(0.0, self.timeout - self.held_for)
        return max(0.0, self.remaining)

    @property
    def word(self) -> str:
        """The state in the language of the user."""
        return str(STATES[self.state])

    @property
    def condition(self) -> str:
        """The state as one code; a lock that is held can be ``"stopped"`` or ``"slow"``."""
        if self.state == "held":
            if self.stopped:
                return "stopped"
            if self.slow:
                return "slow"
        return self.state.replace("_", " ")

    @property
    def share(self) -> str:
        """How many of its slots are held, as ``2 of 3``; empty if it has only one."""
        if self.slots <= 1:
            return ""
        return _("{} of {}").format(self.slots_held, self.slots)

    @property
    def slow(self) -> bool:
        """Whether it has been held for much longer than is usual, as far as that is known.

        Of runs that are all alike, the next is longer than the five before it in one case of six:
        so the limit is twice the longest. A second instead of a hundredth is nothing to look at.
        """
        usual = self.usual
        if usual is None or usual.runs < ENOUGH:
            return False
        return self.held_for > max(2 * usual.longest, usual.median + CLEARLY)


SAID = (CannotList, ImproperlyConfigured, NoHistory, NotMarked, UnknownName)
"""Errors whose texts say all that there is to say."""


def cannot_ask(error: Exception) -> str:
    """Say in one line why the cache that holds the locks cannot be used."""
    if isinstance(error, SAID):
        return str(error)
    cure = ""
    if isinstance(error, LockUnavailable) and isinstance(error.__cause__, Exception):
        error = error.__cause__
        store: Any = get_store(conf.cache)
        if store.family == "database":
            cure = CURES.get(trouble(error), "").format(store.alias)
    text = _("The cache {} (SINGLETASK_CACHE) cannot be used: {}.")
    return text.format(repr(conf.cache), in_words(error) + cure)


PROCESS = attrgetter(*(field.name for field in dataclasses.fields(Process)))
USUAL = 30
"""Locks whose usual hold is looked up."""


def match(locks: Sequence[HeldLock], selector: Selector) -> list[HeldLock]:
    """Return the locks, or slots of them, that are meant: those of the first way that finds any.

    These are: a name or key; an id; a task, call or pattern; a host. An entry of unknown origin has
    an empty token and host, so an empty text means no lock; nor does one in which all is cut out.
    """
    text = selector.text
    if not text.strip("…"):
        return []
    keys = {text, *selector.locks}
    found = [lock for lock in locks if {lock.key, lock.lock_key, lock.name} & keys]
    if found or selector.is_exact:
        return found
    found = [lock for lock in locks if text in (lock.token, lock.task_id)]
    if not found:
        found = [lock for lock in locks if selector.covers(lock.name, lock.task)]
    if not found:
        found = [lock for lock in locks if text == lock.host]
    return found


def list_held(selectors: Sequence[Selector] = ()) -> list[HeldLock]:
    """List the locks that are held, dead, queued or expired, the longest held first.

    They match one of ``selectors``, if there are any. A store that cannot list its entries is asked
    for the keys of the open rows of the history. Raises :class:`CannotList` if there are none to be
    had, and :class:`LockUnavailable`.
    """
    history = TaskLockEvent.objects
    keys = [key for each in selectors for key in each.locks]
    locks = read(keys)
    seen = {key for lock in locks for key in (lock.key, lock.lock_key)}
    missed = [each for each in selectors if seen.isdisjoint(each.locks)]
    # The first slot may be free while another is held: then no holder said how many there are.
    keys += [slot for each in missed for key in each.locks for slot in LockKey("", key).slots()]
    if missed and all(each.is_exact for each in missed):
        locks = read(keys)
    elif missed or not selectors:
        try:
            locks = read()
        except CannotList as error:
            try:
                with reading():
                    keys += [row.key for row in history.open()[:OPEN]]
                    ended = history.filter(kind="run")[:NEWEST]
                    keys += [row.key for row in ended if row.reason.startswith(KEPT)]
            except NoHistory as reason:
                raise CannotList(f"{error} {reason}") from reason
            locks = read(keys)
    tokens = {lock.token for lock in locks}
    with suppress(NoHistory), reading():
        # Read after the store: otherwise a run that ends between the two would seem expired.
        over = [row for row in history.open()[:OPEN] if row.token not in tokens and is_over(row)]
        locks += [HeldLock(**vars(row.holder()), key=row.key, state="expired") for row in over]
    # A call that is unique until it has finished has its lock as well while it runs.
    locks = [lock for lock in locks if not (lock.queued and lock.pid)]
    if selectors:
        meant = {id(lock) for each in selectors for lock in match(locks, each)}
        locks = [lock for lock in locks if id(lock) in meant]
    return sorted(locks, key=lambda lock: (-lock.held_for, lock.name))


def must_be_known(selectors: Iterable[Selector], locks: Sequence[HeldLock] = ()) -> None:
    """Raise :class:`UnknownName` if a selector means no lock and nothing else that is known."""
    for selector in selectors:
        if match(locks, selector) or selector.is_known():
            continue
        all_locks = list[HeldLock]()
        with suppress(CannotList, LockUnavailable):
            all_locks = list_held()
        if not match(all_locks, selector):
            raise unknown(selector.text, [lock.name for lock in all_locks])


def with_history(locks: list[HeldLock]) -> list[HeldLock]:
    """Set how many calls met each lock, and how long it usually is held.

    What is usual for a task, or a name without one, costs a query, so only the longest held, which
    come first, are looked up: a hold that has only begun cannot be an unusually long one.
    """
    if conf.history == "off":
        return locks
    met = Counter[str]()
    waiting = Counter[str]()
    try:
        with reading():
            tokens = [lock.token for lock in locks]
            counts = TaskLockEvent.objects.values_list("blocked_by", "result", "count")
            for token, result, count in counts.blocked_by(tokens):  # type: ignore[attr-defined]
                met[token] += count
                if result == "waiting":
                    waiting[token] += count
    except NoHistory as error:
        logger.warning("The conflicts cannot be counted. %s", error)
        return locks
    holds: dict[str, UsualHold | None] = {}
    for lock in locks:
        lock.conflicts = met[lock.token]
        lock.waiting = waiting[lock.token]
        if lock.state == "held":
            owner = lock.task or lock.name
            if owner not in holds and len(holds) < USUAL:
                holds[owner] = TaskLockEvent.objects.usual_hold(lock.name, lock.task or "")
            lock.usual = holds.get(owner)
    return locks


def clear(lock: HeldLock, *, actor: str, reason: str = "") -> bool:
    """Free a lock if the holder that was shown still has it; say whether it was freed.

    An expired lock has nothing to free, and its row is for the sweep to close. If the task is
    unique until it has finished, the entry that stops duplicates of this call is freed too: the
    process that hangs would renew it without end.
    """
    ref = LockRef(conf.cache, lock.name, lock.key, lock.task)
    if not ref.clear(lock.token, actor, reason):
        return False
    if lock.task and not lock.queued:
        beside = ref.beside(QUEUED)
        try:
            _entry, queued_call = beside.read_holder()
            # The entry of a call that is queued behind this one stays.
            if queued_call.is_run_of(lock.task_id):
                beside.clear(queued_call.token, actor, reason)
        except LockUnavailable as error:
            # Not raised: the lock itself is free, and the caller must hear that.
            logger.error("%s was freed, but not the entry of its call: %s", lock.key, error)
    return True


GONE = "The holder in the table no longer has the lock. List the locks again."
"""Why a lock was not freed that is released or taken by now."""


def clear_all(
    locks: Iterable[HeldLock], *, actor: str, reason: str = ""
) -> tuple[list[HeldLock], dict[str, list[HeldLock]]]:
    """Free locks; return those that were freed, and the others by why they were not.

    A full server refuses the markers for living holders, but lets the locks of the dead be freed.
    Any other trouble of the cache is the same for the locks that follow, so these are not tried.
    """
    freed: list[HeldLock] = []
    refused: dict[str, list[HeldLock]] = {}
    outage = ""
    for lock in locks:
        why = outage
        if not outage:
            try:
                if clear(lock, actor=actor, reason=reason):
                    freed.append(lock)
                    continue
                why = GONE
            except Exception as error:  # each cache client has errors of its own
                why = cannot_ask(error)
                if not isinstance(error, NotMarked):
                    outage = why
        refused.setdefault(why, []).append(lock)
    return freed, refused


def read(keys: Iterable[str] | None = None) -> list[HeldLock]:
    """Return all that the store has; or what it has under some keys, with the other slots of each.

    Keys of anything but locks are left out.
    """
    locks = []

    @cache  # Many locks share a process: it is kept once, and judged once.
    def facts_of(*facts: Any) -> dict[str, Any]:
        process = Process(*facts)
        return {
            **vars(process),
            "alive": is_alive(process),
            "death": proof_of_death(process),
            "stopped": is_stopped(process),
        }

    for key, entry in _entries(keys):
        holder = Holder.decode(entry.value)
        facts = {**vars(holder), **facts_of(*PROCESS(holder))}
        lock = HeldLock(**facts, key=key, state="held", remaining=entry.remaining)
        if key.startswith(QUEUED):
            lock.state = "queued"
            if holder.kept:
                lock.state = "blocking"
        elif holder.kept:
            lock.state = "kept"
        elif holder.token and not holder.pid:
            lock.state = "handed_over"
        elif lock.death:
            lock.state = "dead"
        locks.append(lock)
    holders = Counter(map(attrgetter("lock_key"), locks))
    for lock in locks:
        lock.slots_held = holders[lock.lock_key]
    return locks


def _entries(keys: Iterable[str] | None) -> Iterable[tuple[str, Entry]]:
    """Return all entries; or those under some keys, and of as many slots as their holders count.

    No request reads more than ``BATCH`` keys: Redis does nothing else meanwhile.
    """
    store = get_store(conf.cache)
    if keys is None:
        return store.entries()
    entries = dict[str, Entry]()
    wanted = dict.fromkeys(filter(is_key, keys))
    start = 0
    while start < len(wanted):
        batch = [*wanted][start : start + BATCH]
        start += len(batch)
        found = store.read_many(batch)
        entries |= found
        locks = {(lock_of_slot(key), Holder.decode(found[key].value).slots) for key in found}
        for key, count in locks:
            wanted |= dict.fromkeys(LockKey("", key).slots(min(count, MAX_SLOTS)))
    return entries.items()
