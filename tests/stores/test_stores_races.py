"""Many processes that race for one key; tests/racers.py runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.race

ROOT = Path(__file__).parents[2]
ROUNDS = 100
# A store class each; MySQL takes with other statements than PostgreSQL.
on_each_store = pytest.mark.parametrize(
    "cache_alias", ["redis", "pymemcache", "db_postgres", "db_mariadb"], indirect=True
)


def run_racers(*arguments: object) -> Any:
    command = [sys.executable, "-m", "tests.racers", *map(str, arguments)]
    variables = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.only_all("another case shows it", "free", "db_mariadb")
@on_each_store
@pytest.mark.parametrize("state", ["free", "expired"])
def test_of_16_processes_exactly_one_takes_a_key(cache_alias: str, state: str) -> None:
    result = run_racers("race", cache_alias, "store", state, ROUNDS)
    assert [len(winners) for winners in result["winners"]] == [1] * ROUNDS
    assert [[holder] for holder in result["holders"]] == result["winners"]


@pytest.mark.only_all("it repeats until it goes wrong")
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
