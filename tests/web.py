"""A web application with two views: one takes a lock, one only sends a task."""

from __future__ import annotations

import os

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse
from django.urls import path

from django_singletask import TaskLock

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
application = get_wsgi_application()
settings.ROOT_URLCONF = __name__


def take(request: HttpRequest, name: str) -> HttpResponse:
    from tests.testapp import tasks

    with TaskLock(name, wait=30):
        return HttpResponse(tasks.body(name, 0.02))


def send(request: HttpRequest, key: str) -> HttpResponse:
    from tests.testapp import tasks

    return HttpResponse(tasks.unique.delay(key).id)


urlpatterns = [path("take/<str:name>", take), path("send/<str:key>", send)]
