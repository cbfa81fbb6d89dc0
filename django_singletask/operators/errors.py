"""Tell an error of a cache or a database without the passwords in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext as _

from django_singletask.conf import conf
from django_singletask.exceptions import LockUnavailable
from django_singletask.history.queries import NoHistory
from django_singletask.operators.names import UnknownName
from django_singletask.stores import CannotList

__all__ = ["cannot_ask", "without_secrets"]


def cannot_ask(error: Exception) -> str:
    """Say in one line why the cache that holds the locks cannot be used."""
    if isinstance(error, (CannotList, ImproperlyConfigured, NoHistory, UnknownName)):
        return without_secrets(str(error))
    if isinstance(error, LockUnavailable) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    reason = without_secrets(str(error).partition("\n")[0]).rstrip(".")
    return _("The cache {} (SINGLETASK_CACHE) cannot be used: {}.").format(
        repr(conf.cache), f"{type(error).__name__}: {reason}"
    )


def without_secrets(text: str) -> str:
    """Replace the passwords of ``CACHES`` and ``DATABASES`` in a text by ``***``."""
    secrets = set(_secrets([settings.CACHES, settings.DATABASES]))
    # The longest first: one password can be a part of another.
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _secrets(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _secrets(item, str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secrets(item, name)
    elif isinstance(value, str) and value:
        if "password" in name.lower():
            yield value
        user, at, _host = value.rpartition("@")
        if at and "://" in user:
            password = user.partition("://")[2].partition(":")[2]
            yield from filter(None, (password, unquote(password)))
