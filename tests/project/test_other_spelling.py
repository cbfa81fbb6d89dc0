"""The commands in the guide change the spelling of all common decorators, there and back."""

from __future__ import annotations

import ast
import re

from tests.guides import DOCS

REPLACEMENTS = re.compile(r"^ +s/(.+)/(.*)/g;$", re.MULTILINE)
SHARED = """
@shared_task(base=SingletonTask)
def bare(): ...

@shared_task(base=SingletonTask, lock_on=["feed_id"])
def first(): ...

@shared_task(bind=True, base=SingletonTask)
def last(): ...

@shared_task(bind=True, autoretry_for=(OSError, KeyError), base=SingletonTask, acks_late=True)
def between(): ...

@shared_task(
    base=SingletonTask,
    lock_on=["feed_id"],
    retry_kwargs=dict(max_retries=3),
)
def lines(): ...

@shared_task(
    bind=True,
    base=SingletonTask,
)
def last_line(): ...

@shared_task(bind=True, base=Own, lock_slots=3)
def own(): ...

@shared_task
def other(): ...

@shared_task(name="plain")
def named(): ...
"""
SINGLETON = """
@singleton_task
def bare(): ...

@singleton_task(lock_on=["feed_id"])
def first(): ...

@singleton_task(bind=True)
def last(): ...

@singleton_task(bind=True, autoretry_for=(OSError, KeyError), acks_late=True)
def between(): ...

@singleton_task(
    lock_on=["feed_id"],
    retry_kwargs=dict(max_retries=3),
)
def lines(): ...

@singleton_task(
    bind=True,
)
def last_line(): ...

@shared_task(bind=True, base=Own, lock_slots=3)
def own(): ...

@shared_task
def other(): ...

@shared_task(name="plain")
def named(): ...
"""


def replace(code: str, command: str) -> str:
    for pattern, result in REPLACEMENTS.findall(command):
        there = result.replace("\\@", "@").replace("$1", r"\1")
        code = re.sub(pattern, there, code)
    return code


def decorators(code: str) -> list[list[str]]:
    """Return what is in the decorator of each function, whatever its order."""
    functions = [node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    return [
        sorted(ast.unparse(part) for part in ast.iter_child_nodes(node.decorator_list[0]))
        for node in functions
    ]


def test_the_replacements_change_the_spelling_and_change_it_back() -> None:
    page = (DOCS / "guides/type-checkers.rst").read_text()
    there, back = page.split("perl -0pi")[1:]
    assert replace(SHARED, there) == SINGLETON
    assert decorators(replace(SINGLETON, back)) == decorators(SHARED)
    with_base = "@singleton_task(bind=True, base=Own)"
    assert replace(with_base, back) == "@shared_task(bind=True, base=Own)"
    assert replace("@singleton_task()", back) == "@shared_task(base=SingletonTask)"
