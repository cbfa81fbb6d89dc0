"""Call ``manage.py locks`` as the tests of its actions do."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from django_singletask.holder import Holder
from django_singletask.locks.keys import name_key
from django_singletask.stores import get_store

__all__ = ["alarm", "hold", "locks", "locks_as_json"]


def hold(*, key: str | None = None, **facts: Any) -> None:
    """Put an entry into the store as another process would."""
    facts = {"token": "t", "name": "nightly", "host": "web-3", "pid": 8121, **facts}
    key = key or name_key(f"held {facts['token']}").key
    assert get_store("redis").add(key, Holder.from_dict(facts).encode(), 30) is None


def locks(*arguments: str) -> str:
    """Return what the command prints."""
    output = io.StringIO()
    call_command("locks", *arguments, stdout=output, no_color=True)
    return output.getvalue()


def locks_as_json(*arguments: str) -> Any:
    return json.loads(locks(*arguments, "--json"))


def alarm(*arguments: str) -> tuple[str, str]:
    """Return what ``list`` prints, and the error with which it ends."""
    output = io.StringIO()
    with pytest.raises(CommandError) as caught:
        call_command("locks", "list", *arguments, stdout=output, no_color=True)
    return output.getvalue(), str(caught.value)
