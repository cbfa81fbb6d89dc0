"""Locks in memcached, through pylibmc or pymemcache."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from django_singletask import clock
from django_singletask.exceptions import LockUnavailable
from django_singletask.stores.base import MAX_KEY, TRIES, Entry, Outcome, Slots
from django_singletask.stores.epoch import EPOCH, ForgetfulStore, Forgotten

PLAIN_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY}}}")
"""Keys that memcached accepts; Django's own check takes fifty times as long."""
FRESH = 0.1
"""Seconds for which a cas number is used.

A longer run does not need the speed. A proxy may keep the connection open while its server
restarts, which takes longer than this.
"""

# memcached reads an expiry above 30 days as a date, which is here in January 1970, and deletes the
# entry at once. A negative expiry does not work: with pylibmc's binary protocol memcached reports
# success, but keeps the entry for decades.
PAST = 30 * 24 * 60 * 60 + 1


def _expiry(lease: float) -> int:
    # memcached counts whole seconds, so an entry can end up to a second early.
    return min(math.ceil(lease) + 1, PAST - 1)


class MemcachedStore(ForgetfulStore):
    """Read an entry with ``gets``, and change it with ``cas``.

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

    def make_key(self, key: str) -> str:
        """Return the cache key, or raise ``InvalidCacheKey`` if the server would refuse it."""
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
            if self.epoch.value is None:
                self.look()
            self.epoch.check()
        taken = super().take(slots, value, lease, heeds_epoch=heeds_epoch)
        if heeds_epoch and isinstance(taken, str):
            self._look_after_add(taken, value)
            try:
                self.epoch.check()
            except Forgotten:
                self.release(taken, value)
                raise
        return taken

    # If the epoch is the same after the add as it was known before, the cache has forgotten nothing
    # in between. In the other order a flush could come between the look and the add:
    #
    #   cache:                             flushed
    #   taker:  looks: the same epoch                 adds -> taken, beside the holder
    #
    # With several servers, the epoch is on one of them, and speaks only for that one.

    def _look_after_add(self, key: str, value: bytes) -> None:
        epoch = self._repeat(self._ask, self.client.get, self._name(EPOCH))
        if epoch is None:
            self.look()  # adds one
        else:
            self.epoch.see(epoch)

    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        name = self._name(key)
        expiry = PAST if lease is None else _expiry(lease)
        for _ in range(TRIES):
            present, cas = self._remembered(name, old) or self._repeat(self._gets, name)
            if present is None:
                return Outcome.GONE
            if present not in (old, new):
                return Outcome.TAKEN
            if self._cas(name, new, cas, expiry):
                return Outcome.OK
            # Another request changed the entry between these two: try again.
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
            "memcached has no fencing tokens: it can lose a counter at any time, and then a later "
            "holder would get a smaller number. Keep locks that need a token in Redis or in a "
            "database: set SINGLETASK_CACHE, or TaskLock(cache=…)."
        )

    def add_epoch(self, value: bytes) -> None:
        self._ask(self.client.add, self._name(EPOCH), value, 0)

    def close(self) -> None:
        self.client.disconnect_all()

    def _name(self, key: str) -> Any:
        """Return the cache key in the client's type."""
        return self.make_key(key)

    def _add(self, name: Any, value: bytes, expiry: int) -> Any:
        """Add an entry if there is none; return the value that is there, None if it is gone again.

        A request that was sent twice finds its own value there.
        """
        return value if self._ask(self.client.add, name, value, expiry) else self._gets(name)[0]

    def _remembered(self, name: Any, value: bytes) -> Any:
        """Return, once, the value and the cas number of the entry that was just added here."""
        return None

    def _gets(self, name: Any) -> Any:
        """Return the value and its cas number; None for each if there is no entry."""
        return self._ask(self.client.gets, name) or (None, None)

    def _get_many(self, cache_keys: list[str]) -> Any:
        return self._ask(self.client.get_multi, cache_keys)

    def _repeat(self, ask: Any, *args: Any) -> Any:
        """Send a request again if the server has closed the connection, as after a restart."""
        was_open = self.is_open
        try:
            return ask(*args)
        except LockUnavailable as error:
            if not was_open or not isinstance(error.__cause__, self.hung_up):
                raise
            return ask(*args)

    def _cas(self, *args: Any) -> Any:
        return self._ask(self.client.cas, *args)

    def _ask(self, request: Any, *args: Any) -> Any:
        """Send a request; after any error, close the connection.

        An error that a signal raises, such as SystemExit, leaves the reply unread. pymemcache
        would use it as the reply to its next request:

          body:     add a ->  SIGTERM                  release b ->
          server:             a: "STORED" (unread)                   b: ...
          client:                                      b: "STORED"
        """
        self.is_open = False
        try:
            reply = request(*args)
        except self.not_found:
            reply = None
        except BaseException as error:
            self.hang_up()
            if isinstance(error, self.client_errors):
                raise self.unavailable(error) from error
            raise
        self.is_open = True
        return reply

    def hang_up(self) -> None:
        self.client.disconnect_all()


class PyLibMCStore(MemcachedStore):
    """Keep locks through a separate pylibmc client, with the text or binary protocol."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)

        class Client(cache._class):  # type: ignore[misc] # noqa: SLF001 - it is pylibmc.Client
            """Return bytes unchanged: a lock is never unpickled."""

            def deserialize(self, value: bytes, flags: int) -> bytes:
                return value

        self.client = Client(cache.client_servers, **cache._options)  # noqa: SLF001
        # Without these the client would report success before the server does.
        self.client.behaviors.update(
            {"cas": True, "buffer_requests": False, "no_block": False, "_noreply": False}
        )
        self.not_found = cache.LibraryValueNotFoundException
        self.client_errors = (cache._lib.Error, OSError)  # noqa: SLF001 - it is pylibmc
        self.unsent = cache._lib.ServerDown  # noqa: SLF001
        errors = ("ConnectionError", "ReadError", "ServerDown", "SomeErrors", "UnknownReadFailure")
        self.hung_up = tuple(getattr(cache._lib, name) for name in errors)  # noqa: SLF001

    def set_timeouts(self, seconds: float) -> None:
        units = {"connect_timeout": 1e3, "_poll_timeout": 1e3}  # in milli- and microseconds
        units |= {"receive_timeout": 1e6, "send_timeout": 1e6}
        for name, unit in units.items():
            limit = int(seconds * unit)
            before = self.client.behaviors[name]
            self.client.behaviors[name] = min(before, limit) if before > 0 else limit
        self.hang_up()

    def hang_up(self) -> None:
        # After an error libmemcached does not connect for two seconds, and with the binary protocol
        # never again. A copy connects at once.
        super().hang_up()
        self.client = self.client.clone()

    def _name(self, key: str) -> bytes:
        # gets() of pylibmc 1.6.3 converts a str to bytes, and frees them before it sends them,
        # without the GIL. Meanwhile another thread may put its own key at that address:
        #
        #   thread 1: gets("a") -> frees b"a" .............. sends b"b" -> reads the entry of b
        #   thread 2:                          b"b" ...
        return self.make_key(key).encode()

    def _gets(self, name: bytes) -> Any:
        # gets reports "no entry" also if the server does not answer, but get raises. If get finds
        # an entry, send gets again for the cas number.
        while True:
            value, cas = super()._gets(name)
            if value is not None or self._ask(self.client.get, name) is None:
                return value, cas

    def _cas(self, *args: Any) -> Any:
        # With the binary protocol and a proxy, libmemcached sometimes refuses to send a cas (error
        # 47) after a successful gets, for an unknown reason. The cas number is valid on any
        # connection.
        try:
            return super()._cas(*args)
        except LockUnavailable as error:
            if not isinstance(error.__cause__, self.unsent):
                raise
            return super()._cas(*args)

    def _get_many(self, cache_keys: list[str]) -> dict[str, bytes]:
        # get_multi returns no entries also if the server has closed the connection. One server
        # always has the epoch. With several servers, check each missing key.
        names = [*(cache_key.encode() for cache_key in cache_keys), self._name(EPOCH)]
        while True:
            values = self._ask(self.client.get_multi, names)
            missing = [name for name in names if name not in values]
            doubtful = missing if len(self.cache.client_servers) > 1 or not values else []
            if all(self._ask(self.client.get, name) is None for name in doubtful):
                return {name.decode(): value for name, value in values.items()}


class PyMemcacheStore(MemcachedStore):
    """Keep locks through a separate pymemcache client."""

    _taken: tuple[Any, ...] = (None,)

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        self.client_errors = (cache._lib.MemcacheError, OSError)  # noqa: SLF001 - pymemcache
        self.hung_up = (ConnectionError, cache._lib.MemcacheUnexpectedCloseError)  # noqa: SLF001
        # Without a serializer a lock is never unpickled. ignore_exc would turn an outage into a
        # miss, and noreply into a success. By default the client stops asking a server after
        # errors, or asks another one, which does not have the locks. With no attempts and no dead
        # time it always asks the server of the key.
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
            # The choice among one server would take longer than the request.
            (self.client,) = self.clients.values()

    def set_timeouts(self, seconds: float) -> None:
        for client in self.clients.values():
            client.timeout = min(client.timeout or seconds, seconds)
            client.connect_timeout = min(client.connect_timeout or seconds, seconds)
        self.hang_up()

    # One request reads the epoch and the cas number of the new entry, so the release need not read
    # it. A restarted server may use the number again for another holder. A restart closes
    # connections, so the number is used only on the connection that it came from:
    #
    #   holder A:  add   gets -> cas 17                 connects again   cas 17 -> frees B's lock
    #   server:                           restarts
    #   holder B:                                   add -> cas 17
    #
    # A renewal changes the number, so the server then refuses it, and the release reads it again.

    def _look_after_add(self, key: str, value: bytes) -> None:
        name, epoch = self._name(key), self._name(EPOCH)
        found = self._repeat(self._ask, self.client.gets_many, [name, epoch])
        present, cas = found.get(name, (None, None))
        sock = getattr(self.client, "sock", None)  # not of several servers, or of a pool
        if present == value and sock is not None:
            self._taken = name, value, cas, sock, clock.now() + FRESH
        if epoch in found:
            self.epoch.see(found[epoch][0])
        else:
            self.look()

    def _remembered(self, name: Any, value: bytes) -> Any:
        taken, self._taken = self._taken, (None,)
        if taken[:2] != (name, value):
            return None
        *_, cas, sock, until = taken
        return (value, cas) if sock is self.client.sock and clock.now() < until else None
