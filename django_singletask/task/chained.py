"""Let the other bases of a task keep their ``__call__``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Task
from celery.contrib.django.task import DjangoTask

__all__ = ["ChainedTask"]

# Celery's own __call__ ends the chain of super().__call__(). As for a call without a message, it
# pushes another request, empty (Celery 5.4) or a copy, and what the body does, such as retry(), is
# not seen in the request of the message. In a worker Celery prevents that for the class that is
# called first, but here SingletonTask is called before.
ENDS_HERE = "singletask_chain_ends_here"
"""Attribute of a request: the next one that is pushed above it is itself."""


class ChainedTask(DjangoTask):  # type: ignore[type-arg] # it is not generic at run time
    """A task whose other bases may have a ``__call__``, which is called with the same request."""

    abstract = True

    def rest_of_call(self, request: Any) -> Callable[..., Any]:
        """Return what is to be called under the lock, for a request that is pushed already."""
        call = super().__call__
        if getattr(call, "__func__", None) is Task.__call__:
            return self.run  # no other base has one

        def call_others(*args: Any, **kwargs: Any) -> Any:
            setattr(request, ENDS_HERE, True)
            try:
                return call(*args, **kwargs)
            finally:
                vars(request).pop(ENDS_HERE, None)

        return call_others

    def push_request(self, *args: Any, **kwargs: Any) -> None:
        """Push a new request, or once more the one whose chain of calls ends here."""
        request: Any = self.request_stack.top
        ends_here = request is not None and vars(request).pop(ENDS_HERE, False)
        # Celery's __call__ gives these two alone. Another base may call run() instead, and then
        # this is a request that the body has pushed.
        if ends_here and not args and kwargs.keys() == {"args", "kwargs"}:
            self.request_stack.push(request)
        else:
            super().push_request(*args, **kwargs)
