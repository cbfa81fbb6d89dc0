"""A result backend whose STARTED replaces a SUCCESS, as that of django-celery-results does."""

from __future__ import annotations

import os
from typing import Any

from celery.backends.redis import RedisBackend


class Overwriting(RedisBackend):
    def _store_result(self, task_id: str, result: Any, state: str, *rest: Any, **facts: Any) -> Any:
        names = ("traceback", "request")
        facts |= dict(zip(names, rest, strict=False))
        meta = self._get_result_meta(result=result, state=state, **facts)
        key = self.get_key_for_task(task_id)
        value = self.encode(meta | {"task_id": task_id})
        self.client.set(key, value, ex=3600)
        self.client.publish(key, value)
        return result


URL = os.environ.get("SINGLETASK_TEST_REDIS_URL", "redis://127.0.0.1:1/0").rpartition("/")[0]
ADDRESS = f"{__name__}:{Overwriting.__name__}+{URL}/2"
"""For ``result_backend``."""
