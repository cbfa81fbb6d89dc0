"""The limits of options and settings: what fits, and what is said of what does not.

tests/task/test_options.py tries each value wherever an option can be set,
tests/project/test_checks.py those of the settings, and tests/task/test_pairs.py combines the usual
values of the options.
"""

from __future__ import annotations

import enum
import math
from typing import Any, NamedTuple

MONTH = 30 * 24 * 60 * 60
NAN = float("nan")


class Limit(NamedTuple):
    """What an option or a setting can be; its default is the first of the usual values."""

    check: str
    """The number of the system check."""
    rule: str
    """What follows the name in the message, with "{where}" and "{value}"."""
    usual: list[Any]
    extreme: list[Any]
    """Other values that fit."""
    wrong_types: list[Any]
    """Values that are refused with ``TypeError``."""
    wrong_values: list[Any]
    """Values that are refused with ``ValueError``."""

    def message(self, name: str, value: Any, where: str = "") -> str:
        shown = getattr(value, "__qualname__", repr(value))
        return name + self.rule.format(where=where, value=shown)


def seconds(rule: str, usual: list[Any], *extreme: float, wrong: list[float]) -> Limit:
    text = f"{{where}} must be a number of seconds, {rule}, not {{value}}."
    wrong_values = [*wrong, NAN, MONTH + 1]
    return Limit("E008", text, usual, [*extreme, MONTH], ["60", True], wrong_values)


def one_of(*choices: Any, extreme: Any = (), types: Any = (1,), values: Any = ("never",)) -> Limit:
    text = f"={{value}}{{where}} is not one of {', '.join(map(str, choices))}."
    return Limit("E012", text, [*choices], [*extreme], [*types], [*values])


def report(*args: Any, **kwargs: Any) -> str:
    return "reported"


class Policy(str, enum.Enum):  # noqa: UP042 - str() of it is not its value
    REQUEUE = "requeue"


ABOVE_0 = f"above 0 and at most {MONTH} (30 days)"
FROM_0 = f"0 or more and at most {MONTH} (30 days)"
BOOLEANS = [1, 0, "yes", None]
OPTIONS = {
    "lock_timeout": seconds(ABOVE_0, [None, 30], 1e-9, wrong=[0, -1, math.inf]),
    "lock_renew": one_of(True, False, types=BOOLEANS, values=()),
    "lock_on": Limit(
        "E009",
        "{where} must be a list of argument names, not {value}.",
        usual=[None, [], ["a"]],
        extreme=[("a", "b")],
        wrong_types=[3, [3]],
        wrong_values=[],
    ),
    "lock_name": Limit(
        "E010",
        "{where} must be a format string or a callable, not {value}.",
        usual=[None, "x:{a}"],
        extreme=["x{a.real}", "x{b:>5}", "nightly"],
        wrong_types=[3],
        wrong_values=[],
    ),
    "on_conflict": one_of(
        *("skip", "raise", "wait", "requeue"),
        extreme=[Policy.REQUEUE],
        types=[1, None],
        values=["never", ""],
    ),
    "lock_wait": seconds(f"{FROM_0}, or math.inf", [None, 0, 0.5], math.inf, wrong=[-1]),
    "lock_at_least": seconds(FROM_0, [0, 5], wrong=[-1, math.inf]),
    "lock_slots": Limit(
        "E008",
        "{where} must be a whole number from 1 to 1000, not {value}.",
        usual=[1, 2],
        extreme=[1000],
        wrong_types=["2", 2.0, True, None],
        wrong_values=[0, -1, 1001],
    ),
    "on_skip": Limit(
        "E012",
        "{where} must be a plain function, not {value}.",
        usual=[None, report],
        extreme=[print],
        wrong_types=["report", 1],
        wrong_values=[],
    ),
    "on_outage": one_of("raise", "run", "skip"),
    "skip_result": Limit(
        "E012",
        "{where} must be a value (for a function use on_skip), not {value}.",
        usual=[None, "busy"],
        extreme=[0, [1]],
        wrong_types=[dict, print],
        wrong_values=[],
    ),
    "unique_until": one_of(None, "start", "finish", "expiry"),
    "unique_for": seconds(ABOVE_0, [None, 60], wrong=[0]),
    "on_duplicate": one_of("return", "raise", "replace"),
    "lock_history": one_of(True, False, types=BOOLEANS, values=()),
}

SETTINGS = {
    "SINGLETASK_LOCK_TIMEOUT": OPTIONS["lock_timeout"]._replace(
        check="E007",
        usual=[60, 0.5],
        wrong_types=[*OPTIONS["lock_timeout"].wrong_types, None],
    ),
    "SINGLETASK_HISTORY": Limit(
        "E013",
        " must be one of ('background', 'inline', 'off'), not {value}.",
        usual=["background", "inline", "off"],
        extreme=[],
        wrong_types=[True, None],
        wrong_values=["sometimes"],
    ),
    "SINGLETASK_HISTORY_KEEPS": Limit(
        "E021",
        " must be one of ('all', 'trouble'), not {value}.",
        usual=["all", "trouble"],
        extreme=[],
        wrong_types=[True, None],
        wrong_values=["conflicts"],
    ),
    "SINGLETASK_RECORD_ARGUMENTS": Limit(
        "E014",
        " must be True or False, not {value}.",
        usual=[True, False],
        extreme=[],
        wrong_types=["False", 0, None],
        wrong_values=[],
    ),
    "SINGLETASK_TESTING": Limit(
        "E019",
        " must be True or False, not {value}.",
        usual=[True, False],
        extreme=[],
        wrong_types=["False", 0, None],
        wrong_values=[],
    ),
    "SINGLETASK_HISTORY_DAYS": Limit(
        "E016",
        " must be a number of days above 0 and up to 36500, not {value}.",
        usual=[30],
        extreme=[0.5, 36_500],
        wrong_types=["30", None, True, []],
        wrong_values=[0, -1, 36_501, NAN],
    ),
    "SINGLETASK_TASK_URL": Limit(
        "E017",
        " must be an http or https address whose only field is {{task_id}}, not {value}.",
        usual=[None, "https://flower.example/task/{task_id}"],
        extreme=["", "HTTP://f:5555/{task_id}#{task_id}"],
        wrong_types=[b"https://flower.example/{task_id}", 7],
        wrong_values=[
            "https://flower.example/task/",
            "https://flower.example/task/{id}",
            "https://flower.example/{task_id}/{0}",
            "https://flower.example/{task_id!r}",
            "https://{task_id}/",
            "javascript:alert('{task_id}')",
            " javascript://x/{task_id}",
            "//flower.example/{task_id}",
            "https://flower.example/a b/{task_id}",
        ],
    ),
}

OF_LOCKS = {
    "lock_timeout": "timeout",
    "lock_renew": "renew",
    "lock_wait": "wait",
    "lock_at_least": "at_least",
    "lock_slots": "slots",
    "on_conflict": "on_conflict",
}
"""The options that ``TaskLock`` and ``only_one`` have, too, by their names there."""
OF_FUNCTIONS = {**OF_LOCKS, "skip_result": "skip_result", "on_skip": "on_skip"}
"""The options of ``only_one``. What the others have alone is in docs/guides/outside-tasks.rst."""
