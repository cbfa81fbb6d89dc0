"""The shell command that stops a task."""

from __future__ import annotations

import shlex

from celery import Celery

from django_singletask.operators import words


def test_command_names_the_package_of_the_application() -> None:
    assert words.stop_command("3f0c") == "celery -A tests.testapp control terminate SIGTERM 3f0c"


def test_queued_call_is_revoked() -> None:
    assert words.stop_command("3f0c", queued=True) == "celery -A tests.testapp control revoke 3f0c"


def test_application_that_no_module_has_is_left_to_the_reader() -> None:
    with Celery("nowhere", set_as_current=False) as app:
        app.set_current()
        try:
            assert words.stop_command("3f0c").startswith("celery -A <app> control ")
        finally:
            from tests.testapp import celery_app

            celery_app.set_current()


def test_task_id_that_anything_may_have_written_is_one_argument() -> None:
    assert shlex.split(words.stop_command("a; rm -rf b"))[-1] == "a; rm -rf b"
