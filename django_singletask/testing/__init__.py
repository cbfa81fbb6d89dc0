"""Replace the locks in the tests of a project, without a server, a database or a worker.

``django_singletask.testing.stores`` tests a store that a project adds.
"""

from __future__ import annotations

import sys

from django_singletask.testing.locks import advance_time, hold, no_locks, queued

__all__ = ["advance_time", "hold", "no_locks", "queued"]

if "pytest" in sys.modules:  # so that a failed assert there shows its values
    sys.modules["pytest"].register_assert_rewrite(f"{__name__}.stores")
