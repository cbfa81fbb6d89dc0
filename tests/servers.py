"""Private servers for the tests: free loopback ports, temporary folders, nothing left behind.

>>> with Redis() as redis:
...     redis.pause()

Start them from a thread that lives on: Linux ends a server with the thread that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import pwd
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode
from urllib.request import urlopen

START_WITHIN = 60
# Below the range of ports for outgoing connections, so that none of those takes the port of a
# server that restarts.
PORTS = range(20_000, 32_000)
PORTS_OF_A_PROCESS = 250

# Folders of servers that are not in PATH: Debian's, then Homebrew's for versioned formulas.
FOLDERS = ["/usr/lib/postgresql/*/bin", "/usr/sbin", "/usr/local/sbin"]
FOLDERS += ["/opt/homebrew/opt/*/bin", "/usr/local/opt/*/bin"]

# A program that becomes the server. It gives up root, and asks Linux to kill it when its parent
# ends in any way; the parent may have ended already. A preexec_fn would be unsafe in a process that
# has threads.
LAUNCHER = """
import ctypes, os, sys
parent, user, group, death, *command = sys.argv[1:]
if user:
    os.setgroups([])
    os.setgid(int(group))
    os.setuid(int(user))  # before prctl(), which a change of the user undoes
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(death))  # PR_SET_PDEATHSIG
if os.getppid() == int(parent):
    os.execv(command[0], command)
"""


class Need(NamedTuple):
    """What tests need, and what installs it."""

    name: str
    apt: str
    brew: str
    program: str = ""
    module: str = ""

    @property
    def how(self) -> str:
        pip = f" && pip install {self.name}" if self.module else ""
        return f"Debian, Ubuntu: apt install {self.apt}{pip}. macOS: brew install {self.brew}{pip}."

    def is_here(self) -> bool:
        if self.module:
            return importlib.util.find_spec(self.module) is not None
        return find(self.program) is not None


NEEDS = [
    Need("Redis", "redis-server", "redis", program="redis-server"),
    Need("Valkey", "valkey-server", "valkey", program="valkey-server"),
    Need("Memcached", "memcached", "memcached", program="memcached"),
    Need("PostgreSQL", "postgresql", "postgresql@17", program="postgres"),
    Need("MariaDB", "mariadb-server", "mariadb", program="mariadbd"),
    Need("PgBouncer", "pgbouncer", "pgbouncer", program="pgbouncer"),
    Need("pylibmc", "gcc libmemcached-dev zlib1g-dev", "libmemcached zlib", module="pylibmc"),
    Need("mysqlclient", "gcc libmariadb-dev pkg-config", "mariadb pkgconf", module="MySQLdb"),
]

# What is needed only by tests that are not in the default run.
NEEDS_OF_THE_REST = [
    Need("RabbitMQ", "rabbitmq-server", "rabbitmq", program="rabbitmq-server"),
    Need("Prometheus", "prometheus", "prometheus", program="prometheus"),
    Need("Chromium", "chromium", "--cask chromium", program="chromium"),
    Need("ChromeDriver", "chromium-driver", "chromedriver", program="chromedriver"),
]


def missing(*, everything: bool = True) -> list[Need]:
    """Return the servers, compiled clients and parts of the browser that are not installed."""
    needs = NEEDS + NEEDS_OF_THE_REST if everything else NEEDS
    return [need for need in needs if not need.is_here()]


def require(program: str) -> None:
    """Skip the test, unless the program of this server is installed."""
    for need in NEEDS + NEEDS_OF_THE_REST:
        if need.program == program and not need.is_here():
            raise unittest.SkipTest(f"{need.name} is not installed")


def find(program: str) -> str | None:
    # In reverse, so that the newest PostgreSQL is first: /usr/lib/postgresql/17 before 15.
    folders = [folder for pattern in FOLDERS for folder in sorted(glob(pattern), reverse=True)]
    return shutil.which(program) or shutil.which(program, path=os.pathsep.join(folders))


def free_port() -> int:
    """Return a port of this process, in turn, that no other program has taken."""
    for port in itertools.islice(reserved_ports(), PORTS_OF_A_PROCESS):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise RuntimeError("All ports of this process are in use")


@functools.cache
def reserved_ports() -> Iterator[int]:
    """Reserve a block of ports for this process, and return an endless iterator over them.

    The first port of a block says whose it is: its process listens there as long as it lives. So
    two runs of the tests never choose the same port, although a server binds its port only some
    seconds after it was chosen.
    """
    for first in range(PORTS.start, PORTS.stop, PORTS_OF_A_PROCESS):
        owner = socket.socket()
        try:
            owner.bind(("127.0.0.1", first))
            owner.listen()
        except OSError:
            owner.close()
            continue
        owner.detach()  # it stays open until the process ends
        return itertools.cycle(range(first + 1, first + PORTS_OF_A_PROCESS))
    raise RuntimeError(f"Too many processes use the ports from {PORTS.start} to {PORTS.stop}")


class Server(ABC):
    """A private server process; a context manager. Each kind says how to start and ask it."""

    program: str
    user = ""  # the user that runs it if root runs the tests
    stop_signal = signal.SIGTERM
    death_signal = signal.SIGKILL

    def __init__(self) -> None:
        self.port = free_port()
        self.folder: Path | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._started = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on port {self.port}>"

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    # What each kind of server brings

    @abstractmethod
    def command(self, folder: Path) -> list[str]: ...

    def fill(self, folder: Path) -> None:  # noqa: B027 - most servers need none
        """Make the files that the server needs to start."""

    @abstractmethod
    def answers(self) -> bool: ...

    # Starting and ending

    def prepare(self) -> None:
        """Make the server's folder, unless it exists; `start` does this too.

        This skips the test if the server is not installed.
        """
        require(self.program)
        if self.folder is None:
            folder = Path(tempfile.mkdtemp(prefix=f"singletask-{self.program}-"))
            if self._account():
                os.chown(folder, *self._account())
            self.folder = folder
            atexit.register(self.stop)
            self.fill(folder)

    def start(self) -> Server:
        """Start the server and return when it answers. After `kill` it finds its files again."""
        self.prepare()
        deadline = time.monotonic() + START_WITHIN
        self._spawn()
        while not self.answers():
            if time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{self!r} does not answer:\n{self._log()}")
            if self.process.poll() is not None:
                # Another process took the port, or children of a killed PostgreSQL still live.
                if time.monotonic() > deadline - START_WITHIN + 5:
                    raise RuntimeError(f"{self!r} ended at its start:\n{self._log()}")
                if not self._started:
                    self.port = free_port()
                time.sleep(0.2)
                self._spawn()
            time.sleep(0.01)
        self._started = True
        return self

    def stop(self) -> None:
        """Shut the server down and remove its files."""
        if os.getpid() != self._owner:
            return  # this is a forked child, and the server is its parent's
        if self.process is not None and self.process.poll() is None:
            self.resume()
            self.process.send_signal(self.stop_signal)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None
        atexit.unregister(self.stop)

    def kill(self) -> None:
        """End the server by SIGKILL; its files stay for the next `start`."""
        if self.process is not None and self.process.poll() is None:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def restart_empty(self) -> None:
        """Restart on the same port with no data, as a cache server does after a crash."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Stop answering while connections stay open (SIGSTOP)."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _spawn(self) -> None:
        program, *arguments = self.command(self.folder)
        account = [str(number) for number in self._account() or ("", "")]
        launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid()), *account]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*launcher, str(int(self.death_signal)), find(program) or program, *arguments],
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the tests, which then stop the servers
            )

    def _run_program(self, program: str, *arguments: str) -> None:
        """Run a program that makes the server's files, as the server's user."""
        uid, gid = self._account() or (None, None)
        done = subprocess.run(
            [find(program) or program, *arguments],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            user=uid,
            group=gid,
            extra_groups=None if uid is None else [],
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed:\n{done.stdout.decode(errors='replace')}")

    def _environment(self) -> dict[str, str]:
        # The server's user may not have access to the temporary folder of the tests.
        return {**os.environ, "TMPDIR": str(self.folder)}

    def _account(self) -> tuple[int, int] | None:
        """Return the user and group that run the server; None: those that run the tests."""
        if not self.user or os.geteuid() != 0:
            return None
        for name in (self.user, "nobody"):
            with contextlib.suppress(KeyError):
                return pwd.getpwnam(name)[2:4]
        return None

    def _signal(self, number: int) -> None:
        # One by one, because PostgreSQL's children lead process groups of their own. The parent
        # first, so that it starts no more of them.
        for pid in [self.process.pid, *children(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-2000:]


class Redis(Server):
    """A Redis server: alone, a replica of another, or a sentinel that watches another."""

    program = "redis-server"
    service = "singletask"

    def __init__(
        self,
        *,
        replica_of: Redis | None = None,
        sentinel_for: Redis | None = None,
        **config: object,  # lines of redis.conf: appendonly="yes"
    ) -> None:
        super().__init__()
        self.replica_of = replica_of
        self.sentinel_for = sentinel_for
        self.config = config
        self.replicas = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self, folder: Path) -> list[str]:
        lines = {"port": self.port, "bind": "127.0.0.1", "dir": folder}
        mode = []
        if self.sentinel_for:
            mode = ["--sentinel"]
            # A minute, so that a machine that hangs for a moment causes no failover.
            lines |= {
                f"sentinel monitor {self.service}": f"127.0.0.1 {self.sentinel_for.port} 1",
                f"sentinel down-after-milliseconds {self.service}": 60_000,
            }
        else:
            lines |= {"save": '""', "repl-diskless-sync-delay": 0}
        if self.replica_of:
            lines["replicaof"] = f"127.0.0.1 {self.replica_of.port}"
        lines |= {name.replace("_", "-"): value for name, value in self.config.items()}
        file = folder / "redis.conf"
        file.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        return [self.program, str(file), *mode]

    def start(self) -> Redis:
        first = not self._started
        super().start()
        if self.replica_of and first:
            self.replica_of.replicas += 1
        return self

    def answers(self) -> bool:
        if self.sentinel_for:
            reply = ask(self.port, f"SENTINEL replicas {self.service}\r\n".encode())
            return reply.startswith(b"*") and int(reply[1:2]) >= self.sentinel_for.replicas
        if self.replica_of:
            return b"master_link_status:up" in ask(self.port, b"INFO replication\r\n")
        return ask(self.port, b"PING\r\n") == b"+PONG\r\n"


class Valkey(Redis):
    """A server of the project that continues Redis 7.2; all else is the same."""

    program = "valkey-server"


class Cluster:
    """A cluster of primaries with a replica each, of one program; a context manager."""

    def __init__(
        self, kind: type[Redis] = Valkey, *, primaries: int = 3, replicas: int = 1, **config: object
    ) -> None:
        self.have_met = False
        options = {
            "cluster_enabled": "yes",
            "cluster_node_timeout": 1000,
            "cluster_replica_validity_factor": 0,
            **config,
        }
        self.nodes = [
            kind(cluster_port=free_port(), **options) for _ in range(primaries * (1 + replicas))
        ]
        self.primaries = self.nodes[:primaries]

    @property
    def url(self) -> str:
        return ",".join(node.url for node in self.primaries)

    def start(self) -> Cluster:
        """Start the nodes, let them meet, and return when each can be used.

        If they have met, start those again that were killed; each finds its files.
        """
        if self.have_met:
            for node in self.nodes:
                if not node.answers():
                    node.start()
            self.wait(lambda: all(map(self.is_ready, self.nodes)))
            return self
        with ThreadPoolExecutor() as threads:
            list(threads.map(Server.prepare, self.nodes))
        for node in self.nodes:
            node.start()
        first, count = self.nodes[0], len(self.primaries)
        for number, node in enumerate(self.nodes):
            assert self.say(node, "CLUSTER SET-CONFIG-EPOCH", number + 1) == "+OK\r\n"
            self.say(first, "CLUSTER MEET 127.0.0.1", node.port, node.config["cluster_port"])
            if number < count:
                ends = (16384 * number // count, 16384 * (number + 1) // count - 1)
                assert self.say(node, "CLUSTER ADDSLOTSRANGE", *ends) == "+OK\r\n"
        ids = [self.id_of(node) for node in self.nodes]
        self.wait(lambda: all(each in self.say(self.nodes[-1], "CLUSTER NODES") for each in ids))
        for number, node in enumerate(self.nodes[count:]):
            primary = ids[number % count]
            self.wait(lambda: self.say(node, "CLUSTER REPLICATE", primary) == "+OK\r\n")  # noqa: B023
        self.wait(lambda: all(map(self.is_ready, self.nodes)))
        self.have_met = True
        return self

    def is_ready(self, node: Redis) -> bool:
        if "cluster_state:ok" not in self.say(node, "CLUSTER INFO"):
            return False
        if len(self.slots(node)) < len(self.primaries):
            return False
        facts = self.say(node, "INFO replication")
        return "role:master" in facts or "master_link_status:up" in facts

    def slots(self, node: Redis) -> list[str]:
        """Return the lines of the primaries that have slots, as a node knows them."""
        lines = self.say(node, "CLUSTER NODES").splitlines()
        return [line for line in lines if len(line.split()) > 8 and "fail" not in line.split()[2]]

    def id_of(self, node: Redis) -> str:
        return self.say(node, "CLUSTER MYID").split()[1]

    @staticmethod
    def say(node: Redis, *words: object) -> str:
        """Send a command, and return the reply as it came."""
        return ask(node.port, " ".join(map(str, words)).encode() + b"\r\n").decode()

    @staticmethod
    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + START_WITHIN
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError("The cluster is not ready")
            time.sleep(0.02)

    def stop(self) -> None:
        for node in reversed(self.nodes):
            node.kill()
            node.stop()

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


class Memcached(Server):
    program = "memcached"
    user = "nobody"

    def __init__(self, *options: str) -> None:
        super().__init__()
        self.options = options

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def command(self, folder: Path) -> list[str]:
        port = str(self.port)
        return [self.program, "-l", "127.0.0.1", "-p", port, "-U", "0", "-c", "1024", *self.options]

    def answers(self) -> bool:
        return ask(self.port, b"version\r\n").startswith(b"VERSION")


class PostgreSQL(Server):
    program = "postgres"
    user = "postgres"
    stop_signal = signal.SIGINT  # fast: does not wait for clients to leave
    death_signal = signal.SIGQUIT  # takes its children along

    @property
    def url(self) -> str:
        return f"postgresql://singletask@127.0.0.1:{self.port}"

    def fill(self, folder: Path) -> None:
        options = ["--username=singletask", "--auth=trust", "--encoding=UTF8", "--locale=C"]
        self._run_program("initdb", "--pgdata=data", "--no-sync", *options)

    def command(self, folder: Path) -> list[str]:
        options = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": 200,
            "fsync": "off",
            "full_page_writes": "off",
            "synchronous_commit": "off",
        }
        settings = [f"--{name}={value}" for name, value in options.items()]
        return [self.program, "-D", str(folder / "data"), *settings]

    def answers(self) -> bool:
        return logs_in(self.port)


class PgBouncer(Server):
    """A pool of connections to a PostgreSQL server, which each transaction may change."""

    program = "pgbouncer"
    user = "postgres"

    def __init__(self, target: int) -> None:
        super().__init__()
        self.target = target  # the port of PostgreSQL

    def command(self, folder: Path) -> list[str]:
        file = folder / "pgbouncer.ini"
        file.write_text(
            f"[databases]\n* = host=127.0.0.1 port={self.target} user=singletask\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\n"
            "unix_socket_dir =\nauth_type = any\npool_mode = transaction\n"
        )
        return [self.program, str(file)]

    def answers(self) -> bool:
        return logs_in(self.port)


class MariaDB(Server):
    program = "mariadbd"
    user = "mysql"

    @property
    def url(self) -> str:
        return f"mysql://singletask@127.0.0.1:{self.port}"

    def fill(self, folder: Path) -> None:
        (folder / "init.sql").write_text(
            "CREATE USER IF NOT EXISTS singletask@'127.0.0.1';\n"
            "GRANT ALL ON *.* TO singletask@'127.0.0.1';\n"
        )
        data = f"--datadir={folder / 'data'}"
        options = ["--auth-root-authentication-method=normal", "--skip-test-db"]
        self._run_program("mariadb-install-db", "--no-defaults", data, *options)

    def command(self, folder: Path) -> list[str]:
        options = {
            "datadir": folder / "data",
            "socket": folder / "socket",
            "pid-file": folder / "pid",
            "init-file": folder / "init.sql",
            "port": self.port,
            "bind-address": "127.0.0.1",
            "character-set-server": "utf8mb4",
            "max-connections": 200,
            "max-connect-errors": 1_000_000,  # `answers` leaves in the middle of the handshake
            "innodb-flush-log-at-trx-commit": 0,
            "innodb-use-native-aio": 0,
        }
        settings = [f"--{name}={value}" for name, value in options.items()]
        return [self.program, "--no-defaults", "--skip-name-resolve", *settings]

    def answers(self) -> bool:
        return ask(self.port)[4:5] == b"\x0a"  # it greets first, with the version of its protocol


class Epmd(Server):
    """Erlang's port mapper: a node that finds none starts a daemon, which outlives the node."""

    program = "epmd"
    user = "rabbitmq"

    def command(self, folder: Path) -> list[str]:
        return [self.program, "-port", str(self.port), "-address", "127.0.0.1"]

    def answers(self) -> bool:
        return len(ask(self.port, b"\0\1n")) >= 4  # the names of its nodes


class RabbitMQ(Server):
    """A node of its own, without plugins. It takes about five seconds to start."""

    program = "rabbitmq-server"
    user = "rabbitmq"

    def __init__(self) -> None:
        super().__init__()
        self.epmd = Epmd()

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def fill(self, folder: Path) -> None:
        (folder / "rabbitmq.conf").touch()
        (folder / "plugins").write_text("[].")

    def command(self, folder: Path) -> list[str]:
        # What Debian has in PATH becomes another user, and logs into the folder of the service.
        debian = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
        return [str(debian) if debian.exists() else self.program, "-noinput"]

    def answers(self) -> bool:
        return ask(self.port, b"AMQP\0\0\x09\1").startswith(b"\1")  # a frame of a method

    def start(self) -> RabbitMQ:
        if self.epmd.process is None or self.epmd.process.poll() is not None:
            self.epmd.start()
        super().start()
        return self

    def stop(self) -> None:
        super().stop()
        self.epmd.stop()

    def _environment(self) -> dict[str, str]:
        variables = {
            "HOME": self.folder,  # for Erlang's cookie
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": self.epmd.port,
            "RABBITMQ_ALLOW_INPUT": 1,  # the script becomes Erlang, instead of waiting for it
            "RABBITMQ_CONF_ENV_FILE": self.folder / "none",
            "RABBITMQ_CONFIG_FILE": self.folder / "rabbitmq",
            "RABBITMQ_DIST_PORT": free_port(),
            "RABBITMQ_ENABLED_PLUGINS_FILE": self.folder / "plugins",
            "RABBITMQ_LOG_BASE": self.folder,
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_MNESIA_BASE": self.folder / "mnesia",
            "RABBITMQ_NODENAME": "singletask@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": self.port,
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }
        texts = {name: str(value) for name, value in variables.items()}
        return {**super()._environment(), **texts}


class Prometheus(Server):
    """Prometheus, which reads the metrics of one port and judges rules five times a second."""

    program = "prometheus"

    def __init__(self, target: int, rules: str) -> None:
        super().__init__()
        self.target = target
        self.rules = rules

    def fill(self, folder: Path) -> None:
        (folder / "rules.yml").write_text(self.rules)
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 200ms, evaluation_interval: 200ms}\n"
            "rule_files: [rules.yml]\n"
            "scrape_configs:\n"
            f"- {{job_name: worker, static_configs: [{{targets: ['127.0.0.1:{self.target}']}}]}}\n"
        )

    def command(self, folder: Path) -> list[str]:
        return [
            self.program,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]

    def answers(self) -> bool:
        return ask(self.port, b"GET /-/ready HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 200")

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression, each with its labels and its value."""
        words = urlencode({"query": expression})
        with urlopen(f"http://127.0.0.1:{self.port}/api/v1/query?{words}") as reply:
            return json.load(reply)["data"]["result"]


def ask(port: int, request: bytes = b"") -> bytes:
    """Return the first part of a server's answer; nothing when there is none."""
    with contextlib.suppress(OSError):
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(request)
            return connection.recv(4096)
    return b""


def logs_in(port: int) -> bool:
    """Log in to PostgreSQL, which a server that is still starting answers with an error."""
    body = struct.pack("!i", 196_608) + b"user\0singletask\0database\0postgres\0\0"
    return ask(port, struct.pack("!i", len(body) + 4) + body).startswith(b"R")


def children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        pgrep = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
        return [int(child) for child in pgrep.stdout.split()]


@contextlib.contextmanager
def running(servers: Iterable[Server]) -> Iterator[None]:
    """Start the servers in this order, and stop them; their files are made at the same time."""
    servers = list(servers)
    try:
        with ThreadPoolExecutor() as threads:
            list(threads.map(Server.prepare, servers))
        for server in servers:
            server.start()
        yield
    finally:
        for server in reversed(servers):
            server.stop()
