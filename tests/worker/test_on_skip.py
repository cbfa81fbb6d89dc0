"""What on_skip raises, with real workers."""

from __future__ import annotations

import pytest

from tests.deadline import wait_for
from tests.testapp import tasks


@pytest.mark.only_all("shown on another cache", "pymemcache")
@pytest.mark.parametrize("cache", ["redis", "pymemcache"])
def test_a_call_that_is_skipped_is_tried_again_or_rejected(start_worker, queue, on_cache, cache):
    on_cache(cache)
    again, rejecting = tasks.trying_again, tasks.rejecting
    worker = start_worker(cache=cache)

    def skips(call):
        return sum(line["task_id"] == call.id for line in worker.events("skipped"))

    with again.lock("a"), rejecting.lock("a"):
        tried = again.apply_async(("a",), queue=queue)
        wait_for(lambda: skips(tried) >= 3, "it was skipped again and again")
        assert tried.state == "RETRY"
        assert again.apply_async(("a",), queue=queue).id == tried.id  # it is still queued
        rejected = rejecting.apply_async(("a",), queue=queue)
        wait_for(lambda: skips(rejected), "it was skipped")
        wait_for(lambda: rejecting.queued("a") is None, "an equal call can be queued")
    assert tried.get(timeout=20) == "ran"
    wait_for(lambda: again.queued("a") is None, "an equal call can be queued")
    later = rejecting.apply_async(("a",), queue=queue)
    assert later.get(timeout=20) == "ran"
    assert skips(rejected) == 1
    assert [line["task_id"] for line in worker.events("start")] == [tried.id, later.id]
