"""Locks in a Redis Cluster or Valkey Cluster, with the connections of the cache's client."""

from __future__ import annotations

import math
import re
import time
from binascii import crc_hqx
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from django_singletask import clock
from django_singletask.exceptions import LockUnavailable
from django_singletask.stores import base
from django_singletask.stores.base import Entry, Errors, Outcome, Slots
from django_singletask.stores.epoch import LOOK, Epoch
from django_singletask.stores.keys import EPOCH, PREFIX, is_key
from django_singletask.stores.redis import Pool, Pools, RedisStore, Request, request_to_read

# The groups of locks
#
# A script may use only keys of one hash slot, of which a cluster has 16384. The first two digits of
# a lock's digest choose one of 256 groups, and the keys of a group end in its hash tag. So a lock,
# its slots and markers, and the group's epoch and counter are in one hash slot, and a group is to
# the requests of RedisStore what a server is. The tag of group i is the smallest number whose hash
# slot is one of 64i to 64i + 63, so that the groups are spread over the nodes as the slots are; 477
# is the largest. It never changes, because the hash of a cluster does not, and to compute them all
# takes less than a millisecond.
HASHED = {str(number): crc_hqx(b"%d" % number, 0) % 16384 for number in range(478)}
# The smallest number of a group is the last one here, so it replaces the others.
TAGS = {slot // 64: number for number, slot in reversed(HASHED.items())}
DIGEST = re.compile(r":([0-9a-f]{2})[0-9a-f]{30}(#\d+)?(:cleared:[^:]*)?$")

PAUSE = 0.05
"""Seconds until a request is sent again whose keys are on their way to another node."""
NEVER_PROMOTED = b"master_replid2:0000000000000000"
"""How the line of INFO begins of a node that was no replica before."""
ASKING = bool, "ASKING"


class Map:
    """The address of each group's node, as this process knows it, and the epoch of each group."""

    def __init__(self, whole: Epoch, seed: str) -> None:
        self.epochs: list[Epoch] = [Epoch(whole.cache, whole) for _ in TAGS]
        self.owners: list[str] = [seed] * len(TAGS)
        """A group that no node has is at the first address that was set, where it is refused."""
        self.addresses: set[str] = set()
        """Each address in ``owners``; there is none before the map is read."""
        self.servers: dict[str, bytes] = {}
        """The line of a node's INFO that identifies its process, by address."""
        self.ready: set[bytes] = set()
        """The same line of each process that has answered a take."""


# A node that forgets
#
# Each node can restart empty, or with an old snapshot, or be replaced by a replica that lags. Then
# its groups are what a plain server is that has forgotten its locks, and the other groups are not
# concerned. A restart shows by the epoch of the group, or by the "run_id" on a new connection:
#
#   holder:  holds in group 7 .............. looks: another epoch, or run_id: takes it again
#   node:                    restarts
#   taker:                             takes in group 7: the same       waits 1 s     takes -> held
#
# A replica that took over has the epoch of before, and may lack the newest locks. A node to which a
# slot migrated has all of them, and nobody waits. In the map both are another owner of the group:
#
#   failover:    owner: A    A dies    B is promoted    owner: B, which had no group   -> forgotten
#   migration:   owner: A    keys move to C             owner: C, which has others     -> moved
#   new node:    owner: A    keys move to D             owner: D, was never promoted   -> moved
#
# All groups are compared in one step. Otherwise the second group of A would find B among the
# owners, because the first one has put it there.


class Node(RedisStore):
    """The requests to one node; for a take, set ``epoch`` to that of the group."""

    in_cluster = True

    def __init__(self, cluster: ClusterStore, where: str) -> None:
        self.cluster = cluster
        self.where = where
        self.cache: Any = cluster.cache
        self.cache_alias: str = cluster.cache_alias
        self.client_errors: Errors = cluster.client_errors
        self.connect: Any = cluster.connect
        self.errors: Any = cluster.errors
        self.patience: float = cluster.patience
        self.pools: Pools = cluster.pools
        self.refusals: Any = cluster.refusals
        self.places: frozenset[str] = frozenset({where})
        host, _, port = where.rpartition(":")  # an IPv6 host has colons
        self.options: dict[str, Any] = cluster.options | {"host": host, "port": int(port)}
        self.connections: Pool = cluster.pools[f"{self.cache_alias} {where}"]

    # The thread that renews locks has a limit for each request. If a node hangs, its locks must not
    # keep the thread from those of other nodes:
    #
    #   thread: renews a (hangs, 2 s)   renews b (hangs, 2 s) ...      renews z: its lease has ended
    #   so:     renews a (hangs, 2 s)   b: not sent           ...      renews z

    def ask(self, *requests: Request, takes: bool = False) -> list[Any]:
        if clock.now() < self.cluster.hanging_until.get(self.where, 0):
            raise self.unavailable(self.errors.TimeoutError(f"{self.where} has not answered"))
        try:
            replies = super().ask(*requests, takes=takes)
        except LockUnavailable as error:
            is_limited = self.cluster.limited < math.inf
            if is_limited and isinstance(error.__cause__, self.errors.TimeoutError):
                self.cluster.hanging_until[self.where] = clock.now() + LOOK
            raise
        if takes and self.connections:
            # A node answers a take only when it is ready. So the process at the other end of this
            # connection has been ready, whatever it says later.
            used = self.connections[-1]
            self.cluster.map.ready.add(getattr(used, "server", b""))
        return replies

    # While a node is down, the others say CLUSTERDOWN, if the cluster must be complete. They have
    # forgotten nothing, and their locks are not concerned. A node that has restarted says the same
    # until it has found the others. But its process ("run_id") has not answered a take before:
    #
    #   node A:   restarts   CLUSTERDOWN: not ready             takes: wait 1 s
    #   node B:              CLUSTERDOWN: was ready before      takes: do not wait

    def epoch_keys(self) -> list[str]:
        keys = []
        for group, owner in enumerate(self.cluster.map.owners):
            if owner == self.where:
                keys.append(Group(self.cluster, group).epoch_key)
        return keys

    def known_server(self) -> bytes | None:
        return self.cluster.map.servers.get(self.where)

    def note_server(self, line: bytes) -> None:
        nodes = self.cluster.map
        if line == b"not ready" and self.known_server() in nodes.ready:
            return
        for epoch, owner in zip(nodes.epochs, nodes.owners, strict=True):
            if owner == self.where:
                epoch.note("server", line)
        nodes.servers[self.where] = line  # last: read_map() would note the line without a change


class Group(RedisStore):
    """The locks of one group, on whichever node has it now."""

    def __init__(self, cluster: ClusterStore, number: int) -> None:
        self.cluster = cluster
        self.cache_alias: str = cluster.cache_alias
        self.number = number
        self.epoch: Epoch = cluster.map.epochs[number]
        tag = "{" + TAGS[number] + "}"
        self.make_key: Callable[[str], str] = lambda key: cluster.make_key(key) + tag
        self.epoch_key: str = self.make_key(EPOCH)

    # A slot that migrates
    #
    # Its keys move one by one. The old node answers for those that it still has, and sends whoever
    # wants another one to the new node ("ASK"). Each key is on one node at a time, so two processes
    # cannot both find a lock free. A take needs the epoch and the lock: while only one of them has
    # moved, both nodes say "TRYAGAIN".
    #
    #   old node:   epoch, lock      lock                               -
    #   new node:                    epoch              epoch, lock     has the slot
    #   take:       -> held          -> TRYAGAIN        -> ASK -> held  -> MOVED -> held
    #   release:    -> freed         -> freed           -> ASK -> freed -> MOVED -> freed
    #
    # These refusals change nothing. But if the connection fails, the node may have made a deletion
    # and passed it on before a replica took over. So the deletion is sent twice, as in RedisStore.

    def ask(self, *requests: Request, takes: bool = False) -> list[Any]:
        words = requests  # of one request, about one lock
        where = self.cluster.find(self.number)
        left = base.TRIES
        self.was_sent_twice: bool = False
        while True:
            left -= 1
            node = Node(self.cluster, where)
            node.epoch = self.epoch
            try:
                reply = node.ask(*words, takes=takes)[-1]
                if isinstance(reply, LockUnavailable):  # to the request after ASKING
                    raise reply
                self.was_sent_twice |= node.was_sent_twice
                return [reply]
            except LockUnavailable as error:
                if left == 0:
                    raise
                words = requests
                refusal: Any = error.__cause__
                if isinstance(refusal, self.cluster.errors.MovedError):  # a subclass of AskError
                    self.cluster.read_map(where, answers=True)
                elif isinstance(refusal, self.cluster.errors.AskError):
                    words = (ASKING, *requests)
                    where = beside(where, refusal.host, refusal.port)
                    continue
                elif isinstance(refusal, self.cluster.errors.TryAgainError):
                    time.sleep(PAUSE)
                else:
                    self.cluster.read_map(where)
                    self.was_sent_twice = True
                    if self.cluster.find(self.number) == where:
                        raise
                where = self.cluster.find(self.number)


def beside(where: str, host: str, port: int) -> str:
    """Return an address that the node at ``where`` has named; an empty host is that node's own."""
    if not host:
        host = where.rpartition(":")[0]
    return f"{host}:{port}"


class ClusterStore(RedisStore):
    """Send each request to the group of its lock.

    Of the cache's client, only the connections and their options are used. A cluster client would
    read its map without the limits of a background thread, and send a script again without saying
    so.
    """

    batch = 1  # a node that does not answer concerns no lock of another one

    redirects = True

    def __init__(self, cache: Any, alias: str) -> None:
        # Until when no request is sent to a node that hangs, by its address.
        self.hanging_until: dict[str, float] = {}
        super().__init__(cache, alias)
        self.seeds: list[str] = []
        for url in self.urls():
            options = {"host": "localhost", "port": 6379}
            options |= self.client.connection_pool.from_url(url).connection_kwargs
            self.seeds.append("{host}:{port}".format(**options))
        unread = Map(self.epoch, self.seeds[0])
        self.map: Map = vars(self.epoch).setdefault("map", unread)
        self.addresses: set[str] = self.map.addresses

    def clients(self) -> dict[str, Any]:
        self.read_map()
        pool = type(self.client.connection_pool)
        clients = {}
        for where in sorted(self.map.addresses):
            connections = pool(connection_class=self.connect, **Node(self, where).options)
            clients[where] = type(self.client)(connection_pool=connections)
        return clients

    def group(self, key: str) -> Group:
        """Return the group of a lock, given the key of one of its entries."""
        digest = DIGEST.search(key)
        number = 0
        if digest:
            number = int(digest[1], 16)
        return Group(self, number)

    def find(self, group: int) -> str:
        """Return the address of a group's node."""
        if not self.map.addresses:
            self.read_map()
        if self.addresses != self.map.addresses:
            self.addresses = self.map.addresses
            self.close()  # so that no connection to a node that is gone stays
        return self.map.owners[group]

    def read_map(self, where: str = "", *, answers: bool = False) -> None:
        """Ask a node which node has which group, and note the answer.

        The node at ``where`` is asked first if it ``answers``, and otherwise last.
        """
        nodes = self.map
        order = [*nodes.addresses.union(self.seeds) - {where}]
        if answers:
            order.insert(0, where)
        elif where:
            order.append(where)
        for each in order:
            try:
                read = partial(self._owners, each)
                (owners,) = Node(self, each).ask((read, "CLUSTER", "SLOTS"))
                break
            except LockUnavailable as error:
                failure = error
        else:
            raise failure  # pyright: ignore[reportGeneralTypeIssues]
        addresses = {*owners}
        promoted = set[str]()
        if nodes.addresses:
            promoted.update(filter(self._was_promoted, addresses - nodes.addresses))
        for epoch, owner in zip(nodes.epochs, owners, strict=True):
            if owner in promoted:
                epoch.server = b"another"  # also where INFO is forbidden
                epoch.note("server", owner.encode())
            epoch.server = nodes.servers.get(owner)
        nodes.owners = owners
        nodes.addresses = addresses

    def _owners(self, where: str, ranges: Any) -> list[str]:
        """Return the address of each group's node, from what the node at an address says."""
        owners = self.map.owners[:]
        for start, end, (host, port, *_), *_replicas in ranges:
            name = ""  # an unknown host is the one that was asked
            if host is not None:
                name = host.decode()
            for group, tag in TAGS.items():
                if start <= HASHED[tag] <= end:
                    owners[group] = beside(where, name, int(port))
        return owners

    def _was_promoted(self, where: str) -> bool:
        """Return whether a node was a replica before, as far as it says."""
        try:
            (info,) = Node(self, where).ask((bytes, "INFO"))
        except LockUnavailable:  # INFO can be forbidden
            return True
        return NEVER_PROMOTED not in info

    def read_each(self, parts: Mapping[int, Sequence[str]]) -> Iterator[Any]:
        """Read keys of each group, all of a node in one trip; yield groups and entries.

        If a node fails, this raises after the trips to the others.
        """
        requests = dict[int, Request]()
        trips = defaultdict[str, list[int]](list)
        refused = list[int]()
        failed = list[int]()
        for group, keys in parts.items():
            requests[group] = request_to_read(keys, map(Group(self, group).make_key, keys))
            trips[self.find(group)].append(group)
        for where, groups in trips.items():
            try:
                replies = Node(self, where).ask(*[requests[group] for group in groups])
            except LockUnavailable:
                failed += groups
                continue
            for group, reply in zip(groups, replies, strict=True):
                if isinstance(reply, LockUnavailable):
                    refused.append(group)
                else:
                    yield group, reply
        # Perhaps the slots of these groups have moved, or other nodes have taken over.
        for group in refused + failed:
            yield group, Group(self, group).ask(requests[group])[0]

    # The requests of a store

    def take(self, slots: Slots, *args: Any, **options: Any) -> Any:
        return self.group(slots.keys[0]).take(slots, *args, **options)

    def insert(self, key: str, value: bytes, lease: float) -> Any:
        return self.group(key).insert(key, value, lease)

    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        return self.group(key).change(key, old, new, lease)

    _extend = base.Store._extend  # noqa: SLF001

    def fence(self, key: str, value: bytes) -> int | None:
        return self.group(key).fence(key, value)

    def read_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        wanted = list(keys)
        parts = defaultdict[int, list[str]](list)
        found = dict[str, Entry]()
        for key in wanted:
            parts[self.group(key).number].append(key)
        for _group, entries in self.read_each(parts):
            found |= entries
        return {key: found[key] for key in wanted if key in found}

    # Who holds no lock looks for the processes that it will fork. A worker for each of a hundred
    # thousand processes must not read all epochs each second: one of each node shows that the
    # others must be read.

    def look(self, keys: Iterable[str] = ()) -> None:
        groups = {self.group(key).number for key in keys}
        if groups:
            self.look_at(groups)
            return
        changes_before = self.epoch.changes
        unknown = [group for group in TAGS if not self.map.epochs[group].value]
        self.look_at({*unknown, *self.one_of_each()})
        if self.epoch.changes != changes_before:  # look_at() has noted another epoch
            self.look_at(TAGS)

    def look_at(self, groups: Iterable[int]) -> None:
        for group, entries in self.read_each(dict.fromkeys(groups, (EPOCH,))):
            if EPOCH in entries:
                self.map.epochs[group].see(entries[EPOCH].value)
            else:
                Group(self, group).look()
        self.epoch.seen_at = clock.now()

    def one_of_each(self) -> Iterable[int]:
        """Return a group of each node."""
        return {owner: group for group, owner in enumerate(self.map.owners)}.values()

    def entries(self) -> Iterator[tuple[str, Entry]]:
        prefix = self.prefix()
        self.read_map()
        for group in self.one_of_each():
            for names in Group(self, group).names(prefix):
                keys = [PREFIX + name.removeprefix(prefix).partition("{")[0] for name in names]
                yield from self.read_many(filter(is_key, keys)).items()
