"""What a type checker says about ``only_one`` and the errors; see tasks.py."""

from __future__ import annotations

from typing import Any, assert_type

from django_singletask import Holder, LockConflict, TaskLock, only_one


@only_one
def bare(user_id: int) -> str:
    return ""


@only_one(key="sync-{user_id}", timeout=30, wait=5)
def skips(user_id: int) -> str:
    return ""


@only_one(on_conflict="raise", slots=2)
def raises(user_id: int) -> str:
    return ""


@only_one(skip_result=0)
def with_result(user_id: int) -> str:
    return ""


def on_skip(conflict: LockConflict, user_id: int) -> bytes:
    return b""


@only_one(on_skip=on_skip)
def with_function(user_id: int) -> str:
    return ""


@only_one
async def bare_async(user_id: int) -> str:
    return ""


@only_one(at_least=60)
async def skips_async(user_id: int) -> str:
    return ""


@only_one(on_conflict="raise")
async def raises_async(user_id: int) -> str:
    return ""


class Importer:
    @only_one(key="import-{feed_id}")
    def run(self, feed_id: int) -> str:
        return ""


async def results() -> None:
    assert_type(bare(1), str | None)
    assert_type(skips(user_id=1), str | None)
    assert_type(raises(1), str)
    assert_type(with_result(1), str | int)
    assert_type(with_function(1), str | Any)
    assert_type(await bare_async(1), str | None)
    assert_type(await skips_async(1), str | None)
    assert_type(await raises_async(1), str)
    assert_type(Importer().run(1), str | None)
    bare(1).upper()  # refused
    skips("x")  # refused
    raises(user="x")  # refused
    Importer().run("x")  # refused


@only_one(keyy="sync")  # refused
def misspelled() -> None: ...


@only_one(on_conflict="wait")  # refused
def wrong_choice() -> None: ...


@only_one(timeout="30")  # refused
def wrong_type() -> None: ...


@only_one(on_conflict="raise", skip_result=0)  # refused
def without_effect() -> None: ...


TaskLock("nightly", on_conflict="skip")
TaskLock("nightly", on_conflict="wait")  # refused


def handle(conflict: LockConflict) -> str:
    assert_type(conflict.holder, Holder | None)
    assert_type(conflict.name, str)
    assert_type(conflict.remaining, float | None)
    assert conflict.holder.host  # refused
    if conflict.holder is None:
        return conflict.note
    assert_type(conflict.holder.task_id, str | None)
    return conflict.holder.host
