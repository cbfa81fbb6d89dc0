"""The Python code on the pages of the guides, for tests that run it as it stands there."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from tests.limits import OPTIONS

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^( *)\.\. code-block:: python\n\n((?:\1    .*\n|\n)+)", re.MULTILINE)


def blocks(page: str) -> list[str]:
    """Return the blocks of Python code on a page."""
    found = BLOCK.findall((DOCS / page).read_text())
    return [textwrap.dedent(block) for _indent, block in found]


def lock_options(page: str) -> dict[str, dict[str, Any]]:
    """Return the lock options that a page gives to each task, without the arguments of its lock."""
    found: dict[str, dict[str, Any]] = {}

    def shared_task(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        def keep(function: Callable[..., Any]) -> Any:
            of_lock = options.keys() & OPTIONS.keys() - {"lock_on", "lock_name"}
            found[function.__name__] = {name: options[name] for name in of_lock}
            return MagicMock()

        return keep if function is None else keep(function)

    exec("\n".join(blocks(page)), {"shared_task": shared_task, **_NAMES})
    return found


_NAMES = {"SingletonTask": object, "LockConflict": Exception}
