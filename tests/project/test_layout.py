"""How large and how dense the package may be, what it offers to users, what importing it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "django_singletask"

AT_MOST = {
    "nodes": 60_239,
    "nodes of testing": 6_608,
    "nodes for a statement": 6.67,
    "choices inside a line": 25,
    "choices outside the operators' modules": 24,
    "assignment expressions": 1,
    "several assignments in one": 2,
    "big statements": 19,
}
"""Of the syntax trees, of the package without testing. Lines have no bound: that would reward
packing them. A bound is lowered when the code allows it."""

BIG = 25
"""The most nodes of a statement that is not big, without the statements inside it."""

Located = ast.stmt | ast.expr

FOR_OPERATORS = ("operators", "management", "admin", "templatetags")

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


def in_wing(path: Path, *wings: str) -> bool:
    return path.relative_to(ROOT / PACKAGE).with_suffix("").parts[0] in wings


def nodes(root: ast.AST) -> list[ast.AST]:
    return [node for node in ast.walk(root) if not isinstance(node, ast.expr_context)]


def statements(module: ast.Module) -> list[ast.stmt]:
    """Return all statements but the docstrings."""
    return [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]


def own_nodes(node: ast.AST) -> int:
    """Count the nodes of a statement, without those of the statements inside it."""
    inside = (ast.stmt, ast.ExceptHandler, ast.expr_context)
    children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, inside)]
    return 1 + sum(map(own_nodes, children))


def questions(node: ast.AST) -> list[ast.expr]:
    """Return what an if, a while, an assert or a comprehension asks."""
    if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)):
        return [node.test]
    if isinstance(node, ast.comprehension):
        return node.ifs
    return []


def is_condition(node: ast.expr) -> bool:
    """Return whether an expression is True or False, by the look of it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("all", "any", "bool", "callable", "isinstance")
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_not or isinstance(node, (ast.Compare, ast.BoolOp))


def choices(module: ast.Module) -> Iterator[ast.expr]:
    """Find the choices that no if statement shows, ``and`` and ``or`` in a test not counted."""
    asked = {
        inner
        for node in ast.walk(module)
        for question in questions(node)
        for inner in ast.walk(question)
        if isinstance(inner, ast.BoolOp)
    }
    for node in ast.walk(module):
        match node:
            case ast.IfExp():
                yield node
            case ast.BoolOp() if node not in asked:
                yield node
            case ast.BinOp(op=ast.Mult()) if is_condition(node.left) or is_condition(node.right):
                yield node
            case ast.Subscript() if is_condition(node.slice):
                yield node


def walruses(module: ast.Module) -> list[ast.NamedExpr]:
    return [node for node in ast.walk(module) if isinstance(node, ast.NamedExpr)]


def pairs(module: ast.Module) -> Iterator[ast.Assign]:
    """Find each ``a, b = x, y``."""
    for node in ast.walk(module):
        match node:
            case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple()):
                yield node


def big_statements(module: ast.Module) -> list[ast.stmt]:
    return [statement for statement in statements(module) if own_nodes(statement) > BIG]


COUNTED = [path for path in MODULES.values() if not in_wing(path, "testing")]
NOT_FOR_OPERATORS = [path for path in COUNTED if not in_wing(path, *FOR_OPERATORS)]
IN_LINES: dict[str, tuple[Callable[[ast.Module], Iterable[Located]], list[Path]]] = {
    "choices inside a line": (choices, COUNTED),
    "choices outside the operators' modules": (choices, NOT_FOR_OPERATORS),
    "assignment expressions": (walruses, COUNTED),
    "several assignments in one": (pairs, COUNTED),
    "big statements": (big_statements, COUNTED),
}


@pytest.mark.parametrize("name", IN_LINES)
def test_a_line_says_one_thing(name: str) -> None:
    find, paths = IN_LINES[name]
    spots = [
        f"{path.relative_to(ROOT)}:{node.lineno}" for path in paths for node in find(tree(path))
    ]
    assert len(spots) <= AT_MOST[name], "\n".join(spots)


def test_the_package_is_not_larger() -> None:
    total = sum(len(nodes(tree(path))) for path in COUNTED)
    assert total <= AT_MOST["nodes"]
    in_all = sum(len(statements(tree(path))) for path in COUNTED)
    assert round(total / in_all, 2) <= AT_MOST["nodes for a statement"]


def test_testing_is_not_larger() -> None:
    counted = [path for path in MODULES.values() if in_wing(path, "testing")]
    assert sum(len(nodes(tree(path))) for path in counted) <= AT_MOST["nodes of testing"]


def test_importing_the_package_imports_no_model_and_no_database_client() -> None:
    # Without what is there before: while the coverage is measured, that is more.
    program = "import sys; before = {*sys.modules}; import django_singletask; "
    program += "print(*sys.modules.keys() - before)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.split())
    assert PACKAGE in imported
    assert {name for name in imported if name.endswith(".models")} == set()
    clients = {"redis", "django_redis", "valkey", "django_valkey", "pylibmc", "pymemcache"}
    clients |= {"psycopg", "MySQLdb", "sqlite3"}
    assert imported & clients == set()
