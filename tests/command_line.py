"""Call ``manage.py locks`` as the tests of its actions do."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from django_singletask.holder import Holder
from tests import inside
from tests.entries import key_of

__all__ = ["alarm", "ended_process", "hold", "locks", "locks_as_json"]


def hold(*, key: str | None = None, left: float = 30, alias: str = "redis", **facts: Any) -> Holder:
    """Put an entry into the store as another process would; return its holder."""
    facts = {"token": "t", "name": "nightly", "host": "web-3", "pid": 8121, **facts}
    holder = dataclasses.replace(Holder.from_dict({}), **facts)
    inside.put_entry(key or key_of(f"held {holder.token}"), holder.encode(), left, alias)
    return holder


def ended_process() -> dict[str, Any]:
    """Return what an entry says of a process of this host that has ended."""
    with subprocess.Popen(["true"]) as child:
        child.wait()
    return {**inside.this_process(), "pid": child.pid, "start": "1"}


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
