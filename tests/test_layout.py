"""What each module of the package offers to others, and what importing the package costs."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "django_singletask"
# The code that may use names of the package.
USERS = [PACKAGE, "tests", "benchmarks", "example_project"]

# What users, Django or Celery import by name, whether or not anything here does.
PUBLIC = {
    PACKAGE: {
        "DuplicateTask",
        "LockConflict",
        "LockError",
        "LockLost",
        "LockUnavailable",
        "SingletonTask",
        "TaskLock",
        "current_lock",
        "only_one",
    },
    f"{PACKAGE}.admin": {"TaskLockEventAdmin"},
    f"{PACKAGE}.apps": {"SingletaskConfig"},
    f"{PACKAGE}.history.recorder": {"flush"},
    f"{PACKAGE}.management.commands.locks": {"Command"},
    f"{PACKAGE}.models": {"TaskLockEvent"},
    f"{PACKAGE}.signals": {"LockEvent", "lock_event"},
    f"{PACKAGE}.testing": {"hold", "no_locks"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path
    for path in sorted((ROOT / PACKAGE).rglob("*.py"))
    if "migrations" not in path.parts
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def body(path: Path) -> Iterator[ast.stmt]:
    """Yield the statements of a module that are not in a function or class."""
    blocks = [tree(path).body]
    while blocks:
        for statement in blocks.pop():
            yield statement
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                blocks += [
                    getattr(statement, field, []) for field in ("body", "orelse", "handlers")
                ]


def defined(path: Path) -> set[str]:
    """Return the names that a module defines itself; names that it imports are not among them."""
    names = set()
    for statement in body(path):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            names |= bound_names(statement)
    return names


def offered(path: Path) -> list[str] | None:
    for statement in body(path):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(statement.value)
            return names
    return None


def bound_names(node: ast.AST) -> set[str]:
    """Return the names that are assigned in a node, and the parameters in it."""
    names = {
        inner.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }
    return names | {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}


class Uses(ast.NodeVisitor):
    """Collect the names of the package's modules that one file uses, as (module, name).

    ``names`` has what is imported or read as an attribute. ``strings`` has what stands in a string:
    the dotted path of a name, also relative to ``folder``, or ``setattr(module, "name", …)``.
    """

    def __init__(self, parsed: ast.Module, folder: str = "") -> None:
        self.names: set[tuple[str, str]] = set()
        self.strings: set[tuple[str, str]] = set()
        self._folder = folder
        self._modules: dict[str, str] = {}  # what a local name stands for
        self.visit(parsed)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        outer = self._modules
        # A local variable hides a module of the same name.
        hidden = bound_names(node)
        self._modules = {name: module for name, module in outer.items() if name not in hidden}
        self.generic_visit(node)
        self._modules = outer

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name in MODULES and alias.asname:
                self._modules[alias.asname] = alias.name
            elif alias.name in MODULES:
                self._modules[PACKAGE] = PACKAGE

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            module = f"{node.module}.{alias.name}"
            if module in MODULES:
                self._modules[alias.asname or alias.name] = module
            elif node.module in MODULES:
                self.names.add((node.module, alias.name))

    def module(self, node: ast.expr) -> str | None:
        """Return the module that an expression stands for."""
        if isinstance(node, ast.Name):
            return self._modules.get(node.id)
        if isinstance(node, ast.Attribute) and (package := self.module(node.value)):
            module = f"{package}.{node.attr}"
            return module if module in MODULES else None
        return None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        module = self.module(node.value)
        if module and f"{module}.{node.attr}" not in MODULES and not node.attr.startswith("__"):
            self.names.add((module, node.attr))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func).endswith("setattr") and len(node.args) > 1:
            module, name = self.module(node.args[0]), node.args[1]
            if module and isinstance(name, ast.Constant):
                self.strings.add((module, str(name.value)))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        text = node.value
        if not isinstance(text, str):
            return
        parts = text.split(".")
        if all(map(str.isidentifier, parts)):
            for end in range(len(parts) - 1, 0, -1):
                path = ".".join(parts[:end])
                for module in {path, f"{self._folder}.{path}"} & set(MODULES):
                    self.strings.add((module, parts[end]))
                    return
        if "import" in text and PACKAGE in text:
            with suppress(SyntaxError):  # not a program then, but a sentence
                self.visit(ast.parse(textwrap.dedent(text)))


@cache
def uses() -> dict[str, dict[str, set[str]]]:
    """Return which file uses what: module -> name -> files."""
    files: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    paths = {path for folder in USERS for path in (ROOT / folder).rglob("*.py")}
    for path in paths - {Path(__file__)}:
        folder = module_name(path.parent / "__init__.py")
        file_uses = Uses(tree(path), folder if folder in MODULES else "")
        # A test may replace what a module imports: the module does not offer that name.
        strings = {use for use in file_uses.strings if use[1] in defined(MODULES[use[0]])}
        for module, name in file_uses.names | strings:
            if path != MODULES[module]:
                files[module][name].add(str(path.relative_to(ROOT)))
    return files


@pytest.mark.parametrize("module", MODULES)
def test_all_says_what_others_use(module: str) -> None:
    used, public = uses()[module], PUBLIC.get(module, set())
    names = set(offered(MODULES[module]) or [])
    problems = [f"{name} is in __all__, but nothing uses it" for name in names - set(used) - public]
    problems += [
        f"{name} is not in __all__, but used by {', '.join(sorted(used[name]))}"
        for name in set(used) - names
    ]
    problems += [f"{name} is for users, but not in __all__" for name in public - names]
    assert not problems, "\n".join(sorted(problems))


@pytest.mark.parametrize("module", MODULES)
def test_all_is_sorted_and_has_no_private_names(module: str) -> None:
    def isort_style(name: str) -> tuple[bool, bool, str]:
        """Constants first, then classes, then functions and the rest, as ruff's RUF022 has it."""
        is_constant = len(name) > 1 and name.isupper()
        return not is_constant, not name[0].isupper(), name

    names = offered(MODULES[module]) or []
    assert names == sorted(set(names), key=isort_style)
    assert [name for name in names if name.startswith("_")] == []


def test_every_use_is_seen() -> None:
    """Guard the guard: each way to use a name, and a local variable that hides a module."""
    program = """
        import django_singletask
        import django_singletask.locks.lock as lock_module
        from django_singletask import SingletonTask
        from django_singletask.locks import lock, renewal as thread

        lock.TaskLock, thread.clock, lock_module.current_lock
        django_singletask.conf.conf
        monkeypatch.setattr(lock, "patched", 1)
        monkeypatch.setattr("django_singletask.locks.keys.replaced", 1)
        run("from django_singletask import only_one")
        load("renewal.drop")

        def local(lock):
            return lock.name, [thread.token for thread in lock.threads]
    """
    locks = f"{PACKAGE}.locks"
    seen = Uses(ast.parse(textwrap.dedent(program)), folder=locks)
    assert seen.names == {
        (PACKAGE, "SingletonTask"),
        (PACKAGE, "only_one"),
        (f"{PACKAGE}.conf", "conf"),
        (f"{locks}.lock", "TaskLock"),
        (f"{locks}.lock", "current_lock"),
        (f"{locks}.renewal", "clock"),
    }
    assert seen.strings == {
        (f"{locks}.lock", "patched"),
        (f"{locks}.keys", "replaced"),
        (f"{locks}.renewal", "drop"),
    }


def test_importing_the_package_imports_no_model_and_no_database_client() -> None:
    program = "import sys, django_singletask; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.split())
    assert PACKAGE in imported
    assert {name for name in imported if name.endswith(".models")} == set()
    clients = {"redis", "django_redis", "valkey", "django_valkey", "pylibmc", "pymemcache"}
    clients |= {"psycopg", "MySQLdb", "sqlite3"}
    assert imported & clients == set()


def test_no_module_is_longer_than_300_lines() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > 300} == {}


def test_no_function_is_longer_than_50_lines() -> None:
    functions = [
        (name, node)
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    assert [f"{name}.{node.name}" for name, node in functions if lines_of(node) > 50] == []


def lines_of(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1
