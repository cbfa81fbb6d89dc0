"""How large the package may be, what it offers to users, and what importing it costs."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "django_singletask"

CODE, NODES = 7164, 48208
"""Lines with code, without docstrings and comments, and nodes of the syntax trees.

The numbers only go down, with each commit that makes the package smaller.
"""

# What users, Django or Celery import by name. No other module has an __all__.
PUBLIC = {
    PACKAGE: {
        "DuplicateTask",
        "Holder",
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
    f"{PACKAGE}.history": {"flush"},
    f"{PACKAGE}.management.commands.locks": {"Command"},
    f"{PACKAGE}.models": {"TaskLockEvent"},
    f"{PACKAGE}.signals": {"LockEvent", "lock_event"},
    f"{PACKAGE}.testing": {"advance_time", "hold", "no_locks", "queued"},
    f"{PACKAGE}.testing.stores": {"StoreContract"},
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


def offered(path: Path) -> list[str]:
    for statement in tree(path).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(statement.value)
            return names
    return []


def test_only_the_modules_for_users_say_what_they_offer() -> None:
    assert {name: set(offered(path)) for name, path in MODULES.items() if offered(path)} == PUBLIC


def code_lines(path: Path) -> int:
    text = path.read_text()
    layout = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
    used = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if tokenize.tok_name[token.type] not in layout
    }
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            is_text = isinstance(node.value.value, str)
            used -= set(range(node.lineno, (node.end_lineno or 0) + 1)) if is_text else set()
    return len(used)


def nodes(path: Path) -> int:
    return sum(not isinstance(node, ast.expr_context) for node in ast.walk(tree(path)))


@pytest.mark.parametrize(("count", "limit"), [(code_lines, CODE), (nodes, NODES)])
def test_the_package_is_no_larger_than_before(count: object, limit: int) -> None:
    assert callable(count)
    counted = [path for name, path in MODULES.items() if not name.startswith(f"{PACKAGE}.testing")]
    assert sum(map(count, counted)) <= limit


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
