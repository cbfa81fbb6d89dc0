from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.cache import caches
from django.core.handlers.wsgi import WSGIHandler
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from django.test import Client, override_settings
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By

from django_singletask.models import TaskLockEvent
from tests import servers
from tests.browser import tasks
from tests.chromium import start
from tests.deadline import wait_for
from tests.testapp.celery import app
from tests.worker.harness import Worker

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", action="store_true", help="write docs/pictures")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.only_all("it needs a browser"))
            item.add_marker(pytest.mark.django_db(transaction=True, databases="__all__"))


class QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="session")
def site() -> Iterator[str]:
    """Serve the site of the tests with a strict Content-Security-Policy; return its address."""
    policy = "tests.browser.middleware.strict_policy"
    with override_settings(MIDDLEWARE=[policy, *settings.MIDDLEWARE]):
        application = StaticFilesHandler(WSGIHandler())
    server = ThreadedWSGIServer(("127.0.0.1", servers.free_port()), QuietHandler)
    server.daemon_threads = True
    server.set_app(application)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    servers.require("chromium")
    servers.require("chromedriver")
    driver = start(tmp_path_factory.mktemp("profile"))
    # Otherwise the page has no focus, and no element in it, until the window gets it.
    driver.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
    yield driver
    driver.quit()


class Browser:
    """Chromium on the admin of the tests' site."""

    def __init__(self, driver: webdriver.Chrome, site: str, pictures: bool) -> None:
        self.driver = driver
        self.site = site
        self.pictures = pictures

    def log_in(self, user: User) -> None:
        client = Client()
        client.force_login(user)
        self.driver.get(f"{self.site}/static/admin/css/base.css")  # a cookie needs its site
        self.driver.delete_all_cookies()
        self.driver.execute_script("localStorage.clear()")
        self.driver.add_cookie({"name": "sessionid", "value": client.cookies["sessionid"].value})

    def open(self, address: str = "") -> None:
        with self.another_page():
            self.driver.get(f"{self.site}/admin/django_singletask/tasklockevent/{address}")

    @contextmanager
    def another_page(self) -> Iterator[None]:
        """Wait for the page that the block asks for: under load the driver may be too early."""
        self.driver.execute_script("window.isLeft = true")
        yield
        wait_for(self.is_there, "another page")

    def is_there(self) -> bool:
        script = "return !window.isLeft && document.readyState === 'complete'"
        try:
            return bool(self.driver.execute_script(script))
        except WebDriverException:  # one page goes while the script runs, and the other comes
            return False

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        return [element.text for element in self.all(selector)]

    def click(self, text: str) -> None:
        """Follow a link or press a button; the error says what the page has instead."""
        what = f"//a[normalize-space()='{text}'] | //input[@value='{text}']"
        targets = self.driver.find_elements(By.XPATH, what)
        assert targets, f"{text} is not on {self.driver.current_url}: {self.one('body').text}"
        with self.another_page():
            targets[0].click()

    def colour(self, selector: str, what: str = "background-color") -> str:
        return self.one(selector).value_of_css_property(what)

    def cut(self) -> list[str]:
        """Return the elements that are wider than the column of the page."""
        script = """
            const edge = document.querySelector("#content").getBoundingClientRect().right;
            return [...document.querySelectorAll("#content :not(svg, svg *)")]
                .filter(e => e.getBoundingClientRect().right > edge || (
                    e.matches(".results") && e.scrollWidth > e.clientWidth))
                .map(e => `${e.tagName} ${e.className}`)"""
        elements: list[str] = self.driver.execute_script(script)
        return elements

    def complaints(self) -> list[str]:
        """Return what the browser's console has had to say since the last call."""
        messages = [entry["message"] for entry in self.driver.get_log("browser")]
        return [message for message in messages if "/favicon.ico " not in message]

    def picture(self, name: str) -> None:
        """Write a picture of the window for the docs if the option --pictures is used."""
        if self.pictures:
            PICTURES.mkdir(exist_ok=True)
            self.driver.save_screenshot(str(PICTURES / f"{name}.png"))


@pytest.fixture
def browser(chromium: Any, site: str, pytestconfig: pytest.Config) -> Iterator[Browser]:
    browser = Browser(chromium, site, pytestconfig.getoption("--pictures", default=False))
    browser.size(1200, 800)
    browser.prefer("light")
    browser.complaints()
    yield browser
    complaints = browser.complaints()
    chromium.get("about:blank")  # no page sends requests while the tables are emptied
    assert complaints == []


@pytest.fixture(scope="session")
def worker(django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Run one real worker for all browser tests."""
    queue = f"test-browser-{uuid.uuid4().hex[:12]}"
    folder = tmp_path_factory.mktemp("worker")
    options = ("-I", "tests.browser.tasks")
    worker = Worker(folder, queue, concurrency=3, options=options)
    with worker:
        yield worker
        worker.finish()
    with app.connection_or_acquire() as connection:
        connection.default_channel.queue_delete(queue)


class Locks:
    """Let the worker hold locks until the end of the test."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.held: list[Any] = []

    def hold(self, task: Any, *args: Any) -> Any:
        """Let the worker run a task, and return its lock's holder."""
        result = task.apply_async(args, queue=self.queue)
        lock = task.lock(*args)
        holder = wait_for(lock.holder, f"{lock.name} is held")
        self.held.append((holder.token, result))
        return holder

    def skip(self, task: Any, *args: Any) -> None:
        """Send a call that finds the lock held."""
        task.apply_async(args, queue=self.queue).get(timeout=30)

    def end(self) -> None:
        caches["redis"].set(tasks.STOP, "1", 60)
        for _token, result in self.held:
            result.get(timeout=30)
        caches["redis"].delete(tasks.STOP)
        # The worker writes a moment later: no row of this test may come into the next one.
        ended = TaskLockEvent.objects.filter(ref__in=dict(self.held), ended_at__isnull=False)
        wait_for(lambda: ended.count() == len(self.held), "the rows of all runs have their ends")


@pytest.fixture
def locks(worker: Worker) -> Iterator[Locks]:
    caches["redis"].clear()
    TaskLockEvent.objects.all().delete()
    locks = Locks(worker.queue)
    yield locks
    locks.end()


@pytest.fixture
def operator(browser: Browser) -> Any:
    """Log in a user who has these permissions."""

    def log_in(*codenames: str) -> User:
        user = User.objects.create_user("ada", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
        browser.log_in(user)
        return user

    return log_in
