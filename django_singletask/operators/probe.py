"""Find out whether a cache is shared and atomic: let real processes race for locks in it.

A child of the race, which prints what it won as JSON:

    python -m django_singletask.operators.probe <alias> <name of the race> <number> <keys>
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any, NamedTuple
from urllib.parse import unquote

import django
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from django_singletask.holder import Holder
from django_singletask.locks.keys import name_key
from django_singletask.operators.server import Finding, look_at
from django_singletask.stores import Outcome, Store, close_stores, get_store
from django_singletask.stores.places import servers_of

__all__ = ["Finding", "Probe", "probe", "without_secrets"]

LEASE = 60.0
"""Seconds for which what a killed probe leaves behind stays at most."""
ROUNDS = 10
"""Starts of the race: between two the processes wait for each other."""
TURNS = 200
"""Locks that are taken and given back to measure how long it takes."""
WORD = "django_singletask.probe: "
"""How lines of the children begin: settings may print as well."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """What was found out about a cache; ``median`` and ``slowest`` (99%) are seconds."""

    cache: str
    backend: str
    server: str
    findings: list[Finding]
    median: float | None = None
    slowest: float | None = None

    @property
    def fit(self) -> bool:
        """Whether the cache can hold locks."""
        return not any(finding.level == "unfit" for finding in self.findings)


def probe(alias: str, *, processes: int = 8, keys: int = 200) -> Probe:
    """Let processes race for locks in a cache, and look at its server.

    Every lock is one of the probe's own and is freed. Raises ``ImproperlyConfigured`` for a cache
    that is refused, and the errors of the cache's client.
    """
    store = get_store(alias)
    findings = race(alias, store, processes, keys)
    median, slowest = latency(store)
    findings.append(
        Finding(
            "ok",
            f"a lock is taken and given back in {median * 1000:.2f} ms (median), "
            f"{slowest * 1000:.2f} ms (99%)",
        )
    )
    findings += look_at(store)
    backend = f"{type(store.cache).__module__}.{type(store.cache).__qualname__}"
    return Probe(alias, backend, _server(alias, store), findings, median, slowest)


def _server(alias: str, store: Any) -> str:
    servers = sorted(servers_of(alias))
    if servers:
        return ", ".join(servers)
    if hasattr(store, "connection"):
        return f"table {store.cache._table} of DATABASES[{store.alias!r}]"
    return "in the memory of this process"


# The race
#
# All processes go for the same keys in the same order. One that is slow to start would find all
# of them taken, so the race has several starts, for which all wait:
#
#   parent:   keys of a round? go!         all back? go!
#   child 1:                   add add add           add add add
#   child 2:                   add add add           add add add


def race(alias: str, store: Store, processes: int, keys: int) -> list[Finding]:
    """Let processes race for keys; say whether each was won by exactly one, and seen by all."""
    name = f"django_singletask.probe {uuid.uuid4().hex[:12]}"
    mark, mine = _keys(f"{name} mark", 1)[0], _holder(name, "mark")
    raced = _keys(name, keys)
    if store.add(mark, mine, LEASE) is not None:
        raise RuntimeError(f"{mark}: nobody else can have this lock.")
    try:
        with _children(alias, name, processes, keys) as children:
            told = _run(children, processes, keys)
        seen = [store.read(key) for key in raced]
    finally:
        for key in (mark, *raced):
            with suppress(Exception):  # what stays ends with its lease
                entry = store.read(key)
                if entry is not None:
                    store.release(key, entry.value)
    winners = [[n for n, one in enumerate(told) if index in one["won"]] for index in range(keys)]
    blind = sum(not one["seen"] for one in told)
    return [
        _shared(processes, blind),
        _atomic(processes, keys, winners),
        *_kept(name, winners, seen, blind),
    ]


def _shared(processes: int, blind: int) -> Finding:
    if blind:
        return Finding(
            "unfit",
            f"{blind} of {processes} processes do not see the lock that this one holds: "
            "the cache is not shared, or they use other keys (KEY_PREFIX, KEY_FUNCTION)",
        )
    return Finding("ok", f"{processes} processes see the lock that this one holds")


def _atomic(processes: int, keys: int, winners: Sequence[Sequence[int]]) -> Finding:
    many = sum(len(won) > 1 for won in winners)
    none = sum(not won for won in winners)
    if many or none:
        return Finding(
            "unfit",
            f"of {keys} keys {many} were taken by more than one of {processes} processes at once, "
            f"and {none} by none",
        )
    return Finding("ok", f"each of {keys} keys was taken by exactly one of {processes} processes")


def _kept(
    name: str, winners: Sequence[Sequence[int]], seen: Sequence[Any], blind: int
) -> Iterator[Finding]:
    other = sum(
        entry is None or (len(won) == 1 and entry.value != _holder(name, str(won[0])))
        for won, entry in zip(winners, seen, strict=True)
    )
    # Where the processes do not see each other that follows, and is said already.
    if other and not blind:
        yield Finding("unfit", f"{other} locks were gone, or another's, at the end of the race")


def _keys(name: str, count: int) -> list[str]:
    return [name_key(f"{name} {index}").key for index in range(count)]


def _holder(name: str, who: str) -> bytes:
    # The same for parent and child, and no process: nobody must take it for dead.
    blank = Holder.from_dict({"name": name, "token": f"{name[-12:]}{who}", "timeout": LEASE})
    return blank.encode()


class Child(NamedTuple):
    """A process of the race, and the file of what it logs.

    Nobody reads during the race: in a pipe 64 KB would hold it up for ever.
    """

    process: subprocess.Popen[str]
    log: IO[bytes]


@contextmanager
def _children(alias: str, name: str, processes: int, keys: int) -> Iterator[list[Child]]:
    if not os.environ.get("DJANGO_SETTINGS_MODULE"):
        raise ImproperlyConfigured(
            "The processes that race need DJANGO_SETTINGS_MODULE: set it, or use manage.py."
        )
    # They find the same modules, wherever manage.py stands.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    children: list[Child] = []
    with ExitStack() as logs:
        try:
            for number in range(processes):
                command = [sys.executable, "-m", "django_singletask.operators.probe"]
                log = logs.enter_context(tempfile.TemporaryFile())
                process = subprocess.Popen(
                    [*command, alias, name, str(number), str(keys)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, "PYTHONPATH": paths},
                )
                children.append(Child(process, log))
            yield children
        finally:
            for child in children:
                child.process.kill()
                child.process.communicate()


def _run(children: list[Child], processes: int, keys: int) -> list[dict[str, Any]]:
    for _ in range(ROUNDS + 1):
        for child in children:
            _listen(child)
        for child in children:
            _say(child)
    return [json.loads(_listen(child)) for child in children]


def _listen(child: Child) -> str:
    process, log = child
    assert process.stdout is not None
    # A client without a socket timeout may hang, as it would in a worker: Ctrl-C ends it all.
    line = next((line for line in process.stdout if line.startswith(WORD)), "")
    if not line:
        process.communicate()
        log.seek(0)
        errors = log.read().decode(errors="replace")
        last = without_secrets(errors.strip().rpartition("\n")[2])
        raise RuntimeError(f"A process of the race ended: {last or f'exit {process.returncode}'}")
    return line.removeprefix(WORD)


def _say(child: Child) -> None:
    assert child.process.stdin is not None
    with suppress(BrokenPipeError):  # its last words tell
        child.process.stdin.write("go\n")
        child.process.stdin.flush()


def compete(alias: str, name: str, number: str, keys: int, go: IO[str], out: IO[str]) -> None:
    """Race for the keys, in one of the processes."""

    def wait() -> None:
        print(f"{WORD}ready", file=out, flush=True)
        if not go.readline():
            raise SystemExit(1)  # the parent is gone

    store, mine = get_store(alias), _holder(name, number)
    wait()
    mark = store.read(_keys(f"{name} mark", 1)[0])
    seen = mark is not None and mark.value == _holder(name, "mark")
    raced, won = _keys(name, keys), []
    for turn in range(ROUNDS):
        wait()
        for index in range(turn * keys // ROUNDS, (turn + 1) * keys // ROUNDS):
            entry = store.add(raced[index], mine, LEASE)
            if entry is None or entry.value == mine:
                won.append(index)
    told = json.dumps({"won": won, "seen": seen})
    print(f"{WORD}{told}", file=out, flush=True)
    go.readline()  # memory of its own would be gone with it: not before all have told
    close_stores()


def latency(store: Store) -> tuple[float, float]:
    """Return median and 99% of the seconds that it takes to take a lock and give it back."""
    name = f"django_singletask.probe {uuid.uuid4().hex[:12]}"
    key, mine, spans = _keys(name, 1)[0], _holder(name, "latency"), []
    for _ in range(TURNS):
        began = time.perf_counter()
        taken = store.add(key, mine, LEASE) is None
        released = store.release(key, mine)
        spans.append(time.perf_counter() - began)
        if not taken or released is not Outcome.OK:
            raise RuntimeError("A lock that nobody else can have was held, or gone.")
    return statistics.median(spans), statistics.quantiles(spans, n=100)[98]


def without_secrets(text: str) -> str:
    """Strike the passwords of caches and databases out of a text, an error of a client's, say."""
    for secret in sorted(set(_secrets([settings.CACHES, settings.DATABASES])), key=len)[::-1]:
        text = text.replace(secret, "***")
    return text


def _secrets(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _secrets(item, str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secrets(item, name)
    elif isinstance(value, str) and value:
        if "password" in name.lower():
            yield value
        user, at, _host = value.rpartition("@")
        if at and "://" in user:
            password = user.partition("://")[2].partition(":")[2]
            yield from filter(None, (password, unquote(password)))


if __name__ == "__main__":
    django.setup()
    from django_singletask.operators import probe as module

    alias, name, number, count = sys.argv[1:]
    module.compete(alias, name, number, int(count), sys.stdin, sys.stdout)
