"""Locks in a cluster, through the cluster cache of django-valkey."""

from __future__ import annotations

from typing import Any

from valkey import Valkey
from valkey.cluster import cleanup_kwargs

from django_singletask.stores.cluster import ClusterStore


class ValkeyClusterStore(ClusterStore):
    """Make the connections that the client of the cache would make; it would open some at once."""

    redirects = False

    def make_client(self) -> Any:
        client = self.cache.client
        factory = client.connection_factory
        options = cleanup_kwargs(**factory.base_client_cls_kwargs)  # type: ignore[no-untyped-call]
        options["parser_class"] = factory.get_parser_cls()
        return Valkey.from_url(client._server[0], **options)  # noqa: SLF001 - no public way
