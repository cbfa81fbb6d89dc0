"""A network that loses a reply, repeats it, or loses a connection."""

from __future__ import annotations

import contextlib
import functools
import select
import socket
import threading
from collections.abc import Callable
from typing import Any


class Proxy:
    """Connect a client with a local server, and lose the reply to one request on demand.

    >>> with Proxy(server.port) as proxy:
    ...     connect_to(proxy.port)
    ...     proxy.lose_reply_to(b"INSERT")  # the server handles it; the client loses the connection
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self.doomed: bytes | None = None
        self.instead: Callable[[], object] | None = None
        self.hangs = threading.Event()
        self.dropped: list[socket.socket] = []
        self.twice = False
        """Whether each reply comes twice at once."""
        self.last: Callable[[], object] = int
        self.lost = 0
        self.requests = 0
        """How often the client has sent something."""

    def __enter__(self) -> Proxy:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.threads: list[threading.Thread] = []
        self.sockets: list[socket.socket] = []
        self._start(self._accept)
        return self

    def __exit__(self, *exc_info: object) -> None:
        # After a close() alone, a thread would still wait in accept() or select().
        for open_socket in [self.listener, *self.sockets]:
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
        for thread in list(self.threads):
            thread.join(10)
        for open_socket in [self.listener, *self.sockets]:
            open_socket.close()

    def lose_reply_to(self, request: bytes) -> None:
        """Lose the reply to the next request that contains these bytes."""
        self.doomed = request

    def lose(self, request: bytes, *, meanwhile: Callable[[], object]) -> None:
        """Lose the next request that contains these bytes, and its connection.

        The server does not get it. ``meanwhile`` is called before the client can send it again.
        """
        self.instead, self.doomed = meanwhile, request

    def hang_up(self) -> None:
        """Close the connections, as a server does that was idle for long."""
        for open_socket in self.sockets:
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)

    def hang(self) -> None:
        """Pass nothing on from now on, while connections stay open, and new ones are accepted."""
        self.hangs.set()

    def drop(self) -> None:
        """Pass nothing on over the connections that are open, as a firewall that forgot them."""
        self.dropped += self.sockets

    def say_again(self) -> None:
        """Send the last reply once more, although nobody asked."""
        self.last()

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self.threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
                self.sockets += [client, server]
                self._start(self._pass_on, client, server)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        losing = False
        with contextlib.suppress(OSError):
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(65536)
                    if (self.hangs.is_set() or source in self.dropped) and data:
                        continue
                    self.requests += source is client
                    if source is client and self.doomed and self.doomed in data:
                        losing, self.doomed = True, None
                        if self.instead:
                            self.instead()
                            source, self.instead = server, None
                    if not data or (losing and source is server):
                        self.lost += losing
                        client.shutdown(socket.SHUT_RDWR)
                        server.shutdown(socket.SHUT_RDWR)
                        return
                    if source is client:
                        server.sendall(data)
                    else:
                        # First: with the reply in hand, a test can ask for it once more.
                        self.last = functools.partial(client.sendall, data)
                        client.sendall(data * (1 + self.twice))


class Interposed:
    """Stand between a client's connection to Redis and its socket, with other methods than that."""

    def __init__(self, connection: Any, **methods: Any) -> None:
        self.sock = connection._sock
        vars(self).update(methods)
        connection._sock = self
        # The reader has it too: the compiled one itself, the other one in its buffer.
        parser = connection._parser
        for reader in (parser, getattr(parser, "_buffer", None)):
            if hasattr(reader, "_sock"):
                reader._sock = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)

    def recv_into(self, buffer: bytearray) -> int:
        """Receive as the compiled reader does."""
        data = self.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)
