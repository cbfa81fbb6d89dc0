"""Many processes that race for one key, and processes that fork; tests/racers.py runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.race

ROOT = Path(__file__).parent.parent
ROUNDS = 100
# A store class each; MySQL takes with other statements than PostgreSQL.
on_each_store = pytest.mark.parametrize(
    "cache_alias", ["redis", "pymemcache", "db_postgres", "db_mariadb"], indirect=True
)
# Locks have a connection of their own to Redis, whatever the client of the cache.
on_each_client = pytest.mark.parametrize(
    "cache_alias", ["redis", "pylibmc", "pymemcache", "db_postgres", "db_mariadb"], indirect=True
)


def run_racers(*arguments: object) -> Any:
    command = [sys.executable, "-m", "tests.racers", *map(str, arguments)]
    variables = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=100
    )
    if done.returncode < 0:
        return {"wrong": "crashed"}
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@on_each_store
@pytest.mark.parametrize("state", ["free", "expired"])
def test_of_16_processes_exactly_one_takes_a_key(cache_alias: str, state: str) -> None:
    result = run_racers("race", cache_alias, "store", state, ROUNDS)
    assert [len(winners) for winners in result["winners"]] == [1] * ROUNDS
    assert [[holder] for holder in result["holders"]] == result["winners"]


@pytest.mark.parametrize(
    ("cache_alias", "state"),
    [("filebased", "free"), ("db_postgres", "expired")],
    indirect=["cache_alias"],
)
def test_control_the_same_race_finds_two_takers_by_django(cache_alias: str, state: str) -> None:
    for _ in range(10):
        result = run_racers("race", cache_alias, "django", state, 100)
        if any(len(winners) > 1 for winners in result["winners"]):
            return
    pytest.fail("cache.add() never had two takers: this race shows nothing")


@pytest.mark.parametrize(
    "cache_alias", ["redis", "pymemcache", "db_postgres", "db_mariadb", "db_sqlite"], indirect=True
)
def test_16_processes_take_turns(cache_alias: str) -> None:
    result = run_racers("turns", cache_alias, 2)
    assert result["runs"] > 10
    assert (result["met"], result["lost"]) == (0, 0)


@pytest.mark.parametrize("cache_alias", ["redis", "pymemcache", "db_postgres"], indirect=True)
def test_16_processes_share_three_slots(cache_alias: str) -> None:
    result = run_racers("slots", cache_alias, "right", 1)
    assert (result["most"], result["lost"]) == (3, 0)


@pytest.mark.parametrize("cache_alias", ["redis", "pymemcache", "db_postgres"], indirect=True)
def test_16_deliveries_of_one_message_take_one_slot_at_a_time(cache_alias: str) -> None:
    result = run_racers("slots", cache_alias, "one run", 1)
    assert (result["most"], result["lost"]) == (1, 0)


@pytest.mark.parametrize("cache_alias", ["redis"], indirect=True)
def test_control_a_take_in_two_steps_lets_a_fourth_in(cache_alias: str) -> None:
    assert run_racers("slots", cache_alias, "broken", 1)["most"] > 3


@on_each_client
def test_every_reply_after_a_fork_belongs_to_its_request(cache_alias: str) -> None:
    assert run_racers("fork", cache_alias, "opened", 1000) == {"wrong": 0, "kept": True}


@pytest.mark.parametrize("cache_alias", ["pylibmc"], indirect=True)
def test_control_an_inherited_client_reads_the_replies_of_others(cache_alias: str) -> None:
    for _ in range(10):
        if run_racers("fork", cache_alias, "inherited", 1000)["wrong"]:
            return
    pytest.fail("no reply went to the wrong process: the test above shows nothing")


@pytest.mark.parametrize(
    "cache_alias", ["redis", "pylibmc", "pymemcache", "db_postgres"], indirect=True
)
def test_threads_read_no_entry_of_each_other(cache_alias: str) -> None:
    assert run_racers("threads", cache_alias, "bytes", 500) == {"wrong": 0}


@pytest.mark.parametrize("cache_alias", ["pylibmc"], indirect=True)
def test_control_threads_of_pylibmc_with_str_keys_read_entries_of_each_other(
    cache_alias: str,
) -> None:
    for _ in range(10):
        # The use of freed memory can also make pylibmc crash.
        if run_racers("threads", cache_alias, "str", 500)["wrong"]:
            return
    pytest.fail("no read got another thread's entry: the test with bytes keys shows nothing")
