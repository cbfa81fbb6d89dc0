"""The servers of the demo: make the databases, and see early whether others answer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from urllib.parse import urlsplit

from django.conf import settings
from django.core.cache import caches
from django.core.management import CommandError, call_command

from example_project.celery import app


def prepare() -> None:
    """Make what the workers find when they start. Raises CommandError if a server is away."""
    if settings.CACHE:
        with _answering("cache", settings.CACHE):
            caches["locks"].get("is-there-a-server")
    with _answering("broker", settings.BROKER):
        with app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=3)
            # The file broker keeps its list of queues in one file, and two workers that both
            # begin it can read it half written.
            app.amqp.queues[app.conf.task_default_queue](connection).declare()
    call_command("migrate", verbosity=0, interactive=False)
    if not settings.CACHE:
        call_command("createcachetable", database="locks", verbosity=0)


def remove_queue() -> None:
    """Leave nothing of this demo on a broker that others use too."""
    if not settings.BROKER:
        return
    queue = app.conf.task_default_queue
    # A broker that is gone has nothing to be removed from.
    with contextlib.suppress(Exception), app.connection_for_write() as connection:
        channel = connection.default_channel
        channel.queue_delete(queue)
        if "redis" in connection.transport_cls:
            # What an ended worker had taken but not begun.
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
        # A KeyError's text is its argument in quotes.
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        reason = " ".join(str(text).split()) or type(error).__name__
        raise CommandError(
            f"The {what} {without_password(url)} does not answer: {reason}"
        ) from error


def without_password(url: str) -> str:
    password = urlsplit(url).password
    return url.replace(f":{password}@", ":***@") if password else url
