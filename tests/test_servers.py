"""The private servers of the tests start, pause and end, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.servers import (
    MariaDB,
    Memcached,
    PostgreSQL,
    RabbitMQ,
    Redis,
    Server,
    ask,
    children,
    find,
)

KINDS = [Redis, Memcached, PostgreSQL, MariaDB, RabbitMQ]
ROOT = Path(__file__).parent.parent


def is_gone(pid: int) -> bool:
    """Wait until a process has ended; a zombie has ended too."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_pauses_restarts_and_leaves_nothing(kind: type[Server]) -> None:
    others = set(children(os.getpid()))

    def family() -> list[int]:
        # Not the server alone: the port mapper of RabbitMQ is a process beside it.
        started = set(children(os.getpid())) - others
        return [*started, *(child for pid in started for child in children(pid))]

    with kind() as server:
        folder = server.folder
        processes = family()
        server.pause()
        assert not server.answers()
        server.resume()
        assert server.answers()
        server.kill()
        assert not server.answers()
        server.start()
        assert server.answers()
        processes += family()
    assert all(is_gone(pid) for pid in processes)
    assert not folder.exists()


def test_redis_can_restart_empty_on_its_port() -> None:
    with Redis() as redis:
        port = redis.port
        assert ask(port, b"SET name value\r\n") == b"+OK\r\n"
        redis.restart_empty()
        assert redis.port == port
        assert ask(port, b"GET name\r\n") == b"$-1\r\n"


def test_a_sentinel_knows_primary_and_replica() -> None:
    with Redis() as primary, Redis(replica_of=primary), Redis(sentinel_for=primary) as sentinel:
        reply = ask(sentinel.port, b"SENTINEL get-master-addr-by-name singletask\r\n")
        assert str(primary.port).encode() in reply


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_killed_test_run_ends_its_servers() -> None:
    script = (
        "from tests.servers import *\n"
        f"servers = [{', '.join(f'{kind.__name__}()' for kind in KINDS if find(kind.program))}]\n"
        "for server in servers: server.start()\n"
        "servers += [server.epmd for server in servers if isinstance(server, RabbitMQ)]\n"
        "for server in servers: print(server.process.pid, server.folder, flush=True)\n"
        "print(flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        lines = [line.split() for line in iter(run.stdout.readline, "\n")]
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    for pid, folder in lines:
        assert is_gone(int(pid))
        shutil.rmtree(folder)
