"""Other bases with a ``__call__``, and retries after a conflict, in a real worker."""

from __future__ import annotations

import pytest

from tests.deadline import wait_for
from tests.testapp import tasks

on_both_families = pytest.mark.parametrize("cache", ["redis", "pymemcache"])


@pytest.mark.only_all("it starts a worker")
@on_both_families
def test_another_base_is_called_once_a_run(start_worker, queue, on_cache, cache):
    on_cache(cache)
    worker = start_worker(cache=cache)
    sides = {tasks.noted_inside: True, tasks.noted_outside: False}
    results = [task.apply_async(("a",), queue=queue) for task in sides]
    for task, result in zip(sides, results, strict=True):
        assert result.get(timeout=20) == "ran"
        wait_for(lambda task=task: task.queued("a") is None, "it is queued no more")
        assert called(worker, task) == [sides[task]] * 2  # and once for its retry


def called(worker, task):
    return [line["locked"] for line in worker.events("called") if line["task"] == task.name]


@pytest.mark.only_all("shown on another cache", "pymemcache")
@on_both_families
def test_a_conflict_is_retried_until_the_lock_is_free(start_worker, queue, on_cache, cache):
    on_cache(cache)
    worker = start_worker(cache=cache)
    with tasks.tenacious.lock("a"):
        result = tasks.tenacious.apply_async(("a",), queue=queue)
        wait_for(lambda: len(worker.events("conflict")) > 1, "it was retried")
        assert tasks.tenacious.queued("a").id == result.id
        assert not worker.events("start")
    assert result.get(timeout=20) == "ran"
