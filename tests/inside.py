"""What tests need of the inside of the package: the one place that changes when its walls move.

Each function says what a test asks or does, in the words of the docs. Other files of tests use the
public names and these; only the tests of one module itself import that module, as a whole.
"""

from __future__ import annotations

from typing import Any

from django_singletask import conf, stores
from django_singletask.locks import renewal
from django_singletask.task import options

# == Stores and the epoch

# == Locks, leases, renewal

# == Tasks, messages, headers

# == Options, settings, checks, keys


def option_defaults() -> dict[str, Any]:
    """Return the options of a task, and the default of each."""
    return {name: getattr(options.Attributes, name) for name in options.FIELDS}


def setting(name: str) -> Any:
    """Return what is in effect for ``SINGLETASK_…``, by its short name."""
    return getattr(conf.conf, name)


def family(alias: str) -> str:
    """Return the family of the store that this thread uses for a cache."""
    return stores.get_store(alias).family


def renewed_keys() -> set[str]:
    """Return the keys of the leases that this process renews."""
    return {key for renewer in renewal.renewers.values() for _token, key in renewer.leases}


def problems_of(where: str, **values: Any) -> list[Exception]:
    """Return what is wrong with these options together; a ``UserWarning`` is only reported."""
    return [error for _names, error in options.LockOptions(**values).problems(where)]


# == The history

# == Operators: held now, names, words, the command, the admin

# == Workers
