"""A command that takes a lock, sends a chain, and exits before the chain has run.

    python -m tests.sender finish|pass_on|kept <name of the lock> <queue>

"finish": the last link receives the lock. "pass_on": each link does, and hands it over to the next.
"kept": the lock is not handed over.
"""

from __future__ import annotations

import os
import sys

import django

if __name__ == "__main__":
    django.setup()
    from celery import chain

    from django_singletask import TaskLock
    from tests.testapp import tasks
    from tests.testapp.celery import app

    app.set_default()
    way, name, queue = sys.argv[1:]
    lock = TaskLock(name)
    assert lock.acquire()
    first, last = f"{name} first", f"{name} last"
    if way == "pass_on":
        links = [tasks.pass_on.s(lock.hand_over(for_=60), first, 60), tasks.finish.s(last, 60)]
    elif way == "finish":
        links = [tasks.plain.si(first, 60), tasks.finish.si(lock.hand_over(for_=60), last, 60)]
    else:
        links = [tasks.plain.si(first, 60), tasks.plain.si(last, 60)]
    print(chain(*links).apply_async(queue=queue).id, flush=True)
    os._exit(0)  # as a command that is killed: nothing is given back on the way out
