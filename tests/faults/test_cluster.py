"""What can go wrong only in a cluster: nodes that forget, slots that migrate, replicas that lag.

The contract of a store is in test_stores.py.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from redis import Redis as Client
from valkey.cluster import key_slot

from django_singletask import LockUnavailable, TaskLock
from django_singletask.operators.probe import probe
from django_singletask.stores import cluster
from django_singletask.stores.base import Outcome
from tests import inside, servers
from tests.entries import eventually, holder, key_of, private_store
from tests.servers import Cluster, Redis, Server, Valkey
from tests.stores.test_acl import LINE
from tests.stores.test_stores_redis import requests

CLUSTERS = {"cluster": Valkey, "redis": Redis}
"""The servers for a cache whose client knows clusters, and for one whose client knows none."""
ROOT = Path(__file__).parents[2]
A, B = holder("a"), holder("b")
EPOCH, FENCE = "singletask:@epoch", "singletask:@fence"


def names_on(store: Any, where: str, count: int = 1) -> list[str]:
    """Return names of locks that are on the node with this address."""
    names = map("lock {}".format, range(100_000))
    there = (name for name in names if store.find(store.group(key_of(name)).number) == where)
    return [*islice(there, count)]


def variables(alias: str, both: Cluster) -> dict[str, str]:
    """Return what tells another process where the cache with this alias is."""
    name = "SINGLETASK_TEST_CLUSTER" if alias == "cluster" else "SINGLETASK_TEST_REDIS_URL"
    return {"DJANGO_SETTINGS_MODULE": "tests.settings", name: both.url}


def where_is(node: Redis) -> str:
    return f"127.0.0.1:{node.port}"


# The groups


def test_the_tags_of_the_groups_are_spread_over_the_hash_slots() -> None:
    slots = [key_slot(b"{%s}" % cluster.TAGS[group].encode()) for group in range(256)]
    assert [slot // 64 for slot in slots] == [*range(256)]


def test_the_tags_never_change() -> None:
    """Processes of two versions must look for a lock at the same place."""
    tags = [cluster.TAGS[group] for group in (0, 1, 127, 128, 255)]
    assert tags == ["460", "14", "46", "16", "430"]


@pytest.mark.parametrize("cache_alias", ["cluster"], indirect=True)
def test_all_keys_of_a_lock_are_in_one_hash_slot(cache_alias: str) -> None:
    store: Any = inside.store_of(cache_alias)
    for name in ("nightly", "feeds.tasks.import_feed(feed_id=7)", "a:cleared:b", "x#2"):
        key, *slots = inside.slot_keys(TaskLock(name))[:3]
        keys = [key, *slots, inside.marker_of(key, A), inside.marker_of(slots[0], A)]
        names = [store.group(each).make_key(each) for each in keys]
        names += [store.group(key).make_key(FENCE), store.group(key).epoch_key]
        assert len({key_slot(each.encode()) for each in names}) == 1


def braces(key: str, prefix: str, version: int) -> str:
    return f"{prefix}:{{{version}}}:{key}"


@pytest.mark.parametrize(
    "changes", [{"KEY_PREFIX": "{shop}"}, {"KEY_FUNCTION": f"{__name__}.braces"}], ids=str
)
def test_keys_that_would_choose_the_node_are_refused(settings: Any, changes: Any) -> None:
    settings.CACHES = settings.CACHES | {"cluster": settings.CACHES["cluster"] | changes}
    settings.SINGLETASK_CACHE = "cluster"
    [message] = checks.run_checks(tags=[checks.Tags.caches])
    assert message.id == "django_singletask.E005"
    assert 'KEY_FUNCTION puts "{" into the keys' in message.msg
    with pytest.raises(ImproperlyConfigured, match=r'puts "\{" into the keys'):
        TaskLock("nightly").acquire()


# The requests, on both kinds of servers


@pytest.fixture(scope="module", params=CLUSTERS)
def client(request: pytest.FixtureRequest) -> str:
    """Give the alias of a cache."""
    return request.param


@pytest.fixture(scope="module")
def either(client: str) -> Iterator[Cluster]:
    with Cluster(CLUSTERS[client]) as both:
        yield both


@pytest.fixture
def store(either: Cluster, client: str, settings: Any) -> Iterator[Any]:
    settings.SINGLETASK_CACHE = client
    settings.SINGLETASK_HISTORY = "off"
    for node in either.primaries:
        either.say(node, "FLUSHALL")
    with private_store(settings, client, either.url) as store:
        yield store


def test_take_and_give_back_are_two_requests_and_a_conflict_is_one(
    either: Cluster, store: Any
) -> None:
    def use(*, conflict: bool) -> None:
        assert inside.take(store, A, key, waits=True) == key
        if conflict:
            assert inside.take(store, B, key, waits=True) == {key: A}
        assert store.release(key, A) is Outcome.OK

    key = key_of("nightly")
    use(conflict=True)  # the connection is open, and the server knows the scripts
    port = int(store.find(store.group(key).number).rpartition(":")[2])
    with Client(port=port) as client:
        mine = {"EVALSHA", "GET", "SET", "INFO", "CLUSTER"}
        sent = requests(client, lambda: use(conflict=True))
    assert [each for each in sent if each in mine] == ["EVALSHA"] * 3


def test_a_look_is_one_trip_to_each_node(store: Any, monkeypatch: Any) -> None:
    trips = []
    ask = cluster.Node.ask

    def count(node: cluster.Node, *requests: Any, **options: Any) -> Any:
        if node.cluster is store:  # no other thread's
            trips.append((node.where, len(requests)))
        return ask(node, *requests, **options)

    store.look()
    monkeypatch.setattr(cluster.Node, "ask", count)
    store.look()
    assert sorted(trips) == sorted((where, 1) for where in store.seeds)
    trips.clear()
    Client(port=int(store.seeds[0].rpartition(":")[2])).flushall()
    store.look()  # one of each node, then all, and those that are gone are set
    assert sum(number for _, number in trips if number > 1) == 256
    assert all(epoch.value for epoch in store.map.epochs)
    trips.clear()
    store.look(map(key_of, names_on(store, store.seeds[1], 5)))
    assert trips == [(store.seeds[1], 5)]


def test_locks_of_all_nodes_are_listed_in_few_trips(store: Any, monkeypatch: Any) -> None:
    keys = [key_of(f"lock {number}") for number in range(300)]
    for key in keys:
        store.insert(key, A, 60)
    trips = []
    ask = cluster.Node.ask
    monkeypatch.setattr(
        cluster.Node, "ask", lambda *args, **kw: trips.append(1) or ask(*args, **kw)
    )
    assert {key for key, _ in store.entries()} == {*keys}
    assert len(trips) <= 7  # the map, and for each node a scan and a read


@pytest.mark.only_all("it starts processes")
def test_the_probe_names_each_node(either: Cluster, store: Any, monkeypatch: Any) -> None:
    for name, value in variables(store.cache_alias, either).items():
        monkeypatch.setenv(name, value)
    result = probe(store.cache_alias)
    assert result.fit
    texts = [finding.text for finding in result.findings]
    for node in either.primaries:
        version = "valkey" if isinstance(node, Valkey) else "redis"
        assert any(text.startswith(f"{where_is(node)}: {version} ") for text in texts)
    assert any("MOVED" in text for text in texts) is (store.cache_alias != "cluster")


def test_a_server_that_is_no_cluster_is_an_error(settings: Any, on_redis: None) -> None:
    url = settings.CACHES["redis"]["LOCATION"]
    with private_store(settings, "cluster", url), pytest.raises(LockUnavailable, match="cluster"):
        TaskLock("nightly", cache="cluster").acquire()


def test_a_node_may_have_an_ipv6_address(settings: Any) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    options = {"bind": "127.0.0.1 ::1", "cluster_announce_ip": "::1"}
    with Cluster(primaries=1, replicas=0, **options) as both:
        where = f"::1:{both.nodes[0].port}"
        with private_store(settings, "cluster", f"valkey://[::1]:{both.nodes[0].port}/0") as store:
            assert store.insert(key_of("nightly"), A, 60)
            assert store.map.owners == [where] * 256
            [(server, client)] = store.clients().items()
            assert server == where
            addresses = {each["laddr"] for each in client.client_list(_type="normal")}
            assert addresses == {f"[::1]:{both.nodes[0].port}"}


@pytest.mark.parametrize("client", ["redis"], indirect=True)
@pytest.mark.parametrize("cleared", [False, True])
def test_a_release_that_a_node_made_before_another_one_took_over_counts_as_made(
    store: Any, monkeypatch: Any, cleared: bool
) -> None:
    """The reply is lost, and the new node has the deletion already; but not if it was cleared."""
    lock = TaskLock("nightly")
    assert lock.acquire()
    group, asked = store.group(lock.key).number, cluster.Node.ask
    where = store.find(group)

    def lose(node: cluster.Node, *requests: Any, **options: Any) -> Any:
        monkeypatch.setattr(cluster.Node, "ask", asked)
        if cleared:
            store.clear(lock.key, store.read(lock.key).value, 60)
        else:
            node.ask(*requests, **options)
        raise node.unavailable(store.errors.ConnectionError("gone")) from ConnectionError("gone")

    def read_map(*args: Any, **options: Any) -> None:
        store.map.owners[group] = where.replace("127.0.0.1", "localhost")  # another address

    monkeypatch.setattr(store, "read_map", read_map)
    monkeypatch.setattr(cluster.Node, "ask", lose)
    assert lock.release() is not cleared
    assert store.map.owners[group] != where


# A slot that migrates


class Migration:
    """Move the hash slot of a lock from its node to the next one, in steps."""

    def __init__(self, both: Cluster, store: Any, name: str) -> None:
        self.cluster, self.group = both, store.group(key_of(name))
        self.slot = cluster.HASHED[cluster.TAGS[self.group.number]]
        where = store.find(self.group.number)
        number = [where_is(node) for node in both.primaries].index(where)
        self.old, self.new = both.primaries[number], both.primaries[(number + 1) % 3]

    def begin(self) -> None:
        old, new = map(self.cluster.id_of, (self.old, self.new))
        assert "OK" in self.say(self.new, "IMPORTING", old)
        assert "OK" in self.say(self.old, "MIGRATING", new)

    def move(self, *keys: str) -> None:
        with Client(port=self.old.port) as client:
            for name in keys or client.execute_command("CLUSTER GETKEYSINSLOT", self.slot, 1000):
                client.migrate("127.0.0.1", self.new.port, name, 0, 5000)

    def end(self) -> None:
        new = self.cluster.id_of(self.new)
        for node in (self.new, self.old, *self.cluster.primaries):
            assert "OK" in self.say(node, "NODE", new)
        # Until all know the new version of the map, the slot must not move back: a node could
        # believe an older message, and then each of two nodes says that the other one has it.
        self.cluster.wait(lambda: len({*map(self.version, self.cluster.nodes)}) == 1)

    def version(self, node: Redis) -> str:
        """Return the version of the new node's part of the map, as a node knows it."""
        lines = self.cluster.say(node, "CLUSTER NODES").splitlines()
        return next(line.split()[6] for line in lines if self.cluster.id_of(self.new) in line[:41])

    def all(self) -> None:
        self.begin()
        self.move()
        self.end()

    def back(self) -> None:
        self.old, self.new = self.new, self.old
        self.all()

    def say(self, node: Redis, *words: object) -> str:
        return self.cluster.say(node, "CLUSTER SETSLOT", self.slot, *words)


@pytest.fixture
def migration(either: Cluster, store: Any) -> Iterator[Migration]:
    migration = Migration(either, store, "nightly")
    yield migration
    # The next test finds the slot at home again.
    migration.move()
    with suppress(AssertionError):
        migration.end()
    migration.back()


@pytest.fixture
def outside_of_tests() -> Iterator[None]:
    with inside.outside_of_tests():
        yield


@pytest.mark.usefixtures("outside_of_tests")
def test_a_lock_is_held_while_its_slot_migrates(
    store: Any, migration: Migration, pauses: list[float]
) -> None:
    """The old node answers, then "ASK", then "MOVED"; nobody waits, and nothing is lost."""
    with TaskLock("first"):
        pass
    pauses.clear()
    lock = TaskLock("nightly", timeout=30)
    assert lock.acquire()
    steps: list[Callable[[], None]] = [migration.begin, migration.move, migration.end]
    for step in steps:
        step()
        assert not TaskLock("nightly").acquire()
        lock.extend(30)
        assert lock.owned()
        assert not lock.lost
    assert lock.fencing_token()
    assert lock.release()
    with TaskLock("nightly"):
        pass
    assert pauses == []


@pytest.fixture
def new_node(either: Cluster, store: Any) -> Iterator[Migration]:
    """Give the way to a new node, which leaves the cluster after the test."""
    migration = Migration(either, store, "nightly")
    old, config = migration.old, {"cluster_enabled": "yes", "cluster_port": servers.free_port()}
    config["cluster_allow_replica_migration"] = "no"  # it would follow its last slot
    with type(old)(**config) as node:
        either.say(node, "CLUSTER MEET 127.0.0.1", old.port, old.config["cluster_port"])
        either.wait(lambda: "cluster_state:ok" in either.say(node, "CLUSTER INFO"))
        either.wait(lambda: either.id_of(node) in either.say(old, "CLUSTER NODES"))
        migration.new = node
        yield migration
        if migration.new is node:
            migration.back()
        for each in either.nodes:
            either.say(each, "CLUSTER FORGET", either.id_of(node))


@pytest.mark.usefixtures("outside_of_tests")
def test_nobody_waits_for_a_slot_that_moves_to_a_new_node(
    store: Any, new_node: Migration, pauses: list[float]
) -> None:
    with TaskLock("nightly"):
        pass
    pauses.clear()
    new_node.all()
    with TaskLock("nightly"):
        pass
    assert store.find(new_node.group.number) == where_is(new_node.new)
    assert pauses == []


def test_each_thread_closes_its_connection_to_a_node_that_has_no_group_any_more(
    store: Any, new_node: Migration
) -> None:
    node, use = new_node.new, lambda: can_be_taken("nightly")
    with ThreadPoolExecutor(1) as thread, Client(port=node.port) as client:
        new_node.all()
        assert use()
        assert thread.submit(use).result()
        before = len(client.client_list())
        new_node.back()
        assert use()
        assert len(client.client_list()) == before - 1
        assert thread.submit(use).result()
        assert len(client.client_list()) == before - 2


def test_a_lock_is_released_on_the_new_node_before_the_slot_is_there(
    store: Any, migration: Migration
) -> None:
    lock = TaskLock("nightly")
    assert lock.acquire()
    migration.begin()
    migration.move()
    assert lock.release()
    migration.end()
    with TaskLock("nightly") as again:
        assert again.owned()


def test_a_free_lock_is_taken_by_nobody_while_only_its_epoch_has_moved(
    store: Any, migration: Migration, monkeypatch: Any
) -> None:
    monkeypatch.setattr(cluster, "PAUSE", 0.001)
    with TaskLock("nightly"):
        pass
    migration.begin()
    migration.move()
    with pytest.raises(LockUnavailable, match="TryAgainError"):
        TaskLock("nightly").acquire()
    migration.end()
    with TaskLock("nightly") as lock:
        assert lock.owned()


def test_a_free_lock_is_taken_as_soon_as_its_slot_has_moved(
    store: Any, migration: Migration, monkeypatch: Any
) -> None:
    with TaskLock("nightly"):
        pass
    ends = [migration.end]
    migration.begin()
    migration.move()
    # Only the module's own pauses, since other threads sleep as well.
    pause = SimpleNamespace(sleep=lambda seconds: ends.pop()() if ends else None)
    monkeypatch.setattr(cluster, "time", pause)
    with TaskLock("nightly") as lock:
        assert lock.owned()
    assert not ends


@pytest.mark.only_all("it starts processes")
@pytest.mark.parametrize("client", ["redis"], indirect=True)
def test_many_processes_take_turns_while_slots_migrate(either: Cluster, store: Any) -> None:
    command = [sys.executable, "-m", "tests.racers", store.cache_alias, "2"]
    env = os.environ | variables(store.cache_alias, either)
    racers = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    migration, moves = Migration(either, store, "moves"), 0
    while racers.poll() is None:
        migration.begin()
        time.sleep(0.01)  # some find the slot half way
        migration.move()
        migration.end()
        migration.old, migration.new = migration.new, migration.old
        moves += 1
    result = json.loads(racers.communicate()[0])
    if moves % 2:
        migration.all()
    assert (result["met"], result["lost"]) == (0, 0), result
    assert result["runs"] > 10
    assert moves > 5


# A node that forgets


@pytest.mark.parametrize("cache_alias", ["cluster"], indirect=True)
@pytest.mark.usefixtures("outside_of_tests")
def test_only_the_takes_of_a_node_that_forgot_are_held_back(
    cache_alias: str, cluster: Cluster, settings: Any, pauses: list[float]
) -> None:
    settings.SINGLETASK_HISTORY = "off"

    def pauses_to_take(where: str, number: int) -> int:
        pauses.clear()
        with TaskLock(names_on(store, where, 3)[number], wait=30):
            return len(pauses)

    store: Any = inside.store_of(cache_alias)
    store.look()
    for epoch in store.map.epochs:  # of an earlier test
        epoch.changed_at = -math.inf
    first, second, _ = store.seeds
    assert pauses_to_take(first, 0) == 0
    flush(cluster, 0)
    assert pauses_to_take(first, 1) == 1
    flush(cluster, 0)
    assert pauses_to_take(second, 2) == 0


def test_the_second_begins_when_a_node_that_restarted_takes_requests(
    patient: Cluster, settings: Any
) -> None:
    """It says who it is from its start, and takes requests about two seconds later."""
    settings.SINGLETASK_CACHE = "redis"
    settings.SINGLETASK_HISTORY = "off"
    with private_store(settings, "redis", patient.url) as store:
        [name] = names_on(store, store.seeds[0])
        assert can_be_taken(name)
        epoch = store.group(key_of(name)).epoch
        epoch.changed_at = -math.inf
        restart(patient, 0)
        assert not can_be_taken(name)
        assert epoch.changed_at == -math.inf
        assert eventually(lambda: can_be_taken(name))
        assert epoch.changed_at > -math.inf


def test_a_node_that_restarted_is_ready_although_nobody_serves_some_hash_slots(
    settings: Any,
) -> None:
    settings.SINGLETASK_CACHE = "redis"
    settings.SINGLETASK_HISTORY = "off"
    options = {"cluster_node_timeout": 60_000, "cluster_require_full_coverage": "no"}
    with (
        Cluster(replicas=0, **options) as both,
        private_store(settings, "redis", both.url) as store,
    ):
        name = names_on(store, store.seeds[0], 50)[-1]
        assert can_be_taken(name)
        of_no_group = key_slot(store.epoch_key.encode())
        of_the_first = key_slot(store.group(":00" + 30 * "0").epoch_key.encode())
        for node in both.primaries:
            assert "OK" in both.say(node, "CLUSTER DELSLOTS", of_no_group, of_the_first)
        restart(both, 0)
        assert eventually(lambda: can_be_taken(name))


@pytest.mark.only_all("a failover takes long")
@pytest.mark.usefixtures("outside_of_tests")
@pytest.mark.parametrize(
    ("alias", "info"), [("cluster", "+info"), ("redis", "+info"), ("django_redis", "-info")]
)
def test_a_failover_holds_back_the_takes_of_that_node_alone(
    settings: Any, alias: str, info: str
) -> None:
    """Meanwhile all nodes refuse requests; and where INFO is forbidden, the address tells."""
    settings.SINGLETASK_CACHE = alias
    settings.SINGLETASK_HISTORY = "off"
    with Cluster() as both:
        user = LINE.replace("~shop:", f"~{alias}:"), "+cluster|slots", "+asking", info
        for node in both.nodes:
            assert "OK" in both.say(node, *user)
        url = both.url.replace("//", "//locks:secret@")
        with private_store(settings, alias, url) as store:
            names = [names_on(store, where_is(node))[0] for node in both.primaries]
            epochs = [store.group(key_of(name)).epoch for name in names]
            assert all(map(can_be_taken, names))
            both.primaries[0].kill()
            for name in names[1:]:
                assert eventually(lambda: "ClusterDownError" in refusal(name))  # noqa: B023
            assert all(eventually(lambda: can_be_taken(name)) for name in names)  # noqa: B023
            assert [epoch.changed_at > -math.inf for epoch in epochs] == [True, False, False]


def refusal(name: str) -> str:
    """Return what the node of a lock says if it is not well."""
    try:
        return str(TaskLock(name).locked())
    except LockUnavailable as error:
        return str(error)


def node_of(key: str, both: Cluster) -> int:
    """Return which of the primaries, that share the hash slots equally, has a key."""
    match = cluster.DIGEST.search(key)
    slot = cluster.HASHED[cluster.TAGS[int(match[1], 16)]]
    return slot * len(both.primaries) // 16384


def restart(both: Cluster, number: int) -> None:
    both.primaries[number].kill()
    both.primaries[number].start()


def flush(both: Cluster, number: int) -> None:
    assert "OK" in both.say(both.primaries[number], "FLUSHALL")


def fail_over(both: Cluster, number: int) -> None:
    """Let the replica take over, which has what it got before :func:`let_lag`."""
    replica = both.nodes[len(both.primaries) + number]
    both.primaries[number].kill()
    both.wait(lambda: "role:master" in both.say(replica, "INFO replication"))


def let_lag(both: Cluster, number: int) -> None:
    """Cut the replica off: it waits for a copy that the primary sends in an hour."""
    node, replica = both.primaries[number], both.nodes[len(both.primaries) + number]
    both.wait(lambda: both.say(replica, "DBSIZE") == both.say(node, "DBSIZE"))
    for words in ("repl-diskless-sync yes", "repl-diskless-sync-delay 3600"):
        assert "OK" in both.say(node, "CONFIG SET", words)
    assert "OK" in both.say(node, "DEBUG CHANGE-REPL-ID")
    both.say(node, "CLIENT KILL TYPE replica")


WAYS: dict[str, tuple[Callable[[Cluster, int], None], int]] = {
    "flush": (flush, 0),
    "restart": (restart, 0),
    "old snapshot": (restart, 0),
    "lagging replica": (fail_over, 1),
}
"""How a node forgets, and how many replicas it has."""


def forget(way: str, kind: type[Redis], alias: str, fault: str = "") -> dict[str, Any]:
    """Let the node of a held lock forget it, and return what tests/beside.py saw."""
    work, replicas = WAYS[way]
    with Cluster(kind, enable_debug_command="yes", replicas=replicas) as both:
        key = key_of("nightly")
        number = node_of(key, both)
        tag = cluster.TAGS[int(key[-32:-30], 16)]
        # The copy has the epoch of before.
        both.say(both.primaries[number], f"SET {alias}:1:{EPOCH}{{{tag}}} old")
        if way == "old snapshot":
            assert "OK" in both.say(both.primaries[number], "SAVE")
        if way == "lagging replica":
            let_lag(both, number)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.beside", alias, *fault.splitlines()],
            cwd=ROOT,
            env=os.environ | variables(alias, both),
            text=True,
            stdout=subprocess.PIPE,
        )
        with process:
            assert process.stdout.readline() == "held\n"
            work(both, number)
            return json.loads(process.stdout.read())


@pytest.mark.only_all("another way shows it", "redis")
@pytest.mark.parametrize(
    ("way", "kind", "alias"),
    [
        ("flush", Valkey, "cluster"),
        ("flush", Redis, "redis"),
        ("restart", Redis, "cluster"),
        ("old snapshot", Valkey, "redis"),
        ("lagging replica", Redis, "django_redis"),
    ],
)
def test_a_holder_has_its_lock_back_before_others_take_it(way, kind, alias) -> None:
    assert forget(way, kind, alias) == {"beside": 0, "retaken": 1, "lost": False}


@pytest.mark.only_all("shown with a replica")
@pytest.mark.parametrize(
    ("way", "fault"),
    [
        ("old snapshot", "nobody asks which server answers"),
        ("old snapshot", "nobody sees when it is ready"),
        ("lagging replica", "nobody asks which server answers"),
    ],
)
def test_control_without_it_others_run_beside_the_holder(way, fault) -> None:
    # Where the holder looks as often as without the fault, it may come first.
    assert any(forget(way, Valkey, "redis", fault)["beside"] for _attempt in range(4))


# A node that does not answer


@pytest.fixture(scope="module")
def patient() -> Iterator[Cluster]:
    """Run a cluster whose nodes do not wait for each other."""
    options = {"cluster_node_timeout": 60_000, "cluster_require_full_coverage": "no"}
    with Cluster(replicas=0, **options) as both:
        yield both


@pytest.fixture(params=["cluster", "redis"])
def hanging(
    patient: Cluster, settings: Any, request: pytest.FixtureRequest
) -> Iterator[tuple[Any, Server]]:
    """Give a store, and the first of its nodes."""
    settings.SINGLETASK_CACHE = request.param
    settings.SINGLETASK_HISTORY = "off"
    with private_store(settings, request.param, patient.url) as store:
        store.look()
        yield store, patient.primaries[0]
    patient.primaries[0].resume()
    patient.start()


def hold_while_a_node_hangs(store: Any, node: Server) -> list[bool]:
    """Hold many locks on this node and some on another one; return which of those were lost."""
    names = names_on(store, store.seeds[0], 15)
    others = names_on(store, store.seeds[1], 5)
    locks = [TaskLock(name, timeout=1.5) for name in (*names, *others)]
    for lock in locks:
        assert lock.acquire()
    node.pause()
    time.sleep(3)  # two leases
    lost = [lock.lost for lock in locks[len(names) :]]
    node.resume()
    for lock in locks:
        lock.release()
    return lost


def test_a_node_that_hangs_costs_no_lock_of_another_one(hanging) -> None:
    assert not any(hold_while_a_node_hangs(*hanging))


def test_control_if_each_request_waits_for_the_node_that_hangs_others_are_lost(
    hanging, monkeypatch
) -> None:
    asked = cluster.Node.ask

    def ask(node: cluster.Node, *args: Any, **options: Any) -> Any:
        node.cluster.hanging_until.clear()
        return asked(node, *args, **options)

    monkeypatch.setattr(cluster.Node, "ask", ask)
    assert any(hold_while_a_node_hangs(*hanging))


def test_a_node_that_is_down_is_an_outage_for_its_locks_alone(hanging) -> None:
    store, node = hanging
    [mine], [other] = (names_on(store, store.seeds[number]) for number in (0, 1))
    node.kill()
    with pytest.raises(LockUnavailable):
        TaskLock(mine).acquire()
    with TaskLock(other) as lock:
        assert lock.owned()
    node.start()
    assert eventually(lambda: can_be_taken(mine))


def test_a_node_that_is_down_keeps_nobody_from_asking_the_others(hanging) -> None:
    """A slot has just moved, so a node that is well refuses the first trip."""
    store, node = hanging
    groups = [store.map.owners.index(where) for where in store.seeds]
    store.map.owners[groups[1]] = store.seeds[2]  # as before it moved
    node.kill()
    answers = store.read_each({group: ["nothing"] for group in groups})
    assert [*islice(answers, 2)] == [(groups[2], {}), (groups[1], {})]
    with pytest.raises(LockUnavailable):
        next(answers)


def test_each_outage_has_the_error_of_the_client_as_its_cause(hanging) -> None:
    store, node = hanging
    [name] = names_on(store, store.seeds[0])
    store.limit(0.2)
    node.pause()
    for _ in range(2):  # the second one is not sent
        with pytest.raises(LockUnavailable) as raised:
            store.read(key_of(name))
        assert isinstance(raised.value.__cause__, TimeoutError | store.errors.TimeoutError)


def can_be_taken(name: str) -> bool:
    """Return whether a lock is free, and its node answers."""
    with suppress(LockUnavailable), TaskLock(name, on_conflict="skip") as lock:
        return bool(lock)
    return False


def test_what_could_not_be_given_back_is_given_back_by_the_replica(settings) -> None:
    settings.SINGLETASK_CACHE = "redis"
    settings.SINGLETASK_HISTORY = "off"
    with Cluster() as both, private_store(settings, "redis", both.url):
        number = node_of(key_of("nightly"), both)
        lock = TaskLock("nightly", timeout=60)
        assert lock.acquire()
        replica = both.nodes[len(both.primaries) + number]
        both.wait(lambda: both.say(replica, "DBSIZE") == both.say(both.primaries[number], "DBSIZE"))
        both.primaries[number].kill()
        with pytest.raises(LockUnavailable):
            lock.release()
        both.wait(lambda: "role:master" in both.say(replica, "INFO replication"))
        assert eventually(lambda: can_be_taken("nightly"))
