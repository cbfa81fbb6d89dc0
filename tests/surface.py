"""The public surface: everything that a project, a script or a dashboard can depend on.

tests/test_surface.py compares it with tests/surface.txt. So no name, default, key or code changes
without a line in the diff of that file, and in CHANGELOG.rst.
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

PACKAGE = "django_singletask"
FILE = Path(__file__).with_name("surface.txt")
MODULES = (
    PACKAGE,
    f"{PACKAGE}.signals",
    f"{PACKAGE}.testing",
    f"{PACKAGE}.history",
    f"{PACKAGE}.models",
    f"{PACKAGE}.admin",
)
BY_NAME = (f"{PACKAGE}.admin", f"{PACKAGE}.testing")
"""Modules of whose classes only the name and the arguments are public."""


def text() -> str:
    return "".join(f"{line}\n" for line in lines())


def lines() -> Iterator[str]:
    for name in MODULES:
        module = import_module(name)
        yield from heading(f"Names of {name}")
        for public in sorted(module.__all__):
            yield from described(public, getattr(module, public))
    yield from heading("Options of a task, and their defaults")
    options = import_module(f"{PACKAGE}.task.options")
    choices = options.CHOICES
    for option, kind in options.Attributes.__annotations__.items():
        values = f": one of {choices[option]}" if option in choices else ""
        yield f"{option}: {kind} = {getattr(options.Attributes, option)!r}{values}"
    yield from heading("Settings, and their defaults")
    for setting, default in import_module(f"{PACKAGE}.conf").DEFAULTS.items():
        yield f"SINGLETASK_{setting.upper()} = {default!r}"
    yield from heading("System checks")
    source = Path(import_module(f"{PACKAGE}.checks").__file__ or "").read_text()
    yield from sorted({f"{PACKAGE}.{number}" for number in re.findall(r'"([EW]\d{3})"', source)})
    yield from command()
    yield from codes()
    yield from heading("What is stored: a row, a holder, a message")
    model = import_module(f"{PACKAGE}.models").TaskLockEvent
    yield f"table {model._meta.db_table}: {', '.join(f.column for f in model._meta.fields)}"
    yield f"permissions: {', '.join(name for name, _ in model._meta.permissions)}"
    holder = import_module(f"{PACKAGE}.holder").Holder
    yield f"record: {', '.join(field.name for field in dataclasses.fields(holder))}"
    header = import_module(f"{PACKAGE}.task.header")
    yield f"message header {header.HEADER!r}: {', '.join(['id', 'task', *sorted(header.TYPES)])}"
    yield from heading("Metrics")
    source = (Path(source_of(PACKAGE)) / "contrib/opentelemetry/apps.py").read_text()
    yield from re.findall(r'create_\w+\(\s+"([\w.]+)"', source)


def source_of(package: str) -> Path:
    return Path(import_module(package).__file__ or "").parent


def heading(title: str) -> list[str]:
    return ["", title, "-" * len(title)]


def described(name: str, value: Any) -> Iterator[str]:
    """Yield the signature of a public function or class, and the public attributes of a class."""
    if not inspect.isclass(value):
        yield f"{name}{signature(value) if callable(value) else ''}"
        return
    yield f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
    yield f"    {name}{signature(value)}"
    if not value.__module__.startswith(BY_NAME):
        for attribute in sorted(own_names(value)):
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
    locks = import_module(f"{PACKAGE}.management.commands.locks")
    yield from heading("manage.py locks")
    yield f"actions: {', '.join(locks.ACTIONS)}"
    made = locks.Command()
    made.create_parser("manage.py", "locks")
    for actions, option in made.options:
        yield f"{option.option_strings[0]} of {actions}, default {option.default!r}"


def codes() -> Iterator[str]:
    yield from heading("Codes")
    models = import_module(f"{PACKAGE}.models")
    for name in ("Kind", "HoldOutcome", "Result"):
        yield f"{name}: {', '.join(getattr(models, name).values)}"
    words = import_module(f"{PACKAGE}.operators.words")
    yield f"states: {', '.join(words.STATES)}"
