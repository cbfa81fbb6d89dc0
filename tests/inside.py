"""What tests need of the inside of the package: the one place that changes when its walls move.

Each function says what a test asks or does, in the words of the docs. Other files of tests use the
public names and these; only the tests of one module itself import that module, as a whole.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

from django_singletask import checks, conf, stores
from django_singletask.locks import renewal
from django_singletask.management.commands import locks
from django_singletask.operators import words
from django_singletask.stores import base
from django_singletask.task import header, options

# == Stores and the epoch

# == Locks, leases, renewal

# == Tasks, messages, headers

# == Options, settings, checks, keys


class Option(NamedTuple):
    """An option of a task; without choices any value of its kind may fit."""

    kind: str
    default: Any
    choices: tuple[Any, ...]


def task_options() -> dict[str, Option]:
    return {
        name: Option(kind, getattr(options.Attributes, name), options.CHOICES.get(name, ()))
        for name, kind in options.Attributes.__annotations__.items()
    }


def setting_defaults() -> dict[str, Any]:
    """Return the settings by their short names, without ``SINGLETASK_``."""
    return conf.DEFAULTS


def check_numbers() -> list[str]:
    """Return the numbers in the code of the system checks."""
    return re.findall(r'[."]([EW]\d{3})"', inspect.getsource(checks))


def header_fields() -> list[str]:
    """Return the fields of the header in a message."""
    return ["id", "task", *sorted(header.TYPES)]


def actions_of_the_command() -> list[str]:
    return [*locks.ACTIONS]


def states_of_a_lock() -> list[str]:
    return [*words.STATES]


def setting(name: str) -> Any:
    """Return what is in effect for ``SINGLETASK_…``, by its short name."""
    return getattr(conf.conf, name)


def family(alias: str) -> str:
    """Return the family of the store that this thread uses for a cache."""
    return stores.get_store(alias).family


def knows_the_epoch(alias: str) -> bool:
    """Say whether this process knows the epoch of a cache, or of all servers of a cluster."""
    epoch = base.epoch_of(alias)
    servers = [*epoch.map.epochs] if hasattr(epoch, "map") else [epoch]
    return bool(servers) and all(server.value is not None for server in servers)


def renewed_keys() -> set[str]:
    """Return the keys of the leases that this process renews."""
    return {key for renewer in renewal.renewers.values() for _token, key in renewer.leases}


def problems_of(where: str, **values: Any) -> list[Exception]:
    """Return what is wrong with these options together; a ``UserWarning`` is only reported."""
    return [error for _names, error in options.LockOptions(**values).problems(where)]


# == The history

# == Operators: held now, names, words, the command, the admin

# == Workers
