"""A store of a third party is shown and probed as the built-in ones are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.core import checks
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured

from django_singletask import TaskLock
from django_singletask.operators.probe import probe
from tests import inside
from tests.admin_pages import BASE, log_in, rows_of
from tests.command_line import locks, locks_as_json
from tests.file_locks import FileStore

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture(autouse=True)
def in_files(settings: object) -> Iterator[None]:
    settings.SINGLETASK_CACHE = "files"  # type: ignore[attr-defined]
    caches["files"].clear()
    yield
    caches["files"].clear()


def problems() -> list[checks.CheckMessage]:
    """Return what the checks of the package say of the cache."""
    found = checks.run_checks(tags=[checks.Tags.caches], include_deployment_checks=True)
    return [message for message in found if str(message.id).startswith("django_singletask.")]


def test_it_is_chosen_by_the_class_of_the_cache() -> None:
    assert type(inside.store_of("files")) is FileStore
    assert problems() == []


def test_a_changed_setting_opens_the_stores_again(settings: object) -> None:
    inside.store_of("files")
    settings.SINGLETASK_STORES = {}  # type: ignore[attr-defined]
    with pytest.raises(ImproperlyConfigured, match="FileCache is not one of the supported caches"):
        inside.store_of("files")


def test_the_command_lists_explains_and_clears_its_locks() -> None:
    with TaskLock("nightly") as lock:
        [listed] = locks_as_json("list", "nightly")["locks"]
        assert (listed["name"], listed["state"]) == ("nightly", "held")
        assert 50 < listed["remaining"] <= 60
        assert "nightly" in locks("list")
        assert locks("why", "nightly").startswith("nightly: held")
        locks("clear", "nightly", "--yes")
        assert not lock.locked()


@pytest.mark.only_all("it starts processes")
def test_probe_finds_that_it_is_fit() -> None:
    result = probe("files")
    assert result.fit
    assert result.backend == "tests.file_locks.FileCache"
    assert result.server == str(caches["files"].folder)
    assert {finding.level for finding in result.findings} == {"ok"}


def test_the_admin_shows_its_locks() -> None:
    with TaskLock("nightly"):
        response = log_in("view_tasklockevent").get(BASE)
    [row] = rows_of(response, 'class="singletask-table')
    assert "nightly" in row


def test_a_place_that_another_cache_uses_gives_a_warning(settings: object) -> None:
    other = settings.CACHES["files"]  # type: ignore[attr-defined]
    settings.CACHES = {**settings.CACHES, "pages": other}  # type: ignore[attr-defined]
    [message] = problems()
    assert message.id == "django_singletask.W002"
    assert str(caches["files"].folder) in message.msg
