"""Locks in a Valkey or Redis Cluster, through the cluster client of django-valkey."""

from __future__ import annotations

import math
import re
import time
from binascii import crc_hqx
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from valkey import ConnectionPool, Valkey, cluster, connection
from valkey.exceptions import AskError, MovedError, TryAgainError

from django_singletask import clock
from django_singletask.exceptions import LockUnavailable
from django_singletask.stores import base
from django_singletask.stores.base import Entry, Outcome, Slots, address
from django_singletask.stores.epoch import LOOK, Epoch
from django_singletask.stores.keys import EPOCH, PREFIX, is_key
from django_singletask.stores.redis import RedisStore, Request, request_to_read

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
DIGEST = re.compile(r":([0-9a-f]{2})[0-9a-f]{30}(#\d+)?(:cleared:[^:]*)?$")

PAUSE = 0.05
"""Seconds until a request is sent again whose keys are on their way to another node."""
NEVER_PROMOTED = b"master_replid2:" + b"0" * 40
"""What INFO says of a node that was no replica before."""
ASKING = bool, "ASKING"


def _tags() -> dict[int, str]:
    """Return the smallest number of each group."""
    tags = dict[int, str]()
    for number, slot in HASHED.items():
        tags.setdefault(slot // 64, number)
    return tags


TAGS = _tags()


class Map:
    """The address of each group's node, as this process knows it, and the epoch of each group."""

    def __init__(self, whole: Epoch) -> None:
        self.epochs = [Epoch(whole.cache, whole) for _ in TAGS]
        self.owners: list[str] = []
        self.addresses = set[str]()
        """Each address in ``owners``."""
        self.servers: dict[str, bytes] = {}
        """The line of a node's INFO that identifies its process, by address."""
        self.ready = set[bytes]()
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
        self.cache = cluster.cache
        self.cache_alias = cluster.cache_alias
        self.places = cluster.places
        self.epoch = cluster.epoch
        self.errors = cluster.errors
        self.client_errors = cluster.client_errors
        self.refusals = cluster.refusals
        self.connect = cluster.connect
        host, _, port = where.rpartition(":")  # an IPv6 host has colons
        self.options = cluster.options | {"host": host, "port": int(port)}
        self.patience = cluster.patience
        self.pools = cluster.pools
        self.connections = cluster.pools[f"{self.cache_alias} {where}"]

    # The thread that renews locks has a limit for each request. If a node hangs, its locks must not
    # keep the thread from those of other nodes:
    #
    #   thread: renews a (hangs, 2 s)   renews b (hangs, 2 s) ...      renews z: its lease has ended
    #   so:     renews a (hangs, 2 s)   b: not sent           ...      renews z

    def ask(self, *requests: Request, takes: bool = False) -> list[Any]:
        hanging_until = self.cluster.hanging_until
        if clock.now() < hanging_until.get(self.where, 0):
            error = self.errors.TimeoutError(f"{self.where} has not answered")
            raise self.unavailable(error) from error
        try:
            replies = super().ask(*requests, takes=takes)
            used = self.connections[-1:]
            if takes and used:
                # A node answers a take only when it is ready. So the process at the other end of
                # this connection has been ready, whatever it says later.
                line = getattr(used[0], "server", b"")
                self.cluster.map.ready.add(line)
            return replies
        except LockUnavailable as error:
            is_limited = self.cluster.limited < math.inf
            if is_limited and isinstance(error.__cause__, self.errors.TimeoutError):
                hanging_until[self.where] = clock.now() + LOOK
            raise

    # While a node is down, the others say CLUSTERDOWN, if the cluster must be complete. They have
    # forgotten nothing, and their locks are not concerned. A node that has restarted says the same
    # until it has found the others. But its process ("run_id") has not answered a take before:
    #
    #   node A:   restarts   CLUSTERDOWN: not ready             takes: wait 1 s
    #   node B:              CLUSTERDOWN: was ready before      takes: do not wait

    def note_server(self, line: bytes) -> None:
        nodes = self.cluster.map
        if line == b"not ready" and nodes.servers.get(self.where) in nodes.ready:
            return
        for epoch, owner in zip(nodes.epochs, nodes.owners, strict=False):  # no owners at first
            if owner == self.where:
                epoch.note("server", line)
        nodes.servers[self.where] = line  # last: read_map() would note the line without a change


class Group(RedisStore):
    """The locks of one group, on whichever node has it now."""

    def __init__(self, cluster: ClusterStore, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.cache_alias = cluster.cache_alias
        self.epoch = cluster.map.epochs[number]
        tag = "{" + TAGS[number] + "}"
        self.make_key = lambda key: cluster.make_key(key) + tag
        self.epoch_key = self.make_key(EPOCH)

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
        (request,) = requests  # there is one, about one lock
        where = self.cluster.find(self.number)
        is_redirected = False
        self.was_sent_twice = False
        for left in reversed(range(base.TRIES)):
            node = Node(self.cluster, where)
            node.epoch = self.epoch
            try:
                if is_redirected:
                    _answer, reply = node.ask(ASKING, request, takes=takes)
                    if isinstance(reply, LockUnavailable):
                        raise reply
                else:
                    (reply,) = node.ask(request, takes=takes)
            except LockUnavailable as error:
                if left == 0:
                    raise
                refusal = error.__cause__
                is_redirected = False
                if isinstance(refusal, MovedError):
                    self.cluster.read_map(where, answers=True)
                elif isinstance(refusal, AskError):
                    is_redirected = True
                    where = beside(where, refusal.host, refusal.port)
                    continue
                elif isinstance(refusal, TryAgainError):
                    time.sleep(PAUSE)
                else:
                    self.cluster.read_map(where)
                    self.was_sent_twice = True
                found = self.cluster.find(self.number)
                is_passing = isinstance(refusal, MovedError | TryAgainError)
                if found == where and not is_passing:
                    raise
                where = found
            else:
                if node.was_sent_twice:
                    self.was_sent_twice = True
                return [reply]
        raise AssertionError("unreachable")


def beside(where: str, host: str, port: int) -> str:
    """Return an address that the node at ``where`` has named; an empty host is that node's own."""
    if not host:
        host = where.rpartition(":")[0]
    return f"{host}:{port}"


class ClusterStore(RedisStore):
    """Send each request to the group of its lock.

    The client of django-valkey is not used. It would read its map without the limits of a
    background thread, and send a script again without saying so.
    """

    batch = 1  # a node that does not answer concerns no lock of another one

    def __init__(self, cache: Any, alias: str) -> None:
        self.hanging_until: dict[str, float] = {}
        """Until when no request is sent to a node that hangs, by its address."""
        super().__init__(cache, alias)
        self.places = frozenset(address(*seed.rsplit(":", 1)) for seed in self.seeds)
        self.map: Map = vars(self.epoch).setdefault("map", Map(self.epoch))
        self.addresses = self.map.addresses

    def make_client(self) -> Any:
        """Return a client of the first server, whose options all connections have."""
        client = self.cache.client
        urls = map(connection.parse_url, client._server)  # noqa: SLF001 - no public way
        self.seeds = [f"{url.get('host', 'localhost')}:{url.get('port', 6379)}" for url in urls]
        options = cluster.cleanup_kwargs(**client.connection_factory.base_client_cls_kwargs)  # type: ignore[no-untyped-call]
        # The errors of a cluster have classes only with this parser, which valkey-py uses as well.
        options["parser_class"] = cluster.ClusterParser
        return Valkey.from_url(client._server[0], **options)  # noqa: SLF001

    def clients(self) -> dict[str, Any]:
        self.read_map()
        nodes = [Node(self, each) for each in sorted(self.map.addresses - {""})]
        return {n.where: Valkey.from_pool(ConnectionPool(self.connect, **n.options)) for n in nodes}

    def group(self, key: str) -> Group:
        """Return the group of a lock, given the key of one of its entries."""
        digest = DIGEST.search(key)
        number = 0
        if digest:
            number = int(digest[1], 16)
        return Group(self, number)

    def find(self, group: int) -> str:
        """Return the address of a group's node; without one, that of a node that will refuse."""
        if not self.map.owners:
            self.read_map()
        if self.addresses != self.map.addresses:
            self.addresses = self.map.addresses
            self.close()  # so that no connection to a node that is gone stays
        owner = self.map.owners[group]
        if not owner:
            return self.seeds[0]
        return owner

    def read_map(self, where: str = "", *, answers: bool = False) -> None:
        """Ask a node which node has which group, and note the answer.

        The node at ``where`` is asked first if it ``answers``, and otherwise last.
        """
        nodes = self.map
        known = nodes.addresses.union(self.seeds) - {""}
        order = [*known - {where}]
        if where in known:
            order.append(where)
            if answers:
                order.reverse()
        for each in order:
            try:
                read = partial(self._owners, each)
                (owners,) = Node(self, each).ask((read, "CLUSTER", "SLOTS"))
                break
            except LockUnavailable as error:
                failure = error
        else:
            raise failure
        addresses = {*owners}
        moved = addresses
        if nodes.addresses:
            moved = nodes.addresses | self._never_promoted(addresses - nodes.addresses)
        for epoch, owner in zip(nodes.epochs, owners, strict=True):
            if owner not in moved:
                if epoch.server is None:  # INFO is forbidden
                    epoch.server = b"unknown"
                epoch.note("server", owner.encode())
            epoch.server = nodes.servers.get(owner)
        nodes.owners = owners
        nodes.addresses = addresses

    def _owners(self, where: str, ranges: Any) -> list[str]:
        """Return the address of each group's node, from what the node at an address says."""
        owners = [""] * len(TAGS)
        if self.map.owners:
            owners = self.map.owners[:]
        for start, end, (host, port, *_), *_replicas in ranges:
            name = ""  # an unknown host is the one that was asked
            if host is not None:
                name = host.decode()
            for group, tag in TAGS.items():
                if start <= HASHED[tag] <= end:
                    owners[group] = beside(where, name, int(port))
        return owners

    def _never_promoted(self, addresses: Iterable[str]) -> set[str]:
        """Return the addresses of those nodes that were no replicas before."""
        found = set[str]()
        for each in addresses:
            with suppress(LockUnavailable):  # INFO can be forbidden
                (info,) = Node(self, each).ask((bytes, "INFO"))
                if NEVER_PROMOTED in info:
                    found.add(each)
        return found

    def ask_each(self, requests: dict[int, Any]) -> Iterator[Any]:
        """Send a request for each group, all of a node in one trip; yield groups and replies.

        If a node fails, this raises after the trips to the others.
        """
        trips = defaultdict[str, list[int]](list)
        left = list[int]()
        failures: dict[str, LockUnavailable] = {}
        for group in requests:
            trips[self.find(group)].append(group)
        for where, groups in trips.items():
            try:
                replies = Node(self, where).ask(*[requests[group] for group in groups])
            except LockUnavailable as error:
                replies = [error] * len(groups)
            for group, reply in zip(groups, replies, strict=True):
                if isinstance(reply, LockUnavailable):  # perhaps the slot of the group has moved
                    left.append(group)
                else:
                    yield group, reply
        for group in left:
            where = self.find(group)
            if where in failures:
                continue
            try:
                yield group, Group(self, group).ask(requests[group])[0]
            except LockUnavailable as error:
                failures[where] = error
        for failure in failures.values():
            raise failure

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
        requests = {}
        for group, part in parts.items():
            requests[group] = request_to_read(part, map(Group(self, group).make_key, part))
        for _group, entries in self.ask_each(requests):
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
        requests = {
            each: request_to_read([EPOCH], [Group(self, each).epoch_key]) for each in groups
        }
        for group, entries in self.ask_each(requests):
            if EPOCH in entries:
                self.map.epochs[group].see(entries[EPOCH].value)
            else:
                Group(self, group).look()
        self.epoch.seen_at = clock.now()

    def one_of_each(self) -> Iterable[int]:
        """Return a group of each node."""
        groups = dict[str, int]()
        for group, owner in enumerate(self.map.owners):
            groups.setdefault(owner, group)
        return groups.values()

    def entries(self) -> Iterator[tuple[str, Entry]]:
        prefix = self.prefix()
        self.read_map()
        for group in self.one_of_each():
            for names in Group(self, group).names(prefix):
                keys = [PREFIX + name.removeprefix(prefix).partition("{")[0] for name in names]
                yield from self.read_many(filter(is_key, keys)).items()
