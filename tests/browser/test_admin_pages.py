"""The admin in a real browser, with locks that a real worker holds."""

from __future__ import annotations

import os
import subprocess
import sys

from django.contrib.admin.models import LogEntry

from django_singletask.models import TaskLockEvent
from tests.browser import past
from tests.browser.tasks import fetch_feed, monthly
from tests.deadline import wait_for

VIEW, CLEAR = "view_tasklockevent", "clear_lock"
NEWS = "https://example.org/news.xml"
NAME = past.FEED.format("news")


HOLD = """
import django; django.setup()
from django_singletask import TaskLock
assert TaskLock({!r}).acquire()
import os; os.kill(os.getpid(), 9)
"""


def die_holding(name):
    """Let a process take a lock and kill itself."""
    env = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "SINGLETASK_TEST_CACHE": "redis",
    }
    done = subprocess.run([sys.executable, "-c", HOLD.format(name)], env=env)
    assert done.returncode == -9


def test_what_is_slow_dead_or_starves_is_seen_at_once(browser, operator, locks):
    past.fill_held()
    die_holding("billing.tasks.bill(customer=4711)")
    operator(VIEW, CLEAR)
    browser.open()
    browser.size(1200, 780)
    browser.picture("held")
    rows = browser.texts(".singletask-held tbody tr")
    assert [row.split()[0] for row in rows if "slow" in row] == ["reports.tasks.nightly()"]
    assert [row.split()[0] for row in rows if "dead" in row] == [
        "billing.tasks.bill(customer=4711)"
    ]
    starving = browser.one("#content").text.split("HELD FOR")[0]
    assert "shop.tasks.sync_stock(customer_id=7): 57 conflicts in 1h 34m" in starving


def test_operator_clears_a_lock_and_its_run_goes_on(browser, operator, locks):
    past.fill()
    operator(VIEW, CLEAR)
    locks.hold(monthly)
    holder = locks.hold(fetch_feed, NEWS)
    for _ in range(3):
        locks.skip(fetch_feed, NEWS)
    wait_for(lambda: TaskLockEvent.objects.filter(blocked_by=holder.token, count=3), "3 conflicts")
    die_holding("billing.tasks.bill(customer=4711)")
    browser.open()
    assert browser.texts(".singletask-dead.singletask-state") == ["dead"]
    [row] = [row for row in browser.all(".singletask-held tbody tr") if NAME in row.text]
    with browser.another_page():
        row.find_element("css selector", ".singletask-do a").click()
    browser.picture("clear")
    page = browser.one("#content").text
    assert holder.task_id in page
    assert f"{holder.host}:{holder.pid}\nAlive, on this host." in page
    assert "a second copy can start at the same time" in page
    assert f" control terminate SIGTERM {holder.task_id}" in page
    browser.click("Clear")
    assert "Cleared: " in browser.one(".messagelist .success").text
    assert NAME not in browser.texts(".singletask-held tbody th")
    assert not fetch_feed.lock(NEWS).locked()
    cleared = TaskLockEvent.objects.filter(outcome="cleared", name=NAME)
    [event] = wait_for(lambda: cleared.all(), "the row")
    assert (event.actor, event.token) == ("ada", holder.token)
    assert LogEntry.objects.get().object_repr == f"{NAME}: cleared"


def test_page_of_a_lock_says_why_it_is_held(browser, operator, locks):
    past.fill()
    operator(VIEW, CLEAR)
    holder = locks.hold(fetch_feed, NEWS)
    browser.open()
    with browser.another_page():
        browser.one(".singletask-held tbody th a").click()
    assert browser.texts("h1")[-1] == NAME
    facts = browser.one(".singletask-facts").text
    assert f"by task {holder.task_id} on " in facts
    browser.size(1200, 800)
    browser.picture("lock")
    browser.click("Clear…")
    assert holder.task_id in browser.one("#content").text


def test_history_is_filtered_searched_and_linked(browser, operator, locks):
    past.fill()
    operator(VIEW)
    browser.open()
    browser.click("History")
    assert browser.texts(".singletask-tabs [aria-current]") == ["History"]
    browser.picture("history")
    browser.one("select[name=what] option[value=lost]").click()
    browser.click("Filter")
    [row] = browser.texts("#result_list tbody .field-what")
    assert "gone from the cache" in row
    browser.open(f"history/?q={past.FEED.format('sports')}&what=conflict")
    assert len(browser.all("#result_list tbody tr")) == 8
    with browser.another_page():
        browser.one("#result_list .field-what a").click()
    assert browser.texts("h1")[-1] == past.FEED.format("sports")
    assert "returned" in browser.texts(".singletask-chosen")[0]


def test_timeline_in_light_dark_and_narrow(browser, operator, locks):
    past.fill()
    operator(VIEW)
    locks.hold(fetch_feed, NEWS)
    locks.hold(monthly)
    wait_for(lambda: TaskLockEvent.objects.filter(outcome="", kind="run").count() == 2, "both")
    browser.open("timeline/")
    assert len(browser.all(".singletask-lane")) == 5
    browser.size(1200, 640)
    light = browser.colour(".singletask-held rect", "fill")
    browser.picture("timeline")
    browser.prefer("dark")
    dark = browser.colour(".singletask-held rect", "fill")
    assert dark != light
    # Django's own button: from "auto" to "light", whatever the system prefers.
    browser.one(".theme-toggle").click()
    assert browser.colour(".singletask-held rect", "fill") == light
    browser.prefer("light")
    browser.one(".theme-toggle").click()
    browser.size(375, 800)
    browser.open("timeline/")
    browser.open()
    assert browser.texts(".singletask-lock")


def test_per_task_in_light_dark_and_narrow(browser, operator, locks):
    past.fill_day()
    operator(VIEW)
    browser.open()
    browser.click("Per task")
    assert browser.texts(".singletask-tabs [aria-current]") == ["Per task"]
    browser.click("Longest run")
    assert browser.texts(".singletask-numbers .singletask-lock")[0] == "reports.tasks.monthly"
    assert browser.one(".singletask-numbers [aria-sort]").get_attribute("aria-sort") == "descending"
    trouble = ".singletask-numbers .singletask-warning"
    light = browser.colour(trouble, "color")
    browser.size(1200, 640)
    browser.picture("per-task")
    browser.prefer("dark")
    assert browser.colour(trouble, "color") != light
    browser.prefer("light")
    browser.size(375, 800)
    assert browser.cut() == []


def test_nothing_is_cut_off_in_a_narrow_window(browser, operator, locks):
    past.fill()
    operator(VIEW, CLEAR, "delete_tasklockevent")
    locks.hold(fetch_feed, NEWS)
    die_holding(past.FEED.format("of-a-name-that-is-rather-long"))
    event = TaskLockEvent.objects.filter(kind="conflict").latest("pk")
    lock = fetch_feed.lock(NEWS)
    clear = f"clear/?lock={lock.key}+{lock.holder().token}"
    row = f"{event.pk}/"
    for width in (1100, 900, 375):
        browser.size(width, 800)
        for address in (
            "",
            "history/",
            "timeline/",
            "per-task/",
            clear,
            f"{row}change/",
            f"{row}delete/",
        ):
            browser.open(address)
            assert browser.cut() == [], (width, address)


def test_keyboard_focus_shows_what_a_mark_means(browser, operator, locks):
    past.fill()
    operator(VIEW)
    browser.open("timeline/")
    tip = ".singletask-mark:focus .singletask-tip"
    skip = browser.one(".singletask-skip")
    assert skip.size["width"] == 1
    browser.driver.execute_script("arguments[0].focus()", skip)
    assert skip.size["width"] > 50
    [sign] = browser.all("a.singletask-cleared.singletask-mark[aria-label*='grace']:has(path)")
    assert not browser.all(tip)
    browser.driver.execute_script("arguments[0].focus()", sign)
    assert "cleared after 11m, by grace" in browser.one(tip).text
    assert browser.one(tip).is_displayed()
    with browser.another_page():
        sign.send_keys("\n")
    assert "grace" in browser.texts(".singletask-chosen")[-1]
