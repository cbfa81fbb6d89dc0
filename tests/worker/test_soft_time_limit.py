"""A soft time limit reaches a body that takes and releases locks all the time.

For more limits: SINGLETASK_TEST_LIMITS=4000 python runtests.py tests/worker/test_soft_time_limit.py
"""

from __future__ import annotations

import os

import pytest
from celery import group

from tests.testapp import tasks

pytestmark = pytest.mark.only_all("test_interrupted.py shows it at each place")

CALLS = int(os.environ.get("SINGLETASK_TEST_LIMITS", "40"))
LIMIT = 0.05
SECONDS = 0.4  # for a body that is not told


def test_a_limit_that_strikes_in_a_lock_of_the_body_is_told(start_worker, queue):
    start_worker()
    calls = [
        tasks.take_short_locks.s(SECONDS).set(queue=queue, soft_time_limit=LIMIT)
        for _ in range(CALLS)
    ]
    results = group(calls).apply_async().get(timeout=60 + CALLS)
    never = results.count("never told")
    assert never == 0, f"{never} of {CALLS} limits were never told"
    assert results.count("told") >= 0.9 * CALLS
