"""The clock by which this process counts its leases."""

from __future__ import annotations

import time

__all__ = ["now"]


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# Nobody can set this clock. Where the system has one that goes on while the machine is suspended,
# it is that one: the lease of a sleeping laptop ends in time.
now = _boottime if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
