"""Celery's filesystem broker, made safe for workers that read while messages are written."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

from kombu.transport import filesystem
from kombu.utils.json import dumps


class Channel(filesystem.Channel):
    def _put(self, queue: str, payload: dict[str, Any], **kwargs: Any) -> None:
        """Write the message to a file with another name, then rename the file.

        So a worker sees a whole message or none. The method of kombu creates the file first and
        writes it afterwards, and readers take no lock:

            sender: open("….msg")                               write(…)
            worker:                move("….msg")  read() -> ""           JSON error, message lost
        """
        folder = Path(self.data_folder_out)
        name = f"{time.monotonic_ns():020}_{uuid.uuid4()}"
        unfinished = folder / f"{name}.part"
        unfinished.write_text(dumps(payload), encoding="utf-8")
        os.rename(unfinished, folder / f"{name}.{queue}.msg")


class Transport(filesystem.Transport):
    Channel = Channel

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        for option in ("data_folder_in", "control_folder", "processed_folder"):
            Path(client.transport_options[option]).mkdir(parents=True, exist_ok=True)
