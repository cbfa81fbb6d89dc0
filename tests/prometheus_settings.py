"""Settings of a worker that serves metrics with the code of monitoring.rst."""

from __future__ import annotations

import os

from django.apps import AppConfig

from tests.guides import blocks
from tests.settings import *  # noqa: F403

INSTALLED_APPS = [*INSTALLED_APPS, "tests.prometheus_settings.Served"]  # noqa: F405


class Served(AppConfig):
    name = "tests.prometheus_settings"
    label = "served"

    def ready(self) -> None:
        [code] = [each for each in blocks("operating/monitoring.rst") if "TROUBLE" in each]
        code = code.replace("9808", os.environ["SINGLETASK_TEST_METRICS_PORT"])
        if "SINGLETASK_TEST_NO_ZERO" in os.environ:
            code = code.replace("TROUBLE.labels(name, kind)", "pass")
        # Receivers are kept by weak references.
        self.names: dict[str, object] = {"__name__": "served"}
        exec(code, self.names)
