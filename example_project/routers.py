from __future__ import annotations

from typing import Any

from django.db.models import Model


class LockTableRouter:
    """Put only the table of the lock cache into the database "locks".

    Django's DatabaseCache uses the app label "django_cache" when it asks where its table is.
    """

    def db_for_read(self, model: type[Model], **hints: Any) -> str | None:
        return "locks" if model._meta.app_label == "django_cache" else None

    def db_for_write(self, model: type[Model], **hints: Any) -> str | None:
        return self.db_for_read(model, **hints)

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        if app_label == "django_cache":
            return db == "locks"
        return False if db == "locks" else None
