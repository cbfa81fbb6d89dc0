"""The main process of a worker chooses tokens, and frees the entries of discarded calls."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest

from django_singletask.worker import startup, watcher
from tests import inside
from tests.deliveries import collect_sent, wait_for_debts
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis"),
]


def consumer(pool):
    """Return a worker's consumer with a pool of this kind; Celery knows it by its module."""
    kind = type("TaskPool", (), {"__module__": f"celery.concurrency.{pool}"})
    return SimpleNamespace(pool=kind())


@pytest.fixture
def calls():
    return []


@pytest.fixture
def request_of(calls):
    """Make the request of a message, whose own handlers note that they are called."""

    def make(task):
        return SimpleNamespace(
            task=task,
            id="an id",
            request_dict={},
            on_accepted=lambda *args: calls.append(("accepted", *args)),
            on_success=lambda *args, **kwargs: calls.append(("success", *args)),
        )

    return make


@pytest.fixture
def watched(monkeypatch):
    """Collect the deliveries that the watcher looks after, by pid."""
    monkeypatch.setattr(startup, "watcher", watcher.Watcher())
    return startup.watcher.deliveries


class Request:
    """Has its handlers in its class, as Celery's has."""

    id = "an id"

    def __init__(self, task):
        self.task, self.request_dict = task, {}

    def on_accepted(self, pid, time_accepted):
        pass

    def on_success(self, result):
        pass


class TestHandOutToken:
    def test_each_delivery_has_a_token_of_its_own(self, request_of, watched):
        requests = [request_of(tasks.hold), request_of(tasks.hold)]
        for request in requests:
            startup.hand_out_token(consumer("prefork"), request)
        tokens = {inside.header_of(request.request_dict)["token"] for request in requests}
        assert len(tokens) == 2

    def test_the_header_of_the_message_is_kept(self, request_of, watched):
        request = request_of(tasks.hold)
        fields = {"hops": 3, "token": "of an earlier delivery"}
        headers = inside.headers_for(tasks.hold, "an id", **fields)
        request.request_dict.update(headers, trace="7")
        startup.hand_out_token(consumer("prefork"), request)
        header = inside.header_of(request.request_dict)
        assert (header["hops"], request.request_dict["trace"]) == (3, "7")
        assert header["token"] != fields["token"]

    @pytest.mark.parametrize(
        ("task", "pool"),
        [(tasks.plain, "prefork"), (tasks.hold, "solo"), (tasks.hold, "thread")],
    )
    def test_other_tasks_and_other_pools_have_none(self, request_of, task, pool):
        request = request_of(task)
        startup.hand_out_token(consumer(pool), request)
        assert "token" not in request.request_dict.get("singletask", {})

    def test_the_watcher_learns_which_process_runs_it(self, request_of, watched, calls):
        request = request_of(tasks.hold)
        startup.hand_out_token(consumer("prefork"), request)
        request.on_accepted(77, 0.5)
        assert [*watched] == [77]
        assert watched[77].header.token == inside.header_of(request.request_dict)["token"]
        assert calls == [("accepted", 77, 0.5)]

    def test_the_watcher_learns_that_the_run_of_a_queued_call_has_ended(
        self, request_of, watched, calls
    ):
        request = request_of(tasks.unique)
        headers = inside.headers_for(tasks.unique, "an id", queued="an entry")
        request.request_dict.update(headers)
        startup.hand_out_token(consumer("prefork"), request)
        request.on_accepted(77, 0.5)
        assert not watched[77].ended
        request.on_success("a result")
        assert watched[77].ended
        assert calls == [("accepted", 77, 0.5), ("success", "a result")]

    def test_a_request_whose_run_has_ended_needs_no_collection(self, watched):
        """Otherwise its message stays in the memory of the main process for a while."""
        request = Request(tasks.unique)
        headers = inside.headers_for(tasks.unique, "an id", queued="an entry")
        request.request_dict.update(headers)
        startup.hand_out_token(consumer("prefork"), request)
        gone = weakref.ref(request)
        request.on_accepted(77, 0.5)
        request.on_success("a result")
        watched.clear()
        gc.disable()
        try:
            del request
            assert gone() is None
        finally:
            gc.enable()


class TestDiscardedCall:
    @pytest.fixture
    def message(self, monkeypatch):
        """Queue a call, and give its message."""
        messages = collect_sent(tasks.unique.app, monkeypatch)
        tasks.unique.apply_async(("a",))
        [options] = messages
        headers = {**options["headers"], "id": options["task_id"], "task": tasks.unique.name}
        return SimpleNamespace(headers=headers, id=options["task_id"])

    def test_a_revoked_call_is_queued_no_longer(self, message):
        startup.free_revoked(tasks.unique, message, terminated=False)
        wait_for_debts()
        assert tasks.unique.queued("a") is None

    def test_a_call_that_was_terminated_in_its_run_is_left_to_the_watcher(self, message):
        startup.free_revoked(tasks.unique, message, terminated=True)
        wait_for_debts()
        assert tasks.unique.queued("a").id == message.id

    def test_a_call_of_an_unknown_task_is_queued_no_longer(self, message):
        startup.free_unreadable(message)
        wait_for_debts()
        assert tasks.unique.queued("a") is None

    @pytest.mark.parametrize("headers", [None, {}, {"id": "an id", "task": "any"}], ids=str)
    def test_a_message_of_another_task_frees_nothing(self, message, headers):
        startup.free_unreadable(SimpleNamespace(headers=headers))
        wait_for_debts()
        assert tasks.unique.queued("a").id == message.id
