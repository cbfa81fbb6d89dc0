"""Settings of a worker whose history keeps only trouble."""

from __future__ import annotations

from tests.settings import *  # noqa: F403

SINGLETASK_HISTORY_KEEPS = "trouble"
