"""Locks in Redis or Valkey, through Django's RedisCache, django-redis or django-valkey."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any

from django_singletask.stores.base import FENCE, Entry, Outcome, Slots
from django_singletask.stores.epoch import EPOCH, ForgetfulStore
from django_singletask.stores.scripts import CHANGE, FENCE_SCRIPT, LIST, READ, TAKE

__all__ = ["IDLE", "DjangoRedisStore", "DjangoValkeyStore", "RedisStore"]

OUTCOMES = {1: Outcome.OK, 0: Outcome.GONE, -1: Outcome.TAKEN}

IDLE = 1.0
"""Seconds after which the server may have closed an idle connection."""
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


def _packed(encoding: str, *words: str | bytes | int) -> bytes:
    """Return the request to run a script, in half the time of the client's packer."""
    request = [b"*%d\r\n$7\r\nEVALSHA\r\n" % (len(words) + 1)]
    for word in words:
        encoded = word if isinstance(word, bytes) else str(word).encode(encoding)
        request.append(b"$%d\r\n%b\r\n" % (len(encoded), encoded))
    return b"".join(request)


class RedisStore(ForgetfulStore):
    """Run one script for each request, on the primary server, with one client.

    Django's RedisCache reads from replicas, where a new lock still looks free. django-redis with
    ``IGNORE_EXCEPTIONS`` returns False during an outage, which looks like "held". The client
    itself does neither.
    """

    family = "redis"
    client_package = "redis"
    """The package of the client and its exceptions."""

    shared_calls = 0
    """Calls through the client's pool before the store opens its own connection."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        self.errors: Any = import_module(f"{self.client_package}.exceptions")
        self.client_errors = (getattr(self.errors, f"{self.client_package.title()}Error"), OSError)
        self.client = self._client()
        self.epoch_key = self.make_key(EPOCH)
        pool = self.client.connection_pool
        self.connection = pool.connection_class(**pool.connection_kwargs)
        self.connection.register_connect_callback(self._see_server)
        self._takes = False
        self.in_step = False
        """Whether the last reply on the connection was read completely."""
        self._busy = self._was_open = False
        self._used_at = 0.0
        self._calls = 0
        self._take = self.client.register_script(TAKE)
        self._change = self.client.register_script(CHANGE)
        self._read = self.client.register_script(READ)
        self._list = self.client.register_script(LIST)
        self._fence = self.client.register_script(FENCE_SCRIPT)

    def _client(self) -> Any:
        return self.cache._cache.get_client(None, write=True)  # noqa: SLF001 - no public way

    def _call(
        self,
        script: Any,
        keys: Sequence[str | bytes],
        args: Sequence[Any],
        *,
        repeatable: bool = True,
    ) -> Any:
        """Call a script on the store's own connection, as ``script(keys, args)`` would.

        This takes half the time, because the client takes a connection from its pool for each
        command and checks it. Here an error shows that the connection was closed. Then the request
        is sent again if it is ``repeatable``: if the server has already handled it, the reply is
        the same.
        """
        if self._calls < self.shared_calls or self._busy:
            # Busy: a signal handler calls this while it interrupts another call.
            self._calls += 1
            return script(keys, args)
        self._busy = True
        try:
            return self._call_here(script, keys, args)
        except self.errors.ConnectionError:
            if not (repeatable and self._was_open):
                raise
            return self._call_here(script, keys, args)
        finally:
            self._busy = False

    def _call_here(self, script: Any, keys: Sequence[str | bytes], args: Sequence[Any]) -> Any:
        connection = self.connection
        if not self.in_step or (time.monotonic() - self._used_at > IDLE and self._is_stale()):
            # This is the first use, or the server closed the connection, or an error or a signal
            # ended the last call before its reply was read. This call would read that reply:
            #
            #   here:    take a -> sent   SIGUSR1 ...   take b -> sent -> "a is yours"
            #   server:             "a is yours" ->               "b is held" ->
            self._was_open = False
            connection.disconnect()
            connection.connect()
        self.in_step, self._was_open = False, True
        command = [_packed(connection.encoder.encoding, script.sha, len(keys), *keys, *args)]

        def ask() -> Any:
            connection.send_packed_command(command)
            return connection.read_response()

        try:
            # With the retries in the options of the cache, as the client does.
            reply = connection.retry.call_with_retry(ask, lambda error: connection.disconnect())
        except self.errors.NoScriptError:  # a new or flushed server
            reply = script(keys, args)
        self.in_step = True
        self._used_at = time.monotonic()
        return reply

    def _is_stale(self) -> bool:
        try:
            # Readable: the connection was closed, or there is an unexpected reply.
            return bool(self.connection.can_read())
        except (self.errors.ConnectionError, self.errors.TimeoutError, OSError):
            return True

    def take(
        self, slots: Slots, value: bytes, lease: float, *, heeds_epoch: bool
    ) -> str | dict[str, Entry]:
        keys = [self.epoch_key, *map(self.make_key, slots.keys)]
        limits = slots[1:] if len(slots.keys) > 1 else ()
        epoch = b""
        while True:
            if heeds_epoch:
                self.epoch.check()
                epoch = self.epoch.value or b"unknown"
            self._takes = heeds_epoch
            try:
                args = [value, _milliseconds(lease), epoch, *limits]
                reply = self._call(self._take, keys, args)
            finally:
                self._takes = False
            if isinstance(reply, int):
                return slots.keys[reply]
            if reply:
                parts = (_bytes(each).split(b" ", 2) for each in reply)
                return {slots.keys[int(i)]: Entry(each, _left(int(ms))) for i, ms, each in parts}
            self.look()  # if the epoch has changed, the next check raises

    def add_epoch(self, value: bytes) -> None:
        self.client.set(self.epoch_key, value, nx=True)

    def connect_within(self, seconds: float) -> None:
        self.connection.socket_connect_timeout = seconds
        self._calls = self.shared_calls  # the connections of the pool have longer timeouts

    def _see_server(self, connection: Any) -> None:
        """Note the server of a new connection, and stop a take if it is another server.

        The client calls this at each connect, also before it sends a request again.
        """
        connection.send_command("INFO", "server")
        try:
            facts = _bytes(connection.read_response()).decode()
        except self.errors.ResponseError:
            return  # not allowed: only the epoch shows that locks were forgotten
        for line in facts.splitlines():
            if line.startswith("run_id:"):
                self.epoch.see_server(line)
        if self._takes:
            self.epoch.check()

    def add(self, key: str, value: bytes, lease: float) -> Entry | None:
        taken = self.take(Slots((key,)), value, lease, heeds_epoch=False)
        return None if isinstance(taken, str) else taken[key]

    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        if lease is None:
            # If a deletion were sent again, it would find the entry gone.
            reply = self._call(self._change, [self.make_key(key)], [old], repeatable=False)
        else:
            reply = self._call(self._change, *self._request(key, old, new, lease))
        return OUTCOMES[reply]

    def _request(self, key: str, old: bytes, new: bytes, lease: float) -> tuple[Any, Any]:
        # Unchanged bytes are sent once.
        return [self.make_key(key)], [*dict.fromkeys((old, _milliseconds(lease), new))]

    def renew_many(self, requests: list[tuple[str, bytes, float]]) -> list[Outcome]:
        with self.client.pipeline(transaction=False) as pipeline:
            for key, value, lease in requests:
                self._change(*self._request(key, value, value, lease), client=pipeline)
            outcomes = [OUTCOMES[reply] for reply in pipeline.execute()]
        return [
            self._take_again(*request) if outcome is Outcome.GONE else outcome
            for request, outcome in zip(requests, outcomes, strict=True)
        ]

    def read_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        wanted = list(keys)
        replies = self._call(self._read, [*map(self.make_key, wanted)], [])
        found = zip(wanted, map(_entry, replies), strict=True)
        return {key: entry for key, entry in found if entry is not None}

    def read(self, key: str) -> Entry | None:
        return _entry(self._call(self._read, [self.make_key(key)], [])[0])

    def fence(self, key: str, value: bytes) -> int | None:
        number = self._call(self._fence, [self.make_key(key), self.make_key(FENCE)], [value])
        return None if number is None else int(number)

    def entries(self) -> Iterator[tuple[str, Entry]]:
        pattern = "".join(f"\\{c}" if c in "*?[]\\" else c for c in self.prefix()) + "*"
        cursor: Any = None
        seen: set[str] = set()
        while cursor not in (b"0", "0"):
            args = [cursor or 0, pattern, BATCH]
            cursor, names, values, left = self._call(self._list, [], args)
            for name, value, milliseconds in zip(names, values, left.split(), strict=True):
                key = self.lock_key(_bytes(name).decode(errors="replace"))
                # SCAN may name an entry twice.
                if value is not None and key is not None and key not in seen:
                    seen.add(key)
                    yield key, Entry(_bytes(value), _left(int(milliseconds)))

    def close(self) -> None:
        self.connection.disconnect()
        self.client.connection_pool.disconnect()


class DjangoRedisStore(RedisStore):
    """The same on django-redis, with its default or Sentinel client."""

    # The process shares the pool of django-redis, so a greenlet for one task opens no connection.
    shared_calls = 10

    def _client(self) -> Any:
        return self.cache.client.get_client(write=True)

    def close(self) -> None:
        self.connection.disconnect()  # but not the pool, which is shared


class DjangoValkeyStore(DjangoRedisStore):
    """The same on django-valkey, with its default client: valkey-py has the API of redis-py."""

    client_package = "valkey"
