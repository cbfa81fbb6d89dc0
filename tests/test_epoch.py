"""A cache that was restarted empty, or flushed, is noticed before its locks are taken by others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import Memcached, Redis, ask

ROOT = Path(__file__).parent.parent
SECONDS = 2.0  # shorter than a third of the lease, so that no renewal is due


def beside(alias, way, fault=""):
    """Let a cache forget a lock that is held, and return what tests/beside.py saw."""
    kind, variable = Memcached, "SINGLETASK_TEST_MEMCACHED"
    if "redis" in alias:
        kind, variable = Redis, "SINGLETASK_TEST_REDIS_URL"
    with kind() as server:
        address = server.url if kind is Redis else server.address
        environment = {
            **os.environ,
            variable: address,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
        }
        command = [sys.executable, "-m", "tests.beside", alias, str(SECONDS)]
        process = subprocess.Popen(
            [*command, *([fault] if fault else [])],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
        )
        with process:
            assert process.stdout.readline() == "held\n"
            if way == "restart":
                server.restart_empty()
            else:
                ask(server.port, b"flush_all\r\n" if kind is Memcached else b"FLUSHALL\r\n")
            return json.loads(process.stdout.read())


@pytest.mark.race
@pytest.mark.parametrize("way", ["restart", "flush"])
@pytest.mark.parametrize("alias", ["redis", "pylibmc", "pymemcache"])
def test_a_live_holder_has_its_lock_back_before_others_take_it(alias, way):
    result = beside(alias, way)
    assert result == {"beside": 0, "retaken": 1, "lost": False}


@pytest.mark.race
@pytest.mark.parametrize("fault", ["nobody is held back", "nobody looks"])
def test_control_without_it_many_runs_go_beside_the_holder(fault):
    assert beside("redis", "restart", fault)["beside"] > 1
