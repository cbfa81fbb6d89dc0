"""Django settings of the benchmarks: of run.py, and of the workers and commands that it starts."""

from __future__ import annotations

import os

REDIS = os.environ["BENCHMARK_REDIS"]  # without the number of a database
MEMCACHED = os.environ["BENCHMARK_MEMCACHED"]
BACKENDS = "django.core.cache.backends"

INSTALLED_APPS = ["django.contrib.contenttypes", "django_singletask"]
if "BENCHMARK_PEER" in os.environ:
    # This app must not slow down the workers of its alternatives.
    INSTALLED_APPS.remove("django_singletask")

SECRET_KEY = "only for the benchmarks"
USE_TZ = True
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "USER": "singletask",
        "HOST": "127.0.0.1",
        "PORT": os.environ["BENCHMARK_POSTGRES_PORT"],
    },
    # The benchmark of the history names the file.
    "sqlite": {
        "ENGINE": "django.db.backends.sqlite3",
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "init_command": "PRAGMA journal_mode=WAL"},
    },
}
CACHES = {
    "default": {"BACKEND": f"{BACKENDS}.redis.RedisCache", "LOCATION": f"{REDIS}/0"},
    "django_redis": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": f"{REDIS}/0"},
    "pymemcache": {"BACKEND": f"{BACKENDS}.memcached.PyMemcacheCache", "LOCATION": MEMCACHED},
    "pylibmc": {"BACKEND": f"{BACKENDS}.memcached.PyLibMCCache", "LOCATION": MEMCACHED},
    "database": {"BACKEND": f"{BACKENDS}.db.DatabaseCache", "LOCATION": "locks"},
    # For the recipe: only locks may read and write the table of locks.
    "pages": {"BACKEND": f"{BACKENDS}.db.DatabaseCache", "LOCATION": "pages"},
}
SINGLETASK_HISTORY = os.environ.get("BENCHMARK_HISTORY", "background")
