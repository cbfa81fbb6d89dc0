"""Locks in Redis or Valkey, through Django's RedisCache or django-redis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import monotonic as clock
from typing import Any

from redis.exceptions import ConnectionError, NoScriptError, TimeoutError

from django_singletask.stores.base import Entry, Outcome, Store, marker_key

__all__ = ["DjangoRedisStore", "RedisStore"]

# A script runs alone on the server, so look and act cannot be torn apart:
#
#   holder A: GET -> mine            (its lease ends here, B takes the lock)
#   holder A: DEL                    frees B's lock: impossible inside a script
ADD = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return false end
return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])}
"""
RELEASE = """
local value = redis.call('GET', KEYS[1])
if value == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return value and -1 or 0
"""
RENEW = """
local value = redis.call('GET', KEYS[1])
if value == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
if value then return -1 end
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 2
"""
REPLACE = """
local value = redis.call('GET', KEYS[1])
if value ~= ARGV[1] and value ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""
READ = """
local value = redis.call('GET', KEYS[1])
return value and {value, redis.call('PTTL', KEYS[1])}
"""
READ_MANY = """
local found = {}
for i, key in ipairs(KEYS) do
    local value = redis.call('GET', key)
    found[i] = value and {value, redis.call('PTTL', key)}
end
return found
"""
CLEAR = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], '1', 'PX', ARGV[2])
return redis.call('DEL', KEYS[1])
"""
IDLE = 1.0
"""Seconds after which a server may have closed a connection that was not used."""

AT_ONCE = 1000
"""Keys that are looked at in one trip."""

OUTCOMES = {1: Outcome.OK, 2: Outcome.RETAKEN, 0: Outcome.GONE, -1: Outcome.TAKEN}


def _milliseconds(lease: float) -> int:
    return max(1, int(lease * 1000))


def _bytes(value: bytes | str) -> bytes:
    # str where the project's options say decode_responses=True
    return value.encode() if isinstance(value, str) else value


def _entry(reply: Any) -> Entry | None:
    if reply is None:
        return None
    value, milliseconds = reply
    return Entry(_bytes(value), milliseconds / 1000 if milliseconds >= 0 else None)


class RedisStore(Store):
    """Run one script a call on the primary, on a client that is kept.

    Django's RedisCache builds a client object for each call and reads from replicas, which lag:
    a lock just taken would look free. django-redis with ``IGNORE_EXCEPTIONS`` answers an outage
    with False, which would look held. The bare client does neither.
    """

    shared_calls = 0
    """Calls through the client's pool before those on a connection of the store's own."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        self.client = self._client()
        pool = self.client.connection_pool
        self.connection = pool.connection_class(**pool.connection_kwargs)
        self._answered = self._busy = self._was_open = False
        self._used = 0.0
        self._calls = 0
        self._add = self.client.register_script(ADD)
        self._release = self.client.register_script(RELEASE)
        self._renew = self.client.register_script(RENEW)
        self._replace = self.client.register_script(REPLACE)
        self._read = self.client.register_script(READ)
        self._read_many = self.client.register_script(READ_MANY)
        self._clear = self.client.register_script(CLEAR)

    def _client(self) -> Any:
        return self.cache._cache.get_client(None, write=True)

    def _call(
        self,
        script: Any,
        keys: Sequence[str | bytes],
        args: Sequence[Any],
        *,
        repeatable: bool = True,
    ) -> Any:
        """Call a script on this store's own connection, the same as ``script(keys, args)``.

        In half the time: the client takes a connection from its pool for each command, and asks
        the system each time whether it still is good. Here the error shows that it is not: what is
        ``repeatable``, and says the same if the server did it already, is then sent once more.
        """
        if self._calls < self.shared_calls or self._busy:
            # Who calls in between is a signal's handler, in the middle of a call of this thread.
            self._calls += 1
            return script(keys, args)
        self._busy = True
        try:
            return self._call_here(script, keys, args)
        except ConnectionError:
            if not (repeatable and self._was_open):
                raise
            return script(keys, args)
        finally:
            self._busy = False

    def _call_here(self, script: Any, keys: Sequence[str | bytes], args: Sequence[Any]) -> Any:
        connection = self.connection
        if not self._answered or (clock() - self._used > IDLE and self._is_stale()):
            # First use; the server closed it; or an error or a signal tore the last call off, whose
            # reply may be on its way, and would be taken for that of this call:
            #
            #   here:    take a -> sent   SIGUSR1 ...   take b -> sent -> "a is yours"
            #   server:             "a is yours" ->               "b is held" ->
            self._was_open = False
            connection.disconnect()
            connection.connect()
        self._answered, self._was_open = False, True

        def ask() -> Any:
            connection.send_command("EVALSHA", script.sha, len(keys), *keys, *args)
            return connection.read_response()

        try:
            # As the client does it, with the retries that the options of the cache ask for.
            reply = connection.retry.call_with_retry(ask, lambda error: connection.disconnect())
        except NoScriptError:  # the server is new, or was emptied
            reply = script(keys, args)
        self._answered = True
        self._used = clock()
        return reply

    def _is_stale(self) -> bool:
        try:
            return bool(self.connection.can_read())  # a reply that nobody asked for, or the end
        except (ConnectionError, TimeoutError, OSError):
            return True

    def add(self, key: str, value: bytes, lease: float) -> Entry | None:
        return _entry(self._call(self._add, [self.make_key(key)], [value, _milliseconds(lease)]))

    def release(self, key: str, value: bytes) -> Outcome:
        made = [self.make_key(key)]
        return OUTCOMES[self._call(self._release, made, [value], repeatable=False)]

    def renew(self, key: str, value: bytes, lease: float) -> Outcome:
        keys = [self.make_key(key), self.make_key(marker_key(key, value))]
        args = [value, _milliseconds(lease)]
        # Sent again, it would find what the first has taken again, and hide that it was gone:
        #
        #   here:    renew ->                          renew ->        "yours": as if it always was
        #   server:         gone: taken again -> lost         yours ->
        return OUTCOMES[self._call(self._renew, keys, args, repeatable=False)]

    def renew_many(self, requests: list[tuple[str, bytes, float]]) -> list[Outcome]:
        with self.client.pipeline(transaction=False) as pipeline:
            for key, value, lease in requests:
                keys = [self.make_key(key), self.make_key(marker_key(key, value))]
                self._renew(keys, [value, _milliseconds(lease)], client=pipeline)
            return [OUTCOMES[reply] for reply in pipeline.execute()]

    def replace(self, key: str, old: bytes, new: bytes, lease: float) -> bool:
        args = [old, new, _milliseconds(lease)]
        return bool(self._call(self._replace, [self.make_key(key)], args))

    def read(self, key: str) -> Entry | None:
        return _entry(self._call(self._read, [self.make_key(key)], []))

    def clear(self, key: str, value: bytes, lease: float) -> bool:
        keys = [self.make_key(key), self.make_key(marker_key(key, value))]
        args = [value, _milliseconds(lease)]
        return bool(self._call(self._clear, keys, args, repeatable=False))

    def entries(self) -> Iterator[tuple[str, Entry]]:
        pattern = f"{_glob_escape(self.prefix())}*"
        # SCAN may name an entry twice.
        found = {_bytes(made) for made in self.client.scan_iter(match=pattern, count=AT_ONCE)}
        keys = [(made, key) for made in found if (key := self.lock_key(made.decode())) is not None]
        for start in range(0, len(keys), AT_ONCE):
            part = keys[start : start + AT_ONCE]
            replies = self._call(self._read_many, [made for made, _key in part], [])
            for (_made, key), reply in zip(part, replies, strict=True):
                if (entry := _entry(reply)) is not None:
                    yield key, entry

    def close(self) -> None:
        self.connection.disconnect()
        self.client.connection_pool.disconnect()


class DjangoRedisStore(RedisStore):
    """The same on django-redis, with its default or Sentinel client."""

    # Its pool serves the whole process: a greenlet that runs one task and ends opens nothing.
    shared_calls = 10

    def _client(self) -> Any:
        return self.cache.client.get_client(write=True)

    def close(self) -> None:
        # The pool is one that django-redis keeps for the whole process.
        self.connection.disconnect()


def _glob_escape(text: str) -> str:
    return "".join("\\" + char if char in "*?[]\\" else char for char in text)
