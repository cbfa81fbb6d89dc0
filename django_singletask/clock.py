"""The clock that this process measures its leases with."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

# Nobody can set this clock. Where the system has a clock that keeps running while the machine is
# suspended, that one is used: the lease of a sleeping laptop ends on time.
now: Callable[[], float] = time.monotonic
if hasattr(time, "CLOCK_BOOTTIME"):
    now = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
