"""Locks in Redis or Valkey, through Django's RedisCache, django-redis or django-valkey."""

from __future__ import annotations

import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any
from weakref import WeakSet

from django.core.exceptions import ImproperlyConfigured

from django_singletask import clock
from django_singletask.stores.base import FENCE, Entry, Outcome, Slots
from django_singletask.stores.epoch import EPOCH, ForgetfulStore
from django_singletask.stores.scripts import CHANGE, FENCE_SCRIPT, LIST, READ, TAKE
from django_singletask.threads import are_greenlets

OUTCOMES = {1: Outcome.OK, 0: Outcome.GONE, -1: Outcome.TAKEN}
TEXTS = (CHANGE, FENCE_SCRIPT, LIST, READ, TAKE)
SHA = {text: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for text in TEXTS}

MOST = 20
"""How many connections all greenlets of a process have to one cache."""
BATCH = 1000
"""Keys that are listed and read in one trip."""


def _milliseconds(lease: float) -> int:
    return max(1, int(lease * 1000))


def _bytes(value: bytes | str) -> bytes:
    # A str with the cache's option decode_responses=True.
    return value.encode() if isinstance(value, str) else value


def _entry(reply: Any) -> Entry | None:
    if reply is None:
        return None
    value, milliseconds = reply
    return Entry(_bytes(value), _left(milliseconds))


def _left(milliseconds: int) -> float | None:
    return milliseconds / 1000 if milliseconds >= 0 else None


def _packed(encoding: str, words: Iterable[str | bytes | int]) -> bytes:
    """Return a request in the server's protocol, in half the time of the client's packer."""
    request = []
    for word in words:
        encoded = word if isinstance(word, bytes) else str(word).encode(encoding)
        request.append(b"$%d\r\n%b\r\n" % (len(encoded), encoded))
    return b"*%d\r\n%b" % (len(request), b"".join(request))


def _script(text: str, keys: Sequence[str], args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the request to run a script that the server knows."""
    return "EVALSHA", SHA[text], len(keys), *keys, *args


# The connections of the greenlets of this process, by the alias of the cache. A thread keeps its
# connection. A worker may have a greenlet for each of thousands of tasks, so a greenlet borrows a
# connection for each request, and nobody else has it meanwhile.
_free: defaultdict[str, list[Any]] = defaultdict(list)
_open: defaultdict[str, WeakSet[Any]] = defaultdict(WeakSet)


def _after_fork() -> None:
    # The sockets are the parent's. A connection that is deleted here closes only the child's copy.
    _free.clear()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class RedisStore(ForgetfulStore):
    """Run one script for each request, on the primary server, on a separate connection.

    Django's RedisCache reads from replicas, where a new lock still looks free. django-redis with
    ``IGNORE_EXCEPTIONS`` returns False during an outage, which looks like "held". The pool of the
    client takes half of the time of a request, and nothing there shows that the server is another.
    """

    family = "redis"
    client_package = "redis"
    """The package of the client and its exceptions."""
    batch = 500

    connection: Any = None
    """The connection that this thread keeps; None during a request."""
    was_sent_twice = False
    """Whether the last request was sent again, because the connection was closed."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        self.errors: Any = import_module(f"{self.client_package}.exceptions")
        self.client_errors = (getattr(self.errors, f"{self.client_package.title()}Error"), OSError)
        self.client = self._client()
        self.epoch_key = self.make_key(EPOCH)
        pool = self.client.connection_pool
        self.options = dict(pool.connection_kwargs)
        self.connect = pool.connection_class
        self.borrows = are_greenlets()

    def _client(self) -> Any:
        return self.cache._cache.get_client(None, write=True)  # noqa: SLF001 - no public way

    def set_timeouts(self, seconds: float) -> None:
        for name in ("socket_timeout", "socket_connect_timeout"):
            self.options[name] = min(self.options.get(name) or seconds, seconds)
        retry, backoff = (import_module(f"{self.client_package}.{n}") for n in ("retry", "backoff"))
        self.options["retry"] = retry.Retry(backoff.NoBackoff(), 0)
        self.borrows = False
        self.close()

    def _ask(
        self, *requests: tuple[Any, ...], takes: bool = False, retries: bool = True
    ) -> list[Any]:
        """Send requests together, and return their replies.

        If the server has closed the connection, send them again: if it has handled them already,
        the replies are the same, but for a deletion. ``takes``: raise Forgotten if the cache has
        just forgotten its locks. ``retries``: send them as often as the options of the cache say.
        """
        # A signal handler that interrupts this call finds None, and opens another connection.
        connection, self.connection = self.connection, None
        if connection is None:
            connection = self._borrow() if self.borrows else self.connect(**self.options)
        try:
            self.was_sent_twice = False
            was_open = connection._sock is not None  # noqa: SLF001 - public only in new versions
            try:
                return self._send(connection, requests, takes, retries)
            except self.errors.ConnectionError:
                if not was_open:
                    raise
                self.was_sent_twice = True
                return self._send(connection, requests, takes, retries)
        except self.client_errors as error:
            raise self.unavailable(error) from error
        finally:
            if self.borrows:
                _free[self.cache_alias].append(connection)
            elif self.connection is None:
                self.connection = connection
            else:
                connection.disconnect()

    def _borrow(self) -> Any:
        free, others, pause = _free[self.cache_alias], _open[self.cache_alias], 0.001
        while not free and len(others) >= MOST:
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        if free:
            return free.pop()
        connection = self.connect(**self.options)
        others.add(connection)
        return connection

    def _send(
        self, connection: Any, requests: Sequence[Any], takes: bool, retries: bool
    ) -> list[Any]:
        """Send requests, read all replies, and raise the first error among them.

        After any other error, close the connection. A signal such as a soft time limit could leave
        a reply unread, and the next call would read it:

          here:    take a -> sent   SIGUSR1 ...   take b -> sent -> "a is yours"
          server:             "a is yours" ->               "b is held" ->
        """

        def attempt() -> list[Any]:
            refused, replies = None, []
            try:
                if connection._sock is None:  # noqa: SLF001 - the last attempt closed it
                    self._connect(connection)
                if takes:
                    self.epoch.check()
                connection.send_packed_command(packed)
                for _ in requests:
                    try:
                        replies.append(connection.read_response())
                    except self.errors.ResponseError as error:
                        refused = refused or error
            except BaseException:
                connection.disconnect()
                raise
            if refused is not None:
                if isinstance(refused, self.errors.ReadOnlyError):  # it is no primary any more
                    connection.disconnect()
                raise refused
            return replies

        encoding = connection.encoder.encoding
        packed = [b"".join([_packed(encoding, request) for request in requests])]
        if connection._sock is None:  # noqa: SLF001
            self._connect(connection)  # with the retries of the options
        try:
            if not retries:
                return attempt()
            replies: list[Any] = connection.retry.call_with_retry(attempt, lambda error: None)
            return replies
        except self.errors.NoScriptError:  # a new or flushed server
            load = [("SCRIPT", "LOAD", text) for text in TEXTS]
            return self._send(connection, [*load, *requests], takes, retries)[len(load) :]

    def _connect(self, connection: Any) -> None:
        """Connect, and note the server: another one may have forgotten the locks."""
        try:
            connection.connect()
            connection.send_command("INFO", "server")
            self._see_server(_bytes(connection.read_response()).decode())
        except self.errors.ResponseError:
            return  # it is forbidden: only the epoch shows that locks were forgotten
        except BaseException:
            connection.disconnect()
            raise

    def _see_server(self, facts: str) -> None:
        for line in facts.splitlines():
            if line == "redis_mode:cluster":
                raise ImproperlyConfigured(
                    f"The cache {self.cache_alias!r} cannot hold locks: its server belongs to a "
                    "Redis Cluster, and one request needs several keys. Use a Redis or Valkey "
                    "server that is not in cluster mode, with Sentinel if it must not fail."
                )
            if line.startswith("run_id:"):
                self.epoch.see_server(line)

    def take(
        self, slots: Slots, value: bytes, lease: float, *, heeds_epoch: bool
    ) -> str | dict[str, Entry]:
        keys = [self.epoch_key, *map(self.make_key, slots.keys)]
        limits = slots[1:] if len(slots.keys) > 1 else ()
        epoch = b""
        while True:
            if heeds_epoch:
                epoch = self.epoch.value or b"unknown"
            args = [value, _milliseconds(lease), epoch, *limits]
            (reply,) = self._ask(_script(TAKE, keys, args), takes=heeds_epoch)
            if isinstance(reply, int):
                return slots.keys[reply]
            if reply:
                parts = (_bytes(each).split(b" ", 2) for each in reply)
                return {slots.keys[int(i)]: Entry(each, _left(int(ms))) for i, ms, each in parts}
            self.look()  # if the epoch has changed, the next check raises

    def add_epoch(self, value: bytes) -> None:
        self._ask(("SET", self.epoch_key, value, "NX"))

    def add(self, key: str, value: bytes, lease: float) -> Entry | None:
        taken = self.take(Slots((key,)), value, lease, heeds_epoch=False)
        return None if isinstance(taken, str) else taken[key]

    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        if lease is not None:
            (reply,) = self._ask(self._changing(key, old, new, lease))
            return OUTCOMES[reply]
        sent = clock.now()
        (reply,) = self._ask(_script(CHANGE, [self.make_key(key)], [old]), retries=False)
        if self.was_sent_twice and OUTCOMES[reply] is Outcome.GONE:
            return self.sent_twice(key, old, sent)
        return OUTCOMES[reply]

    def _changing(self, key: str, old: bytes, new: bytes, lease: float) -> tuple[Any, ...]:
        # Unchanged bytes are sent once.
        args = [*dict.fromkeys((old, _milliseconds(lease), new))]
        return _script(CHANGE, [self.make_key(key)], args)

    def _extend(self, requests: Sequence[tuple[str, bytes, float]]) -> list[Outcome]:
        changes = [self._changing(key, value, value, lease) for key, value, lease in requests]
        return [OUTCOMES[reply] for reply in self._ask(*changes)]

    def read_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        wanted = list(keys)
        (replies,) = self._ask(_script(READ, [*map(self.make_key, wanted)], []))
        found = zip(wanted, map(_entry, replies), strict=True)
        return {key: entry for key, entry in found if entry is not None}

    def read(self, key: str) -> Entry | None:
        ((reply,),) = self._ask(_script(READ, [self.make_key(key)], []))
        return _entry(reply)

    def fence(self, key: str, value: bytes) -> int | None:
        keys = [self.make_key(key), self.make_key(FENCE)]
        (number,) = self._ask(_script(FENCE_SCRIPT, keys, [value]))
        return None if number is None else int(number)

    def entries(self) -> Iterator[tuple[str, Entry]]:
        pattern = "".join(f"\\{c}" if c in "*?[]\\" else c for c in self.prefix()) + "*"
        cursor: Any = None
        seen: set[str] = set()
        while cursor not in (b"0", "0"):
            args = [cursor or 0, pattern, BATCH]
            ((cursor, names, values, left),) = self._ask(_script(LIST, [], args))
            for name, value, milliseconds in zip(names, values, left.split(), strict=True):
                key = self.lock_key(_bytes(name).decode(errors="replace"))
                # SCAN may name an entry twice.
                if value is not None and key is not None and key not in seen:
                    seen.add(key)
                    yield key, Entry(_bytes(value), _left(int(milliseconds)))

    def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.disconnect()


class DjangoRedisStore(RedisStore):
    """The same on django-redis, with its default or Sentinel client."""

    def _client(self) -> Any:
        return self.cache.client.get_client(write=True)


class DjangoValkeyStore(DjangoRedisStore):
    """The same on django-valkey, with its default client: valkey-py has the API of redis-py."""

    client_package = "valkey"
