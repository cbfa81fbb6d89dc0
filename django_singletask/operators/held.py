"""Say which locks are held, and clear them: for the command and the admin alike."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from math import inf
from operator import attrgetter
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_singletask.conf import conf
from django_singletask.exceptions import LockUnavailable
from django_singletask.history.queries import (
    BATCH,
    NEWEST,
    OPEN,
    NoHistory,
    UsualHold,
    need_begins,
    reading,
)
from django_singletask.holder import Holder, clean
from django_singletask.locks.keys import QUEUED, LockKey, lock_of_slot
from django_singletask.locks.liveness import is_alive, is_stopped, proof_of_death
from django_singletask.locks.ref import KEPT, LockRef
from django_singletask.log import in_words, logger
from django_singletask.models import WAS_WAITING, TaskLockEvent, is_over
from django_singletask.operators.names import Selector, SeveralMeant, UnknownName
from django_singletask.operators.recorded import find
from django_singletask.operators.starving import Starving, starving
from django_singletask.operators.words import STATES
from django_singletask.process import Process
from django_singletask.stores import find_store, get_store
from django_singletask.stores.base import CannotList, Entry, NotMarked
from django_singletask.stores.database import CURES, trouble
from django_singletask.stores.keys import MAX_SLOTS, is_key

ENOUGH = 5
"""Runs whose length says what is usual: with fewer, no run is slow."""
CLEARLY = 10.0
"""Seconds by which a slow run is longer than the usual one, at least."""


RUNNING = frozenset({"held", "starving", "slow", "stopped"})
"""States of a lock whose run has not ended, as far as is known."""
HOLDING = RUNNING | {"dead", "handed_over", "kept"}
"""States of a lock that somebody has."""
RANKS = {"dead": 0, "expired": 1, "stopped": 2, "slow": 3, "starving": 4}
"""States that somebody should look at, the worst first."""
NO_RANK = len(RANKS)


@dataclasses.dataclass(kw_only=True)
class HeldLock(Holder):
    """A lock that the store holds now, or what looks like one, with its holder.

    ``state`` is one of these:

    * ``"dead"``: held by a process that is proven gone.
    * ``"expired"``: an open row of the history whose first lease is over and whose token the store
      no longer has. A worker's sweep closes the row, unless its process lives and takes the lock
      again, as it may when the cache has forgotten the lock.
    * ``"stopped"``: held by a process that is seen to stand still.
    * ``"slow"``: held for much longer than is usual.
    * ``"starving"``: held, and for an hour or more no run has completed, while others are called.
    * ``"held"``: none of these.
    * ``"kept"``: by a run that has ended (``lock_at_least``).
    * ``"handed_over"``: left to a process that has not received it yet.
    * ``"blocking"``, ``"queued"``: not a lock, but the entry of a call that stops its duplicates; a
      call that blocks has begun.

    ``key`` is that of the slot if the lock has several, ``lock_key`` that of the lock. Each holder
    of such a lock is a lock here, and ``slots_held`` counts them. ``held_for`` and ``remaining``
    are seconds, ``remaining`` None where the store cannot tell. ``alive`` says whether the process
    of the holder is there, None if that cannot be told from this host; ``death`` is the proof that
    it is gone. ``met`` counts the calls that met this holder, by their results, and duplicates of
    its call as ``"duplicate"``; ``conflicts`` is the sum, and ``waiting`` counts those that wait or
    are postponed. :func:`add_conflicts` sets these three, and :func:`add_states` sets ``usual``.
    All are None if they are not known.
    """

    key: str
    state: str
    held_for: float = dataclasses.field(init=False)
    remaining: float | None = None
    alive: bool | None = None
    death: str | None = None
    slots_held: int = 1
    conflicts: int | None = None
    waiting: int | None = None
    met: Counter[str] | None = None
    usual: UsualHold | None = None

    def __post_init__(self) -> None:
        if not self.name:
            self.name: str = clean(self.key, 255)
        self.held_for = 0.0
        if self.since:
            self.held_for = max(0.0, time.time() - self.since)

    @property
    def lock_key(self) -> str:
        return lock_of_slot(self.key)

    @property
    def queued(self) -> bool:
        """Whether this is not a lock, but the entry of a call that stops its duplicates."""
        return self.state in {"queued", "blocking"}

    @property
    def left(self) -> float:
        """Seconds until the entry ends if nobody renews it; by clocks if the store cannot tell."""
        if self.remaining is None:
            return max(0.0, self.timeout - self.held_for)
        return max(0.0, self.remaining)

    @property
    def word(self) -> str:
        """The state in the language of the user."""
        return str(STATES[self.state])

    @property
    def share(self) -> str:
        """How many of its slots are held, as ``2 of 3``; empty if it has only one."""
        if self.slots <= 1:
            return ""
        return _("{} of {}").format(self.slots_held, self.slots)


EXPLAINED = (CannotList, ImproperlyConfigured, NoHistory, NotMarked, SeveralMeant, UnknownName)
"""Errors whose texts need no explanation from here."""


def cannot_ask(error: Exception) -> str:
    """Say in one line why the cache that holds the locks cannot be used."""
    if isinstance(error, EXPLAINED):
        return str(error)
    cure = ""
    if isinstance(error, LockUnavailable) and isinstance(error.__cause__, Exception):
        error = error.__cause__
        store: Any = find_store(conf.cache)
        if store.family == "database":
            cure = CURES.get(trouble(error), "").format(store.alias)
    text = _("The cache {} (SINGLETASK_CACHE) cannot be used: {}.")
    return text.format(repr(conf.cache), in_words(error) + cure)


fields_of_process: Final = attrgetter(*(field.name for field in dataclasses.fields(Process)))
USUAL = 30
"""Locks whose usual hold is looked up."""


def list_held(selectors: Sequence[Selector] = ()) -> list[HeldLock]:
    """List the locks that are held, dead, stopped, queued or expired, in any order.

    One of ``selectors`` selects them, if there are any. A store that cannot list its entries is
    asked for the keys of the open rows of the history. Raises :class:`CannotList` if there are none
    to be had, and :class:`LockUnavailable`.
    """
    if selectors:
        locks = _read_selected(selectors)
    else:
        locks = _read_all()
    expired = _list_expired({lock.token for lock in locks})
    if selectors:
        expired = _selected(selectors, expired)
    # A call that is unique until it has finished has its lock as well while it runs.
    return [lock for lock in [*locks, *expired] if not (lock.queued and lock.pid)]


def _read_selected(selectors: Sequence[Selector]) -> list[HeldLock]:
    """Return what the store has of the locks that are selected, by their keys if these suffice."""
    keys = chain.from_iterable(selector.keys() for selector in selectors)
    locks = _selected(selectors, read(keys))
    unsettled = [each for each in selectors if not _is_settled(each, locks)]
    if unsettled:
        seen = {lock.key for lock in locks}
        others = [lock for lock in _read_all() if lock.key not in seen]
        locks += _selected(unsettled, others)
    return locks


def _selected(selectors: Sequence[Selector], locks: list[HeldLock]) -> list[HeldLock]:
    return [lock for lock in locks if any(each.selects(lock) for each in selectors)]


def _is_settled(selector: Selector, locks: list[HeldLock]) -> bool:
    """Say whether the locks that were read under the keys of a text are all that it means."""
    if selector.is_exact:
        return True
    if selector.text in selector.tasks:
        return False
    return any(map(selector.selects, locks))


def _read_all() -> list[HeldLock]:
    """Return all that the store has, as far as the store or the history can list it."""
    try:
        return read()
    except CannotList as error:
        history = TaskLockEvent.objects
        try:
            need_begins()
            with reading():
                keys = [row.key for row in history.open()[:OPEN]]
                # A lock can be kept after its run has ended.
                ended = history.filter(kind="run")[:NEWEST]
                keys += [row.key for row in ended if row.reason.startswith(KEPT)]
        except NoHistory as reason:
            raise CannotList(f"{error} {reason}") from reason
        return read(keys)


def _list_expired(tokens: set[str]) -> list[HeldLock]:
    """List open rows of the history whose lease is over; ``tokens`` are those of the store.

    Call this after the store was read: otherwise a run that ends between the two seems expired.
    """
    with suppress(NoHistory), reading():
        over = [row for row in TaskLockEvent.objects.open()[:OPEN] if is_over(row)]
        return [
            HeldLock(**vars(row.holder()), key=row.key, state="expired")
            for row in over
            if row.token not in tokens
        ]
    return []


def must_be_known(selectors: Iterable[Selector], locks: Sequence[HeldLock] = ()) -> None:
    """Raise :class:`UnknownName` if a name selects no lock, no task and no row of the history.

    A pattern may select nothing. If the history is off, cannot be read, or keeps only trouble, no
    name is refused, since a free lock leaves no other trace.
    """
    if conf.history == "off" or conf.history_keeps == "trouble":
        return
    for selector in selectors:
        if selector.is_pattern or any(map(selector.selects, locks)) or selector.tasks:
            continue
        with suppress(NoHistory):
            rows, complete = find([selector], limit=1)
            if complete and not rows:
                raise UnknownName(selector.text)


def add_states(locks: list[HeldLock], hungry: Sequence[Starving] | None = None) -> list[HeldLock]:
    """Find out which locks are slow or starve; sort the list, the worst first, and return it.

    ``hungry`` is what :func:`starving` returned, if the caller has asked already.
    """
    if hungry is None:
        hungry = ()
        with suppress(NoHistory):
            hungry = starving()
    starved = {each.name for each in hungry}
    held = [lock for lock in locks if lock.state == "held"]
    for lock in held:
        if lock.name in starved:
            lock.state = "starving"
    _find_slow(held)
    locks.sort(key=lambda lock: (RANKS.get(lock.state, NO_RANK), -lock.held_for, lock.name))
    return locks


def _find_slow(locks: list[HeldLock]) -> None:
    """Mark the locks that are held for much longer than is usual.

    What is usual for a task, or a name without one, costs a query: so only the longest held are
    looked up.
    """
    usual: dict[str, UsualHold | None] = {}
    for lock in sorted(locks, key=attrgetter("held_for"), reverse=True):
        if lock.held_for <= CLEARLY:
            break
        owner = lock.name
        if lock.task:
            owner = lock.task
        if owner not in usual and len(usual) < USUAL:
            usual[owner] = TaskLockEvent.objects.usual_hold(lock.name, lock.task)
        lock.usual = usual.get(owner)
        if lock.usual is not None and lock.held_for > limit_of(lock.usual):
            lock.state = "slow"


def limit_of(usual: UsualHold) -> float:
    """Return the seconds after which a hold is slow.

    That is twice the longest of the last runs: of six runs that are alike, the last is the longest
    in one case of six, by chance. It is also some seconds more than the usual run: nobody should
    look at a run that takes a second instead of a hundredth.
    """
    if usual.runs < ENOUGH:
        return inf
    return max(2 * usual.longest, usual.median + CLEARLY)


def add_conflicts(locks: list[HeldLock]) -> list[HeldLock]:
    """Count the calls that met each lock, by what became of them; return the list."""
    if conf.history == "off":
        return locks
    met: defaultdict[str, Counter[str]] = defaultdict(Counter)
    try:
        with reading():
            tokens = [lock.token for lock in locks]
            others = TaskLockEvent.objects.exclude(reason="retry")  # that is the holder's own call
            rows = others.values_list("blocked_by", "ref", "kind", "result", "count")
            for token, ref, kind, result, count in rows.calls_blocked_by(tokens):  # type: ignore[attr-defined]
                if kind == "duplicate":
                    met[token][kind] += count
                else:
                    met[token][result] += count
                if ref.endswith(WAS_WAITING):
                    met[token]["waiting"] -= count
    except NoHistory as error:
        logger.warning("The conflicts cannot be counted. %s", error)
        return locks
    none = Counter[str]()
    for lock in locks:
        counts = met.get(lock.token, none)
        lock.met = +counts  # without 0, and less: another process may write late
        lock.conflicts = lock.met.total()
        lock.waiting = lock.met["waiting"]
    return locks


def count_states(locks: Iterable[HeldLock]) -> dict[str, int]:
    """Return how many locks are in each state, the worst state first, also 0."""
    counts = Counter(lock.state for lock in locks)
    return {state: counts[state] for state in STATES}


def summary(locks: Sequence[HeldLock]) -> str:
    """Count the locks, and those that somebody should look at: ``17 locks: 4 dead, 1 stopped``."""
    number = len(locks)
    text = ngettext("{} lock", "{} locks", number).format(number)
    counts = count_states(locks)
    troubles = [f"{counts[state]} {STATES[state]}" for state in RANKS if counts[state]]
    if troubles:
        text += f": {', '.join(troubles)}"
    return text


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
        entry_of_call = ref.beside(QUEUED)
        try:
            _entry, call = entry_of_call.read_holder()
            # A task that is not unique has no such entry. One of a call that is queued behind this
            # run stays.
            if call.is_run_of(lock.task_id):
                entry_of_call.clear(call.token, actor, reason)
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
    refused: dict[str, list[HeldLock]] = defaultdict(list)
    outage = ""
    for lock in locks:
        if outage:
            refused[outage].append(lock)
            continue
        try:
            is_freed = clear(lock, actor=actor, reason=reason)
        except Exception as error:  # each cache client has errors of its own
            why_not = cannot_ask(error)
            refused[why_not].append(lock)
            if not isinstance(error, NotMarked):
                outage = why_not
            continue
        if is_freed:
            freed.append(lock)
        else:
            refused[GONE].append(lock)
    return freed, refused


def read(keys: Iterable[str] | None = None) -> list[HeldLock]:
    """Return all that the store has; or what it has under some keys, with the other slots of each.

    Keys of anything but locks are left out.
    """
    locks = []

    @cache  # Many locks share a process: it is kept once, and judged once.
    def facts_of(*fields: Any) -> tuple[dict[str, Any], bool]:
        """Return what is known of the process with these fields, and whether it stands still."""
        process = Process(*fields)
        judged = {"alive": is_alive(process), "death": proof_of_death(process)}
        return {**vars(process), **judged}, is_stopped(process)

    for key, entry in _entries(keys):
        holder = Holder.decode(entry.value)
        known, stopped = facts_of(*fields_of_process(holder))
        facts = {**vars(holder), **known}
        lock = HeldLock(**facts, key=key, state="held", remaining=entry.remaining)
        lock.state = _state(lock, stopped)
        locks.append(lock)
    holders = Counter(lock.lock_key for lock in locks)
    for lock in locks:
        lock.slots_held = holders[lock.lock_key]
    return locks


def _state(lock: HeldLock, stopped: bool) -> str:
    """Return the state that the entry and its process show."""
    if lock.key.startswith(QUEUED):
        if lock.kept:
            return "blocking"
        return "queued"
    if lock.kept:
        return "kept"
    if lock.token and not lock.pid:
        return "handed_over"
    if lock.death:
        return "dead"
    if stopped:
        return "stopped"
    return "held"


def _entries(keys: Iterable[str] | None) -> Iterable[tuple[str, Entry]]:
    """Return all entries; or those under some keys, and of as many slots as their holders count.

    No request reads more than ``BATCH`` keys: Redis does nothing else meanwhile.
    """
    store = get_store(conf.cache)
    if keys is None:
        return store.entries()
    entries = dict[str, Entry]()
    # A dict keeps the order of the keys. It grows by the keys of the slots that holders count.
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
