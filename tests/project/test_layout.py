"""How large the package may be, what it offers to users, and what importing it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "django_singletask"

NODES = 50_750
"""The most nodes of the syntax trees. Lines have no bound: that would reward packing them."""

# Users, Django or Celery import names of these modules; tests/surface.txt has the names. No other
# module has an __all__.
PUBLIC = {
    PACKAGE,
    f"{PACKAGE}.admin",
    f"{PACKAGE}.apps",
    f"{PACKAGE}.history",
    f"{PACKAGE}.management.commands.locks",
    f"{PACKAGE}.models",
    f"{PACKAGE}.signals",
    f"{PACKAGE}.testing",
    f"{PACKAGE}.testing.stores",
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


def has_list_of_names(path: Path) -> bool:
    return any(
        isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__"
        for statement in tree(path).body
    )


def test_only_the_modules_for_users_say_what_they_offer() -> None:
    assert {name for name, path in MODULES.items() if has_list_of_names(path)} == PUBLIC


def nodes(path: Path) -> int:
    return sum(not isinstance(node, ast.expr_context) for node in ast.walk(tree(path)))


def test_the_package_is_not_larger() -> None:
    counted = [path for name, path in MODULES.items() if not name.startswith(f"{PACKAGE}.testing")]
    assert sum(map(nodes, counted)) <= NODES


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
