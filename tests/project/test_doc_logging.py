"""The page about logging has each message of the package, with its level, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/operating/logging.rst").read_text()
ROW = re.compile(r"   \* - (INFO|WARNING|ERROR)\n     - (.+(?:\n       .+)*)")
LEVELS = {
    "logger.info": "INFO",
    "logger.warning": "WARNING",
    "warn_once": "WARNING",
    "logger.error": "ERROR",
    "logger.exception": "ERROR",
}
Message = tuple[str, str]


def text_of(node: ast.expr, function: ast.AST) -> str:
    """Return a text of the code, with … in place of what it is filled with."""
    if isinstance(node, ast.Name):
        texts = [
            (each.lineno, each.value)
            for each in ast.walk(function)
            if isinstance(each, ast.Assign)
            and isinstance(each.targets[0], ast.Name)
            and each.targets[0].id == node.id
            and each.lineno <= node.lineno
        ]
        return text_of(max(texts, key=itemgetter(0))[1], function)
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
    return re.sub(r"%[srgd]", "…", text)


def messages_of(path: Path) -> Iterator[Message]:
    tree = ast.parse(path.read_text())
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (level := LEVELS.get(ast.unparse(node.func))):
            around = [each for each in functions if node in ast.walk(each)]
            function = max(around, key=lambda each: each.lineno)
            yield level, text_of(node.args[0], function)


LOGGED = [
    message
    for path in sorted((ROOT / "django_singletask").rglob("*.py"))
    for message in messages_of(path)
]
LISTED = [
    (level, re.sub(r"\s+", " ", literal))
    for level, cell in ROW.findall(PAGE)
    for literal in re.findall(r"``(.+?)``", cell, re.DOTALL)
]


def shows(listed: Message, logged: Message) -> bool:
    parts = map(re.escape, re.sub(r"policy for …: skip", "policy for …: …", listed[1]).split("…"))
    return listed[0] == logged[0] and re.search(".*".join(parts), logged[1]) is not None


def test_each_message_is_listed_with_its_level():
    missing = [logged for logged in LOGGED if not any(shows(each, logged) for each in LISTED)]
    assert len(LOGGED) > 30
    assert missing == []


def test_each_message_that_is_listed_is_logged():
    assert [each for each in LISTED if not any(shows(each, logged) for logged in LOGGED)] == []


def test_control_another_level_or_text_is_found():
    level, text = LOGGED[0]
    other = "INFO" if level != "INFO" else "ERROR"
    assert not shows((other, text), LOGGED[0])
    assert not shows((level, "… was found"), LOGGED[0])
