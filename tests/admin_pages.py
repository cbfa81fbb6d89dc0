"""Users of the admin's pages, what the pages show, and the history that they show."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from typing import Any
from uuid import uuid4

from django.contrib.auth.models import Permission, User
from django.db import InterfaceError, connection
from django.http import HttpResponse
from django.test import Client
from django.utils import timezone

from django_singletask.models import TaskLockEvent
from tests import past_rows

__all__ = [
    "BASE",
    "CLEAR",
    "LIST",
    "TABLE",
    "TASK",
    "TIMELINE",
    "drop_table",
    "event",
    "fill_table",
    "gone",
    "log_in",
    "rows_of",
    "text_of",
]

BASE = "/admin/django_singletask/tasklockevent/"
LIST, TIMELINE, CLEAR = f"{BASE}history/", f"{BASE}timeline/", f"{BASE}clear/"
TABLE = "django_singletask_tasklockevent"
TASK = "feeds.tasks.import_feed"


def log_in(*codenames: str, name: str = "ada", **options: Any) -> Client:
    """Return a browser of a new member of the staff who has these permissions."""
    user = User.objects.create_user(name, is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    client = Client(**options)
    client.force_login(user)
    return client


def event(**facts: Any) -> TaskLockEvent:
    """Write the row of a run that began now, or of a call."""
    usual = {"kind": "run", "name": f"{TASK}(feed_id=7)", "key": "k", "timeout": 60}
    usual |= {"ref": uuid4().hex, "at": timezone.now()}
    return past_rows.save(**{**usual, **facts})


def rows_of(response: HttpResponse, table: str) -> list[str]:
    """Return the texts of the rows of the table whose tag has this text."""
    assert response.status_code == 200
    body = response.content.decode().partition(table)[2].partition("<tbody>")[2]
    rows = re.findall(r"<tr>.*?</tr>", body.partition("</tbody>")[0], re.DOTALL)
    return [text_of(row) for row in rows]


def text_of(html: str) -> str:
    """Return what a browser shows of some HTML, with a space for each tag between words."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html.replace("<wbr>", ""))).split())


def fill_table() -> None:
    """Write 30,000 rows, one each 10 minutes, as a site does in 7 months."""
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {TABLE} (kind, outcome, result, name, key, cache, task, task_id, ref, "
            "host, pid, at, happened_at, timeout, fixed, count, retaken, waited, blocked_by, "
            "blocked_by_task_id, actor, reason)"
            " SELECT (CASE WHEN n % 500 = 0 THEN 'conflict' ELSE 'run' END), (CASE WHEN n % 500 = 0"
            " THEN '' WHEN n % 700 = 1 THEN 'dead' ELSE 'released' END), 'returned', "
            "'feeds.tasks.import_feed(feed_id=' || n % 1000 || ')', 'k', 'c', "
            "'tests.testapp.tasks.' || (CASE WHEN n % 900 = 0 THEN 'hold' ELSE 'meet' END), "
            "md5(n::text), md5(n::text), 'h', 1, now() - n * interval '10 minutes', "
            "now() - n * interval '10 minutes', 60, false, 1, 0, 0, '', '', '', '' "
            "FROM generate_series(30000, 1, -1) n"
        )
        cursor.execute(f"ANALYZE {TABLE}")


def drop_table() -> None:
    """Take the history's table away until the transaction of the test is rolled back."""
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {TABLE} RENAME TO {TABLE}_gone")


def gone(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
    """Answer for a database whose connection is gone, as a wrapper of its statements."""
    if TABLE in sql:
        raise InterfaceError("connection already closed")
    return execute(sql, *args)
