"""A worker whose locks would not work does not start. See also tests/worker/test_start.py."""

from __future__ import annotations

import sys

import pytest
from celery.signals import worker_process_shutdown, worker_shutdown
from django.core.cache.backends.memcached import PyMemcacheCache
from django.core.cache.backends.redis import RedisCache

from django_singletask.worker import startup
from tests import inside


@pytest.fixture
def on_no_cache(settings):
    settings.SINGLETASK_CACHE = "nowhere"


@pytest.mark.usefixtures("on_no_cache")
class TestRefuse:
    def test_an_error_of_the_checks_ends_the_worker(self, capsys):
        with pytest.raises(SystemExit) as caught:
            startup.refuse()
        assert caught.value.code == 1
        text = capsys.readouterr().err
        assert text.startswith("The worker does not start until this is corrected.\n")
        assert "django_singletask.E001" in text

    def test_a_silenced_error_does_not(self, settings):
        settings.SILENCED_SYSTEM_CHECKS = ["django_singletask.E001"]
        startup.refuse()

    def test_celery_may_skip_the_checks(self, monkeypatch):
        monkeypatch.setenv("CELERY_SKIP_CHECKS", "1")
        startup.refuse()


def test_a_worker_with_good_settings_starts():
    """Negative control."""
    startup.refuse()


class TestLoad:
    @pytest.fixture(params=[(RedisCache, "redis"), (PyMemcacheCache, "pymemcache")], ids=str)
    def absent(self, request, settings, monkeypatch):
        """Let the locks be in a cache whose client is not installed, and give the client."""
        backend, client = request.param
        path = f"{backend.__module__}.{backend.__qualname__}"
        settings.CACHES = {**settings.CACHES, "locks": {"BACKEND": path, "LOCATION": "x:1"}}
        settings.SINGLETASK_CACHE = "locks"
        monkeypatch.setitem(sys.modules, client, None)
        return client

    def test_a_client_that_is_not_installed_ends_the_worker(self, absent, capsys):
        with pytest.raises(SystemExit) as caught:
            startup.load()
        assert caught.value.code == 1
        first, second = capsys.readouterr().err.splitlines()
        assert first == "The worker does not start until this is corrected."
        assert second.startswith("SINGLETASK_CACHE cannot be used: ")
        assert absent in second

    def test_celery_may_skip_the_checks(self, absent, monkeypatch):
        monkeypatch.setenv("CELERY_SKIP_CHECKS", "1")
        startup.load()


@pytest.mark.parametrize("signal", [worker_process_shutdown, worker_shutdown])
def test_the_history_is_written_at_the_end_of_a_process(signal, monkeypatch):
    deadlines = []
    monkeypatch.setattr(startup, "flush", deadlines.append)
    signal.send(None)
    assert deadlines == [2.0]


def test_the_processes_of_the_pool_inherit_the_epoch(cache_alias):
    startup.load()
    forgets = not cache_alias.startswith(("db_", "locmem"))
    assert inside.knows_the_epoch(cache_alias) == forgets


def test_a_cache_that_is_down_does_not_keep_a_worker_from_its_start(settings, dead_redis):
    settings.SINGLETASK_CACHE = dead_redis
    startup.load()
    assert not inside.knows_the_epoch(dead_redis)
