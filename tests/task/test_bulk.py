"""Many rows at once: what the upsert by arrays must not lose, double or change."""

from __future__ import annotations

import dataclasses
import datetime
import uuid

import pytest
from django.contrib.auth.models import User
from django.db import DataError, connection, connections, transaction

from django_singletask.history import flush
from django_singletask.models import TaskLockEvent
from django_singletask.signals import LockEvent, lock_event
from tests import inside, servers
from tests.inside import write_events
from tests.past_rows import keep_history_in
from tests.proxy import Proxy

pytestmark = pytest.mark.django_db(databases="__all__", transaction=True)

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=datetime.UTC)
TABLE = TaskLockEvent._meta.db_table
# A sequence counts on when its transaction is rolled back: this row is refused once only.
THIRD_ROW = """
CREATE SEQUENCE copied;
CREATE FUNCTION refuse() RETURNS trigger AS $$
BEGIN
    IF nextval('copied') = 3 THEN {} END IF;
    RETURN NEW;
END $$ LANGUAGE plpgsql;
CREATE TRIGGER refuse BEFORE INSERT ON {} FOR EACH ROW EXECUTE FUNCTION refuse();
"""
NO_THIRD_ROW = f"DROP TRIGGER refuse ON {TABLE}; DROP FUNCTION refuse; DROP SEQUENCE copied"


@pytest.fixture(autouse=True)
def empty_table():
    TaskLockEvent.objects.all().delete()
    yield
    TaskLockEvent.objects.all().delete()


@pytest.fixture
def background(settings):
    settings.SINGLETASK_HISTORY = "background"
    with inside.new_history():
        yield


@pytest.fixture
def at_third_row():
    """Let PostgreSQL do something at the third row that is inserted."""

    def do(action):
        execute(THIRD_ROW.format(action, TABLE))

    yield do
    execute(NO_THIRD_ROW)


def execute(sql):
    with connection.cursor() as cursor:
        cursor.execute(sql)


def runs(count, **facts):
    """Return the events of so many runs that end at once."""
    events = []
    for _ in range(count):
        facts = {"name": "n", "key": "k", "at": NOW, "since": NOW, "task_id": "i", **facts}
        begun = LockEvent("acquired", token=uuid.uuid4().hex, **facts)
        ending = {"kind": "released", "outcome": "released", "result": "returned"}
        events += [begun, dataclasses.replace(begun, **ending)]
    return events


def write_in_background(events):
    for event in events:
        lock_event.send(LockEvent, event=event)
    assert flush(20)


def tokens():
    return sorted(TaskLockEvent.objects.filter(outcome="released").values_list("ref", flat=True))


def test_server_process_that_is_killed_in_mid_write_loses_no_row(background, at_third_row, caplog):
    at_third_row("PERFORM pg_terminate_backend(pg_backend_pid());")
    events = runs(5)
    write_in_background(events)
    assert tokens() == sorted({event.token for event in events})
    assert "terminating connection" in caplog.text


def test_commit_whose_reply_is_lost_writes_no_row_twice(background, monkeypatch):
    settings = connections.databases["default"]
    with Proxy(settings["PORT"]) as proxy:
        monkeypatch.setitem(settings, "PORT", proxy.port)
        proxy.lose_reply_to(b"COMMIT")
        events = runs(5)
        write_in_background(events)
        inside.stop_history()
        assert proxy.lost == 1
    assert tokens() == sorted({event.token for event in events})


def test_row_level_security_lets_rows_in():
    with transaction.atomic():
        execute(f"ALTER TABLE {TABLE} ENABLE ROW LEVEL SECURITY")
        execute(f"CREATE POLICY all_rows ON {TABLE} USING (true)")
        execute("CREATE ROLE limited")
        execute(f"GRANT ALL ON {TABLE}, {TABLE}_id_seq TO limited")
        execute("SET LOCAL ROLE limited")
        write_events(runs(3))
        assert len(tokens()) == 3
        transaction.set_rollback(True)


def test_view_lets_rows_in(background, monkeypatch):
    execute(f"CREATE VIEW history AS SELECT * FROM {TABLE}")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(TaskLockEvent._meta, "db_table", "history")
            write_in_background(runs(3))
    finally:
        inside.stop_history()
        execute("DROP VIEW history")
    assert len(tokens()) == 3


def test_write_that_fails_in_a_transaction_leaves_it_usable(at_third_row):
    at_third_row("RAISE numeric_value_out_of_range;")
    with transaction.atomic():
        User.objects.create(username="before")
        with pytest.raises(DataError):
            write_events(runs(5))
        write_events(runs(2))
    assert len(tokens()) == 2
    assert User.objects.filter(username="before").exists()


def test_rows_are_part_of_the_transaction_of_the_caller():
    with transaction.atomic():
        write_events(runs(5))
        transaction.set_rollback(True)
    assert tokens() == []


def test_rows_are_written_through_pgbouncer_in_transaction_mode(background, monkeypatch):
    settings = connections.databases["default"]
    with servers.PgBouncer(settings["PORT"]) as bouncer:
        monkeypatch.setitem(settings, "PORT", bouncer.port)
        events = runs(5)
        write_in_background(events[::2])
        write_in_background(events[1::2])
        inside.stop_history()
    assert tokens() == sorted({event.token for event in events})


@pytest.mark.parametrize("alias", ["default", "mariadb", "sqlite"])
def test_odd_texts_and_times_are_stored_as_by_an_insert(settings, alias):
    keep_history_in(settings, alias)
    odd = {"name": "\t\n\r \\N \\. \\\\ ' \" % %s ü \N{SNOWMAN} \U0001f512", "host": "a\x00b\ud800"}
    odd |= {"reason": "\\", "pid": 7, "timeout": 0.1, "longest_renewal_gap": 2.5}
    for part in (runs(1, **odd), runs(3, **odd)):
        write_events(part)
    fields = [field.name for field in TaskLockEvent._meta.fields]
    different = [name for name in fields if name not in ("id", "ref")]
    first, *others = TaskLockEvent.objects.order_by("id").values(*different)
    assert others == [first] * 3
    assert first["name"].startswith(r"\t\n\r \N \. \\ ")
    assert (first["host"], first["at"]) == (r"a\x00b\ud800", NOW)
    # SQLite compares times as texts.
    assert TaskLockEvent.objects.filter(at=NOW, ended_at=NOW).count() == 4
    TaskLockEvent.objects.all().delete()


def test_rows_are_written_to_a_table_in_another_schema(monkeypatch):
    with transaction.atomic():
        execute("CREATE SCHEMA other")
        execute(f'CREATE TABLE other."History" (LIKE {TABLE} INCLUDING ALL)')
        with monkeypatch.context() as patch:
            patch.setattr(TaskLockEvent._meta, "db_table", '"other"."History"')
            write_events(runs(2))
        assert tokens() == []
        execute(f'INSERT INTO {TABLE} SELECT * FROM other."History"')
        assert len(tokens()) == 2
        transaction.set_rollback(True)
