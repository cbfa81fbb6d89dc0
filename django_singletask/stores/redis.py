"""Locks in Redis or Valkey, through Django's RedisCache, django-redis or django-valkey."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import chain
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from django_singletask.forks import at_fork
from django_singletask.stores.base import EPOCH, FENCE, Entry, Outcome, Slots, Store, address
from django_singletask.threads import are_greenlets

# The server runs nothing else during a script, so nothing happens between its read and its change:
#
#   holder A: GET -> mine            (its lease ends here, B takes the lock)
#   holder A: DEL                    frees B's lock: impossible inside a script
#
# A process takes a lock only in the epoch that it knows. SET NX would take the lock in any epoch.
# The client reads one text in a small part of the time of an array. It contains for each entry the
# number of the key, the milliseconds that are left, the length of the value and the value.
TAKE = """
local value, lease, allowed, mark, epoch = unpack(ARGV)
if epoch ~= '' and redis.call('GET', KEYS[1]) ~= epoch then return '' end
local entries, free, own = {}, false, false
for i = 2, #KEYS do
    local found = redis.call('GET', KEYS[i])
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
CHANGE = """
local old, new, lease = unpack(ARGV)
local value = redis.call('GET', KEYS[1])
if value ~= old and value ~= new then return value and -1 or 0 end
if lease == '' then
    redis.call('DEL', KEYS[1])
else
    redis.call('SET', KEYS[1], new, 'PX', lease)
end
return 1
"""
READ = """
local entries = {}
for i, key in ipairs(KEYS) do
    local value = redis.call('GET', key)
    if value then
        local left = redis.call('PTTL', key)
        entries[#entries + 1] = i - 1 .. ' ' .. left .. ' ' .. #value .. ' ' .. value
    end
end
return table.concat(entries)
"""
# Lua's numbers are exact only up to 2**53, and it prints 14 digits. So the server increases the
# counter and returns it as text. The counter has no expiry, so "volatile" policies do not evict it.
FENCE_SCRIPT = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return false end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
if redis.call('INCR', KEYS[2]) < now then
    redis.call('SET', KEYS[2], string.format('%.0f', now))
end
return redis.call('GET', KEYS[2])
"""

HEAD = re.compile(rb"(\d+) (-?\d+) (\d+) ")
OUTCOMES = {1: Outcome.OK, 0: Outcome.GONE, -1: Outcome.TAKEN}
LOADS = [("SCRIPT", "LOAD", text) for text in (CHANGE, FENCE_SCRIPT, READ, TAKE)]
SHA = {text: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for *_, text in LOADS}

MOST = 20
"""How many connections all greenlets of a process have to one cache."""
BATCH = 1000
"""Keys that are listed and read in one trip."""
RECEIVE = 65536
"""Bytes that are received at once at most."""


def _reply(data: bytes, start: int, refusal: type[Exception]) -> tuple[Any, int]:
    """Return the reply that starts there, and its end; the client's reader takes ten times as long.

    Raise ``refusal`` if the server refused the request, and ``ValueError`` if the reply is not
    whole yet.
    """
    stop = data.index(b"\r\n", start)
    kind, text, end = data[start : start + 1], data[start + 1 : stop], stop + 2
    if kind == b":":
        return int(text), end
    if kind == b"-":
        raise refusal(text.decode(errors="replace"))
    if kind == b"+" or text == b"-1":
        return text if kind == b"+" else None, end
    number = int(text)
    if kind == b"$":
        if len(data) < end + number + 2:
            raise ValueError
        return data[end : end + number], end + number + 2
    items = []
    for _ in range(number):
        item, end = _reply(data, end, refusal)
        items.append(item)
    return items, end


def entries_of(keys: Sequence[str], text: bytes) -> dict[str, Entry]:
    """Return entries by key, from a script's text about those that exist."""
    entries, end = {}, 0
    while match := HEAD.match(text, end):
        number, left, length = map(int, match.groups())
        start, end = match.end(), match.end() + length
        # A foreign entry may have no lease.
        entries[keys[number]] = Entry(text[start:end], left / 1000 if left >= 0 else None)
    return entries


# The connections of the greenlets of this process that are not in use, by the alias of the cache
# (and the node of a cluster); None is one to open. A thread keeps its connection. A worker may have
# a greenlet for each of thousands of tasks, so a greenlet borrows a connection for each request,
# and nobody else has it meanwhile.
Pools = defaultdict[str, list[Any]]
_shared = Pools(lambda: [None] * MOST)

# The sockets are the parent's. A connection that is deleted here closes only the child's copy.
at_fork(after_in_child=_shared.clear)


class RedisStore(Store):
    """Run one script for each request, on the primary server, on a separate connection.

    Django's RedisCache reads from replicas, where a new lock still looks free. django-redis with
    ``IGNORE_EXCEPTIONS`` returns False during an outage, which looks like "held". The pool of the
    client takes half of the time of a request, and nothing there shows that the server is another.
    """

    family = "redis"
    forgets = True
    batch = 500

    def __init__(self, cache: Any, alias: str) -> None:
        super().__init__(cache, alias)
        self.client = self.make_client()
        is_valkey = any(base.__module__.startswith("django_valkey.") for base in type(cache).mro())
        package = "valkey" if is_valkey else "redis"
        self.errors: Any = import_module(f"{package}.exceptions")
        self.client_errors = (getattr(self.errors, f"{package.title()}Error"), OSError)
        self.epoch_key = self.make_key(EPOCH)
        pool = self.client.connection_pool
        self.options = dict(pool.connection_kwargs)
        self.connect = pool.connection_class
        host = self.options.get("host") or getattr(pool, "service_name", None)  # of Sentinel
        server = self.options.get("path") or address(host, self.options.get("port", 6379))
        self.places = frozenset({f"{server} database {self.options.get('db') or 0}"})
        # A thread opens a second one only if a signal handler interrupts a request.
        self.pools = _shared if are_greenlets() else Pools(_shared.default_factory)
        self.connections = self.pools[alias]

    def make_client(self) -> Any:
        if hasattr(self.cache, "client"):  # of django-redis or django-valkey
            return self.cache.client.get_client(write=True)
        return self.cache._cache.get_client(None, write=True)  # noqa: SLF001 - no public way

    def clients(self) -> dict[str, Any]:
        """Return the clients of the servers by their addresses; the only one needs none."""
        return {"": self.client}

    def set_timeouts(self, seconds: float) -> None:
        self.options |= dict.fromkeys(("socket_timeout", "socket_connect_timeout"), seconds)
        # Without these options a connection is tried once.
        for name in ("retry", "retry_on_error", "retry_on_timeout"):
            self.options.pop(name, None)
        self.close()
        self.pools = Pools(_shared.default_factory)
        self.connections = self.pools[self.cache_alias]

    def ask(self, *requests: tuple[Any, ...], takes: bool = False) -> list[Any]:
        """Send requests together, and return their replies.

        If the server has closed the connection, send them again: if it has handled them already,
        the replies are the same, but for a deletion. ``takes``: raise Forgotten if the cache has
        just forgotten its locks.

        Keep the connection only after the whole reply. A signal such as a soft time limit could
        leave a reply unread, and the next call would read it. After a failover, an error may be all
        that shows that the server is no primary any more.

          here:    take a -> sent   SIGUSR1 ...   take b -> sent -> "a is yours"
          server:             "a is yours" ->               "b is held" ->
        """
        sent, connections, kept = [*requests], self.connections, None
        refusal = self.errors.ResponseError
        while not connections:
            time.sleep(0.01)
        self.was_sent_twice = False
        try:
            connection = connections.pop() or self.connect(**self.options)
            while True:
                was_open = connection._sock is not None  # noqa: SLF001 - public in new versions
                try:
                    if not was_open:
                        self._open(connection)
                    if takes:
                        self.epoch.check()
                    packed = b""  # in half the time of the client's packer
                    for request in sent:
                        words = [w if isinstance(w, bytes) else str(w).encode() for w in request]
                        lines = [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
                        packed += b"*%d\r\n%b" % (len(words), b"".join(lines))
                        del words, lines  # of a thousand keys
                    sock = connection._sock  # noqa: SLF001
                    sock.sendall(packed)
                    replies, data, end = list[Any](), sock.recv(RECEIVE), 0
                    while len(replies) < len(sent):
                        try:
                            reply, end = _reply(data, end, refusal)
                            replies.append(reply)
                        except ValueError:
                            received = sock.recv(RECEIVE)
                            if not received:
                                raise ConnectionResetError("Connection closed by server") from None
                            data += received
                    kept = connection
                    return replies[-len(requests) :]
                except BaseException as error:
                    connection.disconnect()
                    is_closed = isinstance(error, OSError) and not isinstance(error, TimeoutError)
                    code = str(error).partition(" ")[0] if isinstance(error, refusal) else ""
                    if code in ("CLUSTERDOWN", "LOADING"):
                        self.note_server(b"not ready")
                    if code == "NOSCRIPT":  # a new or flushed server
                        sent = [*LOADS, *requests]
                    elif was_open and (code == "READONLY" or is_closed):
                        self.was_sent_twice = True
                    elif isinstance(error, self.client_errors):
                        raise self.unavailable(error) from error
                    else:
                        raise
        finally:
            connections.append(kept)

    def _open(self, connection: Any) -> None:
        """Connect, and note the server: another one may have forgotten the locks."""
        connection.protocol = 2  # the one that _reply() reads
        connection.connect()  # with the retries of the options
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
        script = "EVALSHA", SHA[TAKE], len(keys), *keys
        args = value, max(1, int(lease * 1000)), slots.allowed, slots.mark
        while True:
            epoch = (self.epoch.value or b"unknown") if heeds_epoch else b""
            (reply,) = self.ask((*script, *args, epoch), takes=heeds_epoch)
            if isinstance(reply, int):
                return slots.keys[reply]
            if reply:
                return entries_of(slots.keys, reply)
            self.look()  # if the epoch has changed, the next check raises

    def insert(self, key: str, value: bytes, lease: float) -> Any:
        expiry = () if lease == math.inf else ("PX", max(1, int(lease * 1000)))
        return self.ask(("SET", self.make_key(key), value, "NX", *expiry))[0]

    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        milliseconds = "" if lease is None else max(1, int(lease * 1000))
        (reply,) = self.ask(("EVALSHA", SHA[CHANGE], 1, self.make_key(key), old, new, milliseconds))
        if lease is None and reply == 0 and self.was_sent_twice:
            return Outcome.SENT_TWICE
        return OUTCOMES[reply]

    def _extend(self, requests: Sequence[tuple[str, bytes, float]]) -> list[Outcome]:
        sent = [
            ("EVALSHA", SHA[CHANGE], 1, self.make_key(key), value, value, max(1, int(lease * 1000)))
            for key, value, lease in requests
        ]
        return [OUTCOMES[reply] for reply in self.ask(*sent)]

    def read_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        wanted = list(keys)
        return self._read(wanted, map(self.make_key, wanted))

    def _read(self, keys: Sequence[str], cache_keys: Iterable[str]) -> dict[str, Entry]:
        (text,) = self.ask(("EVALSHA", SHA[READ], len(keys), *cache_keys))
        return entries_of(keys, text)

    def fence(self, key: str, value: bytes) -> int | None:
        keys = self.make_key(key), self.make_key(FENCE)
        (number,) = self.ask(("EVALSHA", SHA[FENCE_SCRIPT], 2, *keys, value))
        return number and int(number)

    def scan(self, prefix: str) -> Iterator[tuple[str, Entry]]:
        for names in self.names(prefix):
            yield from self._read(names, names).items()

    def names(self, prefix: str) -> Iterator[list[str]]:
        """Yield the cache keys that begin with a prefix, many at a time."""
        pattern = re.sub(r"([*?[\]\\])", r"\\\1", prefix) + "*"
        cursor, seen = b"", set[str]()
        while cursor != b"0":
            request = "SCAN", cursor or 0, "MATCH", pattern, "COUNT", BATCH, "TYPE", "string"
            ((cursor, names),) = self.ask(request)
            # SCAN may name an entry twice.
            new = [*{name.decode(errors="replace") for name in names}.difference(seen)]
            seen.update(new)
            yield new

    def close(self) -> None:
        if not are_greenlets():  # those share their connections
            for connection in filter(None, chain(*self.pools.values())):
                connection.disconnect()
