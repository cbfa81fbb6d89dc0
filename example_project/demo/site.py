"""A local HTTP server that publishes feeds, some of them broken."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from example_project.demo import documents
from example_project.demo.documents import Item, Writer

FIRST_DAY = datetime(2024, 3, 1, 8, tzinfo=UTC)


@dataclass
class PublishedFeed:
    """One feed of the site. A feed that `grows` has one more entry after each publish()."""

    name: str
    format: str
    write: Writer | None = None
    content_type: str = "application/rss+xml; charset=utf-8"
    entries: int = 5
    grows: bool = True
    etag: bool = True
    last_modified: bool = True
    trickle: bool = False
    url: str = ""
    edition: int = 0
    body: bytes = field(default=b"", repr=False)

    @property
    def importable(self) -> bool:
        return self.write not in (None, documents.malformed) and not self.trickle

    @property
    def modified(self) -> datetime:
        return FIRST_DAY + timedelta(days=self.edition if self.grows else 0)

    def publish(self, edition: int) -> None:
        self.edition = edition
        if self.write is None:
            return
        count = self.entries + (edition if self.grows else 0)
        items = [
            Item(
                guid=f"urn:{self.name}:{number}",
                title=f"{self.name} & friends, no. {number}: “Čaj” für <alle>",
                link=f"{self.url}?entry={number}&from=feed",
                published=FIRST_DAY + timedelta(hours=number),
            )
            for number in range(count, 0, -1)
        ]
        self.body = self.write(self.name.title(), self.url, items)

    @property
    def stored(self) -> int:
        """The number of entries that an importer has stored after it has read this edition."""
        return self.entries + (self.edition if self.grows else 0) if self.importable else 0


def feeds() -> list[PublishedFeed]:
    atom, rdf = "application/atom+xml; charset=utf-8", "application/rdf+xml"
    return [
        PublishedFeed("planet", "RSS 2.0", documents.rss20, entries=12),
        PublishedFeed("weather", "RSS 2.0", documents.rss20, last_modified=False),
        PublishedFeed("archive", "RSS 2.0", documents.rss20, grows=False, entries=40),
        PublishedFeed("releases", "Atom", documents.atom, atom, etag=False),
        PublishedFeed("commits", "Atom", documents.atom, atom, entries=20),
        PublishedFeed("essays", "Atom", documents.atom, atom, grows=False),
        PublishedFeed("library", "RSS 1.0", documents.rss10, rdf, entries=8),
        PublishedFeed("jobs", "RSS 1.0", documents.rss10, rdf, grows=False),
        PublishedFeed("truncated", "malformed", documents.malformed, grows=False),
        PublishedFeed("trickling", "slow", documents.rss20, trickle=True),
        PublishedFeed("missing", "404"),
    ]


class FeedSite:
    """Serve `feeds` on a free port of 127.0.0.1 while the `with` block runs.

    `delay` is the time that an answer takes, in seconds. `answers` counts the answers by status.
    """

    def __init__(self, published: list[PublishedFeed], *, delay: float = 0.0) -> None:
        self.feeds = published
        self.delay = delay
        self.answers: Counter[int] = Counter()
        self._count = threading.Lock()
        self._closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.site = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="feed site", daemon=True
        )
        for feed in self.feeds:
            feed.url = f"http://127.0.0.1:{self._server.server_port}/{feed.name}"
        self.publish(0)

    def __enter__(self) -> FeedSite:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def publish(self, edition: int) -> None:
        for feed in self.feeds:
            feed.publish(edition)

    def feed(self, path: str) -> PublishedFeed | None:
        name = path.partition("?")[0].lstrip("/")
        return next((f for f in self.feeds if f.name == name and f.write), None)

    def answered(self, status: int) -> None:
        with self._count:
            self.answers[status] += 1

    def wait(self, seconds: float) -> bool:
        """Wait. Return whether the site is still open."""
        return not self._closing.wait(seconds)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    site: FeedSite

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: importers close the connection to the slow feed."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "FeedSite"

    def do_GET(self) -> None:
        site = self.server.site
        feed = site.feed(self.path)
        if feed is None:
            site.wait(site.delay)
            site.answered(404)
            self.send_error(404)
            return
        body = feed.body
        tag = '"' + hashlib.sha256(body).hexdigest()[:16] + '"'
        if not feed.trickle:
            site.wait(site.delay)
        same = self._unchanged(feed, tag)
        site.answered(304 if same else 200)
        self.send_response(304 if same else 200)
        if feed.etag:
            self.send_header("ETag", tag)
        if feed.last_modified:
            self.send_header("Last-Modified", format_datetime(feed.modified, usegmt=True))
        if same:
            self.end_headers()
            return
        self.send_header("Content-Type", feed.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not feed.trickle:
            self.wfile.write(body)
            return
        end = time.monotonic() + 60
        for position in range(len(body)):
            self.wfile.write(body[position : position + 1])
            if not site.wait(0.1) or time.monotonic() > end:
                return

    def _unchanged(self, feed: PublishedFeed, tag: str) -> bool:
        # RFC 9110: ignore If-Modified-Since if there is an If-None-Match.
        if feed.etag and (sent := self.headers.get("If-None-Match")):
            return sent == tag
        if feed.last_modified and (sent := self.headers.get("If-Modified-Since")):
            return parsedate_to_datetime(sent) >= feed.modified
        return False

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal belongs to the demo."""
