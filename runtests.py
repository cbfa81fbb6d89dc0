"""Run the tests against private servers of Redis, Valkey, Memcached, PostgreSQL, MariaDB, RabbitMQ.

    python runtests.py [--install-services] [--quick] [pytest's own arguments]

The tests of what is not installed are left out, and the end says which and why. In CI (with the
variable CI) nothing may be left out.

Without arguments the tests run in four parts at the same time, each with its own servers: two
mostly with Celery workers and one of faults, which wait for most of the time, and one with all
other tests.

--install-services  On Debian and Ubuntu: first install what is missing, with apt the servers and
                    the browser, then with pip pylibmc and mysqlclient, which need headers. apt does
                    not start the servers as services of the system.
--quick             Run only the tests that need no Celery worker, no browser, no race of 16
                    processes and no fault of a server.
tests/browser --pictures
                    Make the pictures of the docs again.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests import servers

POLICY = Path("/usr/sbin/policy-rc.d")
# Modules of the extra "test". Without them many tests would fail, and not say what to install.
MODULES = ["pytest", "pytest_django", "pytest_randomly", "hypothesis"]
MODULES += ["django_redis", "django_valkey", "psycopg", "pydantic", "pymemcache", "redis"]
# A new file with workers falls into the second part.
FIRST_WORKER_TESTS = [
    "tests/worker/test_killed.py",
    "tests/worker/test_rabbitmq.py",
    "tests/worker/test_store_trouble.py",
    "tests/worker/test_unique.py",
]
# The part without workers takes longest, so two others have some of its tests.
OF_FIRST_PART = ["tests/browser", "tests/test_stores.py"]
OF_FIRST_PART += ["tests/test_stores_broken.py", "tests/test_file_locks.py"]
OF_FAULTS = ["tests/test_locks.py", "tests/test_stores_races.py"]
# Tests of signals, of servers that fail, and of the demo: they start processes and wait for them.
FAULTS = [
    "tests/test_cluster.py",
    "tests/test_example.py",
    "tests/test_interrupted.py",
    "tests/test_redis_cluster.py",
    "tests/test_redis_servers.py",
    "tests/test_release_sent_twice.py",
    "tests/test_signals_and_threads.py",
    "tests/test_stores_outages.py",
    "tests/test_two_caches.py",
    "tests/test_web_servers.py",
]
PARTS = {
    "Tests with workers, first part": [*FIRST_WORKER_TESTS, *OF_FIRST_PART],
    "Tests with workers, second part": [
        *("-m", "worker"),
        *(f"--ignore={path}" for path in (*FIRST_WORKER_TESTS, *FAULTS)),
    ],
    "Tests of faults": [*FAULTS, *OF_FAULTS],
    "Tests without workers": [
        *("-m", "not worker"),
        *(f"--ignore={path}" for path in (*OF_FIRST_PART, *FAULTS, *OF_FAULTS)),
    ],
}


def main(arguments: list[str]) -> int:
    own_options = {"--install-services", "--quick"}.intersection(arguments)
    arguments = [argument for argument in arguments if argument not in own_options]
    quick = "--quick" in own_options
    installing = "--install-services" in own_options
    missing = servers.missing(browser=not quick)
    if installing and missing and shutil.which("apt-get"):
        install(missing)
        missing = servers.missing(browser=not quick)
    if missing and "CI" in os.environ:
        print("In CI no test may be left out, but not everything is installed.", explain(missing))
        return 1
    # Look for the modules without importing them: pytest must be the first to import its plugins.
    if absent := [name for name in MODULES if importlib.util.find_spec(name) is None]:
        print(f'Not installed: {", ".join(absent)}. They come with pip install -e ".[test]"')
        return 1
    if not quick and not arguments:
        code = side_by_side()
        if missing:
            print("The tests of what is not installed were left out.", explain(missing))
        return code
    if quick:
        marks = "not worker and not browser and not race"
        # Only the tests of the browser import selenium.
        ignored = [f"--ignore={path}" for path in ("tests/browser", *FAULTS)]
        arguments = ["-m", marks, *ignored, *arguments]
    import pytest

    os.chdir(Path(__file__).parent)
    # Treat SIGTERM as Ctrl-C: pytest then ends, stops the servers and removes their files. A
    # SystemExit would only fail the test that is running.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A shell lets what it starts in the background ignore Ctrl-C; tests of interrupts need it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with environment() as variables:
        os.environ.update(variables)
        return int(pytest.main(arguments))


def side_by_side() -> int:
    """Run all parts at the same time. Show the first while it runs, the others when they end."""
    command = [sys.executable, str(Path(__file__).resolve())]
    processes: list[subprocess.Popen[bytes]] = []

    def terminate(*signal_and_frame: object) -> None:
        for process in processes:
            process.terminate()

    # A terminal sends Ctrl-C to the parts as well, but nothing else passes SIGTERM on to them.
    signal.signal(signal.SIGTERM, terminate)
    with ExitStack() as stack:
        outputs = {}
        for heading, arguments in PARTS.items():
            output = stack.enter_context(tempfile.TemporaryFile()) if processes else None
            process = subprocess.Popen(
                [*command, *arguments], stdout=output, stderr=output and subprocess.STDOUT
            )
            processes.append(process)
            # After Ctrl-C each part still has to stop its servers.
            stack.callback(process.wait)
            if output:
                outputs[heading] = process, output
        processes[0].wait()
        for heading, (process, output) in outputs.items():
            process.wait()
            output.seek(0)
            print(f"\n-- {heading}", output.read().decode(errors="replace"), sep="\n", flush=True)
    return max(abs(process.returncode) for process in processes)


@contextmanager
def environment() -> Iterator[dict[str, str]]:
    """Run the servers, and yield the variables in which tests/settings.py finds their addresses."""
    started = time.monotonic()
    redis = servers.Redis()
    # This replica is never promoted: tests of a failover start servers of their own.
    replica = servers.Redis(replica_of=redis, replica_priority=0)
    sentinel = servers.Redis(sentinel_for=redis)
    valkey, memcached = servers.Valkey(), servers.Memcached()
    postgres, mariadb = servers.PostgreSQL(), servers.MariaDB()
    everything = [redis, replica, sentinel, valkey, memcached, postgres, mariadb]
    installed = [server for server in everything if servers.find(server.program)]
    with tempfile.TemporaryDirectory(prefix="singletask-") as folder, servers.running(installed):
        seconds = time.monotonic() - started
        names = ", ".join(dict.fromkeys(type(server).__name__ for server in installed))
        print(f"{names or 'No servers'} started in {seconds:.1f} s.", flush=True)
        yield {
            "SINGLETASK_TEST_FOLDER": folder,
            "SINGLETASK_TEST_ABSENT": ",".join(need.name for need in servers.missing()),
            "SINGLETASK_TEST_REDIS_URL": redis.url,
            "SINGLETASK_TEST_REDIS_REPLICA_URL": replica.url,
            "SINGLETASK_TEST_SENTINEL": f"127.0.0.1:{sentinel.port}/{sentinel.service}",
            "SINGLETASK_TEST_VALKEY_URL": valkey.url,
            "SINGLETASK_TEST_MEMCACHED": memcached.address,
            "SINGLETASK_TEST_POSTGRES": postgres.url,
            "SINGLETASK_TEST_MARIADB": mariadb.url,
        }


def explain(missing: list[servers.Need]) -> str:
    lines = [f"{need.name}. {need.how}" for need in missing]
    lines += ["On Debian and Ubuntu this installs all: python runtests.py --install-services"]
    return "\n" + "\n".join(lines)


def install(missing: list[servers.Need]) -> None:
    print("Installing " + ", ".join(need.name for need in missing) + " …", flush=True)
    packages = {package for need in missing for package in need.apt.split()}
    modules = [need.name for need in missing if need.module]
    if modules and not Path(sysconfig.get_path("include"), "Python.h").exists():
        packages.add("python{}.{}-dev".format(*sys.version_info))
    if packages := {package for package in packages if not has_package(package)}:
        with no_services_started():
            with tempfile.NamedTemporaryFile("w", suffix=".list") as source:
                source.write(sources())
                source.flush()
                apt = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
                apt += ["-o", f"Dir::Etc::SourceList={source.name}"]
                command = [*apt, "install", "--no-install-recommends", "-y", *sorted(packages)]
                done = root(*command)
                if done.returncode:
                    # The lists of packages are absent or old. Fetching them takes long, so only
                    # now.
                    root(*apt, "update")
                    done = root(*command)
            if done.returncode:
                print(done.stdout)
    if modules:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", *modules]
        subprocess.run(pip, check=False)
        importlib.invalidate_caches()


def sources() -> str:
    """Return the list of the system, and for these commands alone where Debian 12 has Valkey."""
    lists = ""
    with suppress(OSError):
        lists = Path("/etc/apt/sources.list").read_text()
    with suppress(OSError):
        if platform.freedesktop_os_release().get("VERSION_CODENAME") == "bookworm":
            lists += "\ndeb http://deb.debian.org/debian bookworm-backports main\n"
    return lists


def has_package(package: str) -> bool:
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package]
    return subprocess.run(query, capture_output=True, text=True).stdout == "installed"


def root(*command: str) -> subprocess.CompletedProcess[str]:
    sudo = ["sudo"] if os.geteuid() and shutil.which("sudo") else []
    return subprocess.run(
        [*sudo, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@contextmanager
def no_services_started() -> Iterator[None]:
    """Keep apt from starting what it installs: Debian asks this script, and 101 forbids."""
    if POLICY.exists():
        yield
        return
    with tempfile.NamedTemporaryFile("w") as script:
        script.write("#!/bin/sh\nexit 101\n")
        script.flush()
        root("install", "-m", "755", script.name, str(POLICY))
    try:
        yield
    finally:
        root("rm", "-f", str(POLICY))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
