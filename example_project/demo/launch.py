"""Start the demo: choose its folder and servers, then restart the process with these settings."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import sys
import tempfile
from typing import Any

from django.core.management import CommandError

# The pid of the process that restarted itself. Its children inherit the variable, but not the pid.
LAUNCHED = "EXAMPLE_DEMO"


def is_launched() -> bool:
    return os.environ.get(LAUNCHED) == str(os.getpid())


def restart(options: dict[str, Any]) -> None:
    """Replace this process by one whose settings read the options. Does not return.

    Django loads the settings before it parses the options of a command. So pass the options in the
    environment, where the worker processes find them too.
    """
    if not hasattr(os, "fork"):
        raise CommandError(
            "The demo needs Celery's prefork workers, which Windows does not have: use WSL."
        )
    if importlib.util.find_spec("feedparser") is None:
        raise CommandError('feedparser is not installed: pip install -e ".[demo]"')
    from example_project.demo.interrupt import SIGNALS  # imports signals that Windows does not have

    # Block Ctrl-C until the new process can handle it: only that process removes the folder.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    local = "127.0.0.1,localhost"
    environment = os.environ | {
        LAUNCHED: str(os.getpid()),
        "EXAMPLE_HOME": tempfile.mkdtemp(prefix="singletask-demo-"),
        "EXAMPLE_CACHE": options["cache"] or "",
        "EXAMPLE_BROKER": options["broker"] or "",
        "EXAMPLE_PREFIX": f"demo-{secrets.token_hex(4)}",
        "EXAMPLE_SECRET_KEY": secrets.token_urlsafe(40),
        # The feeds are on this machine, and a proxy cannot reach them.
        "no_proxy": ",".join(filter(None, [os.environ.get("no_proxy"), local])),
    }
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def clean_up() -> None:
    shutil.rmtree(os.environ["EXAMPLE_HOME"], ignore_errors=True)
