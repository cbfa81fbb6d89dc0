"""Tell an error of a cache or a database in one line."""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext as _

from django_singletask.conf import conf
from django_singletask.exceptions import LockUnavailable
from django_singletask.history.queries import NoHistory
from django_singletask.operators.names import UnknownName
from django_singletask.stores.base import CannotList


def cannot_ask(error: Exception) -> str:
    """Say in one line why the cache that holds the locks cannot be used."""
    if isinstance(error, (CannotList, ImproperlyConfigured, NoHistory, UnknownName)):
        return str(error)
    if isinstance(error, LockUnavailable) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    reason = str(error).partition("\n")[0].rstrip(".")
    return _("The cache {} (SINGLETASK_CACHE) cannot be used: {}.").format(
        repr(conf.cache), f"{type(error).__name__}: {reason}"
    )
