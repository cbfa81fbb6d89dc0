"""The protocol of leases, renewals and takeovers, against a simulated store and a virtual clock.

Hypothesis lets processes take locks, sleep, wake, die, lose replies and be cleared, and the store
forget, in any order. TaskLock and Lease are the real ones; only the store, the clock and the thread
that renews are simulated.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from django_singletask import Holder, LockError, LockLost, LockUnavailable, TaskLock
from django_singletask.stores.base import Entry, Outcome, Store
from tests import inside

LEASE = 9.0
HOSTS = 3
# The seconds that a request and that its reply is on its way, and which of them is lost.
DELAYS = st.sampled_from([0, 0, 0.5, 2, 5, 8, 12])
LOSS = st.sampled_from([None, None, None, "request", "reply"])


class SimulatedStore(Store):
    """A store that keeps its promises, behind a network that delays and loses messages."""

    def __init__(self, world: World) -> None:
        super().__init__(SimpleNamespace(make_key=str), "simulated")
        self.world = world
        self.entries: dict[str, tuple[bytes, float]] = {}

    def find(self, key):
        value, expires = self.entries.get(key, (None, 0))
        return None if expires <= self.world.now else value

    def over_the_network(self, act):
        before, after, loss = self.world.network
        self.world.pass_time(before)
        if loss == "request":
            raise LockUnavailable("the request was lost")
        answer = act()
        self.world.pass_time(after)
        if loss == "reply":
            raise LockUnavailable("the reply was lost")
        return answer

    def insert(self, key, value, lease):
        def act():
            if self.find(key) is not None:
                return False
            self.entries[key] = (value, self.world.now + lease)
            return True

        return self.over_the_network(act)

    def change(self, key, old, new, lease):
        fault = "release without compare" if lease is None else "renewal without compare"

        def act():
            there = self.find(key)
            if there is None:
                return Outcome.GONE
            if there not in (old, new) and self.world.fault != fault:
                return Outcome.TAKEN
            if lease is None:
                del self.entries[key]
            else:
                self.entries[key] = (new, self.world.now + lease)
            return Outcome.OK

        return self.over_the_network(act)

    def read_many(self, keys):
        def act():
            found = {key: self.find(key) for key in keys}
            return {key: Entry(value, None) for key, value in found.items() if value is not None}

        return self.over_the_network(act)


FAULTS = {
    "renewal anchored at the reply": inside.renewals_that_count_from_the_reply,
    "renewal without compare": None,
    "release without compare": None,
    "a loss that a renewal undoes": inside.losses_that_a_renewal_undoes,
}
"""What is broken on purpose, by the store or by what is done to the leases."""


class World(RuleBasedStateMachine):
    fault: str | None = None

    @initialize()
    def begin(self):
        self.now = 1000.0
        self.network = (0, 0, None)
        self.store = SimulatedStore(self)
        self.asleep: set[int] = set()
        self.busy: set[int] = set()
        self.dead: set[str] = set()
        self.debts: list[tuple[str, bytes, float]] = []
        # Tokens whose entry the store forgot or an operator cleared: their holders cannot know it
        # before their next renewal.
        self.uninformed: set[str] = set()
        self.lost: set[str] = set()
        self.locks = [self.new_lock() for _ in range(HOSTS)]

    def new_lock(self):
        return TaskLock("nightly", timeout=LEASE, cache="simulated")

    def __init__(self):
        super().__init__()
        self.patches = ExitStack()
        self.patches.enter_context(
            inside.simulation(lambda: self.store, lambda: self.now, self.owe, self.proof)
        )
        if break_leases := FAULTS.get(self.fault):
            self.patches.enter_context(break_leases())

    def teardown(self):
        self.patches.close()

    def owe(self, keys, value, seconds):
        self.debts.append((*keys, value, self.now + seconds))

    def proof(self, holder: Holder):
        return "the test killed it" if holder.token in self.dead else None

    # Time

    def pass_time(self, seconds):
        """Let time pass, in which each process that is awake renews when it is due."""
        until = self.now + seconds
        while True:
            at, who = min(
                (
                    (max(inside.lease_of(lock).due_at, self.now), who)
                    for who, lock in enumerate(self.locks)
                    if lock.token and not lock.lost
                    if who not in self.asleep and who not in self.busy
                ),
                default=(until + 1, None),
            )
            if who is None or at > until:
                break
            self.now = at
            self.renew(who, (0, 0, None))
        self.now = until

    def over(self, who, network):
        """Let the requests of this process meet this network, and those of others the default."""
        stack = ExitStack()
        kept = self.network
        self.network = network
        self.busy.add(who)
        stack.callback(self.busy.discard, who)
        stack.callback(setattr, self, "network", kept)
        return stack

    def renew(self, who, network, lease=None):
        lock = self.locks[who]
        token = lock.token
        with self.over(who, network), suppress(LockUnavailable):
            with suppress(LockLost):
                lock.extend(lease)
            self.uninformed.discard(token)

    # What happens

    def awake(self, data, wants):
        hosts = [
            who for who, lock in enumerate(self.locks) if who not in self.asleep and wants(lock)
        ]
        return data.draw(st.sampled_from(hosts)) if hosts else None

    @rule(seconds=st.sampled_from([0.1, 1, 3, 6, 10]))
    def wait(self, seconds):
        self.pass_time(seconds)

    @rule(data=st.data(), before=DELAYS, after=DELAYS, loss=LOSS)
    def take(self, data, before, after, loss):
        who = self.awake(data, lambda lock: lock.token is None)
        if who is not None:
            with self.over(who, (before, after, loss)), suppress(LockUnavailable, LockError):
                self.locks[who].acquire()

    @rule(data=st.data(), before=DELAYS, after=DELAYS, loss=LOSS)
    def renew_slowly(self, data, before, after, loss):
        who = self.awake(data, lambda lock: lock.token is not None)
        if who is not None:
            self.renew(who, (before, after, loss))

    @rule(
        data=st.data(), before=DELAYS, after=DELAYS, loss=LOSS, lease=st.sampled_from([3.0, 30.0])
    )
    def extend(self, data, before, after, loss, lease):
        who = self.awake(data, lambda lock: lock.token is not None)
        if who is not None:
            self.renew(who, (before, after, loss), lease)

    @rule(data=st.data(), before=DELAYS, after=DELAYS, loss=LOSS)
    def release(self, data, before, after, loss):
        who = self.awake(data, lambda lock: lock.token is not None)
        if who is not None:
            with self.over(who, (before, after, loss)), suppress(LockUnavailable):
                self.locks[who].release()

    @rule(who=st.integers(0, HOSTS - 1))
    def sleep(self, who):
        self.asleep.add(who)

    @rule(who=st.integers(0, HOSTS - 1))
    def wake(self, who):
        self.asleep.discard(who)

    @rule(who=st.integers(0, HOSTS - 1))
    def die(self, who):
        lock = self.locks[who]
        if lock.token is not None:
            self.dead.add(lock.token)
        self.asleep.discard(who)
        self.locks[who] = self.new_lock()

    @precondition(lambda self: self.store.entries)
    @rule()
    def forget(self):
        """The store is flushed, restarts empty, or evicts."""
        self.uninform()
        self.store.entries.clear()

    @rule()
    def clear(self):
        self.uninform()
        self.busy.update(range(HOSTS))  # nobody renews between the requests of an operator
        TaskLock("nightly", cache="simulated").clear()
        self.busy.clear()

    def uninform(self):
        for value, _ in self.store.entries.values():
            self.uninformed.add(Holder.decode(value).token)  # an empty one, of a marker

    @rule()
    def pay(self):
        debts, self.debts = self.debts, []
        for key, value, until in debts:
            if self.now < until:
                self.store.release(key, value)

    # What must hold

    def trusting(self):
        return [
            lock
            for lock in self.locks
            if lock.token is not None and not lock.lost and lock.token not in self.uninformed
        ]

    @invariant()
    def no_two_trust_the_lock(self):
        assert len(self.trusting()) <= 1

    @invariant()
    def a_trusted_lock_has_its_entry_in_the_store(self):
        for lock in self.trusting():
            assert Holder.decode(self.store.find(lock.key) or b"").token == lock.token

    @invariant()
    def a_holder_past_its_deadline_knows_that_the_lock_is_lost(self):
        for lock in self.locks:
            if lock.token is not None and self.now >= inside.lease_of(lock).deadline:
                assert lock.lost

    @invariant()
    def what_is_lost_stays_lost(self):
        for lock in self.locks:
            if lock.token in self.lost:
                assert lock.lost
            elif lock.token is not None and lock.lost:
                self.lost.add(lock.token)


OPTIONS = {
    "deadline": None,
    "stateful_step_count": 40,
    "suppress_health_check": list(HealthCheck),
    "database": None,
}


@pytest.fixture(autouse=True)
def alone(caplog):
    """Let no thread of an earlier test use the simulated clock and store."""
    caplog.set_level("CRITICAL", logger="django_singletask")
    inside.keep_nothing()


def test_the_protocol(settings):
    settings.SINGLETASK_HISTORY = "off"
    run_state_machine_as_test(World, settings=hypothesis_settings(max_examples=300))


@pytest.mark.only_all(
    "one fault shows that faults are found",
    "renewal without compare",
    "release without compare",
    "a loss that a renewal undoes",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_protocol_is_found(fault, settings):
    """Negative controls: the same test, with one thing broken on purpose."""
    settings.SINGLETASK_HISTORY = "off"

    class Broken(World):
        pass

    Broken.fault = fault
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Broken,
            settings=hypothesis_settings(
                max_examples=3000, derandomize=True, phases=[Phase.generate]
            ),
        )


def hypothesis_settings(**options):
    return settings(**OPTIONS, **options)
