from __future__ import annotations

import io
import re

import pytest
from django.apps import apps
from django.contrib.auth.models import Permission
from django.core.management import call_command
from django.db import connections
from django.utils.functional import Promise

from django_singletask.models import COUNTED, TROUBLE, HoldOutcome, Kind, Result, TaskLockEvent

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
        id kind outcome result name key cache task task_id token host pid at ended_at timeout count
        last_at blocked_by blocked_by_task_id actor reason longest_renewal_gap
    """
    assert names == set(re.findall(r"\w+", documented))


def test_labels_are_translatable():
    for field in TaskLockEvent._meta.fields:
        assert isinstance(field.verbose_name, Promise)
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
    assert str(TaskLockEvent(name="n", kind="acquired")) == "n: acquired"
    assert str(TaskLockEvent(name="n", kind="acquired", outcome="released")) == "n: released"


def test_every_kind_but_acquired_is_counted_or_trouble():
    assert COUNTED | TROUBLE | {"acquired"} == set(Kind.values)
    assert set() == COUNTED & TROUBLE


@pytest.mark.parametrize("kind", Kind.values)
def test_only_a_run_that_returned_or_raised_is_completed(kind):
    for outcome in ["", *HoldOutcome.values]:
        for result in ["", *Result.values]:
            row = TaskLockEvent(kind=kind, outcome=outcome, result=result)
            completed = kind == "acquired" and outcome == "released"
            assert row.is_completed == (completed and result in ("returned", "raised"))


@pytest.mark.parametrize("alias", ["default", "mariadb", "sqlite"])
def test_indexes_exist_on_every_database(alias):
    with connections[alias].cursor() as cursor:
        constraints = connections[alias].introspection.get_constraints(
            cursor, TaskLockEvent._meta.db_table
        )
    assert {index.name for index in TaskLockEvent._meta.indexes} <= set(constraints)
