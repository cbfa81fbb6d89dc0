"""Ask the search of the built documentation what people ask, and fail if too few find their page.

    python -m tests.docs_search FOLDER

The folder has the HTML pages. Chromium opens their own search page, as a reader's browser does.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from tests import chromium, servers
from tests.deadline import wait_for

QUESTIONS = Path(__file__).with_suffix(".toml")
LEAST_FIRST = 24
LEAST_IN_FIVE = 36

# The page says in its summary that the search has ended, and how many results it has shown.
RESULTS = """
    const summary = document.querySelector("#search-results .search-summary");
    if (!summary || !summary.textContent) return null;
    const links = document.querySelectorAll("#search-results ul.search > li > a");
    return [...links].map(link => link.getAttribute("href"));
"""


class Answer(NamedTuple):
    """The pages that the search has found for a phrase, in their order."""

    phrase: str
    right: list[str]
    found: list[str]

    @property
    def rank(self) -> int | None:
        """The place of the right page, from 1, or ``None`` if it is not there."""
        ranks = [self.found.index(page) + 1 for page in self.right if page in self.found]
        return min(ranks, default=None)


class QuietHandler(SimpleHTTPRequestHandler):
    """Serve files, and let the browser keep the pages from which it shows a few words."""

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "max-age=600")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main(folder: Path) -> int:
    """Print where the right page of each phrase is, and return 1 if too few are in front."""
    absent = [program for program in ("chromium", "chromedriver") if not servers.find(program)]
    if absent:
        print(f"Not installed: {' and '.join(absent)}. python runtests.py --all says how to do it.")
        return 1
    questions = tomllib.loads(QUESTIONS.read_text())["question"]
    missing = {page for each in questions for page in each["pages"]} - pages_of(folder)
    if missing:
        print(f"{QUESTIONS.name} names pages that {folder} does not have: {sorted(missing)}")
        return 1
    answers = ask(folder, questions)
    print(f"rank  {'phrase':<41} {'first':<27} right page")
    for answer in answers:
        first = next(iter(answer.found), "nothing")
        right = " or ".join(answer.right)
        print(f"{answer.rank or '-':>4}  {answer.phrase:<41} {first:<27} {right}")
    in_front = sum(answer.rank == 1 for answer in answers)
    in_five = sum((answer.rank or 6) <= 5 for answer in answers)
    print(
        f"{in_front} of {len(answers)} first (at least {LEAST_FIRST}), "
        f"{in_five} of {len(answers)} in the first five (at least {LEAST_IN_FIVE})"
    )
    return int(in_front < LEAST_FIRST or in_five < LEAST_IN_FIVE)


def pages_of(folder: Path) -> set[str]:
    """Return the names of the pages, like ``guides/testing``."""
    return {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.html")}


def ask(folder: Path, questions: list[dict[str, Any]]) -> list[Answer]:
    """Ask all questions, one after the other, in one browser."""
    with served(folder) as site, tempfile.TemporaryDirectory() as profile:
        driver = chromium.start(Path(profile))
        try:
            return [
                Answer(each["phrase"], each["pages"], search(driver, site, each["phrase"]))
                for each in questions
            ]
        finally:
            driver.quit()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the files of a folder on a free port, and return the address."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def search(driver: Any, site: str, phrase: str) -> list[str]:
    """Return the pages that the search shows, each once, in their order."""
    driver.get(f"{site}/search.html?q={quote(phrase)}")

    def has_ended() -> bool:
        return driver.execute_script(RESULTS) is not None

    wait_for(has_ended, f"the end of the search for: {phrase}")
    links = driver.execute_script(RESULTS)
    return list(dict.fromkeys(link.partition("#")[0].removesuffix(".html") for link in links))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
