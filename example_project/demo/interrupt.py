"""Handle Ctrl-C and similar signals where it is safe."""

from __future__ import annotations

import signal
import time
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal has asked the demo to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Interrupt:
    """Record the signals that ask the demo to end, and raise only in check() and sleep().

    An exception at any point could happen after a worker has been started and before it is in the
    list of workers to end:

        process = Popen(…)
                            <- KeyboardInterrupt
        workers.append(process)
    """

    def __init__(self) -> None:
        self.number = 0
        for number in SIGNALS:
            signal.signal(number, self._note)
        # launch.py has blocked these signals before it restarted the process.
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
