"""Locks in Redis or Valkey, through Django's RedisCache, django-redis or django-valkey."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import chain
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
local value, lease, allowed, mark, epoch = unpack(ARGV)
if epoch and get(KEYS[1]) ~= epoch then return '' end
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
        own = own or mark ~= '' and string.find(found, mark, 1, true)
    elseif i <= allowed + 1 then
        free = free or i
    end
end
if own or not free then return table.concat(entries) end
redis.call('SET', KEYS[free], value, 'PX', lease)
return free - 2
"""
# A full server refuses SET, but neither PEXPIRE nor DEL. So there a holder can still renew its lock
# and release it.
CHANGE = f"""{GET}
local old, new, lease = unpack(ARGV)
local value = get(KEYS[1])
if value == foreign then return -1 end
if value ~= old and value ~= new then return value and -1 or 0 end
if lease == '' then
    redis.call('DEL', KEYS[1])
elseif value == new then
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
MOST = 20
"""How many connections all greenlets of a process use at once for one cache."""
BATCH = 1000
"""Keys that are listed and read in one trip."""
RECEIVE = 65536
"""Bytes that are received at once at most."""
TIMEOUTS = "socket_timeout", "socket_connect_timeout"
NOT_READY = {"CLUSTERDOWN", "LOADING"}
OF_ALL = NOT_READY | {"NOSCRIPT", "READONLY"}
"""The first words of refusals that concern each request to the server."""
MALFORMED = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading raises if a reply is not one to its request."""

Request = tuple[Any, ...]
"""A function that reads the reply, and the words of the request."""


LOADS = [(bool, "SCRIPT", "LOAD", text) for text in (CHANGE, FENCE_SCRIPT, READ, TAKE)]
SHA = {text: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for *_, text in LOADS}


def _replies(
    data: bytes, start: int, count: int, refusal: type[Exception]
) -> tuple[list[Any], int]:
    """Return the replies that start there, and their end.

    The client's reader takes ten times as long.
    A refusal of the server is the reply to its request. Raises ``EOFError`` if a reply is not whole
    yet, and ``ValueError`` if one is malformed.
    """
    replies = list[Any]()
    for _ in range(count):
        stop = data.find(b"\r\n", start)
        if stop < 0:
            raise EOFError
        kind, text = data[start : start + 1], data[start + 1 : stop]
        start = stop + 2
        if kind == b"+":
            reply: Any = text
        elif kind == b"-":
            reply = refusal(text.decode(errors="replace"))
        else:
            reply = number = int(text)
            if kind != b":" and number == -1:
                reply = None
            elif kind == b"*":
                reply, start = _replies(data, start, number, refusal)
            elif kind == b"$":
                reply = data[start : start + number]
                start += number + 2
                if start > len(data):
                    raise EOFError
            elif kind != b":":
                raise ValueError(text)
        replies.append(reply)
    return replies, start


def entries_of(keys: Sequence[str], text: bytes) -> dict[str, Entry]:
    """Return entries by key, from a script's text about those that exist."""
    entries, end = {}, 0
    while match := HEAD.match(text, end):
        number, left, length = map(int, match.groups())
        start, end = match.end(), match.end() + length
        # A foreign entry may have no lease.
        entries[keys[number]] = Entry(text[start:end], left / 1000 if left >= 0 else None)
    if end != len(text):
        raise ValueError(text)
    return entries


def reading(keys: Sequence[str], cache_keys: Iterable[str]) -> Request:
    """Return the request that reads these entries."""
    return partial(entries_of, keys), "EVALSHA", SHA[READ], len(keys), *cache_keys


class Slot(dict[Any, Any]):
    """The key of the slot that a take got by its number, or by a text the entries of all slots."""

    def __missing__(self, text: bytes) -> dict[str, Entry]:
        return entries_of([*self.values()], text)


def _page(reply: Any) -> tuple[int, set[str]]:
    """Return where the list continues (0: nowhere), and the names of one page of it."""
    cursor, names = reply
    return int(cursor), {name.decode(errors="replace") for name in names}


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
        self.users = WeakSet[User]()

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
    patience = PATIENCE
    forgets = True
    batch = 500

    def __init__(self, cache: Any, alias: str) -> None:
        super().__init__(cache, alias)
        self.client = self.make_client()
        is_valkey = any(base.__module__.startswith("django_valkey.") for base in type(cache).mro())
        self.package = "valkey" if is_valkey else "redis"
        self.errors: Any = import_module(f"{self.package}.exceptions")
        self.client_errors = (getattr(self.errors, f"{self.package.title()}Error"), OSError)
        self.refusals = self.errors.ResponseError
        self.epoch_key = self.make_key(EPOCH)
        pool = self.client.connection_pool
        # A connection of this store waits for 5 s, unless the user chose otherwise. django-redis
        # and django-valkey have names of their own, and hide a None.
        chosen = caches.settings.get(alias, {}).get("OPTIONS", {})
        nothing = {name: None for name in TIMEOUTS if name.upper() in chosen}
        self.options = dict.fromkeys(TIMEOUTS, TIMEOUT) | nothing | pool.connection_kwargs
        self.connect = pool.connection_class
        host = self.options.get("host") or getattr(pool, "service_name", None)  # of Sentinel
        server = self.options.get("path") or address(host, self.options.get("port", 6379))
        self.places = frozenset({f"{server} database {self.options.get('db') or 0}"})
        self.pools = Pools(Pool)
        if are_greenlets():
            self.pools = _shared
        self.connections = self.pools[alias]

    def make_client(self) -> Any:
        if hasattr(self.cache, "client"):  # of django-redis or django-valkey
            return self.cache.client.get_client(write=True)
        return self.cache._cache.get_client(None, write=True)  # noqa: SLF001 - no public way

    def clients(self) -> dict[str, Any]:
        """Return the clients of the servers by their addresses; the only one needs none."""
        return {"": self.client}

    def set_timeouts(self, seconds: float) -> None:
        self.options = self.options | dict.fromkeys(TIMEOUTS, seconds)
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
    # connection is closed.

    def ask(self, *requests: Request, takes: bool = False) -> list[Any]:
        """Send requests together, and return what was read from each reply.

        If the server refuses one of several requests, its reply is the error; if there is only one,
        this raises the error. ``takes``: raise Forgotten if the cache has just forgotten its locks.

        Keep the connection only after the whole reply. A signal such as a soft time limit could
        leave a reply unread, and the next call would read it. After a failover, an error may be all
        that shows that the server is no primary any more.

          here:    take a -> sent   SIGUSR1 ...   take b -> sent -> "a is yours"
          server:             "a is yours" ->               "b is held" ->
        """
        sent: Sequence[Request] = requests
        user = kept = None
        lasts = True
        self.was_sent_twice = False
        try:
            if self.pools is _shared:
                user = self.connections.enter()
            try:
                connection = self.connections.pop()
            except IndexError:
                connection = self.connect(**self.options)
            while True:
                was_open = connection._sock is not None  # noqa: SLF001 - public in new versions
                code = ""
                try:
                    if was_open and connection.waiting(0):
                        connection.disconnect()
                        was_open = False
                    if not was_open:
                        self._open(connection)
                    if takes and clock.now() < self.epoch.changed_at + HOLD_BACK:
                        self.epoch.check()
                    packed = b""  # in half the time of the client's packer
                    for request in sent:
                        _read, *words = request
                        words = [w if isinstance(w, bytes) else str(w).encode() for w in words]
                        lines = [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
                        packed += b"*%d\r\n%b" % (len(words), b"".join(lines))
                        del words, lines  # of a thousand keys
                    sock = connection._sock  # noqa: SLF001
                    sock.sendall(packed)
                    data = sock.recv(RECEIVE)
                    while True:
                        try:
                            replies, end = _replies(data, 0, len(sent), self.refusals)
                            break
                        except EOFError:
                            received = sock.recv(RECEIVE)
                            if not received:
                                raise ConnectionResetError("Connection closed by server") from None
                            data += received
                    if end < len(data):
                        raise ValueError(data[end:])
                    for number, reply in enumerate(replies):
                        if not isinstance(reply, self.refusals):
                            read = sent[number][0]
                            replies[number] = read(reply)
                            continue
                        code = str(reply).partition(" ")[0]
                        if len(requests) == 1 or code in OF_ALL:
                            raise reply
                        replies[number] = self.unavailable(reply)
                    if lasts:
                        kept = connection
                    return replies[-len(requests) :]
                except BaseException as error:
                    connection.disconnect()
                    trouble = error
                    if isinstance(error, MALFORMED):
                        trouble = ConnectionError(f"Malformed reply: {error!r}")
                    if code in NOT_READY:
                        self.note_server(b"not ready")
                    may_repeat = was_open and (code == "READONLY" or isinstance(trouble, OSError))
                    limit = connection.socket_timeout
                    # Without a limit, the system itself has given the connection up.
                    is_over = isinstance(trouble, TimeoutError) and limit is not None
                    if code == "NOSCRIPT" and sent is requests:  # a new or flushed server
                        sent = [*LOADS, *requests]
                    elif may_repeat and not is_over:
                        self.was_sent_twice = True
                    elif may_repeat and limit < self.patience:
                        left = min(limit, self.patience - limit)
                        connection = self.connect(**self.options | dict.fromkeys(TIMEOUTS, left))
                        lasts, self.was_sent_twice = False, True
                    elif isinstance(trouble, self.client_errors):
                        raise self.unavailable(trouble) from trouble
                    else:
                        raise
        finally:
            if kept is not None:
                self.connections.append(kept)
            del user

    def _open(self, connection: Any) -> None:
        """Connect, and note the server: another one may have forgotten the locks."""
        connection.protocol = 2  # the one that _replies() reads
        connection.connect()  # with the retries of the options
        connection.waiting = watch(connection._sock)  # noqa: SLF001
        connection.send_command("INFO", "server")
        try:
            facts = connection.read_response(disable_decoding=True)
        except self.errors.ResponseError:
            return  # it is forbidden: only the epoch shows that locks were forgotten
        if b"redis_mode:cluster" in facts and not hasattr(self, "cluster"):
            raise ImproperlyConfigured(
                f"The cache {self.cache_alias!r} cannot hold locks: its server belongs to a Redis "
                "Cluster. Use django-valkey's ClusterValkeyCache, or a server in no cluster."
            )
        if found := re.search(rb"\brun_id:\w+", facts):
            connection.server = found[0]
            self.note_server(found[0])

    # A server that restarts says who it is before it takes requests: it loads its snapshot, or
    # waits for its cluster. The pause for the holders begins when it is ready. So after a refusal
    # the next connection finds another server again:
    #
    #   server:   restarts     loading ..............  ready
    #   taker:     another run_id -> waits 1 s ...       another again -> waits 1 s    takes -> held
    #   holder:                                                takes its lock again

    def note_server(self, line: bytes) -> None:
        self.epoch.note("server", line)

    def take(
        self, slots: Slots, value: bytes, lease: float, *, heeds_epoch: bool
    ) -> str | dict[str, Entry]:
        keys = [self.epoch_key, *map(self.make_key, slots.keys)]
        read = Slot(enumerate(slots.keys)).__getitem__
        script = read, "EVALSHA", SHA[TAKE], len(keys), *keys
        args = value, max(1, int(lease * 1000)), slots.allowed, slots.mark
        for _ in range(TRIES):
            epoch = []
            if heeds_epoch:
                epoch = [b"unknown" if self.epoch.value is None else self.epoch.value]
            taken: str | dict[str, Entry]
            (taken,) = self.ask((*script, *args, *epoch), takes=heeds_epoch)
            if taken:
                return taken
            self.look()  # if the epoch has changed, the next check raises
        raise Forgotten(HOLD_BACK)

    def insert(self, key: str, value: bytes, lease: float) -> Any:
        expiry = () if lease == math.inf else ("PX", max(1, int(lease * 1000)))
        return self.ask(((b"OK",).__contains__, "SET", self.make_key(key), value, "NX", *expiry))[0]

    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        milliseconds = "" if lease is None else max(1, int(lease * 1000))
        words = "EVALSHA", SHA[CHANGE], 1, self.make_key(key), old, new, milliseconds
        outcome: Outcome
        (outcome,) = self.ask((OUTCOMES.__getitem__, *words))
        if lease is None and outcome is Outcome.GONE and self.was_sent_twice:
            return Outcome.SENT_TWICE
        return outcome

    def _extend(
        self, requests: Sequence[tuple[str, bytes, float]]
    ) -> list[Outcome | LockUnavailable]:
        script, sent = (OUTCOMES.__getitem__, "EVALSHA", SHA[CHANGE], 1), []
        for key, value, lease in requests:
            sent.append((*script, self.make_key(key), value, value, max(1, int(lease * 1000))))
        return self.ask(*sent)

    def read_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        wanted = list(keys)
        return self._read(wanted, map(self.make_key, wanted))

    def _read(self, keys: Sequence[str], cache_keys: Iterable[str]) -> dict[str, Entry]:
        entries: dict[str, Entry]
        (entries,) = self.ask(reading(keys, cache_keys))
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
        cursor, seen = 0, set[str]()
        while True:
            request = _page, "SCAN", cursor, "MATCH", pattern, "COUNT", BATCH
            ((cursor, names),) = self.ask(request)
            new = [*names.difference(seen)]  # SCAN may name an entry twice
            seen.update(new)
            yield new
            if cursor == 0:
                return

    def close(self) -> None:
        if not are_greenlets():  # those share their connections
            for connection in filter(None, chain(*self.pools.values())):
                connection.disconnect()
