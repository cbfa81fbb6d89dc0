"""Ctrl-C and its like, noticed where it is safe."""

from __future__ import annotations

import signal
import time
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """The demo was asked to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Interrupt:
    """Note the signals that ask to end, and raise in check() and sleep() only.

    An exception at any point could fall between the start of a worker and the note that there
    is one to end:

        process = Popen(…)
                            <- KeyboardInterrupt
        workers.append(process)
    """

    def __init__(self) -> None:
        self.number = 0
        for number in SIGNALS:
            signal.signal(number, self._note)
        # They have been held back since before the restart: see launch.py.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number

    def check(self) -> None:
        if self.number:
            raise Interrupted(self.number)

    def sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.check()
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
            self.check()
