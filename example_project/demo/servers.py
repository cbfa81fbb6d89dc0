"""The servers of the demo: create the databases, and check early that the servers answer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from urllib.parse import urlsplit

from django.conf import settings
from django.core.cache import caches
from django.core.management import CommandError, call_command

from example_project.celery import app


def prepare() -> None:
    """Create what the workers need at their start. Raises CommandError if a server is down."""
    if settings.CACHE:
        with _answering("cache", settings.CACHE):
            caches["locks"].get("is-there-a-server")
    with _answering("broker", settings.BROKER):
        with app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=3)
            # The file broker keeps its list of queues in one file. If two workers create that file,
            # one of them can read a part of it only.
            app.amqp.queues[app.conf.task_default_queue](connection).declare()
    call_command("migrate", verbosity=0, interactive=False)
    if not settings.CACHE:
        call_command("createcachetable", database="locks", verbosity=0)


def remove_queue() -> None:
    """Remove everything of this demo from a broker that others use too."""
    if not settings.BROKER:
        return
    queue = app.conf.task_default_queue
    # Nothing can be removed from a broker that is down.
    with contextlib.suppress(Exception), app.connection_for_write() as connection:
        channel = connection.default_channel
        channel.queue_delete(queue)
        if "redis" in connection.transport_cls:
            # The messages that a worker had received and not begun when it ended.
            names = ["unacked", "unacked_index", "unacked_mutex"]
            names += [f"_kombu.{kind}.{queue}" for kind in ("binding", "binding_permanent")]
            channel.client.delete(*names)
        else:
            channel.exchange_delete(queue)


@contextlib.contextmanager
def _answering(what: str, url: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise CommandError(
            f"The {what} {without_password(url)} needs a library: {error}"
        ) from error
    except Exception as error:
        # str() of a KeyError puts its argument in quotes.
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        reason = " ".join(str(text).split()) or type(error).__name__
        raise CommandError(
            f"The {what} {without_password(url)} does not answer: {reason}"
        ) from error


def without_password(url: str) -> str:
    password = urlsplit(url).password
    return url.replace(f":{password}@", ":***@") if password else url
