"""Take a lock in memcached in one round trip, which also returns the cas number."""

from __future__ import annotations

import re
from typing import Any

from django_singletask import clock

__all__ = ["FRESH", "Pipeline"]

REPLY = re.compile(
    rb"(?:NOT_)?STORED\r\n"
    rb"(?:VALUE \S+ \d+ (?P<size>\d+) (?P<cas>\d+)\r\n(?P<value>.*)\r\n)?END\r\n",
    re.DOTALL,
)
NO_REPLY = re.compile(rb"(?!(?:NOT_)?STORED\r\n(?:VALUE |END\r\n)).*\n.*\n")
FRESH = 0.1
"""Seconds for which a cas number is used.

A longer run does not need the speed. A proxy may keep the connection open while its server
restarts, which takes longer than this.
"""


class Pipeline:
    """Send ``add`` and ``gets`` together, on the connection of a pymemcache client.

      one by one:  add -> stored   gets -> A's bytes, cas 17   ...   gets -> the same   cas 17
      together:    add, gets -> stored, A's bytes, cas 17      ...                      cas 17

    A restarted server may use the number again for another holder. A restart closes connections,
    so a number is used only on the connection that it came from:

      holder A:  add, gets -> cas 17                 connects again   cas 17 -> frees B's lock
      server:                          restarts
      holder B:                                  add -> cas 17
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self._taken: tuple[Any, ...] = (None,)

    def add(self, name: str, value: bytes, expiry: int) -> bytes | None:
        """Add an entry if there is none; return the value that is there, None if it is gone again.

        Raises ``ConnectionError`` for any other reply, such as an error. Then the caller sends the
        request through the client, which raises its own error.
        """
        sock, reply, answer = self.client.sock, b"", None
        key = self.client.check_key(name, self.client.key_prefix)
        add = b"add %b 0 %d %d\r\n%b\r\n" % (key, expiry, len(value), value)
        sock.sendall(add + b"gets %b\r\n" % key)
        # A foreign value may contain the end of a reply.
        while answer is None or len(answer["value"] or b"") != int(answer["size"] or 0):
            received = sock.recv(4096)
            reply += received
            if not received or NO_REPLY.match(reply):
                raise ConnectionError(f"The answer of memcached makes no sense: {reply[:80]!r}")
            answer = REPLY.fullmatch(reply)
        if answer["value"] == value:
            self._taken = name, value, answer["cas"], sock, clock.now() + FRESH
        return answer["value"]

    def remembered(self, name: str, value: bytes) -> tuple[bytes, bytes] | None:
        """Return, once, the value and the cas number of the entry that was just added here."""
        taken, self._taken = self._taken, (None,)
        if taken[:2] != (name, value):
            return None
        *_, cas, sock, until = taken
        return (value, cas) if sock is self.client.sock and clock.now() < until else None
