"""Chromium without a window, for the tests of the admin and for the search of the documentation."""

from __future__ import annotations

from pathlib import Path

from selenium import webdriver

from tests import servers

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
FLAGS += ["--disable-dev-shm-usage", "--hide-scrollbars", "--force-device-scale-factor=1"]


def start(profile: Path) -> webdriver.Chrome:
    """Start Chromium with an empty folder as its profile. ``quit()`` ends it."""
    options = webdriver.ChromeOptions()
    options.binary_location = servers.find("chromium") or "chromium"
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # With the path, selenium does not look for a driver, let alone download one.
    service = webdriver.ChromeService(executable_path=servers.find("chromedriver"))
    return webdriver.Chrome(options=options, service=service)
