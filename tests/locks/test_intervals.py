"""The checker of the soak finds two holders that trust one lock, and tokens that do not grow."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.intervals import Recording

PERIODS = r"from [\d.]+ s to [\d.]+ s"
TRUST = rf"process \d+ \(token \w+\) trusted it {PERIODS}( and {PERIODS})* \([a-z ]+\)"


FIRST = {"lock": "a", "token": "first", "pid": 1}
SECOND = {"lock": "a", "token": "second", "pid": 2}
TAKEN = {"event": "taken", "at": 10.0, "sent": 9.9, "until": 20.0}


def recording_of(folder: Path, *lines: dict[str, Any]) -> Recording:
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / "1.jsonl").write_text(text + '{"event": "taken", "half a line of a killed proc')
    return Recording(folder)


@pytest.mark.parametrize(
    ("lines", "trusted", "ended_by"),
    [
        ([], [(10, 20)], "its deadline"),
        ([{"event": "released", "at": 12, "until": 20}], [(10, 12)], "released"),
        ([{"event": "released", "at": 22, "until": 20}], [(10, 20)], "its deadline"),
        ([{"event": "lost", "at": 12, "until": 20}], [(10, 12)], "lost"),
        ([{"event": "killed", "at": 12, "victim": 1}], [(10, 12)], "killed"),
        ([{"event": "killed", "at": 12, "victim": 2}], [(10, 20)], "its deadline"),
        ([{"event": "trusted", "at": 12, "sent": 11, "until": 21}], [(10, 21)], "its deadline"),
        ([{"event": "trusted", "at": 12, "sent": 9.9, "until": 15}], [(10, 15)], "its deadline"),
        (
            [{"event": "trusted", "at": 22, "sent": 21, "until": 31}],
            [(10, 20), (22, 31)],
            "its deadline",
        ),
    ],
)
def test_trust_ends_with_whatever_is_first(
    lines: list[dict[str, Any]], trusted: list[Any], ended_by: str, tmp_path: Path
) -> None:
    (hold,) = recording_of(tmp_path, FIRST | TAKEN, *(FIRST | line for line in lines)).holds
    assert hold.trusted == trusted
    assert hold.ended_by == ended_by


def test_a_lock_that_is_taken_while_its_process_is_being_killed_ends_at_once(
    tmp_path: Path,
) -> None:
    killed = {"event": "killed", "at": 9.999, "victim": 1}
    (hold,) = recording_of(tmp_path, killed, FIRST | TAKEN).holds
    assert hold.trusted == []


def test_two_that_trust_one_lock_are_named(tmp_path: Path) -> None:
    later = SECOND | TAKEN | {"at": 13.0, "sent": 12.9}
    (fault,) = recording_of(tmp_path, FIRST | TAKEN, later).faults()
    assert re.fullmatch(rf"a: {TRUST}, and {TRUST}: both {PERIODS}", fault)


def test_fencing_tokens_that_do_not_grow_are_named(tmp_path: Path) -> None:
    (fault,) = recording_of(
        tmp_path,
        FIRST | TAKEN,
        FIRST | {"event": "fenced", "at": 11.0, "number": 2},
        FIRST | {"event": "released", "at": 12.0, "until": 20},
        SECOND | TAKEN | {"at": 13.0, "sent": 12.9},
        SECOND | {"event": "fenced", "at": 14.0, "number": 2},
    ).faults()
    wrong = r"process 2 \(token \w+\), which took it at [\d.]+ s, has fencing token 2"
    assert re.fullmatch(rf"a: {wrong}, but process 1 \(token \w+\) had 2 at [\d.]+ s", fault)


FORGOT = {"event": "forgot", "since": 11.0, "at": 12.0}
TAKEN_LATER = SECOND | TAKEN | {"at": 13.0, "sent": 12.9}


def test_a_store_that_forgot_explains_two_holders(tmp_path: Path) -> None:
    recording = recording_of(tmp_path, FIRST | TAKEN, FORGOT, TAKEN_LATER)
    assert len(recording.both_trusted()) == 1
    assert recording.faults() == []
    assert recording.beside_one() == 1


@pytest.mark.parametrize(
    "lines",
    [
        [FIRST | TAKEN, TAKEN_LATER, FORGOT | {"since": 13.5, "at": 14.0}],
        [FORGOT | {"since": 8.0, "at": 9.0}, FIRST | TAKEN, TAKEN_LATER],
        [
            FIRST | TAKEN,
            FORGOT,
            FIRST | {"event": "trusted", "at": 12.8, "sent": 12.7, "until": 30},
            TAKEN_LATER,
        ],
    ],
    ids=["it forgot later", "it forgot earlier", "the holder has it again"],
)
def test_a_store_that_forgot_excuses_no_other_fault(
    lines: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert len(recording_of(tmp_path, *lines).faults()) == 1


def test_bodies_are_compared_whether_or_not_they_trust_their_lock(tmp_path: Path) -> None:
    recording = recording_of(
        tmp_path,
        FIRST | TAKEN | {"until": 11.0},
        FIRST | {"event": "began", "at": 10.5},
        SECOND | TAKEN | {"at": 12.0},
        SECOND | {"event": "began", "at": 12.5},
        FIRST | {"event": "ended", "at": 13.0},
    )
    assert recording.both_trusted() == []
    assert [(overlap.start, overlap.end) for overlap in recording.both_ran()] == [(12.5, 13.0)]


def test_the_longest_block_is_that_of_a_killed_holder(tmp_path: Path) -> None:
    conflict = {"event": "conflict", "pid": 2, "blocked_by": "first"}
    recording = recording_of(
        tmp_path,
        FIRST | TAKEN,
        conflict | {"at": 11.0},
        FIRST | {"event": "killed", "victim": 1, "at": 12.0},
        conflict | {"at": 12.5},
        conflict | {"at": 14.0, "blocked_by": "second"},
    )
    assert recording.longest_block() == 0.5
