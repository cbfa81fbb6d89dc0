"""Locks in Redis or Valkey, through Django's RedisCache, django-redis or django-valkey."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from importlib import import_module
from typing import Any
from weakref import WeakSet

from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured

from django_singletask import clock
from django_singletask.exceptions import LockUnavailable
from django_singletask.forks import at_fork
from django_singletask.stores.base import (
    PATIENCE,
    TIMEOUT,
    TRIES,
    Entry,
    Errors,
    Outcome,
    Slots,
    Store,
    address,
    watch,
)
from django_singletask.stores.epoch import HOLD_BACK, Forgotten
from django_singletask.stores.keys import EPOCH, FENCE
from django_singletask.threads import are_greenlets

# The server runs nothing else during a script, so nothing happens between its read and its change:
#
#   holder A: GET -> mine            (its lease ends here, B takes the lock)
#   holder A: DEL                    frees B's lock: impossible inside a script
#
# An entry of another type, such as a list, is the entry of something else. Scripts read this text
# for its value, and never change it.
GET = """
local foreign = 'an entry of another type'
local function get(key)
    local value = redis.pcall('GET', key)
    if type(value) ~= 'table' then return value end
    if string.find(value.err, 'WRONGTYPE', 1, true) then return foreign end
    return redis.call('GET', key)  -- fails again, and ends the script
end
"""
# A process takes a lock only in the epoch that it knows. SET NX would take the lock in any epoch.
# The client reads one text in a small part of the time of an array. It contains for each entry the
# number of the key, the milliseconds that are left, the length of the value and the value.
TAKE = f"""{GET}
local value, lease, epoch, allowed, mark = unpack(ARGV)
if epoch ~= 'any' and get(KEYS[1]) ~= epoch then return '' end
if mark == '' then mark = nil end
local entries, free, own = {{}}, false, false
for i = 2, #KEYS do
    local found = get(KEYS[i])
    if found == value then
        redis.call('PEXPIRE', KEYS[i], lease)
        return i - 2
    end
    if found then
        local left = redis.call('PTTL', KEYS[i])
        entries[#entries + 1] = i - 2 .. ' ' .. left .. ' ' .. #found .. ' ' .. found
        own = own or mark and string.find(found, mark, 1, true)
    elseif i <= (allowed or 1) + 1 then
        free = free or i
    end
end
if own or not free then return table.concat(entries) end
redis.call('SET', KEYS[free], value, 'PX', lease)
return free - 2
"""
# Without a lease this deletes the entry, and without new bytes the entry keeps its own. A full
# server refuses SET, but neither PEXPIRE nor DEL: so there a holder can still renew its lock and
# release it.
CHANGE = f"""{GET}
local old, lease, new = unpack(ARGV)
local value = get(KEYS[1])
if value == foreign then return -1 end
if value ~= old and value ~= new then return value and -1 or 0 end
if not lease then
    redis.call('DEL', KEYS[1])
elseif not new or value == new then
    redis.call('PEXPIRE', KEYS[1], lease)
else
    redis.call('SET', KEYS[1], new, 'PX', lease)
end
return 1
"""
READ = f"""{GET}
local entries = {{}}
for i, key in ipairs(KEYS) do
    local value = get(key)
    if value then
        local left = redis.call('PTTL', key)
        entries[#entries + 1] = i - 1 .. ' ' .. left .. ' ' .. #value .. ' ' .. value
    end
end
return table.concat(entries)
"""
# Lua's numbers are exact only up to 2**53, and it prints 14 digits. So the server increases the
# counter and returns it as text. The counter has no expiry, so "volatile" policies do not evict it.
FENCE_SCRIPT = f"""{GET}
if get(KEYS[1]) ~= ARGV[1] then return 0 end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
if redis.call('INCR', KEYS[2]) < now then
    redis.call('SET', KEYS[2], string.format('%.0f', now))
end
return redis.call('GET', KEYS[2])
"""

HEAD = re.compile(rb"(\d+) (-?\d+) (\d+) ")
OUTCOMES = {1: Outcome.OK, 0: Outcome.GONE, -1: Outcome.TAKEN}
ADDED = {b"OK": True, None: False}
"""What the replies to a SET mean that adds an entry."""
MOST = 20
"""How many connections all greenlets of a process use at once for one cache."""
BATCH = 1000
"""Keys that are listed and read in one trip."""
TIMEOUTS = "socket_timeout", "socket_connect_timeout"
MALFORMED = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading raises if a reply is not one to its request."""

Request = tuple[Any, ...]
"""A function that reads the reply, and the words of the request."""

SCRIPTS = CHANGE, FENCE_SCRIPT, READ, TAKE
SHA = {text: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for text in SCRIPTS}
LOADS = [(bool, "SCRIPT", "LOAD", text) for text in SCRIPTS]


def entries_of(keys: Sequence[str], text: bytes) -> dict[str, Entry]:
    """Return entries by key, from a script's text about those that exist."""
    entries = {}
    end = 0
    while match := HEAD.match(text, end):
        number, left, length = map(int, match.groups())
        start = match.end()
        end = start + length
        remaining = None  # a foreign entry may have no lease
        if left >= 0:
            remaining = left / 1000
        entries[keys[number]] = Entry(text[start:end], remaining)
    if end != len(text):
        raise ValueError(text)
    return entries


def request_to_read(keys: Sequence[str], cache_keys: Iterable[str]) -> Request:
    """Return the request that reads these entries."""
    return partial(entries_of, keys), "EVALSHA", SHA[READ], len(keys), *cache_keys


def slot_or_entries(keys: Sequence[str], reply: Any) -> str | dict[str, Entry]:
    """Return the key of the slot that a take got, or the entries of all slots."""
    if isinstance(reply, bytes):
        return entries_of(keys, reply)
    return dict(enumerate(keys))[reply]


def _page(reply: Any) -> tuple[int, set[str]]:
    """Return where the list continues (0: nowhere), and the names of one page of it."""
    cursor, names = reply
    return int(cursor), {name.decode(errors="replace") for name in names}


@lru_cache
def knowing_clusters(parser: Any, errors: Any) -> Any:
    """Return a parser that raises the errors of a cluster, which that of some clients does not."""
    known = parser.EXCEPTION_CLASSES
    if "MOVED" in known:
        return parser
    known = known | {
        "ASK": errors.AskError,
        "CLUSTERDOWN": errors.ClusterDownError,
        "CROSSSLOT": errors.ClusterCrossSlotError,
        "MOVED": errors.MovedError,
        "TRYAGAIN": errors.TryAgainError,
    }
    return type(parser.__name__, (parser,), {"EXCEPTION_CLASSES": known})


class InCluster(ImproperlyConfigured):
    """The server is a node of a cluster, which this store does not serve."""


class User:
    """Whoever uses a connection of a pool."""


class Pool(list[Any]):
    """Connections that are not in use, and the users of others.

    A worker may have a greenlet for each of thousands of tasks, so greenlets share a pool, and at
    most MOST of them use a connection at once. The references to users are weak. If a signal comes
    at any moment of a request, its frame goes, and its user. A number that the request lowers at
    its end could stay too high:

      greenlet:   20 in use    request ...   SIGUSR1: SoftTimeLimitExceeded    (never lowered)
      others:                                                                  wait for ever
    """

    def __init__(self) -> None:
        super().__init__()
        self.users: WeakSet[User] = WeakSet()

    def enter(self) -> User:
        """Wait for a place, and return its user, who has it as long as somebody refers to it."""
        while len(self.users) >= MOST:
            time.sleep(0.01)
        user = User()
        self.users.add(user)
        return user


# The pools that greenlets share, by the alias of the cache (and the node of a cluster). A thread
# has its own pools.
Pools = defaultdict[str, Pool]
_shared = Pools(Pool)

# The sockets are the parent's. A connection that is deleted here closes only the child's copy.
at_fork(after_in_child=_shared.clear)


class RedisStore(Store):
    """Run one script for each request, on the primary server, on a separate connection.

    Django's RedisCache reads from replicas, where a new lock still looks free. django-redis with
    ``IGNORE_EXCEPTIONS`` returns False during an outage, which looks like "held". The pool of the
    client takes half of the time of a request, and nothing there shows that the server is another.
    """

    family = "redis"
    patience: float = PATIENCE
    forgets = True
    batch = 500

    in_cluster = False
    """Whether the server may belong to a cluster."""

    redirects = False
    """Whether the calls of the cache itself meet redirects, as its client knows no cluster."""

    def __init__(self, cache: Any, alias: str) -> None:
        super().__init__(cache, alias)
        self.client: Any = self.make_client()
        self.use_errors()
        self.epoch_key: str = self.make_key(EPOCH)
        pool = self.client.connection_pool
        # A connection of this store waits for 5 s, unless the user chose otherwise. django-redis
        # and django-valkey have names of their own, and hide a None.
        chosen = caches.settings.get(alias, {}).get("OPTIONS", {})
        nothing = {name: None for name in TIMEOUTS if name.upper() in chosen}
        self.options: dict[str, Any] = (
            dict.fromkeys(TIMEOUTS, TIMEOUT) | nothing | pool.connection_kwargs
        )
        # Processes with the compiled packer always send keys in UTF-8.
        self.options["encoding"] = "utf-8"
        self.options["parser_class"] = knowing_clusters(self.options["parser_class"], self.errors)
        self.connect: Any = pool.connection_class
        self.places: frozenset[str] = frozenset({self._name_server(pool)})
        self.pools: Pools = Pools(Pool)
        if are_greenlets():
            self.pools = _shared
        self.connections: Pool = self.pools[alias]

    def use_errors(self) -> None:
        """Choose the errors of the client's package."""
        errors: Any
        if any(base.__module__.startswith("django_valkey.") for base in type(self.cache).mro()):
            errors = import_module("valkey.exceptions")
            of_client = errors.ValkeyError
        else:
            errors = import_module("redis.exceptions")
            of_client = errors.RedisError
        self.errors = errors
        self.client_errors: Errors = (of_client, OSError)
        self.refusals: Any = (
            errors.ResponseError,
            errors.AuthenticationError,
            errors.BusyLoadingError,
        )

    def _name_server(self, pool: Any) -> str:
        """Return the address and the database, for people."""
        server = self.options.get("path")
        if not server:
            service = getattr(pool, "service_name", None)  # of Sentinel
            host = self.options.get("host", service)
            server = address(host, self.options.get("port", 6379))
        return f"{server} database {self.options.get('db', 0)}"

    def make_client(self) -> Any:
        if hasattr(self.cache, "client"):  # of django-redis or django-valkey
            return self.cache.client.get_client(write=True)
        return self.cache._cache.get_client(None, write=True)  # noqa: SLF001 - no public way

    def is_limited(self) -> bool:
        """Return whether the options of the cache limit the time of a request."""
        return all(self.options[name] for name in TIMEOUTS)

    def urls(self) -> Any:
        """Return the URLs of the servers in ``LOCATION``."""
        if hasattr(self.cache, "client"):  # of django-redis or django-valkey
            return self.cache.client._server  # noqa: SLF001 - no public way
        return self.cache._servers  # noqa: SLF001

    def clients(self) -> dict[str, Any]:
        """Return the clients of the servers by their addresses; the only one needs none."""
        return {"": self.client}

    def set_timeouts(self, seconds: float) -> None:
        self.options |= dict.fromkeys(TIMEOUTS, seconds)
        self.patience = 0.0
        # Without these options a connection is tried once.
        for name in ("retry", "retry_on_error", "retry_on_timeout"):
            self.options.pop(name, None)
        self.close()
        self.pools = Pools(Pool)
        self.connections = self.pools[self.cache_alias]

    # When a request is sent again
    #
    # A server or a firewall ends connections that are idle, and some say nothing: then the first
    # request after the pause is lost. So what fails on a connection that was open before is sent
    # again on a new one. If the server has handled it already, the reply is the same, but for a
    # deletion. A reply that comes late, or twice, must not count as the reply to the next request:
    #
    #   here:    take a -> ...    5 s, gives up     take b -> "a is yours"
    #   server:                        "a is yours"            "b is held"
    #
    # So nothing may be there to read before a request, and nothing after its reply; otherwise the
    # connection is closed. A push message of the server counts as something to read.
    #
    # A connection is kept only after the whole reply. A signal such as a soft time limit could
    # leave a reply unread, and the next call would read it. After a failover, an error may be all
    # that shows that the server is no primary any more.
    #
    #   here:    take a -> sent   SIGUSR1 ...   take b -> sent -> "a is yours"
    #   server:             "a is yours" ->               "b is held" ->

    def ask(self, *requests: Request, takes: bool = False) -> list[Any]:
        """Send requests together, and return what was read from each reply.

        If the server refuses one of several requests, its reply is the error; if there is only one,
        this raises the error. ``takes``: raise Forgotten if the cache has just forgotten its locks.
        """
        user = None
        lasts = True
        loads = False
        self.was_sent_twice: bool = False
        try:
            if self.pools is _shared:
                user = self.connections.enter()
            try:
                connection = self.connections.pop()
            except IndexError:
                connection = self.connect(**self.options)
            while True:
                was_open = connection._sock is not None  # noqa: SLF001 - public in new versions
                try:
                    if was_open and connection.waiting(0):
                        connection.disconnect()
                        was_open = False
                    if not was_open:
                        self._open(connection)
                    if loads:
                        self._load_scripts(connection)
                    if takes and clock.now() < self.epoch.changed_at + HOLD_BACK:
                        self.epoch.check()
                    replies = self._exchange(connection, requests)
                except BaseException as error:
                    connection.disconnect()
                    if isinstance(error, self.errors.NoScriptError) and not loads:
                        loads = True  # a new or flushed server
                        continue
                    trouble = self._trouble(error)
                    if trouble is None:
                        raise
                    again = self._connection_after(connection, trouble, was_open)
                    if again is None:
                        raise self.unavailable(trouble) from trouble
                    lasts = again is connection
                    connection = again
                    self.was_sent_twice = True
                else:
                    if lasts:
                        self.connections.append(connection)
                    return replies
        finally:
            del user

    def _load_scripts(self, connection: Any) -> None:
        for reply in self._exchange(connection, LOADS):
            if isinstance(reply, LockUnavailable):
                raise reply  # such as: this user may not load scripts

    def _exchange(self, connection: Any, requests: Sequence[Request]) -> list[Any]:
        """Send requests on a connection, and return what was read from each reply."""
        words = [request[1:] for request in requests]
        connection.send_packed_command(connection.pack_commands(words), check_health=False)
        replies = list[Any]()
        for request in requests:
            read = request[0]
            try:
                reply = connection.read_response(disable_decoding=True)
            except self.errors.ResponseError as refusal:
                if len(requests) == 1 or self._concerns_all(refusal):
                    raise
                replies.append(self.unavailable(refusal))
            else:
                replies.append(read(reply))
        try:
            if connection.has_more(0):
                raise ValueError("another reply")
        except (self.errors.ConnectionError, OSError):  # the server has closed it after its reply
            connection.disconnect()
        return replies

    def _concerns_all(self, refusal: Exception) -> bool:
        """Return whether the server would refuse each other request as well."""
        errors = self.errors
        return isinstance(
            refusal, (errors.ClusterDownError, errors.NoScriptError, errors.ReadOnlyError)
        )

    def _trouble(self, error: BaseException) -> Exception | None:
        """Return the outage that an error shows; None if it shows none, such as a signal."""
        errors = self.errors
        if isinstance(error, (*MALFORMED, errors.InvalidResponse)):
            return ConnectionError(f"Malformed reply: {error!r}")
        if isinstance(error, (errors.BusyLoadingError, errors.ClusterDownError)):
            self.note_server(b"not ready")
        if "SELECT is not allowed in cluster mode" in str(error):
            raise ImproperlyConfigured(
                f"The cache {self.cache_alias!r} cannot hold locks: its server is a node of a "
                f"cluster, which has no database {self.options['db']}. Use database 0 in LOCATION "
                "and OPTIONS."
            ) from error
        is_redirect = isinstance(error, (errors.ClusterCrossSlotError, errors.MovedError))
        if is_redirect and not self.in_cluster:
            raise self._in_cluster() from error
        if isinstance(error, self.client_errors):
            return error
        return None

    def _in_cluster(self) -> InCluster:
        """Return what to raise if the server is a node of a cluster."""
        return InCluster(
            f"The cache {self.cache_alias!r} cannot hold locks: its server is a node of a cluster, "
            f"and {type(self).__qualname__} is for a server in no cluster. If the server was in "
            "none when this process started, restart the process."
        )

    # Whether the server is a node of a cluster
    #
    # A node says so in its INFO. Where INFO is forbidden, or does not say it, a node refuses a
    # script of two keys in different hash slots, as the epoch and the fencing token are.
    # Each process asks once, before its first request about a lock, or inherits the answer.
    #
    # In a cluster the keys have tags. So a process that has learned that there is no cluster must
    # not go on if there is one now:
    #
    #   process 1:   learns: no node            takes: MOVED, or INFO of a new connection -> error
    #   server:                        becomes a node
    #   process 2:                                   learns: a node    takes the key with its tag

    def is_node(self) -> bool:
        """Return whether the server is a node of a cluster, or raise LockUnavailable."""
        try:
            self.read_many([EPOCH, FENCE])
        except InCluster:
            return True
        return False

    def _connection_after(self, connection: Any, trouble: Exception, was_open: bool) -> Any:
        """Return where to send again what has failed; None: nowhere."""
        if not was_open:
            return None
        is_refusal = isinstance(trouble, self.refusals)
        if is_refusal and not isinstance(trouble, self.errors.ReadOnlyError):
            return None
        limit = connection.socket_timeout
        if limit is None or not isinstance(trouble, self.errors.TimeoutError):
            return connection  # without a limit, the system itself has given the connection up
        left = min(limit, self.patience - limit)
        if left <= 0:
            return None
        return self.connect(**self.options | dict.fromkeys(TIMEOUTS, left))

    def _open(self, connection: Any) -> None:
        """Connect, and note the server: another one may have forgotten the locks."""
        connection.connect()  # with the retries of the options
        connection.waiting = watch(connection._sock)  # noqa: SLF001
        # The parser looks into its buffer and then at the socket. The client's can_read() calls it,
        # but first makes the text of an error that there may be.
        connection.has_more = connection._parser.can_read  # noqa: SLF001
        connection.send_command("INFO", "server")
        try:
            facts = connection.read_response(disable_decoding=True)
        except self.errors.ResponseError:
            facts = b""  # it is forbidden: only the epoch shows that locks were forgotten
        if b"redis_mode:cluster" in facts and not self.in_cluster:
            raise self._in_cluster()
        found = re.search(rb"\brun_id:\w+", facts)
        if found:
            connection.server = found[0]
            if self.known_server() not in (None, found[0]):
                self._ask_whether_ready(connection)
            self.note_server(found[0])
        if connection.has_more(0):
            raise ValueError("another reply")

    # A server that restarts says who it is before it takes requests: it loads its snapshot, or
    # waits for its cluster. The pause for the holders begins when it is ready. So another server is
    # asked for a key before it is noted:
    #
    #   server:   restarts, loads .....................  ready
    #   taker:    another run_id: asks -> refused         asks: waits 1 s ............ takes -> held
    #   holder:                                                    takes its lock again
    #
    # The first server of a process is noted at once. If it then refuses a request, the next
    # connection finds another server.
    #
    # A node says that nobody serves the hash slot of a key whether it is ready or not. So it is
    # then asked for the key of its next group.

    def _ask_whether_ready(self, connection: Any) -> None:
        """Raise what the server says until it takes requests."""
        for key in self.epoch_keys():
            connection.send_command("GET", key)
            try:
                connection.read_response(disable_decoding=True)
            except self.errors.ResponseError as refusal:  # such as: the key is on another node
                if "not served" in str(refusal):
                    continue
                if self._concerns_all(refusal):
                    raise
            return

    def epoch_keys(self) -> list[str]:
        """Return the keys of the epochs of all locks on this server."""
        return [self.epoch_key]

    def known_server(self) -> bytes | None:
        return self.epoch.server

    def note_server(self, line: bytes) -> None:
        self.epoch.note("server", line)

    def take(
        self, slots: Slots, value: bytes, lease: float, *, heeds_epoch: bool
    ) -> str | dict[str, Entry]:
        keys = [self.epoch_key, *map(self.make_key, slots.keys)]
        read = partial(slot_or_entries, slots.keys)
        milliseconds = max(1, int(lease * 1000))
        script = read, "EVALSHA", SHA[TAKE], len(keys), *keys, value, milliseconds
        several: Request = ()
        if slots.allowed > 1 or slots.mark:
            several = slots.allowed, slots.mark
        for _ in range(TRIES):
            epoch: bytes | None = b"any"
            if heeds_epoch:
                epoch = self.epoch.value
                if epoch is None:
                    epoch = b"unknown"
            request = *script, epoch, *several
            taken: str | dict[str, Entry]
            (taken,) = self.ask(request, takes=heeds_epoch)
            if taken:
                return taken
            self.look()  # notes the epoch; if it has changed, the next ask() raises Forgotten
        raise Forgotten(HOLD_BACK)

    def insert(self, key: str, value: bytes, lease: float) -> Any:
        words: list[Any] = ["SET", self.make_key(key), value, "NX"]
        if lease != math.inf:
            words += ["PX", max(1, int(lease * 1000))]
        (was_added,) = self.ask((ADDED.__getitem__, *words))
        return was_added

    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        words = ["EVALSHA", SHA[CHANGE], 1, self.make_key(key), old]
        if lease is not None:
            words.append(max(1, int(lease * 1000)))
            if new != old:
                words.append(new)
        outcome: Outcome
        (outcome,) = self.ask((OUTCOMES.__getitem__, *words))
        if lease is None and outcome is Outcome.GONE and self.was_sent_twice:
            return Outcome.SENT_TWICE
        return outcome

    def _extend(
        self, requests: Sequence[tuple[str, bytes, float]]
    ) -> list[Outcome | LockUnavailable]:
        script = OUTCOMES.__getitem__, "EVALSHA", SHA[CHANGE], 1
        sent = []
        for key, value, lease in requests:
            milliseconds = max(1, int(lease * 1000))
            sent.append((*script, self.make_key(key), value, milliseconds))
        return self.ask(*sent)

    def read_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        wanted = list(keys)
        return self._read(wanted, map(self.make_key, wanted))

    def _read(self, keys: Sequence[str], cache_keys: Iterable[str]) -> dict[str, Entry]:
        entries: dict[str, Entry]
        (entries,) = self.ask(request_to_read(keys, cache_keys))
        return entries

    def fence(self, key: str, value: bytes) -> int | None:
        keys = self.make_key(key), self.make_key(FENCE)
        (number,) = self.ask((int, "EVALSHA", SHA[FENCE_SCRIPT], 2, *keys, value))
        if number == 0:
            return None
        return int(number)

    def scan(self, prefix: str) -> Iterator[tuple[str, Entry]]:
        for names in self.names(prefix):
            yield from self._read(names, names).items()

    def names(self, prefix: str) -> Iterator[list[str]]:
        """Yield the cache keys that begin with a prefix, many at a time."""
        pattern = re.sub(r"([*?[\]\\])", r"\\\1", prefix) + "*"
        cursor = 0
        seen = set[str]()
        while True:
            request = _page, "SCAN", cursor, "MATCH", pattern, "COUNT", BATCH
            ((cursor, names),) = self.ask(request)
            new = names - seen  # SCAN may name an entry twice
            seen |= new
            yield [*new]
            if cursor == 0:
                return

    def close(self) -> None:
        if are_greenlets():  # those share their connections
            return
        for pool in [*self.pools.values()]:
            for connection in pool:
                connection.disconnect()
