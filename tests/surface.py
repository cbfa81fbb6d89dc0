"""The public surface: everything that a project, a script or a dashboard can depend on.

tests/project/test_surface.py compares it with tests/surface.txt. So no name, default, key or code
changes without a line in the diff of that file, and in CHANGELOG.rst.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from django.db.models import Model

from django_singletask import Holder
from django_singletask.models import TaskLockEvent
from tests import inside

PACKAGE = "django_singletask"
ROOT = Path(__file__).parent.parent
FILE = Path(__file__).with_name("surface.txt")
MODULES = ("", ".signals", ".testing", ".history", ".models", ".admin", ".stores.base")
OF_STORES = ["Entry", "Forgotten", "Outcome", "Store"]
"""What docs/contributing/add-a-store.rst imports from a module that has other names, too."""
BY_NAME = (f"{PACKAGE}.admin", f"{PACKAGE}.testing", f"{PACKAGE}.stores")
"""Modules of whose classes only the name, the arguments, and what must be written, are public."""


def text() -> str:
    return "".join(f"{line}\n" for line in lines())


def lines() -> Iterator[str]:
    for name in MODULES:
        module = import_module(f"{PACKAGE}{name}")
        yield from heading(f"Names of {module.__name__}")
        for public in sorted(getattr(module, "__all__", OF_STORES)):
            yield from described(public, getattr(module, public))
    yield from heading("Options of a task, and their defaults")
    for name, option in inside.task_options().items():
        values = f": one of {option.choices}" if option.choices else ""
        yield f"{name}: {option.kind} = {option.default!r}{values}"
    yield from heading("Settings, and their defaults")
    for setting, default in inside.setting_defaults().items():
        yield f"SINGLETASK_{setting.upper()} = {default!r}"
    yield from heading("System checks")
    yield from [f"{PACKAGE}.{number}" for number in sorted(set(inside.check_numbers()))]
    yield from command()
    yield from codes()
    yield from heading("What is stored: a row, a holder, a message")
    meta = TaskLockEvent._meta
    yield f"table {meta.db_table}: {', '.join(field.column for field in meta.fields)}"
    yield f"permissions: {', '.join(name for name, _ in meta.permissions)}"
    yield f"record: {', '.join(field.name for field in dataclasses.fields(Holder))}"
    yield f"message header 'singletask': {', '.join(inside.header_fields())}"
    yield from heading("Metrics")
    source = ROOT / PACKAGE / "contrib/opentelemetry/apps.py"
    yield from re.findall(r'create_\w+\(\s+"([\w.]+)"', source.read_text())


def heading(title: str) -> list[str]:
    return ["", title, "-" * len(title)]


def described(name: str, value: Any) -> Iterator[str]:
    """Yield the signature of a public function or class, and the public attributes of a class."""
    if not inspect.isclass(value):
        yield f"{name}{signature(value) if callable(value) else ''}"
        return
    yield f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
    if name not in OF_STORES or "__init__" in vars(value):
        yield f"    {name}{signature(value)}"
    names = own_names(value)
    if value.__module__.startswith(BY_NAME):
        parts = ("__abstractmethods__", "_fields", "__members__")
        names = {each for part in parts for each in getattr(value, part, ())}
    for attribute in sorted(names):
        found = inspect.getattr_static(value, attribute, None)
        inner = getattr(found, "__func__", found)
        yield f"    .{attribute}{signature(inner) if inspect.isfunction(inner) else ''}"


def own_names(cls: type) -> set[str]:
    """Return the public attributes that this package gives a class, and those of an object."""
    if issubclass(cls, Model):
        names = {field.name for field in cls._meta.fields}
        return names | {name for name, found in vars(cls).items() if isinstance(found, property)}
    names = set()
    for each in cls.__mro__:
        if each.__module__.startswith(PACKAGE):
            names |= vars(each).keys() | inspect.get_annotations(each).keys()
    examples = {"TaskLock": ["surface"], "LockConflict": ["surface"], "DuplicateTask": ["a", "b"]}
    if cls.__name__ in examples:
        names |= vars(cls(*examples[cls.__name__])).keys()
    return {name for name in names if not name.startswith("_")}


def signature(function: Any) -> str:
    try:
        # Python 3.14 writes annotations without quotes.
        text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))
    except (TypeError, ValueError):
        return "(…)"
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def command() -> Iterator[str]:
    yield from heading("manage.py locks")
    yield f"actions: {', '.join(inside.actions_of_the_command())}"
    for action in inside.actions_of_the_command():
        for option, default in inside.options_of_the_command(action).items():
            yield f"{option} of {action}, default {default!r}"


def codes() -> Iterator[str]:
    yield from heading("Codes")
    for name in ("kind", "outcome", "result"):
        codes = [code for code, _label in TaskLockEvent._meta.get_field(name).choices if code]
        yield f"{name}: {', '.join(codes)}"
    yield f"states: {', '.join(inside.states_of_a_lock())}"
