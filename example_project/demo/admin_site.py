"""The admin on a local port, for `manage.py demo --serve`."""

from __future__ import annotations

import secrets
import threading
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.management import CommandError
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from django.core.wsgi import get_wsgi_application


class QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal belongs to the demo."""


class AdminSite:
    """Open the port at once, so that the demo fails early if another program uses the port."""

    def __init__(self, port: int) -> None:
        try:
            self._server = ThreadedWSGIServer(("127.0.0.1", port), QuietHandler)
        except OSError as error:
            raise CommandError(
                f"Port {port} cannot be used for the admin: {error.strerror}"
            ) from error
        self.url = f"http://127.0.0.1:{self._server.server_port}/admin/"
        self.name, self.password = "admin", secrets.token_urlsafe(9)

    def start(self) -> None:
        get_user_model().objects.create_superuser(self.name, password=self.password)
        # Serve the admin's style sheets as `runserver` does.
        self._server.set_app(StaticFilesHandler(get_wsgi_application()))
        threading.Thread(target=self._server.serve_forever, name="admin", daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
