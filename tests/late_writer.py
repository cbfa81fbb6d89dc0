"""A process that reads an account under a lock, stands still past its lease, and then writes.

    python -m tests.late_writer guarded|unguarded

It prints its fencing token, and after SIGCONT how many rows it has written.
"""

from __future__ import annotations

import os
import signal
import sys

import django

if __name__ == "__main__":
    django.setup()
    from django_singletask import TaskLock
    from tests.testapp.models import Account

    with TaskLock("account", timeout=1) as lock:
        token = lock.fencing_token()
        account = Account.objects.get()
        print(token, flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        rows = Account.objects.filter(pk=account.pk)
        if sys.argv[1] == "guarded":
            rows = rows.filter(fence__lt=token)
        print(rows.update(balance=account.balance + 1, fence=token))
