from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse


def strict_policy(
    get_response: Callable[[HttpRequest], HttpResponse],
) -> Callable[[HttpRequest], HttpResponse]:
    """Allow nothing but the site's own files: no inline script, no style attribute, no CDN."""

    def respond(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        response["Content-Security-Policy"] = "default-src 'self'"
        return response

    return respond
