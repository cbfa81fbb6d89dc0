"""Random load; children, whole workers, the lock store and the broker are killed at random."""

from __future__ import annotations

import math
import random

import pytest

from tests import intervals, servers
from tests.intervals import Recording
from tests.worker.soak import GAPS, Soak, is_lost

pytestmark = pytest.mark.only_all("it runs for as long as it is told")

CONF = {
    "broker_transport_options": {
        "visibility_timeout": 3,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        # A worker that is killed while it restores messages keeps others from it for so long.
        "unacked_mutex_expire": 5,
    }
}
# What was acknowledged is on the disk. With everysec, Redis answers before it has written if the
# disk is slow, and a kill then takes what it has granted.
DURABLE = {"appendonly": "yes", "appendfsync": "always"}


class OneNode(servers.Cluster):
    """A cluster of which one node is killed, and started again with its data."""

    def kill(self):
        random.choice(self.primaries).kill()


@pytest.fixture(params=["redis", "valkey", "cluster", "pylibmc", "pymemcache"])
def store(request):
    """Give the alias of a cache, its server and how workers find it."""
    if request.param not in ("cluster", "pymemcache") and request.config.getoption("soak") < 60:
        pytest.skip("short: the cluster is of Valkey servers, and pymemcache is asked")
    if request.param == "cluster":
        with OneNode(replicas=0, **DURABLE) as server:
            yield "cluster", server, {"SINGLETASK_TEST_CLUSTER": server.url}
    elif request.param in ("redis", "valkey"):
        with (servers.Redis if request.param == "redis" else servers.Valkey)(**DURABLE) as server:
            yield f"own_{request.param}", server, {"SINGLETASK_TEST_OWN_REDIS_URL": server.url}
    else:
        with servers.Memcached() as server:
            yield f"own_{request.param}", server, {"SINGLETASK_TEST_OWN_MEMCACHED": server.address}


@pytest.mark.timeout(0)  # it takes as long as --soak says; its parts have deadlines
def test_soak(start_worker, store, tmp_path, monkeypatch, request, record_property):
    alias, server, environment = store
    monkeypatch.setenv(intervals.FOLDER, str(tmp_path))
    with servers.Redis(**DURABLE) as broker:
        environment = {
            **environment,
            intervals.FOLDER: str(tmp_path),
            "SINGLETASK_TEST_BROKER": broker.url,
        }
        workers = [
            start_worker(name=name, concurrency=4, conf=CONF, cache=alias, env=environment)
            for name in ("one", "two")
        ]
        soak = Soak(
            workers,
            server,
            broker,
            forgets=isinstance(server, servers.Memcached),
            seconds=request.config.getoption("soak"),
        )
        soak.run()
        recording = Recording(tmp_path)
        table = soak.table(recording)
    record_property("soak", {"store": alias.removeprefix("own_"), **table})
    assert recording.faults() == []
    assert [fate for fate in table if fate.isupper()] == []
    assert min(soak.killed[victim] for victim in GAPS) > 0
    for pair in recording.both_ran():  # that it was lost is no reason for a body to end at once
        assert is_lost(pair.first) or recording.is_forgotten(pair), recording.words(pair)
    assert recording.beside_one() <= 1
    assert recording.longest_block() < 2
    # An entry can outlast its hold: the store was down, and the worker ended before it was back.
    lived_on = {
        hold.token: hold.trusted[-1][1]
        for hold in recording.holds
        if hold.killed == math.inf and hold.trusted
    }
    for line in recording.of("dead"):
        assert line["at"] > lived_on.get(line["token"], 0), line
