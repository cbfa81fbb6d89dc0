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
    find,
)

pytestmark = pytest.mark.only_all("all tests use the servers")

KINDS = [Redis, Memcached, PostgreSQL, MariaDB, RabbitMQ]
ROOT = Path(__file__).parents[2]


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
