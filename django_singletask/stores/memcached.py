"""Locks in memcached, through pylibmc or pymemcache."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

from django_singletask.stores.base import Entry, Outcome, Store, marker_key

__all__ = ["PyLibMCStore", "PyMemcacheStore"]

# Above 30 days memcached reads an expiry as a date: this one lies in January 1970. It deletes at
# once, with every client and protocol; a negative expiry does not (pylibmc's binary protocol
# reports success and leaves the entry for decades).
PAST = 30 * 24 * 60 * 60 + 1

TRIES = 10


def _expiry(lease: float) -> int:
    # memcached counts in whole seconds of a clock that ticks once a second, so it ends a lease up
    # to a second early. The holder trusts its lock for the lease alone.
    return min(math.ceil(lease) + 1, PAST - 1)


class MemcachedStore(Store):
    """Look at an entry with ``gets``, change it with ``cas``.

    memcached cannot compare and delete, but it can compare and set an expiry in the past:

      holder A: gets -> A's bytes, cas 17
                                        (A's lease ends here, B takes the lock: cas 18)
      holder A: cas 17, expiry in the past -> refused, B keeps its lock
    """

    client: Any
    not_found: Any = ()

    def make_key(self, key: str) -> str:
        """Make the key; refuse one that the server cannot take, of a prefix with a space, say."""
        made: str = self.cache.make_and_validate_key(key)
        return made

    @abstractmethod
    def _client_add(self, key: str, value: bytes, expiry: int) -> bool: ...

    @abstractmethod
    def _gets(self, key: str) -> tuple[bytes | None, Any]: ...

    @abstractmethod
    def _cas(self, key: str, value: bytes, cas: Any, expiry: int) -> bool: ...

    def _ask(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Send a request; after an error, a signal's too, start anew on another connection.

        An error that a signal raises, such as SystemExit, leaves the reply unread, and pymemcache
        would take it for the reply to its next request:

          body:     add a ->  SIGTERM                  release b ->
          server:             a: "STORED" (unread)                   b: ...
          client:                                      b: "STORED"

        libmemcached would leave a server alone for two seconds after its outage, and with the
        binary protocol for good.
        """
        try:
            return request(*args, **kwargs)
        except self.not_found:
            return None
        except BaseException:
            self.client.disconnect_all()
            raise

    def close(self) -> None:
        self.client.disconnect_all()

    def add(self, key: str, value: bytes, lease: float) -> Entry | None:
        made = self.make_key(key)
        for _ in range(TRIES):
            if self._client_add(made, value, _expiry(lease)):
                return None
            found, _cas = self._gets(made)
            if found is not None:
                return Entry(found, None)
            # It was released between the two requests: once more.
        return Entry(b"", None)

    def release(self, key: str, value: bytes) -> Outcome:
        return self._change(self.make_key(key), value, value, PAST)

    def renew(self, key: str, value: bytes, lease: float) -> Outcome:
        made = self.make_key(key)
        outcome = self._change(made, value, value, _expiry(lease))
        if outcome is not Outcome.GONE:
            return outcome
        # clear() writes its marker before it deletes, so whoever finds no entry because of it
        # finds the marker. In the other order:
        #
        #   clear: delete                                        marker
        #   renew:         gets -> none   marker? none   add -> taken again
        marker, _cas = self._gets(self.make_key(marker_key(key, value)))
        if marker is not None:
            return Outcome.GONE
        entry = self.add(key, value, lease)
        # Another thread of the holder may have renewed at the same moment, and taken it again.
        return Outcome.RETAKEN if entry is None or entry.value == value else Outcome.TAKEN

    def replace(self, key: str, old: bytes, new: bytes, lease: float) -> bool:
        return self._change(self.make_key(key), old, new, _expiry(lease)) is Outcome.OK

    def read(self, key: str) -> Entry | None:
        found, _cas = self._gets(self.make_key(key))
        return None if found is None else Entry(found, None)

    def clear(self, key: str, value: bytes, lease: float) -> bool:
        # The marker stays even if nothing is deleted: then the lock is gone or somebody else's,
        # and another operator who clears it at this moment may rely on it.
        self._client_add(self.make_key(marker_key(key, value)), b"1", _expiry(lease))
        return self._change(self.make_key(key), value, value, PAST) is Outcome.OK

    def _change(self, made: str, old: bytes, new: bytes, expiry: int) -> Outcome:
        for _ in range(TRIES):
            found, cas = self._gets(made)
            if found is None:
                return Outcome.GONE
            if found not in (old, new):
                return Outcome.TAKEN
            if self._cas(made, new, cas, expiry):
                return Outcome.OK
            # Changed between the two requests (by a renewal, a takeover): look again.
        return Outcome.TAKEN


class PyLibMCStore(MemcachedStore):
    """Locks through a pylibmc client of its own, text or binary protocol."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        import pylibmc

        class Client(pylibmc.Client):  # type: ignore[misc]
            """Keep bytes as they are: a lock is never unpickled."""

            def serialize(self, value: bytes) -> tuple[bytes, int]:
                return value, 0

            def deserialize(self, value: bytes, flags: int) -> bytes:
                return value

        cache._class = Client
        self.client = cache._cache
        # Each of the others would acknowledge a request that was not carried out.
        self.client.behaviors.update(
            {"cas": True, "buffer_requests": False, "no_block": False, "_noreply": False}
        )
        self.not_found = pylibmc.NotFound

    # Keys go to the client as bytes. Of a str, gets() of pylibmc 1.6.3 makes bytes of its own and
    # frees them before it sends them, without the GIL. By then another thread may have put its
    # own key there:
    #
    #   thread 1: gets("a") -> frees b"a" .............. sends b"b" -> reads the entry of b
    #   thread 2:                          b"b" ...

    def _client_add(self, key: str, value: bytes, expiry: int) -> bool:
        return bool(self._ask(self.client.add, key.encode(), value, time=expiry))

    def _gets(self, key: str) -> tuple[bytes | None, Any]:
        # gets says "no entry" too when the server does not answer, or has closed the connection;
        # get raises then. If get finds an entry, gets has to be asked again for its cas.
        raw = key.encode()
        while True:
            value, cas = self._ask(self.client.gets, raw) or (None, None)
            if value is not None or self._ask(self.client.get, raw) is None:
                return value, cas

    def _cas(self, key: str, value: bytes, cas: Any, expiry: int) -> bool:
        return bool(self._ask(self.client.cas, key.encode(), value, cas, time=expiry))


class _Raw:
    """Keep bytes as they are: a lock is never unpickled."""

    def serialize(self, key: bytes, value: bytes) -> tuple[bytes, int]:
        return value, 0

    def deserialize(self, key: bytes, value: bytes, flags: int) -> bytes:
        return value


class PyMemcacheStore(MemcachedStore):
    """Locks through a pymemcache client of its own."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        # ignore_exc would turn an outage into a miss, noreply an outage into a success. After an
        # error the client would answer "not stored" for a second without asking the server, and
        # then leave it alone for a minute, or use another one, where the locks are not: with no
        # attempts and no dead time it asks the server of the key each time.
        cache._options = {
            **cache._options,
            "serde": _Raw(),
            "ignore_exc": False,
            "default_noreply": False,
            "retry_attempts": 0,
            "dead_timeout": -1,
        }
        self.client = cache._cache

    def _client_add(self, key: str, value: bytes, expiry: int) -> bool:
        return bool(self._ask(self.client.add, key, value, expire=expiry))

    def _gets(self, key: str) -> tuple[bytes | None, Any]:
        value, cas = self._ask(self.client.gets, key)
        return value, cas

    def _cas(self, key: str, value: bytes, cas: Any, expiry: int) -> bool:
        return bool(self._ask(self.client.cas, key, value, cas, expire=expiry))
