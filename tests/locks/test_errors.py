"""The error of a client, which the command and the admin print, shows no password."""

from __future__ import annotations

import pytest
from django.conf import settings as configured
from django.db.utils import ConnectionHandler, OperationalError

from tests import inside
from tests.entries import private_store

SECRET = "s3cret"
SERVER = configured.CACHES["redis"]["LOCATION"].partition("//")[2]


@pytest.mark.parametrize(
    "location",
    [
        f"redis://user:{SECRET}@{SERVER}",
        f"redis://user:{SECRET}@127.0.0.1:1/0",
        f"redis://:{SECRET}@127.0.0.1:1/0",
        f"redis://user:{SECRET}@127.0.0.1:port/0",
        f"redis://user:{SECRET}@[::/0",
        f"http://user:{SECRET}@127.0.0.1:1/0",
        f"user:{SECRET}@127.0.0.1:1/0",
    ],
)
@pytest.mark.parametrize("alias", ["redis", "django_redis", "django_valkey", "cluster"])
def test_password_in_the_address_of_redis(settings, alias, location):
    check_cache(settings, alias, location)


@pytest.mark.parametrize("alias", ["redis", "django_redis", "django_valkey"])
def test_password_in_the_options_of_redis(settings, alias):
    name = "password" if alias == "redis" else "PASSWORD"
    check_cache(settings, alias, "redis://user@127.0.0.1:1/0", options={name: SECRET})


def test_password_of_memcached(settings):
    check_cache(settings, "pylibmc_binary", options={"username": "user", "password": SECRET})


def check_cache(settings, alias, location=None, **options):
    with (
        pytest.raises(Exception) as caught,  # noqa: PT011, each client has errors of its own
        private_store(settings, alias, location, **options) as store,
    ):
        store.read("singletask:x:0")
    assert SECRET not in inside.in_words(caught.value)


@pytest.mark.django_db(databases="__all__")
@pytest.mark.parametrize("port", [None, 1])
@pytest.mark.parametrize("alias", ["default", "mariadb"])
def test_password_of_a_database(alias, port):
    facts = {**configured.DATABASES[alias], "USER": "nobody", "PASSWORD": SECRET}
    facts["PORT"] = port or facts["PORT"]
    with pytest.raises(OperationalError) as caught:
        ConnectionHandler({"default": facts})["default"].ensure_connection()
    assert SECRET not in inside.in_words(caught.value)
