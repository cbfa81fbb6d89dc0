"""Locks in memcached, through pylibmc or pymemcache."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from django_singletask import clock
from django_singletask.arguments import MAX_LEASE
from django_singletask.stores import base
from django_singletask.stores.base import TRIES, Entry, Errors, Outcome, Slots, Store
from django_singletask.stores.epoch import Forgotten
from django_singletask.stores.keys import EPOCH, MAX_KEY

LATEST = 0.6 * base.PATIENCE
"""Seconds after which an error leaves no time to send the request again."""
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
PAST = MAX_LEASE + 1


def _expiry(lease: float) -> int:
    if lease == math.inf:
        return 0
    # memcached counts whole seconds, and may delete an entry one second before its expiry.
    return min(math.ceil(lease) + 1, MAX_LEASE)


def _place(server: str) -> str:
    parts = urlsplit(f"//{server}")
    if parts.path:
        return server.removeprefix("unix:")
    port = parts.port
    if port is None:
        port = 11211
    return base.address(parts.hostname, port)


class MemcachedStore(Store):
    """Change an entry with ``cas``, and the number that ``gets`` returns with the entry.

    The clients cannot compare and delete, but they can compare and set an expiry in the past:

      holder A: gets -> A's bytes, cas 17
                                        (A's lease ends here, B takes the lock: cas 18)
      holder A: cas 17, expiry in the past -> refused, B keeps its lock
    """

    family = "memcached"
    forgets = True

    client: Any
    not_found: Any = ()
    """What the client raises if there is no entry."""
    hung_up: Any = ()
    """What the client raises if the server has closed the connection, or does not answer on it."""
    resends_cas: Any = ()
    """The errors after which a ``cas`` is sent again; ``hung_up`` is for all other requests."""
    is_open: bool = False
    """Whether the last request was answered, so that the connection is open."""

    def __init__(self, cache: Any, alias: str) -> None:
        super().__init__(cache, alias)
        self.places: frozenset[str] = frozenset(map(_place, cache.client_servers))

    def insert(self, key: str, value: bytes, lease: float) -> Any:
        return self._ask("add", self._name(key), value, _expiry(lease))

    # If the epoch is the same after the add as it was known before, the cache has forgotten nothing
    # in between. In the other order a flush could come between the look and the add:
    #
    #   cache:                             flushed
    #   taker:  looks: the same epoch                 adds -> taken, beside the holder
    #
    # With several servers, the epoch is on one of them, and speaks only for that one.

    def take(
        self, slots: Slots, value: bytes, lease: float, *, heeds_epoch: bool
    ) -> str | dict[str, Entry]:
        if heeds_epoch:
            if not self.epoch.value:
                self.look()  # reads the epoch, for the first time in this process
            self.epoch.check()
        taken = super().take(slots, value, lease, heeds_epoch=heeds_epoch)
        # The key of a slot that was taken is a str; without one, take() returns a dict.
        if heeds_epoch and isinstance(taken, str):
            self._read_epoch_after_add(taken)
            try:
                self.epoch.check()
            except Forgotten:
                self.release(taken, value)
                raise
        return taken

    def _read_epoch_after_add(self, key: str) -> None:
        """Note the epoch that the server has now, after the entry of this key was added."""
        self.look()

    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        name = self._name(key)
        expiry = PAST
        if lease is not None:
            expiry = _expiry(lease)
        for _ in range(TRIES):
            present, cas = self._get_with_cas(name, old)
            if present is None:
                if self.read(key) is None:
                    return Outcome.GONE
                continue  # gets found nothing, because the server did not answer it: try again
            if present not in (old, new):
                return Outcome.TAKEN
            if self._ask("cas", name, new, cas, expiry):
                return Outcome.OK
            # Another request changed the entry between these two: try again.
        return Outcome.TAKEN

    def _get_with_cas(self, name: Any, expected: bytes) -> Any:
        """Return the bytes and the cas number of an entry, or None and None if there is none.

        A client that knows the cas number of the ``expected`` bytes need not ask the server.
        """
        return self._ask("gets", name)

    def read_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        names = {self._name(key): key for key in keys}
        values = self._ask("get_multi", [*names])
        return {key: Entry(values[name], None) for name, key in names.items() if name in values}

    def fence(self, key: str, value: bytes) -> int | None:
        # This will not change: memcached does not tell its time either, except in whole seconds.
        raise NotImplementedError(
            "memcached has no fencing tokens: it can lose a counter at any time. Keep locks "
            "that need them in Redis or in a database: set SINGLETASK_CACHE, or TaskLock(cache=…)."
        )

    def close(self) -> None:
        self.client.disconnect_all()

    def _name(self, key: str) -> Any:
        """Return the cache key in the client's type; raise ``InvalidCacheKey`` for a bad one."""
        name = self.make_key(key)
        if not PLAIN_KEY.fullmatch(name):
            self.cache.validate_key(name)
        return name

    def _has_unread(self) -> bool:
        """Return whether a reply came late, or the server has closed the connection."""
        return False

    def _ask(self, request: str, *args: Any) -> Any:
        """Call this method of the client; after any error, close the connection.

        If the connection was open, some errors mean that the request can be sent again.

        An error that a signal raises, such as SystemExit, leaves the reply unread. pymemcache
        would use it as the reply to its next request:

          body:     add a ->  SIGTERM                  release b ->
          server:             a: "STORED" (unread)                   b: ...
          client:                                      b: "STORED"
        """
        while True:
            began = clock.now()
            was_open = self.is_open
            self.is_open = False
            try:
                self.is_asking: bool = True
                if was_open and self._has_unread():
                    raise ConnectionResetError("closed by the server, or out of step")
                reply = getattr(self.client, request)(*args)
            except self.not_found:
                reply = None
            except BaseException as error:
                self.close()
                resends = self.hung_up
                if request == "cas":
                    resends = self.resends_cas
                in_time = clock.now() - began < min(self.limited, LATEST)
                if was_open and in_time and isinstance(error, resends):
                    continue
                if isinstance(error, self.client_errors):
                    raise self.unavailable(error) from error
                raise
            finally:
                self.is_asking = False
            self.is_open = True
            return reply


def _client_class(pylibmc_client: Any, always: list[bytes]) -> Any:
    """Return the class of a store's clients.

    ``always`` has the cache key of the epoch if there is one server only, and otherwise nothing.
    """

    class Client(pylibmc_client):  # type: ignore[misc]
        """Return bytes unchanged: a lock is never unpickled."""

        def deserialize(self, value: bytes, flags: int) -> bytes:
            return value

        # gets and get_multi report "no entry" also if the server does not answer, but a get after
        # them raises. A single server has the epoch, so a reply without any entry is no answer. Of
        # several servers, only those of the keys are asked, and get asks again for each entry that
        # is missing. For _ask() all of this is one request, which begins again after an error: on
        # a new connection, a get alone may call the entry of a server that hangs missing, too.

        def get_multi(self, names: list[bytes]) -> Any:
            asked = {*names, *always}
            while True:
                found = super().get_multi([*asked])
                if found and always:
                    return found
                missing = asked.difference(found)
                there = [name for name in missing if self.get(name) is not None]
                if not there:
                    return found

    return Client


class PyLibMCStore(MemcachedStore):
    """Keep locks through a separate pylibmc client, with the text or binary protocol."""

    def __init__(self, cache: Any, alias: str) -> None:
        super().__init__(cache, alias)
        always = []
        if len(cache.client_servers) == 1:
            always.append(self._name(EPOCH))
        client_class = _client_class(cache._class, always)  # noqa: SLF001 - it is pylibmc.Client
        options = dict(cache._options)  # noqa: SLF001
        # Without behaviors, pylibmc 1.6 prints 30 errors on Python 3.13.
        options.setdefault("behaviors", {})
        self.client: Any = client_class(cache.client_servers, **options)
        # Without these the client would report success before the server does.
        self.client.behaviors.update(
            {"cas": True, "buffer_requests": False, "no_block": False, "_noreply": False}
        )
        pylibmc = cache._lib  # noqa: SLF001
        self.not_found: Any = cache.LibraryValueNotFoundException
        self.client_errors: Errors = (pylibmc.Error, OSError)
        # With the binary protocol and a proxy, libmemcached sometimes refuses to send a cas (error
        # 47) after a successful gets, for an unknown reason. The cas number is valid on any
        # connection.
        self.resends_cas: Any = pylibmc.ServerDown
        self.hung_up: Any = pylibmc.Error  # pylibmc has five errors for closed connections

    def set_timeouts(self, seconds: float) -> None:
        milliseconds = dict.fromkeys(("connect_timeout", "_poll_timeout"), int(seconds * 1e3))
        microseconds = dict.fromkeys(("receive_timeout", "send_timeout"), int(seconds * 1e6))
        self.client.behaviors.update(milliseconds | microseconds)
        self.close()

    def close(self) -> None:
        # After an error libmemcached does not connect for two seconds, and with the binary protocol
        # never again. A copy connects at once.
        super().close()
        self.client = self.client.clone()

    def _name(self, key: str) -> Any:
        # gets() of pylibmc 1.6.3 converts a str to bytes, and frees them before it sends them,
        # without the GIL. Meanwhile another thread may put its own key at that address:
        #
        #   thread 1: gets("a") -> frees b"a" .............. sends b"b" -> reads the entry of b
        #   thread 2:                          b"b" ...
        return super()._name(key).encode()


class PyMemcacheStore(MemcachedStore):
    """Keep locks through a separate pymemcache client."""

    def __init__(self, cache: Any, alias: str) -> None:
        super().__init__(cache, alias)
        pymemcache = cache._lib  # noqa: SLF001
        self.client_errors: Errors = (pymemcache.MemcacheError, OSError)
        self.hung_up: Any = (OSError, pymemcache.MemcacheUnexpectedCloseError)
        # Without a serializer a lock is never unpickled. ignore_exc would turn an outage into a
        # miss, and noreply into a success. By default the client stops asking a server after
        # errors, or asks another one, which does not have the locks. With no attempts and no dead
        # time it always asks the server of the key.
        options: dict[str, Any] = {"timeout": base.TIMEOUT, "connect_timeout": base.TIMEOUT}
        options.update(cache._options)  # noqa: SLF001
        options.update(serde=None, serializer=None, deserializer=None)
        options.update(ignore_exc=False, default_noreply=False, retry_attempts=0, dead_timeout=-1)
        self.client: Any = cache._class(cache.client_servers, **options)  # noqa: SLF001
        self.clients: dict[str, Any] = self.client.clients
        self.last_added: dict[Any, Any] = {}
        """The last entry that was read after an add, by its name and bytes.

        Its facts are the cas number, the connection, and until when the number is used.
        """
        if type(self.client) is pymemcache.HashClient and len(self.clients) == 1:
            # The choice among one server would take longer than the request.
            (self.client,) = self.clients.values()

    def set_timeouts(self, seconds: float) -> None:
        for client in self.clients.values():
            client.timeout = client.connect_timeout = seconds
        self.close()

    # One request reads the epoch and the cas number of the new entry, so a release within FRESH
    # seconds need not read it. A restarted server may use the number again for another holder. A
    # restart closes connections, so the number is used only on the connection that it came from:
    #
    #   holder A:  add   gets -> cas 17                 connects again   cas 17 -> frees B's lock
    #   server:                           restarts
    #   holder B:                                   add -> cas 17
    #
    # A renewal changes the number. Then the server refuses the old number, and the release reads
    # the new one.

    def _read_epoch_after_add(self, key: str) -> None:
        name = self._name(key)
        epoch = self._name(EPOCH)
        found = self._ask("gets_many", [name, epoch])
        sock = getattr(self.client, "sock", None)  # None of several servers, or of a pool
        if sock is not None and name in found:
            present, cas = found[name]
            self.last_added = {(name, present): (cas, sock, clock.now() + FRESH)}
        if epoch in found:
            self.epoch.see(found[epoch][0])
        else:
            self.look()  # adds an epoch

    def _get_with_cas(self, name: Any, expected: bytes) -> Any:
        facts = self.last_added.pop((name, expected), None)
        if facts is not None:
            cas, sock, used_until = facts
            if sock is self.client.sock and clock.now() < used_until:
                return expected, cas
        return super()._get_with_cas(name, expected)

    def _has_unread(self) -> bool:
        for client in self.clients.values():
            sock = getattr(client, "sock", None)  # a pool has no socket
            if sock is None:
                continue
            has_data = base.watch(sock)
            if has_data(0):
                return True
        return False
