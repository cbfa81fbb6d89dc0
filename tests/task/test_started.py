"""With ``task_track_started``, STARTED is stored when the body begins, and replaces nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest
from celery.exceptions import Retry

from django_singletask import SingletonTask
from tests.deliveries import collect_sent, deliver, held_by
from tests.inside import headers_for
from tests.overwriting import URL, Overwriting
from tests.testapp import tasks
from tests.testapp.celery import app

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis"),
]


class Recording(Overwriting):
    """Collect what is stored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stored: list[tuple[str, Any]] = []

    def _store_result(self, task_id: str, result: Any, state: str, *rest: Any, **facts: Any) -> Any:
        self.stored.append((state, result))
        return super()._store_result(task_id, result, state, *rest, **facts)

    def row(self) -> Any:
        return self.client.get(self.get_key_for_task("mine"))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    monkeypatch.setenv("SINGLETASK_TEST_LOG", str(tmp_path / "log"))
    recording = Recording(app=app, url=f"{URL}/2")
    recording.client.delete(recording.get_key_for_task("mine"))
    for task in (tasks.hold, tasks.requeue):
        monkeypatch.setattr(task.__class__, "backend", recording)
        monkeypatch.setattr(task.__class__, "stores_started", True)
    yield recording
    recording.client.delete(recording.get_key_for_task("mine"))


def message(task: Any = tasks.hold, again: bool = False, **request: Any) -> Any:
    facts = {"delivery_info": {"redelivered": again}, "ignore_result": False}
    return deliver(task, "a", **headers_for(task, due=time.time() - 60) | facts | request)


def test_a_run_stores_it_once(backend: Any) -> None:
    message(hostname="a worker")
    (state, facts), success = backend.stored
    assert (state, facts["hostname"], success) == ("STARTED", "a worker", ("SUCCESS", "ran"))


def test_a_run_without_a_lock_stores_it(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.hold.__class__, "lock_on", None)
    monkeypatch.setattr(tasks.hold.__class__, "lock_name", staticmethod(lambda *args: None))
    message()
    assert [state for state, _ in backend.stored] == ["STARTED", "SUCCESS"]


def test_a_run_that_ignores_its_result_stores_nothing(backend: Any) -> None:
    message(ignore_result=True)
    assert backend.stored == []


def test_without_the_setting_it_is_not_stored(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks.hold.__class__, "stores_started", False)
    message()
    assert [state for state, _ in backend.stored] == ["SUCCESS"]


@pytest.mark.parametrize("state", ["SUCCESS", "RETRY"])
def test_a_dropped_delivery_leaves_the_result_as_it_was(backend: Any, state: str) -> None:
    backend.store_result("mine", "first", state)
    row = backend.row()
    assert message(again=True).info.state == "IGNORED"
    assert backend.row() == row


def test_the_state_of_a_run_that_celery_cancelled_has_a_retry_as_its_error(backend: Any) -> None:
    """So it can be told from a run whose next try is on its way."""
    backend.mark_as_retry("mine", Retry(message="cancelled by Celery"))
    assert isinstance(tasks.hold.AsyncResult("mine").result, Retry)
    backend.mark_as_retry("mine", ValueError("this run retries"))
    assert not isinstance(tasks.hold.AsyncResult("mine").result, Retry)


def test_control_celery_alone_replaces_it(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the call runs again."""
    monkeypatch.setattr(tasks.hold.__class__, "track_started", True)
    backend.store_result("mine", "first", "SUCCESS")
    collect_sent(app, monkeypatch)
    message(again=True)
    assert backend.stored[1][0] == "STARTED"


def test_a_postponed_call_has_no_state(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = collect_sent(app, monkeypatch)
    with held_by("another", task=tasks.requeue):
        message(tasks.requeue)
    assert len(sent) == 1
    assert backend.stored == []


def test_a_skipped_call_has_not_started(backend: Any) -> None:
    with held_by("another"):
        message()
    assert backend.stored == [("SUCCESS", "skipped")]


def test_other_states_are_stored_before_the_call(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before_start(task: Any, *args: Any) -> None:
        task.update_state(state="PREPARED")

    monkeypatch.setattr(tasks.hold.__class__, "before_start", before_start)
    message()
    assert [state for state, _ in backend.stored] == ["PREPARED", "STARTED", "SUCCESS"]


def test_a_backend_that_cannot_store_it_ends_no_run(
    backend: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(task_id: str, result: Any, state: str, **facts: Any) -> None:
        if state == "STARTED":
            raise OSError("no space left")

    monkeypatch.setattr(backend, "store_result", refuse)
    assert message().retval == "ran"
    assert "The state STARTED of task mine cannot be stored." in caplog.text


@pytest.mark.parametrize("option", [True, False, None])
def test_the_option_is_taken_over_from_celery(
    option: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(app.conf, "task_track_started", True)

    class Tracked(SingletonTask):
        name = f"tracked {option}"
        track_started = option

        def run(self) -> None: ...

    Tracked.bind(app)
    Tracked.bind(app)  # as for a second application
    assert (Tracked.stores_started, Tracked.track_started) == (option is not False, False)
