"""Settings of the example. They need no server, but environment variables can name real ones.

EXAMPLE_HOME    an existing folder for the databases, the file broker and the results
EXAMPLE_CACHE   redis://… or memcached://host:port for the locks, instead of an SQLite file
EXAMPLE_BROKER  redis://… or another Celery broker, instead of files
EXAMPLE_PREFIX  separates two demos on one server (cache keys and queue)
EXAMPLE_SECRET_KEY
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from django.core.exceptions import ImproperlyConfigured

BASE_DIR = Path(__file__).resolve().parent
HOME = Path(os.environ.get("EXAMPLE_HOME") or BASE_DIR / "data")
CACHE = os.environ.get("EXAMPLE_CACHE", "")
BROKER = os.environ.get("EXAMPLE_BROKER", "")
PREFIX = os.environ.get("EXAMPLE_PREFIX", "example")

SECRET_KEY = os.environ.get("EXAMPLE_SECRET_KEY", "for the example only, never for a real site")
DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_singletask",
    "example_project.feeds",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "example_project.urls"
STATIC_URL = "static/"
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
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True


def time_zone_of_this_machine() -> str:
    link = os.path.realpath("/etc/localtime").partition("zoneinfo/")[2]
    for name in (os.environ.get("TZ", "").lstrip(":"), link):
        # $TZ can also be a rule, such as CET-1CEST, which is not the name of a time zone.
        with suppress(LookupError, ValueError, OSError):
            return ZoneInfo(name).key
    return "UTC"


TIME_ZONE = time_zone_of_this_machine()


def sqlite(name: str) -> dict[str, Any]:
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": HOME / name,
        "OPTIONS": {
            # Many worker processes write to one file: wait for the other writer, and ask for the
            # write lock at BEGIN, because a transaction that asks later fails at once.
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
        },
    }


def lock_cache(url: str) -> dict[str, Any]:
    if not url:
        return {"BACKEND": "django.core.cache.backends.db.DatabaseCache", "LOCATION": "locks"}
    scheme = urlsplit(url).scheme
    if scheme in ("redis", "rediss", "unix"):
        return {
            "BACKEND": "django.core.cache.backends.redis.RedisCache",
            "LOCATION": url,
            "KEY_PREFIX": PREFIX,
            "OPTIONS": {"socket_connect_timeout": 3, "socket_timeout": 5},
        }
    if scheme == "memcached":
        return {
            "BACKEND": "django.core.cache.backends.memcached.PyMemcacheCache",
            "LOCATION": urlsplit(url).netloc,
            "KEY_PREFIX": PREFIX,
            "OPTIONS": {"connect_timeout": 3, "timeout": 5},
        }
    raise ImproperlyConfigured(
        f"EXAMPLE_CACHE is {url!r}: it must begin with redis://, rediss://, unix:// or memcached://"
    )


# The locks have a separate file: otherwise SQLite could not take a lock inside atomic().
DATABASES = {"default": sqlite("data.sqlite3"), "locks": sqlite("locks.sqlite3")}
DATABASE_ROUTERS = ["example_project.routers.LockTableRouter"]
CACHES = {
    "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
    "locks": lock_cache(CACHE),
}

SINGLETASK_CACHE = "locks"
# The demo shows each row at once. Do not copy this: by default a thread writes the history, and no
# task waits for it.
SINGLETASK_HISTORY = "inline"

if BROKER:
    CELERY_BROKER_URL = BROKER
    if urlsplit(BROKER).scheme in ("redis", "rediss"):
        CELERY_BROKER_TRANSPORT_OPTIONS = {
            # This also separates the list of messages that workers have received.
            "global_keyprefix": f"{PREFIX}:",
            "socket_connect_timeout": 3,
            "socket_timeout": 10,
        }
else:
    CELERY_BROKER_URL = "filesystem://"
    CELERY_BROKER_TRANSPORT = "example_project.broker:Transport"
    CELERY_BROKER_TRANSPORT_OPTIONS = {
        "data_folder_in": str(HOME / "queue"),
        "data_folder_out": str(HOME / "queue"),
        "control_folder": str(HOME / "queue" / "control"),
        # Otherwise messages are moved through the system's temporary folder. That folder can be on
        # another file system, where a move is a copy.
        "store_processed": True,
        "processed_folder": str(HOME / "queue" / "taken"),
        "polling_interval": 0.1,
    }
CELERY_TASK_DEFAULT_QUEUE = f"feeds-{PREFIX}"
CELERY_RESULT_BACKEND = f"file://{HOME}"
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_TIMEOUT = 3
# A call waits in the queue, where any worker can take it, not in the memory of a busy worker.
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_ENABLE_REMOTE_CONTROL = False

# Each run of import_feed writes here when it began and ended (feeds/run_log.py).
FEEDS_RUN_LOG = HOME / "runs.log"
FEEDS_TIMEOUT = 1.5
FEEDS_MAX_BYTES = 5_000_000
