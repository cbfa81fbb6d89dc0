from __future__ import annotations

import io
import re

import pytest
from django.apps import apps
from django.contrib.auth.models import Permission
from django.core.management import call_command
from django.db import connections
from django.utils.functional import Promise

from django_singletask.locks.keys import QUEUED
from django_singletask.models import KINDS, OUTCOMES, RESULTS, TaskLockEvent
from tests.past_rows import TROUBLE, before_now, new

pytestmark = pytest.mark.django_db(databases="__all__")


def test_migrations_are_complete():
    call_command("makemigrations", "--check", "--dry-run", verbosity=0, stdout=io.StringIO())


def test_migrations_are_complete_under_another_default_auto_field(settings):
    settings.DEFAULT_AUTO_FIELD = "django.db.models.SmallAutoField"
    arguments = ["django_singletask", "--check", "--dry-run"]
    call_command("makemigrations", *arguments, verbosity=0, stdout=io.StringIO())
    assert apps.get_app_config("django_singletask").default_auto_field.endswith("BigAutoField")


def test_fields_are_those_that_are_documented():
    names = {field.name for field in TaskLockEvent._meta.get_fields()}
    documented = """
        id ref kind outcome result name key cache task task_id host pid at happened_at ended_at
        noticed_at retaken retaken_at timeout fixed count last_at blocked_by blocked_by_task_id
        actor reason longest_renewal_gap waited
    """
    assert names == set(re.findall(r"\w+", documented))


def test_labels_are_translatable():
    for field in TaskLockEvent._meta.fields:
        assert isinstance(field.verbose_name, Promise) or field.name == "ref"  # nobody sees it
    assert isinstance(TaskLockEvent._meta.verbose_name, Promise)
    for field in ("kind", "outcome", "result"):
        for _value, label in TaskLockEvent._meta.get_field(field).flatchoices:
            assert isinstance(label, Promise)


def test_permissions_are_to_view_to_delete_and_to_clear():
    permissions = Permission.objects.filter(content_type__app_label="django_singletask")
    assert set(permissions.values_list("codename", flat=True)) == {
        "view_tasklockevent",
        "delete_tasklockevent",
        "clear_lock",
    }


def test_row_says_its_name_and_what_happened():
    assert str(TaskLockEvent(name="n", kind="run")) == "n: run"
    assert str(TaskLockEvent(name="n", kind="run", outcome="released")) == "n: released"
    assert str(TaskLockEvent(name="n", kind="conflict", result="skipped")) == "n: conflict"


def test_only_a_run_has_a_token():
    assert TaskLockEvent(kind="run", ref="t").token == "t"
    assert TaskLockEvent(kind="conflict", ref="t:skip:skipped").token == ""
    assert TaskLockEvent(kind="duplicate", ref="t:queued:").token == ""


def test_every_outcome_but_released_is_trouble_and_so_is_a_lock_that_was_retaken():
    for outcome in TROUBLE:
        assert TaskLockEvent(kind="run", outcome=outcome).troubles == [outcome]
    assert TaskLockEvent(kind="run", outcome="released").troubles == []
    assert TaskLockEvent(kind="run", outcome="lost", retaken=2).troubles == ["retaken", "lost"]


def test_a_hold_ends_when_its_run_says_so_unless_it_was_cleared():
    ended, noticed = before_now(5), before_now(9)

    def end(outcome, **times):
        return TaskLockEvent(kind="run", outcome=outcome, **times).hold_ended_at

    assert end("released", ended_at=ended) == ended
    assert end("lost", ended_at=ended, noticed_at=noticed) == ended
    assert end("dead", noticed_at=noticed) == noticed
    assert end("cleared", ended_at=ended, noticed_at=noticed) == noticed
    assert end("", noticed_at=noticed) is None  # a sweep has missed the token once


@pytest.mark.parametrize(("state", "ended"), [("expired", True), ("held", False)])
def test_a_fixed_lease_ends_when_its_time_is_over(state, ended):
    at, noticed = before_now(100), before_now(9)

    def lasted(**facts):
        row = TaskLockEvent(kind="run", at=at, timeout=20, fixed=True, **facts)
        row.state = state
        return row.hold_ended_at and round((row.hold_ended_at - at).total_seconds())

    assert lasted(outcome="expired", noticed_at=noticed) == 20
    assert lasted(outcome="lost", ended_at=noticed) == 20
    assert lasted(outcome="lost", noticed_at=before_now(92), ended_at=noticed) == 8  # forgotten
    assert lasted(outcome="released", ended_at=noticed) == 91  # it was extended
    assert lasted() == (20 if ended else None)


def test_a_queued_call_that_was_cleared_ends_when_it_was_cleared():
    at, cleared = before_now(9), before_now(5)
    row = new(kind="run", outcome="cleared", key=f"{QUEUED}n", at=at, noticed_at=cleared)
    assert (row.hold_ended_at, row.end) == (None, cleared)


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_run_that_returned_or_raised_is_completed(kind):
    for outcome in ["", *OUTCOMES]:
        for result in ["", *RESULTS]:
            row = TaskLockEvent(kind=kind, outcome=outcome, result=result)
            completed = kind == "run" and outcome == "released"
            assert row.is_completed == (completed and result in ("returned", "raised"))


@pytest.mark.parametrize("alias", ["default", "mariadb", "sqlite"])
def test_indexes_exist_on_every_database(alias):
    with connections[alias].cursor() as cursor:
        constraints = connections[alias].introspection.get_constraints(
            cursor, TaskLockEvent._meta.db_table
        )
    assert {index.name for index in TaskLockEvent._meta.indexes} <= set(constraints)
