"""The clock by which this process counts its leases."""

from __future__ import annotations

import time
from functools import partial

__all__ = ["now"]


# Nobody can set this clock. Where the system has one that goes on while the machine is suspended,
# it is that one: the lease of a sleeping laptop ends in time.
now = time.monotonic
if hasattr(time, "CLOCK_BOOTTIME"):
    now = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
