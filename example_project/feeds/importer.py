"""Fetch a feed with a conditional GET, parse it, and store its entries."""

from __future__ import annotations

import calendar
import hashlib
import io
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit
from xml.sax import SAXException

from django.conf import settings
from django.db import transaction
from django.utils import timezone as django_timezone

from example_project.feeds.models import Entry, Feed

AGENT = "django-singletask-example"


class FeedError(Exception):
    """A feed could not be imported. The message is the reason, in one line."""


@dataclass(frozen=True)
class Answer:
    """The answer of a server, unchanged."""

    body: bytes
    content_type: str = ""
    etag: str = ""
    last_modified: str = ""


@dataclass(frozen=True)
class Document:
    """A parsed feed. `entries` maps guids to entries, so that no entry is there twice."""

    title: str
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)


def import_feed(feed_url: str) -> dict[str, Any]:
    """Import one feed. Return what was done, as plain data for the result backend.

    Raises FeedError. The reason is also stored in Feed.last_error.
    """
    feed, _ = Feed.objects.get_or_create(url=feed_url)
    try:
        answer = fetch(feed.url, etag=feed.etag, last_modified=feed.last_modified)
        document = parse(answer) if answer else None
    except FeedError as error:
        reason = str(error)[:500]
        Feed.objects.filter(pk=feed.pk).update(last_error=reason, checked_at=django_timezone.now())
        raise
    if answer is None or document is None:
        Feed.objects.filter(pk=feed.pk).update(last_error="", checked_at=django_timezone.now())
        return {"feed": feed_url, "status": "not modified", "new": 0}
    return {"feed": feed_url, "status": "imported", "new": store(feed, answer, document)}


def fetch(url: str, *, etag: str = "", last_modified: str = "") -> Answer | None:
    """Return the server's answer, or None if the feed has not changed (304)."""
    headers = {"User-Agent": AGENT}
    if etag:
        headers["If-None-Match"] = etag
    if last_modified:
        headers["If-Modified-Since"] = last_modified
    timeout = settings.FEEDS_TIMEOUT
    deadline = time.monotonic() + timeout
    try:
        # urllib would also open file: and ftp: addresses.
        if urlsplit(url).scheme not in ("http", "https"):
            raise FeedError("not an http or https address")
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return Answer(
                body=_read(response, deadline),
                content_type=response.headers.get("Content-Type", ""),
                etag=response.headers.get("ETag", "")[:500],
                last_modified=response.headers.get("Last-Modified", "")[:100],
            )
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 304:
            return None
        raise FeedError(f"HTTP {error.code} {error.reason}") from error
    except (OSError, HTTPException, ValueError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, TimeoutError):
            raise FeedError(f"no complete answer within {timeout:g} s") from error
        detail = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        raise FeedError(f"cannot fetch: {detail}") from error


def _read(response: Any, deadline: float) -> bytes:
    # The timeout of a socket starts again with each byte. A server that sends a byte from time to
    # time would make this run hold its lock for hours.
    body = b""
    while chunk := response.read1(65536):
        body += chunk
        if time.monotonic() > deadline:
            raise TimeoutError
        if len(body) > settings.FEEDS_MAX_BYTES:
            raise FeedError(f"larger than {settings.FEEDS_MAX_BYTES:,} bytes")
    return body


def parse(answer: Answer) -> Document:
    """Read RSS or Atom of any version. Raises FeedError if the document is not well-formed."""
    # Import it here: commands such as manage.py check import the tasks, and need no feedparser.
    import feedparser

    parsed = feedparser.parse(
        # Pass a stream: feedparser opens bytes or text as a file name or an address.
        io.BytesIO(answer.body),
        response_headers={"content-type": answer.content_type},
    )
    problem = parsed.get("bozo_exception")
    if isinstance(problem, SAXException):
        line = getattr(problem, "getLineNumber", lambda: None)()
        where = f" (line {line})" if line else ""
        raise FeedError(f"malformed XML: {problem.getMessage()}{where}")
    # feedparser reports no problem for an empty document.
    if not parsed.get("version"):
        raise FeedError(f"not a feed ({answer.content_type or 'no content type'})")
    document = Document(title=parsed.feed.get("title", "")[:500])
    for entry in parsed.entries:
        guid = entry.get("id") or entry.get("link") or entry.get("title", "")
        if not guid:
            continue
        if len(guid) > 500:
            guid = hashlib.sha256(guid.encode()).hexdigest()
        document.entries.setdefault(
            guid,
            {
                "title": entry.get("title", "")[:500],
                "link": entry.get("link", "")[:1000],
                "published": _moment(entry.get("published_parsed") or entry.get("updated_parsed")),
            },
        )
    return document


def _moment(parsed: time.struct_time | None) -> datetime | None:
    try:
        return parsed and datetime.fromtimestamp(calendar.timegm(parsed), UTC)
    except (OverflowError, ValueError, OSError):
        return None


def store(feed: Feed, answer: Answer, document: Document) -> int:
    """Store what is new or changed. Return how many entries are new.

    To store a document twice changes nothing. The ETag is stored in the same transaction: if it was
    stored earlier, a crash in between would make the next answer a 304, and lose the entries.
    """
    with transaction.atomic():
        stored = {entry.guid: entry for entry in feed.entries.filter(guid__in=document.entries)}
        new, changed = [], []
        for guid, values in document.entries.items():
            entry = stored.get(guid)
            if entry is None:
                new.append(Entry(feed=feed, guid=guid, **values))
            elif any(getattr(entry, name) != value for name, value in values.items()):
                for name, value in values.items():
                    setattr(entry, name, value)
                changed.append(entry)
        Entry.objects.bulk_create(new, ignore_conflicts=True)
        Entry.objects.bulk_update(changed, ["title", "link", "published"])
        feed.title = document.title
        feed.etag = answer.etag
        feed.last_modified = answer.last_modified
        feed.last_error = ""
        feed.checked_at = django_timezone.now()
        feed.save()
    return len(new)
