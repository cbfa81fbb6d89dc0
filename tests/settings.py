"""Settings of the tests, and of the workers and commands that tests start as processes.

The databases are named as the test databases, so that such a process, which pytest-django knows
nothing of, finds what the test sees. runtests.py sets the variables; without them the settings
still load (mypy and makemigrations read them), but no server answers. It also names what is not
installed: tests/absent.py says what becomes of the tests of it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

from tests.absent import needed_by

FOLDER = Path(os.environ.get("SINGLETASK_TEST_FOLDER", "/nonexistent"))
REDIS_URL = os.environ.get("SINGLETASK_TEST_REDIS_URL", "redis://127.0.0.1:1/0")
VALKEY_URL = os.environ.get("SINGLETASK_TEST_VALKEY_URL", "redis://127.0.0.1:1/0")
CLUSTER = os.environ.get("SINGLETASK_TEST_CLUSTER", "redis://127.0.0.1:1")
REDIS_REPLICA_URL = os.environ.get("SINGLETASK_TEST_REDIS_REPLICA_URL", "redis://127.0.0.1:1/0")
SENTINEL, _, SENTINEL_SERVICE = os.environ.get(
    "SINGLETASK_TEST_SENTINEL", "127.0.0.1:1/singletask"
).partition("/")
MEMCACHED = os.environ.get("SINGLETASK_TEST_MEMCACHED", "127.0.0.1:1")
POSTGRES_URL = os.environ.get("SINGLETASK_TEST_POSTGRES", "postgresql://singletask@127.0.0.1:1")
MARIADB_URL = os.environ.get("SINGLETASK_TEST_MARIADB", "mysql://singletask@127.0.0.1:1")

DEBUG = False
SECRET_KEY = "only for the tests"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"
# The slow default would be most of the time of each test that logs in.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
# Without a row for each session, pages need fewer statements.
SESSION_ENGINE = "django.contrib.sessions.backends.signed_cookies"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_singletask",
    "tests.testapp",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]


def server_database(engine: str, url: str, **options: object) -> dict[str, object]:
    address = urlsplit(url)
    return {
        "ENGINE": f"django.db.backends.{engine}",
        "HOST": address.hostname,
        "PORT": address.port,
        "USER": address.username,
        "PASSWORD": address.password or "",
        "NAME": "singletask",
        "TEST": {"NAME": "singletask", **options},
    }


def sqlite_database(name: str) -> dict[str, object]:
    file = str(FOLDER / f"{name}.sqlite3")
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": file,
        "TEST": {"NAME": file},
        # SQLite does not let writers in by turns: where several write all the time, one may wait
        # for long if the machine is busy. Like the servers of the tests, it does not wait for
        # the disk.
        "OPTIONS": {"timeout": 30, "init_command": "PRAGMA synchronous = OFF"},
    }


DATABASES = {
    "default": server_database("postgresql", POSTGRES_URL),
    "mariadb": server_database("mysql", MARIADB_URL, CHARSET="utf8mb4"),
    "sqlite": sqlite_database("history"),
    "sqlite_locks": sqlite_database("locks"),
}
if needed_by("default"):  # Django wants one; its tests are skipped
    DATABASES["default"] = sqlite_database("default")
if needed_by("mariadb"):
    del DATABASES["mariadb"]
DATABASE_ROUTERS = ["tests.routers.LockTables"]

DJANGO = "django.core.cache.backends"


def cache(backend: str, location: object = "", **options: object) -> dict[str, object]:
    return {"BACKEND": backend, "LOCATION": location, "OPTIONS": options}


CACHES = {
    "redis": cache(f"{DJANGO}.redis.RedisCache", REDIS_URL),
    "redis_replica": cache(f"{DJANGO}.redis.RedisCache", [REDIS_URL, REDIS_REPLICA_URL]),
    "django_redis": cache("django_redis.cache.RedisCache", REDIS_URL),
    "django_redis_sentinel": cache(
        "django_redis.cache.RedisCache",
        f"redis://{SENTINEL_SERVICE}/0",
        CLIENT_CLASS="django_redis.client.SentinelClient",
        CONNECTION_FACTORY="django_redis.pool.SentinelConnectionFactory",
        SENTINELS=[(SENTINEL.split(":")[0], int(SENTINEL.split(":")[1]))],
    ),
    "django_redis_ignore": cache(
        "django_redis.cache.RedisCache", REDIS_URL, IGNORE_EXCEPTIONS=True
    ),
    "valkey": cache(f"{DJANGO}.redis.RedisCache", VALKEY_URL),
    "django_valkey": cache("django_valkey.cache.ValkeyCache", VALKEY_URL),
    "cluster": cache("django_valkey.cluster_cache.cache.ClusterValkeyCache", CLUSTER),
    "redis_cluster": cache(f"{DJANGO}.redis.RedisCache", CLUSTER),
    "django_redis_cluster": cache("django_redis.cache.RedisCache", CLUSTER),
    "pylibmc": cache(f"{DJANGO}.memcached.PyLibMCCache", MEMCACHED),
    "pylibmc_binary": cache(f"{DJANGO}.memcached.PyLibMCCache", MEMCACHED, binary=True),
    "pymemcache": cache(f"{DJANGO}.memcached.PyMemcacheCache", MEMCACHED),
    "db_postgres": cache(f"{DJANGO}.db.DatabaseCache", "locks_pg"),
    "db_mariadb": cache(f"{DJANGO}.db.DatabaseCache", "locks_maria"),
    "db_sqlite": cache(f"{DJANGO}.db.DatabaseCache", "locks_sqlite"),
    "locmem": cache(f"{DJANGO}.locmem.LocMemCache", "locks"),
    "dummy": cache(f"{DJANGO}.dummy.DummyCache"),
    "files": cache("tests.file_locks.FileCache", str(FOLDER / "locks")),
    "filebased": cache(f"{DJANGO}.filebased.FileBasedCache", str(FOLDER / "cache")),
}
# Servers of a test's own, that it stops and restarts.
if "SINGLETASK_TEST_OWN_REDIS_URL" in os.environ:
    own_redis = os.environ["SINGLETASK_TEST_OWN_REDIS_URL"]
    CACHES["own_redis"] = cache(f"{DJANGO}.redis.RedisCache", own_redis)
    CACHES["own_valkey"] = cache("django_valkey.cache.ValkeyCache", own_redis)
if "SINGLETASK_TEST_OWN_MEMCACHED" in os.environ:
    own_memcached = os.environ["SINGLETASK_TEST_OWN_MEMCACHED"]
    CACHES["own_pylibmc"] = cache(f"{DJANGO}.memcached.PyLibMCCache", own_memcached)
    CACHES["own_pymemcache"] = cache(f"{DJANGO}.memcached.PyMemcacheCache", own_memcached)
# They share servers, not entries.
for alias, configuration in CACHES.items():
    configuration["KEY_PREFIX"] = alias
    if needed_by(alias):
        configuration["BACKEND"] = "tests.absent.Cache"
CACHES["default"] = CACHES["redis"]

SINGLETASK_STORES = {
    "tests.file_locks.FileCache": "tests.file_locks.FileStore",
}

# Not in the workers and programs that tests start.
SINGLETASK_TESTING = "pytest" in sys.modules

# What the workers that tests start are told beside.
SINGLETASK_CACHE = os.environ.get("SINGLETASK_TEST_CACHE", "redis")
