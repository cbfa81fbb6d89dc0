"""The one address of a managed cluster, such as ElastiCache Serverless, before a cluster of tests.

It hides which node has a key, and says so little that only a refusal shows that it is a cluster.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from typing import Any

from redis.crc import key_slot

from tests.servers import Cluster

CROSSED = b"-CROSSSLOT Keys in request don't hash to the same slot\r\n"
INFO = b"# Server\r\nredis_version:7.1\r\n"


class Endpoint:
    """Pass each command on to the node of its keys.

    >>> with Endpoint(cluster) as endpoint:
    ...     connect_to(endpoint.port)
    """

    def __init__(self, cluster: Cluster) -> None:
        self.ports = [node.port for node in cluster.primaries]

    def __enter__(self) -> Endpoint:
        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Client)
        self.server.daemon_threads = True
        self.server.ports = self.ports  # type: ignore[attr-defined]
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


class Client(socketserver.StreamRequestHandler):
    """What serves one connection of a client, with a connection of its own to each node."""

    def setup(self) -> None:
        super().setup()
        self.ports = self.server.ports  # type: ignore[attr-defined]
        self.sockets = [socket.create_connection(("127.0.0.1", port)) for port in self.ports]
        self.nodes = [each.makefile("rwb") for each in self.sockets]

    def finish(self) -> None:
        super().finish()
        for each in [*self.nodes, *self.sockets]:
            each.close()

    def handle(self) -> None:
        while line := self.rfile.readline():
            words = []
            for _ in range(int(line[1:])):
                length = int(self.rfile.readline()[1:])
                words.append(self.rfile.read(length + 2)[:-2])
            self.wfile.write(self.reply(words))

    def reply(self, words: list[bytes]) -> bytes:
        name = words[0].upper()
        keys = words[1:2]
        if name == b"EVALSHA":
            keys = words[3 : 3 + int(words[2])]
        if name == b"INFO":
            return b"$%d\r\n%s\r\n" % (len(INFO), INFO)
        if name == b"CLUSTER":
            here = self.server.server_address[1]
            return b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % here
        if name == b"SCAN":
            return self.scan(*words)
        if name in {b"CLIENT", b"HELLO", b"SCRIPT"}:
            return [self.ask(node, words) for node in self.nodes][-1]
        slots = {key_slot(key) for key in keys}
        if len(slots) > 1:
            return CROSSED
        return self.ask(self.nodes[slots.pop() * len(self.nodes) // 16384], words)

    def scan(self, name: bytes, cursor: bytes, *options: bytes) -> bytes:
        """List the keys of all nodes in turn; the cursor says which one, and where."""
        at, number = divmod(int(cursor), len(self.nodes))
        reply = self.ask(self.nodes[number], [name, b"%d" % at, *options])
        _, _, found, rest = reply.split(b"\r\n", 3)
        following = int(found) * len(self.nodes) + number
        if int(found) == 0:
            following = (number + 1) % len(self.nodes)
        text = b"%d" % following
        return b"*2\r\n$%d\r\n%s\r\n%s" % (len(text), text, rest)

    def ask(self, node: Any, words: list[bytes]) -> bytes:
        node.write(b"*%d\r\n" % len(words))
        for word in words:
            node.write(b"$%d\r\n%s\r\n" % (len(word), word))
        node.flush()
        return self.read(node)

    def read(self, node: Any) -> bytes:
        """Read one reply, as it came."""
        line: bytes = node.readline()
        kind = line[:1]
        if kind == b"$" and line != b"$-1\r\n":
            return line + bytes(node.read(int(line[1:]) + 2))
        parts = {b"*": 1, b"%": 2}.get(kind, 0)  # for each item; a map has keys and values
        count = parts and parts * int(line[1:])
        return line + b"".join(self.read(node) for _ in range(count))
