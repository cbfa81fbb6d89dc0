"""Locks in memcached, through pylibmc or pymemcache."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from django_singletask import clock
from django_singletask.stores.base import MAX_KEY, TRIES, Entry, Outcome, Slots
from django_singletask.stores.epoch import EPOCH, ForgetfulStore
from django_singletask.stores.pipeline import Pipeline

__all__ = ["PyLibMCStore", "PyMemcacheStore"]

PLAIN_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY}}}")
"""Keys that memcached takes; Django looks at each character, and that takes fifty times as long."""
LOOK_AGAIN = 0.05
"""Seconds after which a process that takes locks asks for the epoch again."""

# memcached reads an expiry above 30 days as a date: this one lies in January 1970. It deletes the
# entry at once, with every client and protocol. A negative expiry does not: with pylibmc's binary
# protocol memcached reports success and keeps the entry for decades.
PAST = 30 * 24 * 60 * 60 + 1


def _expiry(lease: float) -> int:
    # memcached counts whole seconds of a clock that ticks once a second, so it ends an entry up to
    # a second early. The holder trusts its lock for the lease and no longer.
    return min(math.ceil(lease) + 1, PAST - 1)


class MemcachedStore(ForgetfulStore):
    """Look at an entry with ``gets``, change it with ``cas``.

    memcached cannot compare and delete, but it can compare and set an expiry in the past:

      holder A: gets -> A's bytes, cas 17
                                        (A's lease ends here, B takes the lock: cas 18)
      holder A: cas 17, expiry in the past -> refused, B keeps its lock
    """

    family = "memcached"

    client: Any
    not_found: Any = ()
    """What the client raises if there is no entry."""
    hung_up: Any = ConnectionError
    """What the client raises if the server has closed the connection."""
    is_open = False
    pipeline: Pipeline | None = None

    def make_key(self, key: str) -> str:
        """Make the cache key; raise ``InvalidCacheKey`` for one that the server would refuse."""
        cache_key: str = self.cache.make_key(key)
        if not PLAIN_KEY.fullmatch(cache_key):
            self.cache.validate_key(cache_key)
        return cache_key

    def add(self, key: str, value: bytes, lease: float) -> Entry | None:
        name, expiry = self._name(key), _expiry(lease)
        for _ in range(TRIES):
            present = self._repeat(self._add, name, value, expiry)
            if present == value:
                return None
            if present is not None:
                return Entry(present, None)
            # The lock was released between the two requests: try again.
        return Entry(b"", None)

    def take(
        self, slots: Slots, value: bytes, lease: float, *, heeds_epoch: bool
    ) -> str | dict[str, Entry]:
        if heeds_epoch:
            if clock.now() >= self.epoch.seen_at + LOOK_AGAIN:
                self.look()
            self.epoch.check()
        return super().take(slots, value, lease, heeds_epoch=heeds_epoch)

    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        name = self._name(key)
        expiry = PAST if lease is None else _expiry(lease)
        for _ in range(TRIES):
            taken = self.pipeline and self.pipeline.remembered(name, old)
            present, cas = taken or self._repeat(self._gets, name)
            if present is None:
                return Outcome.GONE
            if present not in (old, new):
                return Outcome.TAKEN
            if self._cas(name, new, cas, expiry):
                return Outcome.OK
            # A renewal or a takeover changed the entry between the two requests: look again.
        return Outcome.TAKEN

    def read(self, key: str) -> Entry | None:
        value, _cas = self._repeat(self._gets, self._name(key))
        return None if value is None else Entry(value, None)

    def read_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        cache_keys = {self.make_key(key): key for key in keys}
        values = self._repeat(self._get_many, [*cache_keys])
        return {
            cache_keys[each]: Entry(values[each], None) for each in cache_keys if each in values
        }

    def fence(self, key: str, value: bytes) -> int | None:
        raise NotImplementedError(
            "memcached gives no fencing tokens: it can forget a counter at any time, and then a "
            "later holder would get a smaller number. Keep the locks that need one in Redis or in "
            "a database: set SINGLETASK_CACHE, or TaskLock(cache=…)."
        )

    def add_epoch(self, value: bytes) -> None:
        self._ask(self.client.add, self._name(EPOCH), value, 0)

    def close(self) -> None:
        self.client.disconnect_all()

    def _name(self, key: str) -> Any:
        """Return the cache key as the client wants it."""
        return self.make_key(key)

    def _add(self, name: Any, value: bytes, expiry: int) -> Any:
        """Add an entry if there is none; return the value that is there then, None if it is gone.

        A request that was sent twice finds its own value there.
        """
        if self.pipeline and self.client.sock:  # the client connects at its own requests
            return self._ask(self.pipeline.add, name, value, expiry)
        return value if self._ask(self.client.add, name, value, expiry) else self._gets(name)[0]

    def _gets(self, name: Any) -> Any:
        """Return the value, None if there is no entry, and its cas number."""
        return self._ask(self.client.gets, name) or (None, None)

    def _get_many(self, cache_keys: list[str]) -> Any:
        return self._ask(self.client.get_multi, cache_keys)

    def _repeat(self, ask: Any, *args: Any) -> Any:
        """Ask once more if the server has closed the connection; for what can be asked twice.

        A server that was restarted has closed it, however long ago that was, and the client learns
        it by this request.
        """
        was_open = self.is_open
        try:
            return ask(*args)
        except self.hung_up:
            if not was_open:
                raise
            return ask(*args)

    def _cas(self, *args: Any) -> Any:
        return self._ask(self.client.cas, *args)

    def _ask(self, request: Any, *args: Any) -> Any:
        """Send a request; after any error, also one that a signal raises, close the connection.

        An error that a signal raises, such as SystemExit, leaves the reply unread. pymemcache
        would take it for the reply to its next request:

          body:     add a ->  SIGTERM                  release b ->
          server:             a: "STORED" (unread)                   b: ...
          client:                                      b: "STORED"
        """
        self.is_open = False
        try:
            reply = request(*args)
        except self.not_found:
            reply = None
        except BaseException:
            self.hang_up()
            raise
        self.is_open = True
        return reply

    def hang_up(self) -> None:
        """Close the connection; the next request opens another."""
        self.client.disconnect_all()


class PyLibMCStore(MemcachedStore):
    """Keep locks through a pylibmc client of the store's own, text or binary protocol."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)

        class Client(cache._class):  # type: ignore[misc] # noqa: SLF001 - it is pylibmc.Client
            """Return bytes as they are: a lock is never unpickled."""

            def deserialize(self, value: bytes, flags: int) -> bytes:
                return value

        self.client = Client(cache.client_servers, **cache._options)  # noqa: SLF001
        # Without these the client would acknowledge requests that were not carried out.
        self.client.behaviors.update(
            {"cas": True, "buffer_requests": False, "no_block": False, "_noreply": False}
        )
        self.not_found = cache.LibraryValueNotFoundException
        self.client_errors = (cache._lib.Error, OSError)  # noqa: SLF001 - it is pylibmc
        self.unsent = cache._lib.ServerDown  # noqa: SLF001
        errors = ("ConnectionError", "ReadError", "ServerDown", "SomeErrors", "UnknownReadFailure")
        self.hung_up = tuple(getattr(cache._lib, name) for name in errors)  # noqa: SLF001

    def connect_within(self, seconds: float) -> None:
        self.client.behaviors["connect_timeout"] = int(seconds * 1000)

    def hang_up(self) -> None:
        # After an error libmemcached asks the server for nothing for two seconds, also if it is
        # told to disconnect, and with the binary protocol never again. A copy asks at once.
        super().hang_up()
        self.client = self.client.clone()

    def _name(self, key: str) -> bytes:
        # From a str, gets() of pylibmc 1.6.3 makes bytes of its own and frees them before it sends
        # them, without the GIL. By then another thread may have put its own key at that address:
        #
        #   thread 1: gets("a") -> frees b"a" .............. sends b"b" -> reads the entry of b
        #   thread 2:                          b"b" ...
        return self.make_key(key).encode()

    def _gets(self, name: bytes) -> Any:
        # gets says "no entry" too if the server does not answer or has closed the connection. get
        # raises then. If get finds an entry, gets must be asked again, for the cas number.
        while True:
            value, cas = super()._gets(name)
            if value is not None or self._ask(self.client.get, name) is None:
                return value, cas

    def _cas(self, *args: Any) -> Any:
        # With the binary protocol and a proxy before the server, libmemcached refuses a cas unsent
        # (error 47) after a gets that has succeeded; why is not known. The number that gets has
        # returned holds on any connection.
        try:
            return super()._cas(*args)
        except self.unsent:
            return super()._cas(*args)

    def _get_many(self, cache_keys: list[str]) -> dict[str, bytes]:
        # get_multi, too, says that there are no entries if the server has closed the connection.
        # The epoch is an entry that a server has. With several servers ask each, key by key.
        names = [*(cache_key.encode() for cache_key in cache_keys), self._name(EPOCH)]
        while True:
            values = self._ask(self.client.get_multi, names)
            missing = [name for name in names if name not in values]
            doubtful = missing if len(self.cache.client_servers) > 1 or not values else []
            if all(self._ask(self.client.get, name) is None for name in doubtful):
                return {name.decode(): value for name, value in values.items()}


class PyMemcacheStore(MemcachedStore):
    """Keep locks through a pymemcache client of the store's own."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        self.client_errors = (cache._lib.MemcacheError, OSError)  # noqa: SLF001 - pymemcache
        self.hung_up = (ConnectionError, cache._lib.MemcacheUnexpectedCloseError)  # noqa: SLF001
        # Without a serializer bytes stay as they are: a lock is never unpickled. ignore_exc would
        # turn an outage into a miss, noreply an outage into a success. After an error the client
        # would answer "not stored" for a second without asking the server, and then for a minute
        # ask no server or another one, where the locks are not. With no attempts and no dead time
        # it asks the server of the key each time.
        options = {
            **cache._options,  # noqa: SLF001
            **dict.fromkeys(("serde", "serializer", "deserializer")),
            "ignore_exc": False,
            "default_noreply": False,
            "retry_attempts": 0,
            "dead_timeout": -1,
        }
        self.client = cache._class(cache.client_servers, **options)  # noqa: SLF001
        self.clients: dict[str, Any] = self.client.clients
        if type(self.client) is cache._lib.HashClient and len(self.clients) == 1:  # noqa: SLF001
            # To choose one server of one costs more than to ask it.
            (self.client,) = self.clients.values()
            if type(self.client) is cache._lib.Client:  # noqa: SLF001 - and no pool of them
                self.pipeline = Pipeline(self.client)

    def connect_within(self, seconds: float) -> None:
        for client in self.clients.values():
            client.connect_timeout = seconds
