"""Raise an error at each place of Python's threading modules while a lock is taken and released.

    python -m tests.interrupted_threads <alias> <first or later>

Each place has a process of its own, whose first lock, or a later one, is interrupted there. Then
the process shows whether its threads still work. This prints as JSON how many of them do, and the
places after which they do not.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import weakref
from contextlib import suppress

import django

from tests.deadline import wait_for
from tests.interruptions import Interruption

LEASE = 8.0
HUNG = 60  # seconds until a process is killed
AT_ONCE = 24  # processes; most of the time they wait
FILES = {threading.__file__, queue.__file__, weakref.__file__, "<frozen _weakrefset>"}
NO_SUCH_PLACE = 99


class TimeIsUp(Exception):
    """Raised at the chosen place."""


def in_threading(file: str) -> bool:
    return file in FILES


def is_recorded(name: str) -> bool:
    from django_singletask.models import TaskLockEvent

    return TaskLockEvent.objects.filter(name=name).exists()


def take(alias: str, name: str) -> None:
    from django_singletask import TaskLock

    with TaskLock(name, cache=alias, timeout=LEASE):
        pass


def fault_of(alias: str, name: str) -> str:
    """Return what does not work any more in this process; nothing if all does."""
    from django_singletask import TaskLock

    lock = TaskLock(name, cache=alias, timeout=LEASE)
    lock.acquire()
    thread = threading.Thread(target=take, args=(alias, f"{name}, other thread"), daemon=True)
    thread.start()
    thread.join(HUNG / 4)
    if thread.is_alive():
        return "another thread gets no lock"
    try:
        wait_for(lambda: lock.remaining() < 0.9 * LEASE, "a part of the lease is over", LEASE)
        wait_for(lambda: lock.remaining() > 0.9 * LEASE, "it is renewed", LEASE)
    except AssertionError:
        return "no lock is renewed"
    lock.release()
    try:
        wait_for(lambda: is_recorded(name), "it is recorded")
    except AssertionError:
        return "no event is recorded"
    return ""


def interrupt(alias: str, when: str, number: int, result: int) -> int:
    """Interrupt a lock of this process, and write what does not work afterwards."""
    signal.alarm(HUNG)
    name = f"interrupted {os.getpid()}"
    if when == "later":
        take(alias, f"{name}, first")
        wait_for(lambda: is_recorded(f"{name}, first"), "it is recorded")
    interruption = Interruption(number, TimeIsUp, in_threading)
    try:
        with suppress(TimeIsUp), interruption:
            take(alias, f"{name}, then")
    finally:
        os.write(result, interruption.place.encode())
    if not interruption.place:
        return NO_SUCH_PLACE
    fault = fault_of(alias, name)
    os.write(result, f": {fault}".encode())
    return bool(fault)


def start(alias: str, when: str, number: int) -> tuple[int, int]:
    """Start the process for a place; return its id and the file that it writes to."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    code = 1
    try:
        code = interrupt(alias, when, number, writer)
    except BaseException as error:
        os.write(writer, f": {error!r}".encode())
    finally:
        os._exit(code)


def main(alias: str, when: str) -> dict[str, object]:
    number, healthy = 0, 0
    broken: list[str] = []
    while True:
        numbers = range(number + 1, number + 1 + AT_ONCE)
        processes = [start(alias, when, each) for each in numbers]
        number += AT_ONCE
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in processes]
        for code, (_, reader) in zip(codes, processes, strict=True):
            with open(reader) as file:
                text = file.read()
            healthy += code == 0
            if code not in (0, NO_SUCH_PLACE):
                broken.append(text + (": it hangs" if code == -signal.SIGALRM else ""))
        if NO_SUCH_PLACE in codes:
            return {"healthy": healthy, "broken": broken}


if __name__ == "__main__":
    django.setup()
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
